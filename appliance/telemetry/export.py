"""Spans and metrics to a collector over OTLP/HTTP, never in a request's way.

Configured by OpenTelemetry's own environment variables and nothing else. A finished span is put
into a bounded queue or dropped and counted; a thread sends. A collector that is dead, slow or
silent costs memory up to the bound and no time. The SDK ignores its flush timeout
(opentelemetry-python issue 4568) and counts no drops, hence ``BoundedExport`` around its batch
processor and a shutdown with a deadline of its own.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

import structlog
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from appliance.errors import ConfigError

MAX_QUEUED_SPANS = 8_192
"""Spans that wait for the collector: about 1,000 requests, 16 MiB."""

MAX_BATCH_SPANS = 512
"""Spans in one export: the SDK's default, about 300 KiB of protobuf."""

EXPORT_DELAY_S = 1.0
"""Time a span waits for company."""

METRICS_INTERVAL_S = 30.0
"""Between two exports of metrics, two scrapes of a common Prometheus set-up."""

COMPLAINT_INTERVAL_S = 60.0
"""A dead collector is reported once in this time, not once a batch."""

GRPC_PORT = 4317
"""Where collectors speak OTLP over gRPC, by convention (opentelemetry.io, OTLP specification)."""

PROTOCOL = "http/protobuf"
"""The only one spoken: the gRPC exporter would share its library with our server."""

OnDrop = Callable[[int, str], None]
"""Told of spans that will not arrive: how many, and why."""


def span_exporter() -> SpanExporter | None:
    """The exporter that the environment asks for, or None.

    Raises:
        ConfigError: the environment asks for a protocol that is not spoken here.
    """
    return OTLPSpanExporter() if _wanted("TRACES") else None


def metric_reader() -> PeriodicExportingMetricReader | None:
    """A reader that sends metrics where the environment says, or None.

    Raises:
        ConfigError: as ``span_exporter``.
    """
    if not _wanted("METRICS"):
        return None
    interval_ms = METRICS_INTERVAL_S * 1_000
    return PeriodicExportingMetricReader(OTLPMetricExporter(), interval_ms)


def stop_within(deadline_s: float, stop: Callable[[], None]) -> bool:
    """Call ``stop`` in a thread and wait no longer than the deadline; whether it came back.

    A stop that hangs keeps its daemon thread until the process ends, which it does not delay.
    """
    thread = threading.Thread(target=stop, name="telemetry-stop", daemon=True)
    thread.start()
    thread.join(deadline_s)
    return not thread.is_alive()


class BoundedExport(SpanProcessor):
    """Sampled spans to an exporter, at most ``max_queue`` waiting; others dropped and counted."""

    def __init__(self, exporter: SpanExporter, on_drop: OnDrop, *, max_queue: int = MAX_QUEUED_SPANS) -> None:
        self._waiting = _Waiting(max_queue)
        self._on_drop = on_drop
        self._batch = BatchSpanProcessor(
            _CountingExporter(exporter, self._waiting, on_drop),
            max_queue_size=max_queue,
            schedule_delay_millis=EXPORT_DELAY_S * 1_000,
            max_export_batch_size=min(MAX_BATCH_SPANS, max_queue),
        )

    def on_end(self, span: ReadableSpan) -> None:
        """Queue or drop; never waits."""
        context = span.get_span_context()
        if context is None or not context.trace_flags.sampled:
            return
        if self._waiting.enter():
            self._batch.on_end(span)
        else:
            self._on_drop(1, "queue_full")

    def shutdown(self) -> None:
        """Send what waits; may take long with a dead collector (see ``stop_within``)."""
        self._batch.shutdown()  # type: ignore[no-untyped-call]  # the SDK leaves it untyped

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Send what waits now; the SDK does not keep to the timeout."""
        return self._batch.force_flush(timeout_millis)

    def abandon(self) -> None:
        """Count what still waits as dropped; called when the shutdown deadline has passed."""
        left = self._waiting.clear()
        if left:
            self._on_drop(left, "shutdown")


class _Waiting:
    """How many spans are in the SDK's queue, so that it never overflows by itself."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._count = 0
        self._lock = threading.Lock()

    def enter(self) -> bool:
        with self._lock:
            if self._count >= self._limit:
                return False
            self._count += 1
            return True

    def leave(self, spans: int) -> None:
        with self._lock:
            self._count = max(0, self._count - spans)

    def clear(self) -> int:
        with self._lock:
            left, self._count = self._count, 0
            return left


class _CountingExporter(SpanExporter):
    """Frees queue room as a batch is taken and counts batches that do not arrive."""

    def __init__(self, inner: SpanExporter, waiting: _Waiting, on_drop: OnDrop) -> None:
        self._inner = inner
        self._waiting = waiting
        self._on_drop = on_drop
        self._complain_after = 0.0
        self._log = structlog.get_logger("athanor.telemetry")

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._waiting.leave(len(spans))
        result = self._inner.export(spans)
        if result is not SpanExportResult.SUCCESS:
            self._on_drop(len(spans), "export_failed")
            self._complain(len(spans))
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._inner.force_flush(timeout_millis)

    def _complain(self, spans: int) -> None:
        now = time.monotonic()
        if now < self._complain_after:
            return
        self._complain_after = now + COMPLAINT_INTERVAL_S
        self._log.warning(
            "collector_unreachable",
            dropped_spans=spans,
            hint="look at OTEL_EXPORTER_OTLP_ENDPOINT; requests are served regardless",
        )


def _wanted(signal: str) -> bool:
    """Whether OTLP export of ``TRACES`` or ``METRICS`` is configured."""

    def value(name: str) -> str:
        return os.environ.get(name, "").strip()

    if value("OTEL_SDK_DISABLED").lower() == "true":
        return False
    if value(f"OTEL_{signal}_EXPORTER").lower() == "none":
        return False
    own = value(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT")
    if not (own or value("OTEL_EXPORTER_OTLP_ENDPOINT")):
        return False
    spoken = value(f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL") or value("OTEL_EXPORTER_OTLP_PROTOCOL")
    if spoken not in ("", PROTOCOL):
        raise ConfigError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL is {spoken!r}; only {PROTOCOL} is spoken: unset it and "
            "name the collector's HTTP port (4318 by convention) in OTEL_EXPORTER_OTLP_ENDPOINT"
        )
    _hint_at_port(own or value("OTEL_EXPORTER_OTLP_ENDPOINT"))
    return True


def _hint_at_port(endpoint: str) -> None:
    """A collector's gRPC port is the commonest slip, and from here it only looks dead."""
    if urlsplit(endpoint).netloc.endswith(f":{GRPC_PORT}"):
        structlog.get_logger("athanor.telemetry").warning(
            "collector_port",
            hint=f"port {GRPC_PORT} is OTLP over gRPC by convention; over HTTP it is 4318",
        )
