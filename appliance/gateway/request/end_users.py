"""Accounts of tenants' end users: what is left of their limits, and how many of their requests run.

The table is bounded for each tenant and for all. A tenant may invent as many names as it likes: when there is no room,
an account that was not used for long makes place, if its buckets are full and none of its requests run, since it then
is as one that is new. Where none can go, further end users share one account, so that a limit is never exceeded by
names. Only tenants whose policy has limits for end users have accounts here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

from policy.limits import Bucket, Rate, level, settle
from policy.model import EndUserLimits, Tenant
from policy.request import EndUserUsage

MAX_OF_TENANT = 1_024
"""End users of one tenant that have accounts of their own at a time."""

MAX_OF_ALL = 65_536
"""End users of all tenants likewise: some 30 MiB."""

LOOKED_AT = 8
"""Accounts that are looked at for one that can go, the longest unused first: more would take a time that a tenant
chooses."""

OTHERS = "others"
"""Name of the account that end users share for whom there is no room; no pseudonym is one."""


@dataclass(slots=True)
class EndUserAccount:
    """What one end user has left."""

    limits: EndUserLimits
    requests: Bucket | None = None
    """None: nothing was taken yet."""
    output: Bucket | None = None
    concurrency: int = 0

    @property
    def usage(self) -> EndUserUsage:
        """Return what the policy looks at."""
        return EndUserUsage(concurrency=self.concurrency, request_bucket=self.requests, output_bucket=self.output)

    def take_request(self, choices: int, now: float) -> None:
        """Take one request of the rate, and a slot for each of its choices."""
        self.concurrency += choices
        if (each := self.limits.requests_per_minute) is not None:
            self.requests = _less(self.requests, Rate(each), 1, now)

    def take_output(self, tokens: int, now: float) -> None:
        """Take the output tokens that a request may use."""
        if (each := self.limits.output_tokens_per_minute) is not None:
            self.output = _less(self.output, Rate(each), tokens, now)

    def settle(self, reserved: int, used: int, choices: int, now: float) -> None:
        """End a request: free its slots, and give back the output tokens that it did not use."""
        self.concurrency -= choices
        each = self.limits.output_tokens_per_minute
        if each is not None and self.output is not None:
            self.output = settle(self.output, Rate(each), reserved=reserved, used=used, now=now)

    def follow(self, limits: EndUserLimits, now: float) -> None:
        """Bring the account under the limits in force; no more is left than they give."""
        if limits == self.limits:
            return
        self.requests = _under(self.requests, limits.requests_per_minute, now)
        self.output = _under(self.output, limits.output_tokens_per_minute, now)
        self.limits = limits

    def rests(self, now: float) -> bool:
        """Return whether the account is as a new one would be."""
        return not self.concurrency and all(
            bucket is None or each is None or level(bucket, Rate(each), now) >= each
            for bucket, each in (
                (self.requests, self.limits.requests_per_minute),
                (self.output, self.limits.output_tokens_per_minute),
            )
        )


class EndUsers:
    """Accounts of all tenants' end users. Single-threaded, as the event loop is."""

    def __init__(self, of_tenant: int = MAX_OF_TENANT, of_all: int = MAX_OF_ALL) -> None:
        self._of_tenant, self._of_all = of_tenant, of_all
        self._tables: dict[str, OrderedDict[str, EndUserAccount]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def find(self, tenant: Tenant | None, name: str, now: float) -> EndUserAccount | None:
        """Return the account of an end user of a tenant, who may be nobody by name; None where the tenant has no limits
        for end users."""
        if tenant is None or not tenant.end_users.any:
            return None
        table = self._tables.setdefault(tenant.id, OrderedDict())
        account = table.get(name)
        if account is None and not self._makes_room(table, now):
            name = OTHERS
            account = table.get(name)
        if account is None:
            account = table[name] = EndUserAccount(tenant.end_users)
            self._count += 1
        table.move_to_end(name)
        account.follow(tenant.end_users, now)
        return account

    def keep(self, tenants: Mapping[str, Tenant]) -> None:
        """Forget the end users of tenants that have no limits for them any more; a request that runs settles with the
        account that it has."""
        for name in [name for name in self._tables if name not in tenants or not tenants[name].end_users.any]:
            self._count -= len(self._tables.pop(name))

    def _makes_room(self, table: OrderedDict[str, EndUserAccount], now: float) -> bool:
        if len(table) < self._of_tenant and self._count < self._of_all:
            return True
        for name, account in islice(table.items(), LOOKED_AT):
            if account.rests(now):
                del table[name]
                self._count -= 1
                return True
        return False


def _less(bucket: Bucket | None, rate: Rate, amount: int, now: float) -> Bucket:
    left = float(rate.capacity) if bucket is None else level(bucket, rate, now)
    return Bucket(left - amount, now)


def _under(bucket: Bucket | None, each: int | None, now: float) -> Bucket | None:
    if bucket is None or each is None:
        return None
    return Bucket(min(bucket.level, float(each)), now)
