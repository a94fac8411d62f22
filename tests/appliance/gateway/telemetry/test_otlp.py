"""What the environment asks for, both protocols of OTLP, and collectors that mean ill."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from prometheus_client.parser import text_string_to_metric_families

from appliance.common.errors import ConfigError
from appliance.gateway.telemetry import otlp
from appliance.gateway.telemetry.tracer import OtelTelemetry, open_telemetry
from tests.appliance.captured_logs import capture_logs
from tests.appliance.gateway.telemetry.calls import SETTINGS, serve
from tests.appliance.gateway.telemetry.collector import running, running_grpc

FEW_MIB = 8 << 20
"""What a hostile collector gets rid of at most: what is read of it, and buffers of sockets on the way."""


def figure(telemetry: OtelTelemetry, name: str) -> float:
    """The sum of a metric's samples, as Prometheus reads it."""
    text = telemetry.metrics.render()[1].decode()
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        if family.name == name
        for sample in family.samples
        if not sample.name.endswith("_created")
    )


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:4318/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://127.0.0.1:4318/v1/metrics"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "true"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": " "}, False),
    ],
)
def test_the_standard_variables_switch_export(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], wanted: bool
) -> None:
    """Spans are exported when an OTLP endpoint is named and nothing switches them off."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    exporter = otlp.span_exporter()
    assert (exporter is not None) is wanted
    if exporter is not None:
        exporter.shutdown()


@pytest.mark.parametrize("name", ["OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"])
def test_another_protocol_is_refused_at_start(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Asking for one that is not spoken is an error that names those that are, never a silent fallback."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
    monkeypatch.setenv(name, "http/json")
    with pytest.raises(ConfigError, match=r"http/protobuf and grpc are spoken"):
        otlp.span_exporter()
    for spoken, module in (("http/protobuf", "proto.http"), ("grpc", "proto.grpc")):
        monkeypatch.setenv(name, spoken)
        exporter = otlp.span_exporter()
        assert exporter is not None
        assert module in type(exporter).__module__
        exporter.shutdown()


@pytest.mark.parametrize(
    ("spoken", "port", "hinted"),
    [("http/protobuf", 4317, True), ("http/protobuf", 4318, False), ("grpc", 4318, True), ("grpc", 4317, False)],
)
def test_the_other_protocols_port_is_hinted_at(
    monkeypatch: pytest.MonkeyPatch, spoken: str, port: int, hinted: bool
) -> None:
    """Naming the port of the protocol that is not spoken, the commonest slip, is told once at the start."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://user:secret@127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", spoken)
    with capture_logs() as lines:
        exporter = otlp.span_exporter()
    assert exporter is not None
    exporter.shutdown()
    assert [line["event"] for line in lines] == (["collector_port"] if hinted else [])
    assert "secret" not in str(lines)


@pytest.mark.parametrize(
    ("sampler", "argument", "ratio"),
    [
        ("", "", 1.0),
        ("always_on", "", 1.0),
        ("parentbased_always_on", "", 1.0),
        ("always_off", "", 0.0),
        ("traceidratio", "0.25", 0.25),
        ("parentbased_traceidratio", "0", 0.0),
        ("traceidratio", "", 1.0),
    ],
)
def test_the_standard_sampler_is_the_operators_rule(
    monkeypatch: pytest.MonkeyPatch, sampler: str, argument: str, ratio: float
) -> None:
    """The environment's sampler becomes a share; a parent's flag plays no part in it."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", argument)
    assert otlp.sample_ratio() == ratio


@pytest.mark.parametrize(
    ("sampler", "argument"),
    [("jaeger_remote", ""), *(("traceidratio", argument) for argument in ("1.5", "-1", "x", "nan"))],
)
def test_an_unknown_sampler_is_refused_at_start(monkeypatch: pytest.MonkeyPatch, sampler: str, argument: str) -> None:
    """A sampler that is not known or a share that is none stops the start: neither all nor nothing is guessed."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", argument)
    with pytest.raises(ConfigError, match="OTEL_TRACES_SAMPLER"):
        open_telemetry(SETTINGS)


