// The official client for Node: makes the call that its first argument describes as JSON, with the messages of the
// descriptor set in the file of its second, and prints what it saw as JSON (tests/grpc_clients/call.py has both).
"use strict";

const fs = require("fs");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const call = JSON.parse(process.argv[2]);
const definition = loader.loadFileDescriptorSetFromBuffer(fs.readFileSync(process.argv[3]), {
  keepCase: true,
  enums: String,
  oneofs: true,
});
const api = grpc.loadPackageDefinition(definition);
const seen = {};

function credentials() {
  if (call.ca === null) return grpc.credentials.createInsecure();
  const read = (path) => (path === null ? null : fs.readFileSync(path));
  return grpc.credentials.createSsl(read(call.ca), read(call.private_key), read(call.certificate));
}

function client(service) {
  const unbounded = { "grpc.max_send_message_length": -1, "grpc.max_receive_message_length": -1 };
  return new service(call.address, credentials(), unbounded);
}

function decoded(name, bytes) {
  return definition[name].deserialize(Buffer.from(bytes));
}

function failed(error) {
  seen.code = grpc.status[error.code];
  seen.message = error.details;
  const [packed] = error.metadata ? error.metadata.get("grpc-status-details-bin") : [];
  if (packed === undefined) return;
  for (const box of decoded("google.rpc.Status", packed).details) {
    const name = box.type_url.split("/").pop();
    const detail = decoded(name, box.value);
    if (name === "google.rpc.ErrorInfo") Object.assign(seen, { reason: detail.reason, domain: detail.domain });
    if (name === "google.rpc.RequestInfo") seen.error_request_id = detail.request_id;
    if (name === "google.rpc.BadRequest") seen.violations = detail.field_violations.map((one) => one.field);
    if (name === "google.rpc.ResourceInfo") seen.resource = detail.resource_name;
    if (name === "google.rpc.QuotaFailure") seen.quota = detail.violations.map((one) => one.description);
  }
}

function generate(metadata, options, done) {
  const request = {
    model: call.model,
    text: call.text_bytes ? "x".repeat(call.text_bytes) : call.text,
    max_output_tokens: call.max_output_tokens,
    ignore_eos: call.ignore_eos,
    sampling: { temperature: call.temperature },
  };
  const stream = client(api.athanor.inference.v1.InferenceService).Generate(request, metadata, options);
  Object.assign(seen, { events: [], deltas: 0, text: "" });
  stream.on("metadata", (initial) => { [seen.request_id] = initial.get("x-request-id"); });
  stream.on("data", ({ event, delta, finished }) => {
    if (seen.events[seen.events.length - 1] !== event) seen.events.push(event);
    if (event === "finished") seen.output_tokens = finished.usage.output_tokens;
    if (event !== "delta") return;
    seen.text += delta.text || "";
    seen.deltas += 1;
    if (seen.deltas === call.cancel_after) stream.cancel();
  });
  stream.on("error", (error) => { failed(error); done(); });
  stream.on("end", done);
}

function watch(metadata, options, done) {
  const stream = client(api.grpc.health.v1.Health).Watch({ service: call.service }, metadata, options);
  stream.once("data", (answer) => { seen.status = answer.status; stream.cancel(); });
  stream.on("error", (error) => { if (seen.status === undefined) failed(error); done(); });
}

function reflect(metadata, options, done) {
  const stream = client(api.grpc.reflection.v1alpha.ServerReflection).ServerReflectionInfo(metadata, options);
  stream.on("data", (answer) => {
    seen.services = answer.list_services_response.service.map((one) => one.name).sort();
  });
  stream.on("error", (error) => { failed(error); done(); });
  stream.on("end", done);
  stream.write({ list_services: "" });
  stream.end();
}

function main() {
  const metadata = new grpc.Metadata();
  if (call.key !== null) metadata.set("authorization", `Bearer ${call.key}`);
  const options = { deadline: Date.now() + call.timeout_s * 1000 };
  const done = () => { fs.writeSync(1, JSON.stringify(seen)); process.exit(0); };
  const unary = (show) => (error, answer) => { error ? failed(error) : show(answer); done(); };
  const service = client(api.athanor.inference.v1.InferenceService);
  const health = client(api.grpc.health.v1.Health);
  const actions = {
    models: () =>
      service.ListModels({}, metadata, options, unary(({ models }) => { seen.models = models.map((one) => one.name); })),
    check: () =>
      health.Check({ service: call.service }, metadata, options, unary(({ status }) => { seen.status = status; })),
    watch: () => watch(metadata, options, done),
    reflect: () => reflect(metadata, options, done),
    generate: () => generate(metadata, options, done),
  };
  actions[call.do]();
}

main();
