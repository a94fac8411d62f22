"""How many log lines refused requests may have: a bucket for each tenant, and one for all strangers. Pure: times are
arguments. Other lines that come in floods have buckets of their own kind: errors of the event loop, one for each place.

What is served is bounded by the policy. What is refused costs its sender nothing, and a line each would let one caller
fill the journal, whose own limit (journald.conf(5), RateLimitBurst) then drops everybody's lines.
"""

from __future__ import annotations

from dataclasses import dataclass

BURST_LINES = 60
"""Lines that may follow each other at once."""

LINES_A_SECOND = 2.0
"""Lines of one caller after that: with the burst a hundredth of what journald takes of a service by default."""


@dataclass(slots=True)
class _Bucket:
    level: float
    then: float
    unsaid: int = 0


class RefusedLines:
    """The buckets. Tenants come from verified credentials only, so there are no more than policies name."""

    def __init__(self, now: float) -> None:
        self._began = now
        self._buckets: dict[str | None, _Bucket] = {}

    def take(self, tenant: str | None, now: float) -> int | None:
        """Whether a refusal of this tenant, or of a stranger, may be said: None when it may not, else how many were
        left unsaid since the last one that was."""
        bucket = self._buckets.setdefault(tenant, _Bucket(BURST_LINES, self._began))
        bucket.level = min(BURST_LINES, bucket.level + max(0.0, now - bucket.then) * LINES_A_SECOND)
        bucket.then = max(bucket.then, now)
        if bucket.level < 1:
            bucket.unsaid += 1
            return None
        bucket.level -= 1
        unsaid, bucket.unsaid = bucket.unsaid, 0
        return unsaid