@pytest.mark.parametrize("spoken", ["http/protobuf", "grpc"])
def test_both_signals_go_over_both_protocols(monkeypatch: pytest.MonkeyPatch, spoken: str) -> None:
    """With the general endpoint, a close sends every span and one flush of the metrics, over HTTP and over gRPC."""
    with running() if spoken != "grpc" else running_grpc() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", spoken)
        telemetry = open_telemetry(SETTINGS)
        serve(telemetry)
        assert telemetry.close(deadline_s=10)
        assert len(collector.spans(7)) == 7
        request = collector.metrics.get(timeout=10)
    sent = {
        metric.name
        for resource in request.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    assert {"gen_ai.server.request.duration", "gen_ai.client.token.usage", "athanor.requests"} <= sent
    assert figure(telemetry, "athanor_telemetry_sent_spans") == 7


Talk = Callable[[socket.socket], int]
"""What a hostile collector does with a connection; gives how many bytes of an answer it got rid of."""


def reset(connection: socket.socket) -> int:
    """Hang up with a reset in the middle of the request."""
    connection.recv(64)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return 0


def garbage(connection: socket.socket) -> int:
    """Answer with what is no HTTP and no HTTP/2."""
    connection.recv(1 << 20)
    return connection.send(b"\x00\xff" * 4_096)


def endless(connection: socket.socket) -> int:
    """Say that all is well, in an answer without an end."""
    connection.recv(1 << 20)
    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 100000000000\r\n\r\n")
    sent = 0
    while sent < 64 << 20:
        sent += connection.send(bytes(1 << 16))
    return sent


def redirect(connection: socket.socket) -> int:
    """Send the spans elsewhere."""
    connection.recv(1 << 20)
    return connection.send(b"HTTP/1.1 307 Go\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n")


def patience(connection: socket.socket) -> int:
    """Ask to be asked again in thirty years."""
    connection.recv(1 << 20)
    return connection.send(b"HTTP/1.1 503 No\r\nretry-after: 1000000000\r\ncontent-length: 0\r\n\r\n")


@contextmanager
def hostile(talk: Talk) -> Iterator[tuple[int, list[int]]]:
    """A listener that does this to every connection; its port, and what it got rid of."""
    got_rid: list[int] = []
    server = socket.create_server(("127.0.0.1", 0))
    over = threading.Event()

    def accept() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            if over.is_set():
                connection.close()
                return
            with connection:
                connection.settimeout(5)
                try:
                    got_rid.append(talk(connection))
                except OSError:
                    got_rid.append(0)

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield server.getsockname()[1], got_rid
    finally:
        over.set()
        socket.create_connection(server.getsockname()).close()
        thread.join()
        server.close()


@pytest.mark.parametrize("spoken", ["http/protobuf", "grpc"])
@pytest.mark.parametrize("talk", [reset, garbage, endless, redirect, patience])
def test_a_hostile_collector_costs_counted_spans(monkeypatch: pytest.MonkeyPatch, talk: Talk, spoken: str) -> None:
    """Whatever it answers, requests go on, each span is counted as sent or lost, little is read, and the close ends."""
    with hostile(talk) as (port, got_rid):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", spoken)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
        telemetry = open_telemetry(SETTINGS)
        for _ in range(10):
            serve(telemetry)
        before = time.perf_counter()
        telemetry.close(deadline_s=4)
        assert time.perf_counter() - before < 20
        lost, sent = (figure(telemetry, f"athanor_telemetry_{what}_spans") for what in ("dropped", "sent"))
        assert lost + sent == 70
        # An answer that begins with 200 is a promise; whatever else came is none.
        assert sent == (70 if talk is endless and spoken != "grpc" else 0)
    assert got_rid
    assert max(got_rid) < FEW_MIB
