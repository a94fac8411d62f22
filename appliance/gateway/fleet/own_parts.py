"""This host's parts of tenants' limits, as the ledger has them: what runs short, and what can be lent."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from appliance.common.usage.periods import period_of
from appliance.gateway.fleet.lending import INPUT, MAX_AMOUNTS, OUTPUT, REQUESTS, SPEND, TOKENS, LimitAmount
from appliance.gateway.request.accounts import Account
from appliance.gateway.request.ledger import Ledger
from appliance.gateway.request.spend import Spends
from policy.limits import Bucket, Rate, level
from policy.model import Limits

SHORT = 4
"""A part runs short when less than one in so many of it is left."""

LEASE = 2
"""One lease of a rate is one in so many of a full bucket's part, which with what is left is no more than the part."""

BUDGET_LEASE = 8
"""One lease of a budget is one in so many of the part: at a day's end what was lent and not spent is lost."""

SMALLEST = 64
"""A lease of less than one in so many of the part is not worth a message."""

MAX_USED = 256
"""Tenants that are looked at in one turn; one that runs short is used again at once."""


@dataclass(slots=True)
class OwnParts:
    """Parts of all tenants (``lending.Parts``)."""

    ledger: Ledger
    spends: Spends
    clock: Callable[[], float] = time.monotonic
    _used: dict[str, None] = field(default_factory=dict)

    def note(self, tenant: str) -> None:
        """Note that something was taken, or refused, of a tenant's limits."""
        if len(self._used) < MAX_USED:
            self._used[tenant] = None

    @property
    def day(self) -> int:
        """Day of the budgets now, by number."""
        return period_of(self.spends.now).day

    def short(self) -> list[LimitAmount]:
        """Return what runs short of tenants that used something since the last call."""
        used, self._used = self._used, {}
        found = list[LimitAmount]()
        for tenant in used:
            if (account := self.ledger.account(tenant)) is None:
                continue
            for kind, rate, bucket in _buckets(account):
                if level(bucket, rate, self.clock()) < rate.capacity / SHORT:
                    found.append(LimitAmount(tenant, kind, max(1, rate.capacity // LEASE)))
            part, left = self._budget(tenant)
            if part and left < part // SHORT:
                found.append(LimitAmount(tenant, SPEND, max(1, part // BUDGET_LEASE)))
            if len(found) >= MAX_AMOUNTS:
                break
        return found

    def lend(self, wanted: LimitAmount) -> int:
        """Take at most the amount that is wanted of what is above half of a rate's part, or of half of what is left of
        a budget's."""
        tenant = wanted.tenant
        if tenant not in self.ledger.policy.tenants:
            return 0
        if wanted.kind == SPEND:
            part, left = self._budget(tenant)
            amount = min(wanted.amount, left // 2)
            if amount <= part // SMALLEST:
                return 0
            self.spends.move(tenant, amount)
            return amount
        account, now = self.ledger.account(tenant, begin=True), self.clock()
        for kind, rate, bucket in _buckets(account) if account is not None else ():
            if kind == wanted.kind:
                held = level(bucket, rate, now)
                amount = min(wanted.amount, int(held - rate.capacity / 2))
                if amount <= rate.capacity // SMALLEST:
                    return 0
                _set(account, kind, Bucket(held - amount, now))
                return amount
        return 0

    def take(self, loan: LimitAmount) -> None:
        """Put what was lent into the own part: a rate's bucket is full at most."""
        tenant = loan.tenant
        if tenant not in self.ledger.policy.tenants:
            return
        if loan.kind == SPEND:
            self.spends.move(tenant, -loan.amount)
        account, now = self.ledger.account(tenant, begin=True), self.clock()
        for kind, rate, bucket in _buckets(account) if account is not None else ():
            if kind == loan.kind:
                held = level(bucket, rate, now)
                _set(account, kind, Bucket(max(held, min(held + loan.amount, float(rate.capacity))), now))
        self.ledger.lines.wake(tenant)

    def _budget(self, tenant: str) -> tuple[int, int]:
        """Return the smaller of the parts of a tenant's budgets, and what is left of the one of which less is; zeros
        without a limit of spend."""
        limits = self.ledger.limits(tenant)
        if not limits.bounds_spend:
            return 0, 0
        spent = self.ledger.spends.of(tenant)
        pairs = _limited(limits, spent.day, spent.month)
        return min(part for part, _ in pairs), max(0, min(part - used for part, used in pairs))


def _limited(limits: Limits, day: int, month: int) -> list[tuple[int, int]]:
    both = (limits.spend_per_day, day), (limits.spend_per_month, month)
    return [(part, used) for part, used in both if part is not None]


def _buckets(account: Account) -> Iterator[tuple[str, Rate, Bucket]]:
    """Yield the rates that a tenant has, each with its bucket."""
    rates = account.rates
    yield REQUESTS, rates.requests, account.requests
    yield TOKENS, rates.tokens, account.tokens
    if rates.input is not None and account.input is not None:
        yield INPUT, rates.input, account.input
    if rates.output is not None and account.output is not None:
        yield OUTPUT, rates.output, account.output


def _set(account: Account | None, kind: str, bucket: Bucket) -> None:
    assert account is not None, "its buckets were looked at"
    setattr(account, kind, bucket)
