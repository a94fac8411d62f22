"""What the gateway asks of telemetry: one trace a request, a few counters, never any content.

The implementation lives in the neighbouring modules; this seam exists because tests drive a session with a recording
double and because nothing outside this package may import OpenTelemetry.
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol

from appliance.errors import ApplianceError
from appliance.request import CallContext, EmbedRequest, GenerateRequest


class Phase(Enum):
    """The phases of a request, in order; span names are ``athanor.<value>``."""

    POLICY = "policy"
    TEXT = "text"
    QUEUE = "queue"
    PREFILL = "prefill"
    DECODE = "decode"


class RequestTrace(Protocol):
    """The server span of one call, its generation span, and one span for each phase.

    Phases may be begun and ended in any order; ``finish`` closes what is open. Times are ``time.time_ns`` and default
    to now: the queue phase ends at a time computed from what the engine reports.
    """

    @property
    def trace_id(self) -> str:
        """32 hex digits."""
        ...

    def begin(self, phase: Phase, at_ns: int | None = None) -> None:
        """Open the phase's span."""
        ...

    def end(self, phase: Phase, at_ns: int | None = None, **attributes: str | int | float | bool) -> None:
        """Close it with ``athanor.``-prefixed attributes (underscores become dots after the first word)."""
        ...

    def annotate(self, **attributes: str | int | float | bool) -> None:
        """Set ``athanor.`` attributes on the generation span: tenant, policy rule and digest, sandbox, replays."""
        ...

    def first_token(self, together: int = 1) -> None:
        """The first output token arrived now, and with it all of the first ``together``: time to first token."""
        ...

    def finish(
        self,
        *,
        error: ApplianceError | None,
        input_tokens: int = 0,
        cached_tokens: int = 0,
        output_tokens: int = 0,
        finish_reason: str | None = None,
    ) -> None:
        """End all spans, record the metrics and write the request's one log line. Idempotent."""
        ...


class Telemetry(Protocol):
    """One a process."""

    def start(self, context: CallContext, request_id: str, tenant: str | None) -> RequestTrace:
        """Open the server span of a call."""
        ...

    def describe(self, trace: RequestTrace, request: GenerateRequest | EmbedRequest) -> None:
        """Open the generation span with the GenAI request attributes."""
        ...

    def count(self, name: str, amount: int = 1, **labels: str) -> None:
        """Add to a counter named in ``appliance.telemetry.names``."""
        ...

    def gauge(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge named in ``appliance.telemetry.names``."""
        ...
