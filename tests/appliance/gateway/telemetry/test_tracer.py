"""The spans of a request: shape, attributes, parents, sampling, and what is never in them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from appliance.common.errors import (
    CancelledError,
    InternalError,
    InvalidRequestError,
    RateLimitedError,
    UnauthenticatedError,
)
from appliance.common.json_codec import encode
from appliance.gateway.generate_request import CallContext
from appliance.gateway.telemetry import names
from appliance.gateway.telemetry.request_trace import Phase
from appliance.gateway.telemetry.spans import Sampler
from appliance.gateway.telemetry.store import MAX_SPANS, StoredTrace
from appliance.gateway.telemetry.tracer import OtelTelemetry, TelemetrySettings, open_telemetry
from tests.appliance.captured_logs import capture_logs
from tests.appliance.gateway.telemetry.calls import CONTENT, HTTP, SETTINGS, request, serve
from tests.appliance.gateway.telemetry.collector import Collector, attributes

SPANS = 7
"""Of one answered request: server, generation and five phases."""

REMOTE_TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
REMOTE_SPAN = "00f067aa0ba902b7"


@pytest.fixture
def telemetry(monkeypatch: pytest.MonkeyPatch, collector: Collector) -> Iterator[OtelTelemetry]:
    """Telemetry that exports to the collector, configured as an operator would."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{collector.url}/v1/traces")
    one = open_telemetry(SETTINGS)
    yield one
    one.close()


def only(telemetry: OtelTelemetry) -> StoredTrace:
    """The last request in the embedded store."""
    newest = telemetry.store.newest(1).traces[0]
    return telemetry.store.find(newest.request_id)[0]


def test_collector_receives_the_whole_request(telemetry: OtelTelemetry, collector: Collector) -> None:
    """Seven spans arrive over a real socket, nested and named as the conventions say."""
    trace_id = serve(telemetry)
    assert telemetry.close()
    spans = {span.name: span for span in collector.spans(SPANS)}
    assert {span.trace_id.hex() for span in spans.values()} == {trace_id}
    server, generation = spans["POST /v1/chat/completions"], spans["chat mini"]
    assert server.kind == Span.SPAN_KIND_SERVER
    assert server.parent_span_id == b""
    assert generation.kind == Span.SPAN_KIND_INTERNAL
    assert generation.parent_span_id == server.span_id
    phases = [f"athanor.{phase.value}" for phase in Phase]
    assert sorted(phases) == sorted(spans.keys() - {server.name, generation.name})
    assert {spans[phase].parent_span_id for phase in phases} == {generation.span_id}
    for span in spans.values():
        assert server.start_time_unix_nano <= span.start_time_unix_nano
        assert span.start_time_unix_nano <= span.end_time_unix_nano <= server.end_time_unix_nano


def test_attributes_are_those_of_the_pin(telemetry: OtelTelemetry, collector: Collector) -> None:
    """Generation and server span carry exactly the attributes listed in ``names``."""
    serve(telemetry)
    telemetry.close()
    (body,) = collector.bodies
    spans = {span.name: attributes(span) for span in collector.spans(SPANS)}
    generation = spans["chat mini"]
    first = generation.pop("gen_ai.response.time_to_first_chunk")
    assert isinstance(first, float)
    assert 0 < first < 1
    assert generation == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "athanor",
        "gen_ai.output.type": "text",
        "gen_ai.request.model": "mini",
        "gen_ai.request.max_tokens": 64,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 40.0,
        "gen_ai.request.seed": 7,
        "gen_ai.request.presence_penalty": 0.25,
        "gen_ai.request.stream": True,
        "gen_ai.response.id": "chatcmpl-000000000000000000000001",
        "gen_ai.response.model": "mini",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": 12,
        "gen_ai.usage.cache_read.input_tokens": 8,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.reasoning.output_tokens": 3,
        "athanor.tenant.id": "alpha",
        "athanor.policy.rule": "tenants.alpha",
        "athanor.policy.digest": "9f86",
        "athanor.sandbox": "gvisor-systrap",
    }
    assert spans["POST /v1/chat/completions"] == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "athanor.front_end": "http",
        "athanor.request.id": "req_000000000000000000000001",
        "athanor.tenant.id": "alpha",
        "athanor.outcome": "ok",
    }
    assert names.SCHEMA_URL.encode() in body
    assert b"service.instance.id" in body


