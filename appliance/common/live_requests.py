"""Requests that run, for the operator: without content. And whether the appliance drains."""

from __future__ import annotations

from dataclasses import dataclass

MAX_LISTED = 1_000
"""Requests of one answer, the oldest ones; more are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRequest:
    """One request that waits or runs."""

    id: str
    tenant: str
    model: str
    credential: str
    """As the policy names it."""
    state: str
    """``waiting`` or ``running``."""
    age_s: float
    input_tokens: int
    """0 while they are not counted."""
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRequests:
    """Requests that wait or run, the oldest first."""

    requests: tuple[LiveRequest, ...]
    left_out: int = 0
    """Number of those that are not listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainStatus:
    """Whether new requests are refused for the operator's sake."""

    draining: bool
    running: int
    """Requests that wait or run still."""
