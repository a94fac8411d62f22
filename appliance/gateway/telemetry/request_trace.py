"""Spans of one request, from its arrival to the values that store, metrics and log take from them.

All times of one request come from one clock: Unix time at the start, moved on by the monotonic
clock, so that no span is negative when the machine's clock is set. Times told from outside (the
engine's report of its queue) are hostile and are kept between the request's start and now.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum

from opentelemetry.trace import SpanKind

from appliance.common.errors import ApplianceError
from appliance.common.figures import NS
from appliance.common.outcomes import FAILED, outcome_of
from appliance.gateway.generate_request import AnyRequest, CallContext
from appliance.gateway.telemetry import attributes, names
from appliance.gateway.telemetry.attributes import Value
from appliance.gateway.telemetry.metrics import FinishedRequest
from appliance.gateway.telemetry.spans import SpanExport, SpanRecord, SpanValue, TraceIds
from appliance.gateway.telemetry.store import MAX_SPANS, StoredTrace, TraceSummary

MAX_OPEN_ATTRIBUTES = 32
"""Different words that ``annotate`` keeps of one request."""


class Phase(Enum):
    """Phases of a request, in order; span names are ``athanor.<value>``."""

    POLICY = "policy"
    TEXT = "text"
    QUEUE = "queue"
    PREFILL = "prefill"
    DECODE = "decode"


ENGINE_PHASES = (Phase.QUEUE, Phase.PREFILL, Phase.DECODE)
"""Phases that end with an engine."""


class RequestTrace:
    """The server span of one call, its generation span, and one span for each phase, as records. ``done`` is called
    once, by ``finish``, and a sampled trace goes to ``export``.

    Phases may be begun and ended in any order; ``finish`` closes what is open. Times are of ``now_ns`` and default
    to now: the queue phase ends at a time computed from what the engine reports.
    """

    def __init__(
        self,
        export: SpanExport | None,
        context: CallContext,
        request_id: str,
        tenant: str | None,
        done: Callable[[FinishedRequest], None],
    ) -> None:
        self._wall_ns = time.time_ns()
        self._mono_ns = time.monotonic_ns()
        self._export = export
        self._context = context
        self._request_id = request_id
        self._tenant = tenant
        self._done = done
        self._model: str | None = None
        self._operation: str | None = None
        self._generation: SpanRecord | None = None
        self._phases: dict[Phase, SpanRecord] = {}
        self._started: list[SpanRecord] = []
        self._queued: SpanRecord | None = None
        self._dropped = 0
        self._own: dict[str, Value] = {}
        self._first_ns: int | None = None
        self._first_tokens = 0
        self._last_ns: int | None = None
        self._finished = False
        self._ids = TraceIds.of(context.traceparent)
        self._server = self._open(
            attributes.clean(context.route), SpanKind.SERVER, self._ids.remote_parent, self._wall_ns
        )
        self._server.attributes.update(attributes.server(context, request_id, tenant))

    @property
    def age_s(self) -> float:
        """Seconds since the request came."""
        return (time.monotonic_ns() - self._mono_ns) / NS

    @property
    def trace_id(self) -> str:
        """Trace id as 32 hex digits: the caller's when it sent a valid ``traceparent``."""
        return format(self._ids.trace_id, "032x")

    @property
    def traceparent(self) -> str:
        """The call's span for whom it asks (W3C Trace Context)."""
        return f"00-{self.trace_id}-{self._server.span_id:016x}-01"

    def now_ns(self) -> int:
        """Return now by this request's clock, in which ``begin`` and ``end`` take other moments."""
        return self._wall_ns + time.monotonic_ns() - self._mono_ns

    def describe(self, request: AnyRequest) -> None:
        """Open the generation span; phases begun from now on are its children."""
        if self._generation is not None or self._finished:
            return
        # The request itself is not kept: it holds the prompt.
        self._model, self._operation = attributes.clean(request.model), request.operation.value
        name = attributes.clean(f"{request.operation.value} {request.alias or request.model}")
        span = self._generation = self._open(name, SpanKind.INTERNAL, self._server.span_id, self.now_ns())
        span.attributes.update(attributes.generation(request, self._context.route))
        if request.alias:
            span.attributes[names.RESPONSE_MODEL] = self._model
        if self._tenant is not None:
            span.attributes[names.TENANT] = self._tenant
        span.attributes.update(self._own)

    def begin(self, phase: Phase, at_ns: int | None = None) -> None:
        """Open the phase's span; one that is open already ends here. A second queue is a replay: what the engine before
        left open ends with an error, and a link leads from the new queue to the old one."""
        if self._finished:
            return
        if phase is Phase.QUEUE and self._queued is not None:
            self._lose_engine(at_ns)
        self.end(phase, at_ns)
        if len(self._started) >= MAX_SPANS:
            self._dropped += 1
            return
        above = self._generation or self._server
        span = self._phases[phase] = self._open(
            names.OWN_PREFIX + phase.value, SpanKind.INTERNAL, above.span_id, self._clamp(at_ns)
        )
        if phase is Phase.QUEUE:
            if self._queued is not None:
                span.replays = self._queued.span_id
                span.attributes[names.REPLAYED_SPAN] = format(self._queued.span_id, "016x")
            self._queued = span

    def end(self, phase: Phase, at_ns: int | None = None, **attributes_: Value) -> None:
        """Close the phase's span; nothing happens when it is not open."""
        span = self._phases.pop(phase, None)
        if span is None:
            return
        span.attributes.update(attributes.own(attributes_))
        span.end_ns = max(self._clamp(at_ns), span.start_ns)
        if phase is Phase.DECODE:
            self._last_ns = span.end_ns

    def annotate(self, **attributes_: Value) -> None:
        """Set ``athanor.`` attributes on the generation span, once it is there."""
        if self._finished:
            return
        found = attributes.own(attributes_)
        if len(self._own.keys() | found.keys()) > MAX_OPEN_ATTRIBUTES:
            return
        self._own.update(found)
        if names.TENANT in found:
            self._tenant = str(found[names.TENANT])
            self._server.attributes[names.TENANT] = self._tenant
        if self._generation is not None:
            self._generation.attributes.update(found)

    def first_token(self, together: int = 1) -> None:
        """Note that the first ``together`` output tokens arrived now; later calls, of a replay, change nothing."""
        if self._first_ns is None:
            self._first_ns, self._first_tokens = self.now_ns(), together

    def finish(
        self,
        *,
        error: ApplianceError | None,
        input_tokens: int = 0,
        cached_tokens: int = 0,
        output_tokens: int = 0,
        reasoning_tokens: int = 0,
        finish_reason: str | None = None,
    ) -> None:
        """End all spans and hand the request to store, metrics and log. Idempotent."""
        if self._finished:
            return
        if error is not None:
            self._note_policy(error)
        end_ns = self.now_ns()
        for phase, span in tuple(self._phases.items()):
            if error is not None:
                span.error = True
                span.attributes[names.ERROR_TYPE] = attributes.error_type(error)
            self.end(phase, end_ns)
        self._finished = True
        summary = TraceSummary(
            request_id=self._request_id,
            trace_id=self.trace_id,
            route=attributes.clean(self._context.route),
            outcome=outcome_of(error),
            started_ns=self._wall_ns,
            duration_s=(end_ns - self._wall_ns) / NS,
            error=attributes.error_type(error) if error is not None else None,
            tenant=self._tenant,
            model=self._model,
            input_tokens=input_tokens,
            cached_tokens=cached_tokens,
            output_tokens=output_tokens,
            ttft_s=None if self._first_ns is None else (self._first_ns - self._wall_ns) / NS,
            token_s=self._token_s(output_tokens, self._last_ns or end_ns),
            finish_reason=finish_reason,
            policy_rule=self._text(names.POLICY_RULE),
            sandbox=self._text(names.SANDBOX),
        )
        if self._generation is not None and reasoning_tokens:
            self._generation.attributes[names.REASONING_TOKENS] = reasoning_tokens
        self._end_generation(summary, end_ns)
        self._server.attributes.update(attributes.server_end(self._context, error))
        # The conventions leave a server span's status unset when the caller was at fault.
        self._server.error = summary.outcome == FAILED
        self._server.end_ns = end_ns
        exported = self._export is not None and self._export.tell(self._ids, self._started)
        spans = tuple(span.stored() for span in self._started)
        self._done(
            FinishedRequest(
                trace=StoredTrace(summary, spans, self._dropped),
                front_end=self._context.front_end,
                operation=self._operation,
                replays=int(self._own.get(names.own_attribute("replays"), 0)),
                cost=int(self._own.get(names.own_attribute("usage_cost"), 0)),
                exported=exported,
            )
        )

    def _note_policy(self, error: ApplianceError) -> None:
        """Note rule and digest of the policy that denied the request, or that ended it while it ran."""
        if error.rule:
            self.annotate(policy_rule=error.rule, **({"policy_digest": error.policy} if error.policy else {}))
        if error.cut_policy:
            self.annotate(policy_cut_rule=error.cut_rule, policy_cut_digest=error.cut_policy)

    def _token_s(self, output_tokens: int, last_ns: int) -> float | None:
        """Return the mean seconds per output token after those that came first; None where none came later.

        Tokens that arrive together, because a short answer is computed faster than the gateway looks, say nothing
        about how long each took.
        """
        later = output_tokens - self._first_tokens
        if self._first_ns is None or later < 1:
            return None
        return max(0, last_ns - self._first_ns) / NS / later

    def _lose_engine(self, at_ns: int | None) -> None:
        """End the open phases inside an engine, which has died, with an error."""
        for phase in ENGINE_PHASES:
            span = self._phases.get(phase)
            if span is not None:
                span.error = True
                span.attributes[names.ERROR_TYPE] = names.ENGINE_LOST
                self.end(phase, at_ns)

    def _open(self, name: str, kind: SpanKind, parent_id: int | None, start_ns: int) -> SpanRecord:
        span = SpanRecord(name, kind, parent_id, start_ns)
        self._started.append(span)
        return span

    def _end_generation(self, summary: TraceSummary, end_ns: int) -> None:
        span = self._generation
        if span is None or summary.model is None:
            return
        found: dict[str, SpanValue] = {
            names.INPUT_TOKENS: summary.input_tokens,
            names.CACHED_TOKENS: summary.cached_tokens,
            names.OUTPUT_TOKENS: summary.output_tokens,
        }
        if summary.finish_reason is not None:
            found[names.FINISH_REASONS] = (summary.finish_reason,)
        if summary.ttft_s is not None or summary.error is None:
            found[names.RESPONSE_MODEL] = summary.model
        if summary.ttft_s is not None:
            found[names.TIME_TO_FIRST_CHUNK] = summary.ttft_s
        if summary.error is not None:
            found[names.ERROR_TYPE] = summary.error
            span.error = True
        span.attributes.update(found)
        span.end_ns = end_ns

    def _text(self, name: str) -> str | None:
        value = self._own.get(name)
        return None if value is None else str(value)

    def _clamp(self, at_ns: int | None) -> int:
        now_ns = self.now_ns()
        return now_ns if at_ns is None else min(max(at_ns, self._wall_ns), now_ns)