def test_grpc_calls_carry_rpc_attributes(telemetry: OtelTelemetry) -> None:
    """A gRPC call's server span follows the rpc conventions instead of the http ones."""
    route = "athanor.inference.v1.InferenceService/Generate"
    serve(telemetry, CallContext(route, "grpc"), error=RateLimitedError("slow down"))
    server = only(telemetry).spans[0]
    assert server.name == route
    assert server.attributes["rpc.system.name"] == "grpc"
    assert server.attributes["rpc.method"] == route
    assert server.attributes["rpc.response.status_code"] == "RESOURCE_EXHAUSTED"
    assert not any(name.startswith("http.") for name in server.attributes)


@pytest.mark.parametrize(
    ("error", "kind", "outcome", "server_status"),
    [
        (RateLimitedError("x"), "rate_limited", "refused", Status.STATUS_CODE_UNSET),
        (InvalidRequestError("x"), "invalid_request", "invalid", Status.STATUS_CODE_UNSET),
        (CancelledError("x"), "cancelled", "cancelled", Status.STATUS_CODE_UNSET),
        (InternalError("x"), "internal", "failed", Status.STATUS_CODE_ERROR),
    ],
)
def test_errors_set_status_and_type(
    telemetry: OtelTelemetry, collector: Collector, error, kind, outcome, server_status
) -> None:
    """The generation span is an error always, the server span only when the fault was ours."""
    serve(telemetry, error=error)
    telemetry.close()
    spans = {span.name: span for span in collector.spans(SPANS)}
    generation, server = spans["chat mini"], spans["POST /v1/chat/completions"]
    assert generation.status.code == Status.STATUS_CODE_ERROR
    assert server.status.code == server_status
    assert attributes(generation)["error.type"] == attributes(server)["error.type"] == kind
    assert attributes(server)["http.response.status_code"] == error.wire.http
    assert only(telemetry).summary.outcome == outcome


def test_a_call_refused_before_it_was_a_request(telemetry: OtelTelemetry) -> None:
    """Without a credential there is a server span alone, with its error and no tenant."""
    trace = telemetry.start(HTTP, "req_000000000000000000000002", None)
    trace.finish(error=UnauthenticatedError("who are you"))
    stored = only(telemetry)
    assert [span.name for span in stored.spans] == ["POST /v1/chat/completions"]
    assert stored.summary.tenant is None
    assert stored.summary.error == "unauthenticated"


