"""Audit entries of prompts that other hosts sent here: one for each, within a rate of each host; beyond it, sums.

A listed host that was taken over could otherwise fill the log's disk with calls that cost it nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from appliance.gateway.front.allowance import Allowance, Rate
from appliance.gateway.request.audit_feed import AuditFeed

COMPUTED_RATE = Rate(burst=1_024, per_s=64)
"""Entries of one host's computed prompts. Each cost this host's engine a step at least, so more come from engines that
find all of each prompt in memory alone."""

OTHER_RATE = Rate(burst=64, per_s=1)
"""Entries of one host's calls that ended otherwise. An honest host rests after most of these ends, or is refused for a
policy that both hosts soon have."""

COMPUTED = "computed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedCall:
    """A call that has ended."""

    host: str
    """SPIFFE id of the caller, one of a list."""
    request: str
    tenant: str
    model: str
    outcome: str
    tokens: int


@dataclass(slots=True)
class ServedEntries:
    """Writes the entries."""

    audit: AuditFeed
    clock: Callable[[], float] = time.monotonic
    _rates: dict[tuple[str, bool], Allowance] = field(default_factory=dict)
    """By host and whether the prompt was computed; bounded by the list of hosts."""

    def add(self, call: ServedCall) -> None:
        """Write the entry of a call, or count it with others of its host and outcome in one entry twice a second."""
        computed, now = call.outcome == COMPUTED, self.clock()
        rate = self._rates.get((call.host, computed))
        if rate is None:
            rate = self._rates[call.host, computed] = Allowance(COMPUTED_RATE if computed else OTHER_RATE, now)
        if not rate.spend(1, now):
            self.audit.count(
                "prefill",
                what="served",
                request="",
                tenant="",
                host=call.host,
                model="",
                outcome=call.outcome,
                tokens=0,
            )
            return
        self.audit.add(
            "prefill",
            what="served",
            request=call.request,
            tenant=call.tenant,
            host=call.host,
            model=call.model,
            outcome=call.outcome,
            tokens=call.tokens,
            count=1,
        )
