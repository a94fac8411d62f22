"""Records of spans, and their export through OpenTelemetry's SDK where a collector is configured.

An SDK span costs ten times what a record of the same facts costs, and most of them are never sent: without a collector
none is, with sampling only a share. So a request keeps records, which the embedded store takes as they are; those of a
sampled request are passed to the SDK at its end, under the same ids and times.
"""

from __future__ import annotations

import hashlib
import random
import secrets
import time
from collections.abc import Callable
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

from appliance.common.operator_calls import OperatorCall
from appliance.gateway.telemetry.attributes import Value
from appliance.gateway.telemetry.names import (
    ERROR_TYPE,
    LINK_REASON,
    OUTCOME,
    REQUEST_ID,
    REQUEST_MODEL,
    RPC_METHOD,
    RPC_STATUS,
    RPC_SYSTEM,
    TENANT,
)
from appliance.gateway.telemetry.store import StoredSpan

SpanValue = Value | tuple[str, ...]
"""Value of a span's attribute."""

DRAW_S = 60
"""Seconds for which a trace's fate holds: longer than most traces, short beside a flood."""

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

    def stored(self) -> StoredSpan:
        """Return the finished span as the store keeps it."""
        assert self.end_ns is not None, "every span is ended before it is stored"
        error = self.attributes.get(ERROR_TYPE)
        return StoredSpan(
            span_id=format(self.span_id, "016x"),
            parent_id=format(self.parent_id, "016x") if self.parent_id is not None else None,
            name=self.name,
            start_ns=self.start_ns,
            end_ns=self.end_ns,
            attributes={
                key: ", ".join(value) if isinstance(value, tuple) else value for key, value in self.attributes.items()
            },
            error=str(error) if error is not None else None,
        )


def operator_span(call: OperatorCall) -> SpanRecord:
    """Return the span of a call of the operator's API that has just ended."""
    ended = time.time_ns()
    attributes: dict[str, SpanValue] = {
        RPC_SYSTEM: "grpc",
        RPC_METHOD: call.method,
        RPC_STATUS: call.outcome,
        REQUEST_ID: call.request,
    }
    failed = call.outcome != "OK"
    if failed:
        attributes[ERROR_TYPE] = call.outcome
    begun = ended - call.milliseconds * 1_000_000
    return SpanRecord(call.method, SpanKind.SERVER, None, begun, attributes, ended, failed)


def prompt_span(request: str, tenant: str, model: str, outcome: str, took_s: float, parent: int | None) -> SpanRecord:
    """Return the span of a prompt that was computed for another host and has just ended; ``parent`` is that host's."""
    ended, method = time.time_ns(), "athanor.fleet.v1.PrefillService/Compute"
    attributes: dict[str, SpanValue] = {
        RPC_SYSTEM: "grpc",
        RPC_METHOD: method,
        OUTCOME: outcome,
        REQUEST_ID: request,
        TENANT: tenant,
        REQUEST_MODEL: model,
    }
    failed = outcome != "computed"
    if failed:
        attributes[ERROR_TYPE] = outcome
    return SpanRecord(method, SpanKind.SERVER, parent, ended - round(took_s * 1e9), attributes, ended, failed)


@dataclass(frozen=True, slots=True)
class TraceIds:
    """The trace that a request belongs to, and the caller's span above it."""

    trace_id: int
    remote_parent: int | None

    @classmethod
    def of(cls, traceparent: str | None) -> TraceIds:
        """Return the caller's trace when it sent a valid ``traceparent`` (W3C Trace Context), else a new one."""
        context = INVALID_SPAN_CONTEXT
        if traceparent:
            found = _PROPAGATOR.extract({"traceparent": traceparent})
            context = get_current_span(found).get_span_context()
        if context.is_valid:
            return cls(context.trace_id, context.span_id)
        return cls(_random.getrandbits(128) or 1, None)


class Sampler:
    """Chooses the traces that go to the collector: ``ratio`` of all, and all those that failed unless ``ratio`` is 0.

    A caller chooses its trace id, so a rule that reads the id would let it choose its fate. The id is hashed under a
    key of this process, so that the requests of one trace share a fate that nobody outside can know; and the draw is
    repeated every minute, so that a caller that has found one good id, or one that hides, gains no more than that.
    """

    def __init__(self, ratio: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._bound = round(ratio * (1 << 64))
        self._key = secrets.token_bytes(16)
        self._clock = clock

    def takes(self, trace_id: int, *, failed: bool = False) -> bool:
        """Return whether a trace goes to the collector; asked once a request, at its end."""
        if failed or self._bound >= 1 << 64:
            return self._bound > 0
        draw = int(self._clock() // DRAW_S)
        told = trace_id.to_bytes(16, "little") + draw.to_bytes(8, "little")
        drawn = hashlib.blake2b(told, digest_size=8, key=self._key).digest()
        return int.from_bytes(drawn, "little") < self._bound


class PresetIds(IdGenerator):
    """Gives the SDK the ids that a record already has. One thread uses it."""

    def __init__(self) -> None:
        self.trace_id = 0
        self.span_id = 0

    def generate_span_id(self) -> int:
        """Return the record's span id."""
        return self.span_id

    def generate_trace_id(self) -> int:
        """Return the record's trace id."""
        return self.trace_id


class SpanExport:
    """Passes the traces that ``sampler`` takes to the SDK."""

    def __init__(self, provider: TracerProvider, tracer: Tracer, ids: PresetIds, sampler: Sampler) -> None:
        self._provider = provider
        self._tracer = tracer
        self._ids = ids
        self._sampler = sampler

    def tell(self, ids: TraceIds, spans: list[SpanRecord]) -> bool:
        """Pass a finished trace to the SDK, if it is sampled; parents come before their children. Returns whether it
        is."""
        if not self._sampler.takes(ids.trace_id, failed=spans[0].error):
            return False
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
        return True

    def shutdown(self) -> None:
        """Send the spans that wait."""
        self._provider.shutdown()


def _links(ids: TraceIds, record: SpanRecord) -> list[Link]:
    if record.replays is None:
        return []
    earlier = SpanContext(ids.trace_id, record.replays, False, TraceFlags(TraceFlags.SAMPLED))
    return [Link(earlier, {LINK_REASON: "replay"})]
