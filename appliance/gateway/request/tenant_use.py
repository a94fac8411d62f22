"""What tenants have used, as the supervisor tells: asked for once in a while, whatever number of callers there are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from appliance.common.control_usage import UsageQuery, Used
from appliance.common.errors import RateLimitedError
from appliance.common.ids import new_request_id
from appliance.common.usage.periods import SECONDS_PER_DAY, month_start
from appliance.gateway.sandboxes.questions import Questions
from appliance.gateway.tenant_account import ModelUse, PeriodUse, TenantUsed, UserUse

FRESH_S = 5.0
"""Seconds for which an answer is given again. A tenant's sums cost the supervisor some milliseconds, so that one who
asks without a pause costs less than a thousandth of a core."""

MAX_KEPT = 1_024
"""Answers kept, of a tenant one and those about single end users; as many as there can be calls at once."""

MAX_NAMED = 16
"""End users that a tenant can ask about by name in ``FRESH_S``: each is a question to the supervisor."""


@dataclass(frozen=True, slots=True)
class _Kept:
    asked_at: float
    answer: asyncio.Task[Used]


class TenantUses:
    """Usage of all tenants; all methods run in one event loop."""

    def __init__(self, questions: Questions[Used], clock: Callable[[], float] = time.monotonic) -> None:
        self._questions = questions
        self._clock = clock
        self._kept: dict[tuple[str, str], _Kept] = {}
        """By tenant and digest of an end user, which is empty where all are asked about."""

    async def of(self, tenant: str, currency: str, user: str = "") -> TenantUsed:
        """Return what a tenant has used, at most ``FRESH_S`` and the audit log's delay ago; of its end users, where the
        digest of a name is given, this one.

        Raises:
            RateLimitedError: the tenant has asked about too many end users.
            UnavailableError: the supervisor does not tell.
        """
        kept, now = self._kept.get((tenant, user)), self._clock()
        if kept is None or now - kept.asked_at >= FRESH_S or _failed(kept.answer):
            if user:
                self._check_named(tenant, now)
            self._forget(now)
            question = UsageQuery(new_request_id(), tenant, user)
            kept = self._kept[tenant, user] = _Kept(now, asyncio.create_task(self._questions.ask(question)))
            kept.answer.add_done_callback(_failed)  # its callers may be gone before it fails
        return _use(tenant, await asyncio.shield(kept.answer), currency)

    def _check_named(self, tenant: str, now: float) -> None:
        """Refuse to ask about one more end user of a tenant that asks about many."""
        asked = [
            one.asked_at
            for (name, user), one in self._kept.items()
            if name == tenant and user and now - one.asked_at < FRESH_S
        ]
        if len(asked) >= MAX_NAMED:
            raise RateLimitedError(
                f"at most {MAX_NAMED} end users can be asked about by name in {FRESH_S:g} seconds",
                retry_after_s=max(0.0, min(asked) + FRESH_S - now),
            )

    def _forget(self, now: float) -> None:
        """Keep room for one more: what is stale goes, then what was asked first."""
        if len(self._kept) < MAX_KEPT:
            return
        for stale in [key for key, one in self._kept.items() if now - one.asked_at >= FRESH_S]:
            del self._kept[stale]
        if len(self._kept) >= MAX_KEPT:
            del self._kept[min(self._kept, key=lambda key: self._kept[key].asked_at)]


def _failed(answer: asyncio.Task[Used]) -> bool:
    return answer.done() and (answer.cancelled() or answer.exception() is not None)


def _use(tenant: str, answer: Used, currency: str) -> TenantUsed:
    day, first, after = answer.day * SECONDS_PER_DAY, month_start(answer.month), month_start(answer.month + 1)
    return TenantUsed(
        tenant,
        PeriodUse(day, day + SECONDS_PER_DAY, _models(answer.in_day), _users(answer.users_in_day)),
        PeriodUse(
            int(first.timestamp()), int(after.timestamp()), _models(answer.in_month), _users(answer.users_in_month)
        ),
        currency,
    )


def _models(sums: Mapping[str, Sequence[int]]) -> tuple[ModelUse, ...]:
    return tuple(ModelUse(name, *numbers) for name, numbers in sums.items())


def _users(sums: Mapping[str, Sequence[int]]) -> tuple[UserUse, ...]:
    return tuple(UserUse(name, *numbers) for name, numbers in sums.items())
