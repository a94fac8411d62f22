"""What tenants have spent in the current day and month: settled costs, and reservations of requests that run.

The supervisor's usage book is the durable account. This one begins with what the supervisor tells of a tenant, goes on
from its own requests, and is what decisions read. A new day or month (UTC) begins at zero; requests that run then are
settled into it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from appliance.common.control import Spent
from appliance.common.usage.periods import SECONDS_PER_DAY, Period, period_of
from policy.request import Spend


@dataclass(slots=True)
class _Spent:
    period: Period
    day: int = 0
    month: int = 0
    reserved: int = 0
    """Costs reserved for requests that run; they count in both periods."""
    orphaned: int = 0
    """Costs reserved today for requests of an earlier gateway, which never ended; they count in both periods."""
    orphaned_before: int = 0
    """Costs reserved likewise on earlier days of the month; they count in the month alone."""

    def roll(self, now: float) -> None:
        """Begin the periods that have begun since the last look. A clock that steps back begins none; one that was far
        ahead and is right again brings its periods back, with the amounts."""
        if now < self.period.day_ends:
            if now < self.period.day_ends - 2 * SECONDS_PER_DAY:
                self.period = period_of(now)
            return
        before, self.period = self.period, period_of(now)
        self.orphaned_before += self.orphaned
        self.day = self.orphaned = 0
        if self.period.month != before.month:
            self.month = self.orphaned_before = 0


@dataclass(frozen=True, slots=True)
class SpendParts:
    """Spend of a tenant, in billionths of the currency's unit: settled costs of the current day and month, and what is
    reserved beside them."""

    day: int
    month: int
    reserved: int
    reserved_before: int = 0
    """Reserved on earlier days for requests that never ended, which counts in the month alone."""


class SpendAccounts(Protocol):
    """What a ledger asks of the account of spend."""

    @property
    def now(self) -> float:
        """Unix time of the account."""
        ...

    def of(self, tenant: str) -> Spend:
        """Return a tenant's spend now."""
        ...

    def parts(self, tenant: str) -> SpendParts:
        """Return a tenant's spend now, with its reservations apart."""
        ...

    def reserve(self, tenant: str, cost: int) -> None:
        """Take a request's largest cost."""
        ...

    def settle(self, tenant: str, reserved: int, cost: int) -> None:
        """Replace what was reserved for a request by its cost."""
        ...


class Spends:
    """Spend of all tenants, in billionths of the currency's unit. ``clock`` gives Unix time."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._tenants: dict[str, _Spent] = {}

    @property
    def now(self) -> float:
        """Unix time, which the periods of spend and the hours of tenants go by."""
        return self._clock()

    def of(self, tenant: str) -> Spend:
        """Return a tenant's spend now."""
        now, spent = self._clock(), self._spent(tenant)
        return Spend(
            day=spent.day + spent.reserved + spent.orphaned,
            month=spent.month + spent.reserved + spent.orphaned + spent.orphaned_before,
            day_left_s=max(0.0, spent.period.day_ends - now),
            month_left_s=max(0.0, spent.period.month_ends - now),
        )

    def parts(self, tenant: str) -> SpendParts:
        """Return a tenant's spend now, with its reservations apart."""
        spent = self._spent(tenant)
        return SpendParts(spent.day, spent.month, spent.reserved + spent.orphaned, spent.orphaned_before)

    def reserve(self, tenant: str, cost: int) -> None:
        """Take a request's largest cost."""
        self._spent(tenant).reserved += cost

    def settle(self, tenant: str, reserved: int, cost: int) -> None:
        """Replace what was reserved for a request by its cost."""
        spent = self._spent(tenant)
        spent.reserved -= reserved
        spent.day += cost
        spent.month += cost

    def move(self, tenant: str, cost: int) -> None:
        """Count what was lent to another host as spent; a negative amount is what was borrowed."""
        spent = self._spent(tenant)
        spent.day += cost
        spent.month += cost

    def take(self, message: Spent) -> None:
        """Take the supervisor's account of tenants that were not asked about before. It has what earlier gateways
        reported and, as far as it was reported, what this one has counted: the larger amount holds. Its account of
        another period says nothing any more."""
        for tenant, (day, month, reserved, before) in message.spent.items():
            spent = self._spent(tenant)
            if message.day == spent.period.day:
                spent.day = max(spent.day, day)
                spent.orphaned = max(0, reserved - spent.reserved)
            if message.month == spent.period.month:
                spent.month = max(spent.month, month)
                spent.orphaned_before = before + (reserved if message.day < spent.period.day else 0)

    def held(self) -> list[str]:
        """Return the tenants of which reservations of an earlier gateway are held."""
        return [tenant for tenant in self._tenants if (spent := self._spent(tenant)).orphaned or spent.orphaned_before]

    def lower(self, message: Spent) -> None:
        """Take a later account of tenants that are known. Reservations of an earlier gateway are no more than all that
        are recorded, this one's included: so none that stands is given up, and those whose requests have ended, because
        a batch ran its lines again or another process told of them, are held no longer. What they were charged counts
        as spent: no more than was held, for the account may not have yet what another host lent. An account of another
        day says nothing. Which part of the record is this gateway's is not known, so of a tenant with requests in
        flight as much stays held as these had reserved at the look with the fewest."""
        for tenant in message.asked:
            spent = self._spent(tenant)
            if message.day == spent.period.day:
                day, month, reserved, before = message.spent.get(tenant, (0, 0, 0, 0))
                held = spent.orphaned + spent.orphaned_before
                spent.orphaned = min(spent.orphaned, reserved)
                spent.orphaned_before = min(spent.orphaned_before, before)
                ended = held - spent.orphaned - spent.orphaned_before
                spent.day += min(max(0, day - spent.day), ended)
                spent.month += min(max(0, month - spent.month), ended)

    def _spent(self, tenant: str) -> _Spent:
        now = self._clock()
        spent = self._tenants.get(tenant)
        if spent is None:
            spent = self._tenants[tenant] = _Spent(period_of(now))
        spent.roll(now)
        return spent
