"""Export never stands in a request's way: dead and silent collectors, drops, deadlines."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from prometheus_client.parser import text_string_to_metric_families

from appliance.gateway.telemetry.export import BoundedExport, stop_within
from appliance.gateway.telemetry.tracer import OtelTelemetry, open_telemetry
from tests.appliance.captured_logs import capture_logs
from tests.appliance.gateway.telemetry.calls import SETTINGS, serve
from tests.appliance.gateway.telemetry.collector import Collector

REQUESTS = 20
"""Requests of one timing: a few tens of milliseconds when nothing is in the way."""

SILENCE_S = 2.0
"""How long an exporter waits for the silent collector."""


def dropped(telemetry: OtelTelemetry) -> dict[str, float]:
    """The dropped-spans counter by reason, as Prometheus reads it."""
    text = telemetry.metrics.render()[1].decode()
    return {
        sample.labels["athanor_reason"]: sample.value
        for family in text_string_to_metric_families(text)
        if family.name == "athanor_telemetry_dropped_spans"
        for sample in family.samples
        if sample.name.endswith("_total") and sample.value
    }


def elapsed_s(telemetry: OtelTelemetry) -> float:
    """Seconds for ``REQUESTS`` requests."""
    before = time.perf_counter()
    for _ in range(REQUESTS):
        serve(telemetry)
    return time.perf_counter() - before


def test_a_silent_collector_delays_no_request(collector: Collector) -> None:
    """Requests run on while the collector hangs; exporting in the request would stop them."""
    collector.release.clear()
    url = f"{collector.url}/v1/traces"
    telemetry = open_telemetry(SETTINGS, OTLPSpanExporter(url, timeout=SILENCE_S))
    serve(telemetry)
    assert collector.arrived.wait(10), "the export never began, so nothing was shown"
    assert elapsed_s(telemetry) < SILENCE_S

    # Positive control: the same exporter in the request's own thread does stop it.
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(url, timeout=SILENCE_S)))
    before = time.perf_counter()
    provider.get_tracer("control").start_span("one").end()
    assert time.perf_counter() - before >= SILENCE_S
    collector.release.set()
    assert telemetry.close(deadline_s=10)


def test_shutdown_keeps_its_own_deadline(collector: Collector) -> None:
    """A collector that hangs holds a stopping process no longer than it was given."""
    collector.release.clear()
    url = f"{collector.url}/v1/traces"
    telemetry = open_telemetry(SETTINGS, OTLPSpanExporter(url, timeout=30))
    serve(telemetry)
    assert collector.arrived.wait(10)
    serve(telemetry)
    before = time.perf_counter()
    assert telemetry.close(deadline_s=0.3) is False
    assert time.perf_counter() - before < 20.0
    assert dropped(telemetry) == {"shutdown": 7.0}
    collector.release.set()
    assert len(collector.spans(14)) == 14  # a thread was still at it, and ends with this


def test_shutdown_sends_what_waits(collector: Collector) -> None:
    """Spans of the last second reach a healthy collector, and close says so."""
    telemetry = open_telemetry(SETTINGS, OTLPSpanExporter(f"{collector.url}/v1/traces"))
    serve(telemetry)
    assert telemetry.close(deadline_s=5)
    assert len(collector.spans(7)) == 7
    assert dropped(telemetry) == {}


def test_a_dead_collector_costs_counted_spans_and_one_complaint() -> None:
    """Nothing listens: every span is counted as failed and the log says it once."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with capture_logs() as lines:
        url = f"http://127.0.0.1:{port}/v1/traces"
        telemetry = open_telemetry(SETTINGS, OTLPSpanExporter(url, timeout=0.2))
        for _ in range(80):
            serve(telemetry)
        assert telemetry.close(deadline_s=10)
    assert dropped(telemetry) == {"export_failed": 80 * 7.0}
    complaints = [line for line in lines if line["event"] == "collector_unreachable"]
    assert len(complaints) == 1
    assert {line["event"] for line in lines} == {"request", "collector_unreachable"}


def test_a_full_queue_drops_and_counts(collector: Collector) -> None:
    """Of the spans offered while the collector hangs, the queue's bound is kept, the rest counted."""
    collector.release.clear()
    counts: Counter[str] = Counter()
    exporter = OTLPSpanExporter(f"{collector.url}/v1/traces", timeout=30)
    bounded = BoundedExport(exporter, lambda spans, why: counts.update({why: spans}), max_queue=16)
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(bounded)
    tracer = provider.get_tracer("test")
    for _ in range(16):
        tracer.start_span("first").end()
    assert collector.arrived.wait(10)  # the worker has taken those 16 and hangs
    for _ in range(100):
        tracer.start_span("more").end()
    assert counts == {"queue_full": 84}
    collector.release.set()
    assert stop_within(10, provider.shutdown)
    assert len(collector.spans(32)) == 32
    assert counts == {"queue_full": 84}


def test_no_thread_is_left_behind(collector: Collector) -> None:
    """After a close the threads that export began are gone."""
    before = set(threading.enumerate())
    telemetry = open_telemetry(SETTINGS, OTLPSpanExporter(f"{collector.url}/v1/traces"))
    exporting = set(threading.enumerate()) - before
    assert exporting
    serve(telemetry)
    assert telemetry.close(deadline_s=10)
    assert not any(thread.is_alive() for thread in exporting)
