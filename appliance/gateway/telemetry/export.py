"""Export of spans, which never delays a request.

A finished span is put into a bounded queue or dropped and counted; a thread sends. A collector that is dead, slow or
silent costs memory up to the bound and no time. The SDK ignores its flush timeout (opentelemetry-python issue 4568) and
counts no drops, hence ``BoundedExport`` around its batch processor and a shutdown with a deadline of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import structlog
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

MAX_QUEUED_SPANS = 4_096
"""Spans that wait for the collector: about 500 requests, 17 MiB. A full queue of 8,192 took 34 (`bench.soak`)."""

MAX_BATCH_SPANS = 512
"""Spans in one export: the SDK's default, about 300 KiB of protobuf."""

EXPORT_DELAY_S = 1.0
"""Seconds that a span waits for others, to be sent with them."""

COMPLAINT_INTERVAL_S = 60.0
"""Seconds between two log lines about a collector that cannot be reached."""

OnDrop = Callable[[int, str], None]
"""Called with the number of spans that will not arrive, and the reason."""

OnSent = Callable[[int], None]
"""Called with the number of spans that a collector has taken."""


def stop_within(deadline_s: float, stop: Callable[[], None]) -> bool:
    """Call ``stop`` in a thread and wait no longer than the deadline; returns whether the call ended.

    A stop that hangs keeps its daemon thread until the process ends, which it does not delay.
    """
    thread = threading.Thread(target=stop, name="telemetry-stop", daemon=True)
    thread.start()
    thread.join(deadline_s)
    return not thread.is_alive()


class BoundedExport(SpanProcessor):
    """Passes sampled spans to an exporter; at most ``max_queue`` wait, further ones are dropped and counted."""

    def __init__(
        self,
        exporter: SpanExporter,
        on_drop: OnDrop,
        on_sent: OnSent = lambda _spans: None,
        *,
        max_queue: int = MAX_QUEUED_SPANS,
    ) -> None:
        self._waiting = _Waiting(max_queue)
        self._on_drop = on_drop
        self._batch = BatchSpanProcessor(
            _CountingExporter(exporter, self._waiting, on_drop, on_sent),
            max_queue_size=max_queue,
            schedule_delay_millis=EXPORT_DELAY_S * 1_000,
            max_export_batch_size=min(MAX_BATCH_SPANS, max_queue),
        )

    @property
    def queued(self) -> int:
        """Number of spans that wait now."""
        return self._waiting.count

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
    """Number of spans in the SDK's queue, bounded here so that the queue never overflows."""

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

    @property
    def count(self) -> int:
        """Number of spans in the queue."""
        return self._count

    def leave(self, spans: int) -> None:
        with self._lock:
            self._count = max(0, self._count - spans)

    def clear(self) -> int:
        with self._lock:
            left, self._count = self._count, 0
            return left


class _CountingExporter(SpanExporter):
    """Frees room in the queue when a batch is taken, and counts batches that do not arrive."""

    def __init__(self, inner: SpanExporter, waiting: _Waiting, on_drop: OnDrop, on_sent: OnSent) -> None:
        self._inner = inner
        self._waiting = waiting
        self._on_drop, self._on_sent = on_drop, on_sent
        self._complain_after = 0.0
        self._log = structlog.get_logger("athanor.telemetry")

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._waiting.leave(len(spans))
        result = SpanExportResult.FAILURE
        try:
            # What a collector answers is parsed in there; an error of that is one more way to fail.
            result = self._inner.export(spans)
        finally:
            if result is SpanExportResult.SUCCESS:
                self._on_sent(len(spans))
            else:
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
