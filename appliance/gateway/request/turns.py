"""Decisions of the policy on one request, and its waits for those that make it wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from appliance.gateway.request.denials import denial
from appliance.gateway.request.ledger import Ledger
from appliance.gateway.request.waiting import Attempt, Gate, Patience
from appliance.gateway.telemetry import names
from appliance.gateway.telemetry.request_trace import Phase, RequestTrace
from policy.decision import Decision, Reason


class Turns:
    """Takes the decisions on one request."""

    __slots__ = ("_count", "_ledger", "_queued_s", "_tenant", "_trace", "_user")

    def __init__(
        self, ledger: Ledger, tenant: str, trace: RequestTrace, count: Callable[..., None], user: str = ""
    ) -> None:
        """``user``: pseudonym of the end user for whom it is; empty: not named."""
        self._ledger, self._tenant, self._trace, self._count, self._user = ledger, tenant, trace, count, user
        self._queued_s = 0.0

    @property
    def queued_ms(self) -> int:
        """Milliseconds for which the request has waited for limits of its tenant."""
        return round(self._queued_s * 1_000)

    async def take(
        self, gate: Gate, attempt: Attempt, until: float, waiting: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Take a decision, after a wait where it says so.

        Args:
            gate: which decision it is.
            attempt: decides, and takes what the request asked for.
            until: deadline of the request in monotonic seconds.
            waiting: block in which the wait can be ended.

        Raises:
            ApplianceError: the policy denies, or the wait ended without what the request asked for.
        """
        lines = self._ledger.lines
        decision = lines.decide(self._tenant, gate, attempt)
        if decision.allowed:
            return
        patience, began, outcome = self._patience(decision, until), time.monotonic(), names.QUEUE_REFUSED
        self._trace.begin(Phase.POLICY)
        try:
            with waiting():
                await lines.wait(self._tenant, gate, attempt, decision, patience, self._user)
            outcome = names.QUEUE_ADMITTED
        except asyncio.CancelledError:
            outcome = names.QUEUE_CANCELLED
            raise
        finally:
            self._queued_s += time.monotonic() - began
            self._count(names.QUEUED_REQUESTS, rule=decision.rule.rpartition(".")[2], outcome=outcome)
            self._trace.annotate(policy_queued_ms=self.queued_ms)
            self._trace.end(Phase.POLICY, policy_rule=decision.rule, policy_effect=decision.effect.value)

    def _patience(self, decision: Decision, until: float) -> Patience:
        """Return how long the request may wait.

        Raises:
            ApplianceError: the policy tells a longer wait.
        """
        now = time.monotonic()
        longest = now + self._ledger.limits(self._tenant).max_queue_s - self._queued_s
        patience = Patience(min(longest, until), until < longest)
        # When one of the running requests ends is not known.
        known = decision.reason not in (Reason.CONCURRENCY, Reason.KV_TOKENS)
        if known and now + (decision.retry_after_s or 0.0) > patience.until:
            raise denial(decision)
        return patience
