// One request, phase by phase, on a time axis that ends with it.

import { make, setStyle } from "./dom.js";
import { duration } from "./format.js";

const NS = 1e9;
const OWN = "athanor.";
const TICKS = 5;
const TITLES = {
  "athanor.policy.rule": "rule", "athanor.queue.wait_us": "queue wait, us",
  "athanor.replays": "replays", "gen_ai.request.max_tokens": "max_tokens", "gen_ai.request.temperature": "temperature",
  "gen_ai.request.top_p": "top_p", "gen_ai.request.top_k": "top_k", "gen_ai.request.seed": "seed",
  "gen_ai.request.stream": "stream", "http.response.status_code": "HTTP status", "rpc.response.status_code": "gRPC status",
};
const MOST_CHARS = 80;
const DIGEST_CHARS = 12; // As everywhere else on the page.

/** The whole picture of a stored trace. */
export function waterfall(trace) {
  const spans = trace.spans;
  if (!spans.length) return make("p", { class: "empty" }, "No spans were recorded.");
  // As differences: whole nanoseconds since 1970 are more than a double holds, what is lost is under a microsecond.
  const start = Math.min(...spans.map((span) => span.start_ns));
  const total = Math.max(1, Math.max(...spans.map((span) => span.end_ns)) - start) / NS;
  const node = make("div", { class: "waterfall" }, axis(total), chart(spans, start, total));
  if (trace.dropped_spans) node.append(make("p", { class: "small" }, `${trace.dropped_spans} more spans were not kept.`));
  node.append(facts(trace));
  return node;
}

function axis(total) {
  const marks = [];
  const step = round(total / TICKS);
  for (let at = 0; at < total * 0.93; at += step) {
    const mark = make("span", {}, at === 0 ? "0" : tick(at));
    setStyle(mark, "left", `${(100 * at) / total}%`);
    marks.push(mark);
  }
  const end = make("span", { class: "end" }, duration(total));
  return make("div", { class: "ticks", "aria-hidden": "true" }, ...marks.filter((_, index) => index * step < total * 0.82), end);
}

const tick = (seconds) => (seconds < 1 ? `${Number((seconds * 1000).toPrecision(3))} ms` : `${Number(seconds.toPrecision(3))} s`);

function round(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find((size) => size * power >= value * 0.999);
}

function chart(spans, start, total) {
  const depths = new Map();
  const rows = spans.map((span) => {
    const depth = (depths.get(span.parent_id) ?? -1) + 1;
    depths.set(span.span_id, depth);
    const phase = span.name.startsWith(OWN) ? span.name.slice(OWN.length) : "";
    const from = (span.start_ns - start) / NS / total;
    const long = (span.end_ns - span.start_ns) / NS;
    const bar = make("span", { class: `span ${phase || "whole"}${span.error ? " failed" : ""}` });
    setStyle(bar, "left", `${100 * from}%`);
    setStyle(bar, "width", `${(100 * long) / total}%`);
    const name = make("span", { class: "phase" }, phase || String(span.attributes["gen_ai.operation.name"] ?? "request"));
    setStyle(name, "padding-left", `${depth}em`);
    const words = span.error ? `${duration(long)}, ${span.error}` : duration(long);
    return make("li", {}, name, make("span", { class: "took" }, words), make("span", { class: "track", "aria-hidden": "true" }, bar));
  });
  return make("ol", {}, ...rows);
}

function facts(trace) {
  const one = trace.summary;
  const known = Object.assign({}, ...trace.spans.map((span) => span.attributes));
  const found = [["request", one.request_id], ["trace", one.trace_id], ["route", one.route],
    ["tokens", `${one.input_tokens} in, ${one.cached_tokens} of them cached; ${one.output_tokens} out`],
    ["ended", one.error ?? one.finish_reason ?? one.outcome], ["sandbox", one.sandbox]];
  for (const [name, title] of Object.entries(TITLES)) found.push([title, known[name]]);
  found.push(["policy", String(known["athanor.policy.digest"] ?? "").slice(0, DIGEST_CHARS)]);
  const rows = found.filter(([, value]) => value !== null && value !== undefined && value !== "")
    .map(([title, value]) => make("div", {}, make("dt", {}, title), make("dd", {}, String(value).slice(0, MOST_CHARS))));
  return make("dl", { class: "facts wide" }, ...rows);
}
