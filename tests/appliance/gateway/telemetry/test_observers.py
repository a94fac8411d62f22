"""Traces in programs that others wrote: a collector between us and a backend, and Phoenix."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from appliance.common.errors import InternalError
from appliance.gateway.telemetry.tracer import open_telemetry
from appliance.operator.demo import choose_ports
from tests.appliance.gateway.telemetry.calls import CONTENT, HTTP, SETTINGS, serve
from tests.appliance.gateway.telemetry.collector import attributes, running_grpc
from tests.observers import observer, program, rotel

REMOTE_TRACE, REMOTE_SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CALLED = replace(HTTP, traceparent=f"00-{REMOTE_TRACE}-{REMOTE_SPAN}-00")


@pytest.mark.parametrize("spoken", ["http/protobuf", "grpc"])
def test_a_collector_passes_whole_traces_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, spoken: str) -> None:
    """Through a real collector every span arrives behind it, with ids, parents, status and attributes unchanged."""
    with running_grpc() as backend, rotel(tmp_path, backend.url) as collector:
        for name, value in collector.environment(spoken).items():
            monkeypatch.setenv(name, value)
        telemetry = open_telemetry(SETTINGS)
        serve(telemetry, CALLED, error=InternalError("x"))
        assert telemetry.close(deadline_s=10)
        spans = {span.name: span for span in backend.spans(7)}
        assert len(spans) == 7
        metrics = backend.metrics.get(timeout=10)
    stored = {one.name: one for one in telemetry.store.find(REMOTE_TRACE)[0].spans}
    for name, span in spans.items():
        assert span.trace_id.hex() == REMOTE_TRACE
        assert (span.span_id.hex(), span.parent_span_id.hex()) == (stored[name].span_id, stored[name].parent_id)
        assert (span.start_time_unix_nano, span.end_time_unix_nano) == (stored[name].start_ns, stored[name].end_ns)
        assert attributes(span).keys() == stored[name].attributes.keys()
    assert stored["POST /v1/chat/completions"].parent_id == REMOTE_SPAN
    assert "gen_ai.server.request.duration" in str(metrics)


@pytest.mark.timeout(300)
def test_phoenix_shows_a_request_as_a_model_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Phoenix takes the trace over both protocols, keeps its tree, and reads model and token counts out of the GenAI
    attributes; no content is there to show."""
    phoenix = observer("phoenix")
    http, grpc = choose_ports((0, 0))
    env = {
        "PHOENIX_WORKING_DIR": str(tmp_path),
        "PHOENIX_PORT": str(http),
        "PHOENIX_GRPC_PORT": str(grpc),
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_TELEMETRY_ENABLED": "false",
    }
    with program([phoenix, "serve"], tmp_path / "phoenix.log", (http, grpc), env):
        for spoken, port in (("http/protobuf", http), ("grpc", grpc)):
            monkeypatch.setenv(
                "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
                f"http://127.0.0.1:{port}" + ("" if spoken == "grpc" else "/v1/traces"),
            )
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", spoken)
            telemetry = open_telemetry(SETTINGS)
            serve(telemetry, CALLED)
            assert telemetry.close(deadline_s=10)
        url, found, deadline = f"http://127.0.0.1:{http}/v1/projects/default/spans?limit=100", [], time.monotonic() + 30
        while len(found) < 14:
            assert time.monotonic() < deadline, found
            found = httpx.get(url, timeout=10).json()["data"]
            time.sleep(0.1)
    assert {span["context"]["trace_id"] for span in found} == {REMOTE_TRACE}
    by_id = {span["context"]["span_id"]: span for span in found}
    servers = [span for span in found if span["parent_id"] == REMOTE_SPAN]
    assert len(servers) == 2 and all(span["parent_id"] in by_id for span in found if span not in servers)
    calls = [span for span in found if span["name"] == "chat mini"]
    assert len(calls) == 2
    for call in calls:
        assert call["span_kind"] == "LLM"
        told = call["attributes"]
        assert told["llm.model_name"] == "mini"
        assert (told["llm.token_count.prompt"], told["llm.token_count.completion"]) == (12, 5)
    assert CONTENT not in str(found)