@pytest.mark.parametrize("flag", ["00", "01"])
@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_the_callers_sampled_flag_decides_nothing(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, flag: str, ratio: float
) -> None:
    """A caller cannot force its traces on the collector nor hide them; the store keeps them all."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{collector.url}/v1/traces")
    telemetry = open_telemetry(replace(SETTINGS, sample_ratio=ratio))
    parent = f"00-{REMOTE_TRACE}-{REMOTE_SPAN}-{flag}"
    assert serve(telemetry, replace(HTTP, traceparent=parent)) == REMOTE_TRACE
    telemetry.close()
    stored = only(telemetry)
    assert len(stored.spans) == SPANS
    assert stored.spans[0].parent_id == REMOTE_SPAN
    if ratio == 0.0:
        assert collector.requests.empty()
    else:
        server = next(s for s in collector.spans(SPANS) if s.kind == Span.SPAN_KIND_SERVER)
        assert server.trace_id.hex() == REMOTE_TRACE
        assert server.parent_span_id.hex() == REMOTE_SPAN


@pytest.mark.parametrize("parent", ["", "junk", f"00-{'0' * 32}-{REMOTE_SPAN}-01", "00-" + "f" * 400])
def test_a_malformed_traceparent_starts_a_new_trace(telemetry: OtelTelemetry, parent: str) -> None:
    """A header that is no trace context is passed over."""
    trace_id = serve(telemetry, replace(HTTP, traceparent=parent))
    assert trace_id != "0" * 32
    assert len(trace_id) == 32
    assert only(telemetry).spans[0].parent_id is None


def test_content_is_nowhere(telemetry: OtelTelemetry, collector: Collector) -> None:
    """Prompt and stop strings are in no span, store entry, metric or log line; ids are."""
    with capture_logs() as lines:
        serve(telemetry)
        serve(telemetry, error=InvalidRequestError(f"bad value {CONTENT}"))
    telemetry.close()
    collector.spans(2 * SPANS)
    seen = b"".join(collector.bodies).decode("latin-1")
    seen += json.dumps([encode(only(telemetry)), lines])
    seen += telemetry.metrics.render()[1].decode()
    assert "req_000000000000000000000001" in seen
    assert CONTENT not in seen
    assert "stop_sequences" not in seen


def test_what_a_caller_names_cannot_steer_a_terminal(telemetry: OtelTelemetry) -> None:
    """A model name is cut to size and loses its control characters in spans and summary."""
    serve(telemetry, asked=request(model="\x1b[2J" + "x" * 10_000))
    stored = only(telemetry)
    assert stored.summary.model is not None
    assert stored.summary.model.startswith("?[2Jxxx")
    assert len(stored.summary.model) == 128
    assert "\x1b" not in json.dumps(encode(stored), ensure_ascii=False)


def test_times_from_outside_stay_within_the_request(telemetry: OtelTelemetry) -> None:
    """A queue time that the engine invented neither precedes the request nor lies ahead."""
    trace = telemetry.start(HTTP, "req_000000000000000000000003", "alpha")
    before_ns = time.time_ns()
    trace.begin(Phase.QUEUE, at_ns=0)
    trace.end(Phase.QUEUE, at_ns=before_ns + 10**18)
    trace.begin(Phase.PREFILL)
    trace.end(Phase.PREFILL, at_ns=1)
    trace.finish(error=None)
    server, queue, prefill = only(telemetry).spans
    assert queue.start_ns == server.start_ns
    assert server.start_ns <= queue.end_ns <= server.end_ns
    assert prefill.end_ns == prefill.start_ns


def test_a_replay_is_linked_to_what_it_does_again(telemetry: OtelTelemetry, collector: Collector) -> None:
    """What an engine left open ends with its death and an error; the next queue links to the one before it."""
    asked = request()
    trace = telemetry.start(HTTP, asked.request_id, "alpha")
    trace.describe(asked)
    trace.begin(Phase.QUEUE)
    trace.end(Phase.QUEUE)
    trace.begin(Phase.PREFILL)
    trace.annotate(replays=1)
    for phase in (Phase.QUEUE, Phase.PREFILL, Phase.DECODE):
        trace.begin(phase)
        trace.end(phase)
    trace.finish(error=None, output_tokens=1)
    telemetry.close()
    _, _, queue, prefill, again, then, decode = sorted(collector.spans(SPANS), key=lambda one: one.start_time_unix_nano)
    assert (queue.name, again.name) == ("athanor.queue", "athanor.queue")
    assert prefill.status.code == Status.STATUS_CODE_ERROR
    assert attributes(prefill) == {"error.type": "engine_lost"}
    assert prefill.end_time_unix_nano <= again.start_time_unix_nano
    (link,) = again.links
    assert (link.trace_id, link.span_id) == (queue.trace_id, queue.span_id)
    assert link.attributes[0].value.string_value == "replay"
    for span in (queue, then, decode):
        assert not span.links
        assert span.status.code == Status.STATUS_CODE_UNSET
    assert b"athanor_replays_total{" in telemetry.metrics.render()[1]


def test_callers_cannot_choose_their_fate() -> None:
    """Trace ids that an ordinary sampler would always take are taken as rarely as any; one id has one fate a minute."""
    now = 0.0
    sampler = Sampler(0.1, lambda: now)
    small = [sampler.takes(number) for number in range(1, 4_001)]
    assert 300 < sum(small) < 500
    assert small == [sampler.takes(number) for number in range(1, 4_001)]
    assert small != [Sampler(0.1, lambda: now).takes(number) for number in range(1, 4_001)]
    now = 61.0
    assert small != [sampler.takes(number) for number in range(1, 4_001)]
    assert sampler.takes(7, failed=True)
    assert not Sampler(0.0).takes(7, failed=True)


def test_tokens_that_came_together_tell_no_rate(telemetry: OtelTelemetry) -> None:
    """A rate is that of the tokens after those that came first, and unknown where none came later."""
    for together, known in ((1, True), (4, True), (5, False)):
        trace = telemetry.start(HTTP, "req_000000000000000000000007", "alpha")
        trace.first_token(together)
        trace.begin(Phase.DECODE)
        time.sleep(0.01)
        trace.end(Phase.DECODE)
        trace.finish(error=None, output_tokens=5)
        summary = only(telemetry).summary
        assert (summary.token_s is not None) is known
        if summary.token_s is not None:
            assert 0.01 <= summary.token_s * (5 - together) < 20


def test_a_replay_begins_its_phases_anew_within_a_bound(telemetry: OtelTelemetry) -> None:
    """Each replay gets spans of its own until the bound; the rest is counted."""
    trace = telemetry.start(HTTP, "req_000000000000000000000004", "alpha")
    for _ in range(40):
        trace.begin(Phase.QUEUE)
    trace.end(Phase.QUEUE, wait_us=7)
    trace.finish(error=None)
    stored = only(telemetry)
    assert len(stored.spans) == MAX_SPANS
    assert stored.dropped_spans == 40 - (MAX_SPANS - 1)


def test_phase_attributes_are_prefixed(telemetry: OtelTelemetry) -> None:
    """The first underscore of a keyword becomes a dot under ``athanor.``."""
    trace = telemetry.start(HTTP, "req_000000000000000000000005", "alpha")
    trace.begin(Phase.QUEUE)
    trace.end(Phase.QUEUE, queue_wait_us=7, replays=1)
    trace.finish(error=None)
    queue = only(telemetry).spans[1]
    assert queue.attributes == {"athanor.queue.wait_us": 7, "athanor.replays": 1}


def test_finish_is_idempotent_and_closes_what_is_open(telemetry: OtelTelemetry) -> None:
    """A second finish, and calls after it, change nothing; open phases end with the request."""
    trace = telemetry.start(HTTP, "req_000000000000000000000006", None)
    trace.begin(Phase.DECODE)
    trace.end(Phase.TEXT)
    trace.annotate(tenant="alpha")
    with capture_logs() as lines:
        trace.finish(error=None)
        trace.finish(error=InternalError("again"))
    trace.begin(Phase.TEXT)
    trace.annotate(tenant="beta")
    stored = only(telemetry)
    assert telemetry.store.newest(10).recorded == 1
    assert len(lines) == 1
    assert stored.summary.tenant == "alpha"
    assert [span.name for span in stored.spans] == [HTTP.route, "athanor.decode"]
    assert stored.spans[1].end_ns == stored.spans[0].end_ns


def test_one_log_line_a_request(telemetry: OtelTelemetry) -> None:
    """The line names the request and its trace, says how it went, and is an error when we failed."""
    with capture_logs() as lines:
        trace_id = serve(telemetry)
        serve(telemetry, error=InternalError("x"))
    good, bad = lines
    assert good["event"] == "request"
    assert good["level"] == "info"
    assert good["request_id"] == "req_000000000000000000000001"
    assert good["trace_id"] == trace_id
    assert good["tenant"] == "alpha"
    assert (good["input_tokens"], good["cached_tokens"], good["output_tokens"]) == (12, 8, 5)
    assert good["duration_ms"] >= good["ttft_ms"] >= 0
    assert (bad["level"], bad["error"]) == ("error", "internal")


def test_switched_off_sdk_still_lists_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """With OTEL_SDK_DISABLED nothing is sent, but requests are still counted, and listed with their spans."""
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    telemetry = open_telemetry(TelemetrySettings(version="0"))
    serve(telemetry)
    assert len(only(telemetry).spans) == SPANS
    assert only(telemetry).summary.output_tokens == 5


def test_the_operators_service_name_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES replace and join what we say of ourselves."""

    def scrape() -> str:
        telemetry = open_telemetry(SETTINGS)
        telemetry.count(names.POLICY_RELOADS, outcome="ok")
        return telemetry.metrics.render()[1].decode()

    plain = scrape()
    assert 'service_name="athanor"' in plain
    assert 'service_version="0.0.test"' in plain
    monkeypatch.setenv("OTEL_SERVICE_NAME", "furnace")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=lab")
    named = scrape()
    assert 'service_name="furnace"' in named
    assert 'deployment_environment_name="lab"' in named
    assert 'service_version="0.0.test"' in named
