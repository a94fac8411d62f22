"""Spans of our own making, and their way to OpenTelemetry's SDK when a collector is to have them.

An SDK span costs ten times what a record of the same facts costs, and most of them are never sent: without a collector
none is, with sampling only a share. So a request keeps records, which the embedded store takes as they are; those of a
sampled request are told to the SDK at its end, under the same ids and times.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import (
    INVALID_SPAN_CONTEXT,
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    TraceFlags,
    Tracer,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.trace.status import StatusCode

from appliance.telemetry.attributes import Value
from appliance.telemetry.names import LINK_REASON
from appliance.telemetry.sampling import Sampler

SpanValue = Value | tuple[str, ...]
"""What an attribute of a span may be."""

_PROPAGATOR = TraceContextTextMapPropagator()
_random = random.Random()  # noqa: S311 - ids that nobody must guess are made elsewhere; these shall only differ


@dataclass(slots=True, eq=False)
class SpanRecord:
    """One span. Times are Unix nanoseconds; ``end_ns`` is None while it is open."""

    name: str
    kind: SpanKind
    parent_id: int | None
    start_ns: int
    attributes: dict[str, SpanValue] = field(default_factory=dict)
    end_ns: int | None = None
    error: bool = False
    """Whether its status is an error."""
    replays: int | None = None
    """Span of this trace that this one does again; a link leads there."""
    span_id: int = field(default_factory=lambda: _random.getrandbits(64) or 1)


@dataclass(frozen=True, slots=True)
class TraceIds:
    """The trace that a request belongs to, and the caller's span above it."""

    trace_id: int
    remote_parent: int | None

    @classmethod
    def of(cls, traceparent: str | None) -> TraceIds:
        """The caller's trace when it sent a valid ``traceparent`` (W3C Trace Context), else a new one."""
        context = INVALID_SPAN_CONTEXT
        if traceparent:
            found = _PROPAGATOR.extract({"traceparent": traceparent})
            context = get_current_span(found).get_span_context()
        if context.is_valid:
            return cls(context.trace_id, context.span_id)
        return cls(_random.getrandbits(128) or 1, None)


class PresetIds(IdGenerator):
    """Gives the SDK the ids that were given already. One thread uses it."""

    def __init__(self) -> None:
        self.trace_id = 0
        self.span_id = 0

    def generate_span_id(self) -> int:
        """The record's."""
        return self.span_id

    def generate_trace_id(self) -> int:
        """The record's."""
        return self.trace_id


class SpanExport:
    """The way to the SDK, for the traces that ``sampler`` takes."""

    def __init__(self, provider: TracerProvider, tracer: Tracer, ids: PresetIds, sampler: Sampler) -> None:
        self._provider = provider
        self._tracer = tracer
        self._ids = ids
        self._sampler = sampler

    def tell(self, ids: TraceIds, spans: list[SpanRecord]) -> None:
        """Hand a finished trace to the SDK, if it is one of the share; parents come before their children."""
        if not self._sampler.takes(ids.trace_id, failed=spans[0].error):
            return
        for record in spans:
            self._ids.trace_id, self._ids.span_id = ids.trace_id, record.span_id
            context = None
            if record.parent_id is not None:
                remote = record.parent_id == ids.remote_parent
                above = SpanContext(ids.trace_id, record.parent_id, remote, TraceFlags(TraceFlags.SAMPLED))
                context = set_span_in_context(NonRecordingSpan(above))
            span = self._tracer.start_span(
                record.name, context, record.kind, record.attributes, _links(ids, record), record.start_ns
            )
            if record.error:
                span.set_status(StatusCode.ERROR)
            span.end(record.end_ns)

    def shutdown(self) -> None:
        """Send what waits."""
        self._provider.shutdown()


def _links(ids: TraceIds, record: SpanRecord) -> list[Link]:
    if record.replays is None:
        return []
    earlier = SpanContext(ids.trace_id, record.replays, False, TraceFlags(TraceFlags.SAMPLED))
    return [Link(earlier, {LINK_REASON: "replay"})]
