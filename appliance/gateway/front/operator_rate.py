"""How often each operator may call: the routes of the admin listener over TLS, and the operator's API.

What one of them may do is bounded by roles and how much at once by shares; without a rate a viewer could still ask
without pause. Each request to the admin listener takes its time from the loop that serves tenants, and each call of
the API makes an entry for the supervisor's.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

from appliance.common.errors import RateLimitedError
from appliance.common.lines import RefusedLines
from appliance.gateway.front.allowance import Rate, StrangersAllowances

CALLS = Rate(burst=100, per_s=10)
"""Calls of one operator that read, and as many that change something: ten pages of the console that look once a second,
or a scraper beside a script. A page's start takes a dozen at once."""

log = structlog.get_logger()


class OperatorRates:
    """Counts calls of operators, by credential or account; the one seen least recently is forgotten where there are
    thousands, and begins anew. All methods run in one event loop."""

    def __init__(self, rate: Rate = CALLS, clock: Callable[[], float] = time.monotonic) -> None:
        # A change is not refused because the same operator's dashboards look too often.
        self._reads, self._changes = (StrangersAllowances(rate, clock) for _ in range(2))
        self._clock = clock
        self._lines = RefusedLines(clock())

    def spend(self, who: str, *, changes: bool) -> None:
        """Count a call of this operator.

        Raises:
            RateLimitedError: there were too many; it says when there may be another.
        """
        allowance, now = (self._changes if changes else self._reads).of(who), self._clock()
        if allowance.spend(1, now):
            return
        unsaid = self._lines.take(None, now)
        if unsaid is not None:
            log.warning("an operator calls too often, and is refused", operator=who, unsaid=unsaid)
        raise RateLimitedError(
            "this operator calls too often; ask less often, or collect what you need from one answer",
            retry_after_s=allowance.seconds_until(1, now),
        )
