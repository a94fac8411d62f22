"""Pure: what is left of a finished request for the trace store, the metrics and the log."""

from __future__ import annotations

from dataclasses import dataclass

from appliance.errors import ApplianceError
from appliance.telemetry import attributes, names
from appliance.telemetry.metrics import RequestRecord
from appliance.telemetry.spans import SpanRecord, SpanValue
from appliance.telemetry.store import Attribute, StoredSpan, StoredTrace, TraceSummary

NS = 1_000_000_000
"""Nanoseconds in a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a request ended, as its session tells it. Times are Unix nanoseconds."""

    start_ns: int
    end_ns: int
    first_token_ns: int | None
    last_token_ns: int
    """End of the decode phase, or of the request where that was never closed."""
    error: ApplianceError | None
    first_tokens: int = 1
    """Output tokens that arrived together with the first."""
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    finish_reason: str | None = None

    @property
    def ttft_s(self) -> float | None:
        """Time to first token; None when there was none."""
        if self.first_token_ns is None:
            return None
        return (self.first_token_ns - self.start_ns) / NS

    @property
    def token_s(self) -> float | None:
        """Mean time per output token after those that came first; None where none came later.

        Tokens that arrive together, because a short answer is computed faster than the gateway looks, say nothing
        about how long each took.
        """
        later = self.output_tokens - self.first_tokens
        if self.first_token_ns is None or later < 1:
            return None
        return max(0, self.last_token_ns - self.first_token_ns) / NS / later


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asked for what, as far as the request came."""

    request_id: str
    trace_id: str
    route: str
    front_end: str
    tenant: str | None
    model: str | None
    operation: str | None
    policy_rule: str | None
    sandbox: str | None
    replays: int = 0


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """What the neighbours get when a request is over."""

    trace: StoredTrace
    record: RequestRecord


def finished(caller: Caller, ending: Ending, spans: tuple[StoredSpan, ...], dropped: int) -> FinishedRequest:
    """The stored trace and the metrics record of one request."""
    error_type = attributes.error_type(ending.error) if ending.error is not None else None
    summary = TraceSummary(
        request_id=caller.request_id,
        trace_id=caller.trace_id,
        route=caller.route,
        outcome=attributes.outcome(ending.error),
        started_ns=ending.start_ns,
        duration_s=(ending.end_ns - ending.start_ns) / NS,
        error=error_type,
        tenant=caller.tenant,
        model=caller.model,
        input_tokens=ending.input_tokens,
        cached_tokens=ending.cached_tokens,
        output_tokens=ending.output_tokens,
        ttft_s=ending.ttft_s,
        token_s=ending.token_s,
        finish_reason=ending.finish_reason,
        policy_rule=caller.policy_rule,
        sandbox=caller.sandbox,
    )
    record = RequestRecord(
        front_end=caller.front_end,
        outcome=summary.outcome,
        duration_s=summary.duration_s,
        tenant=caller.tenant,
        model=caller.model,
        operation=caller.operation,
        error_type=error_type,
        ttft_s=summary.ttft_s,
        token_s=summary.token_s,
        input_tokens=ending.input_tokens,
        cached_tokens=ending.cached_tokens,
        output_tokens=ending.output_tokens,
        phases=_phases(spans),
        replays=caller.replays,
    )
    return FinishedRequest(StoredTrace(summary, spans, dropped), record)


def stored(span: SpanRecord) -> StoredSpan:
    """A finished span as the store keeps it."""
    assert span.end_ns is not None, "every span is ended before it is stored"
    error = span.attributes.get(names.ERROR_TYPE)
    return StoredSpan(
        span_id=format(span.span_id, "016x"),
        parent_id=format(span.parent_id, "016x") if span.parent_id is not None else None,
        name=span.name,
        start_ns=span.start_ns,
        end_ns=span.end_ns,
        attributes={key: _attribute(value) for key, value in span.attributes.items()},
        error=str(error) if error is not None else None,
    )


def _phases(spans: tuple[StoredSpan, ...]) -> tuple[tuple[str, float], ...]:
    return tuple(
        (span.name.removeprefix(names.OWN_PREFIX), (span.end_ns - span.start_ns) / NS)
        for span in spans
        if span.name.startswith(names.OWN_PREFIX)
    )


def _attribute(value: SpanValue) -> Attribute:
    return ", ".join(value) if isinstance(value, tuple) else value
