"""Accounts of all tenants, and how they come under another policy.

A policy of ten thousand tenants may change every rate, and bringing the levels of all accounts under the new rates in
one turn would hold up the event loop. An account is therefore brought under the policy in force when something asks for
it, and all others a few at a time; what is computed is always as of the moment at which the policy came into force.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from appliance.gateway.request.accounts import Account, AccountRates
from policy.model import Limits, Tenant


class AccountTable:
    """All tenants' accounts; all methods run in one event loop."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        self._behind: dict[str, Account] = {}
        """Accounts whose levels are still under the rates of the policy before."""
        self._tenants: Mapping[str, Tenant] = {}
        """Tenants of the policy in force, as of the last switch."""
        self._rates: dict[int, AccountRates] = {}
        """Rates by the id of their limits: thousands of tenants have few different ones, whose objects they share."""
        self._switched_at = 0.0

    def __contains__(self, tenant: str) -> bool:
        """Return whether the tenant has an account."""
        return tenant in self._accounts

    def find(self, tenant: str) -> Account | None:
        """Return the account of a tenant under the policy in force; None while it has none."""
        if self._behind:
            self._follow(tenant)
        return self._accounts.get(tenant)

    def begin(self, tenant: str, limits: Limits, now: float) -> Account:
        """Return a new account of a tenant that has none."""
        account = self._accounts[tenant] = Account.begin(limits, now)
        return account

    def concurrency(self, tenant: str) -> int:
        """Return the tenant's requests that are admitted and not settled."""
        account = self._accounts.get(tenant)
        return account.concurrency if account else 0

    @property
    def at_work(self) -> list[str]:
        """Tenants that have requests admitted and not settled."""
        return [tenant for tenant, account in self._accounts.items() if account.concurrency]

    def switch(self, old: Mapping[str, Tenant], new: Mapping[str, Tenant], now: float) -> None:
        """Bring all accounts under another policy, by its tenants, each when it is asked for (``find``) or its turn
        comes (``catch_up``). Accounts of tenants that are gone go once none of their requests runs."""
        if old is not new:
            self.catch_up(len(self._behind))
            for tenant in self._accounts.keys() - old.keys():
                if (known := new.get(tenant)) is not None:
                    self._accounts[tenant].cut(known.limits, now)
        gone = self._accounts.keys() - new.keys()
        for tenant in gone:
            if not self._accounts[tenant].concurrency:
                del self._accounts[tenant]
        if old is not new:
            self._behind, self._tenants, self._rates, self._switched_at = self._accounts.copy(), new, {}, now

    def catch_up(self, most: int) -> bool:
        """Bring the levels of up to ``most`` accounts under the policy in force; returns whether that leaves some."""
        for tenant in tuple(islice(self._behind, most)):
            self._follow(tenant)
        return bool(self._behind)

    def _follow(self, tenant: str) -> None:
        """Bring an account under the policy in force, as of the moment when it came into force."""
        account, known = self._behind.pop(tenant, None), self._tenants.get(tenant)
        if account is None or known is None:
            return
        found = self._rates.get(id(known.limits))
        if found is None:
            found = self._rates[id(known.limits)] = AccountRates.of(known.limits)
        account.follow(found, self._switched_at)
