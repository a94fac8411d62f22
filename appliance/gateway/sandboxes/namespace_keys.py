"""Namespace keys of tenants, and their retention: what the gateway and the supervisor tell each other of tenants."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from appliance.common.control import LEAVES, SHARED, Control, NamespaceQuery, Namespaces, Retention, Welcome
from appliance.common.errors import ControlError
from appliance.common.kv_shares import group_account
from policy import model as policy_model
from policy.kept import leaves_for_fleet, leaves_machine

TENANTS_PER_QUERY = 500
"""Tenants of one question for namespace keys: the answer must fit one datagram."""

MAX_GONE = 10_000
"""Removed tenants that are remembered: as many as a policy may have."""


class NamespaceKeys:
    """Keys as the supervisor has drawn them."""

    def __init__(self, tell: Callable[[Control], None], changed: Callable[[dict[str, bytes]], None]) -> None:
        """``tell`` sends to the supervisor; ``changed`` is called with all known keys whenever some have come."""
        self._tell = tell
        self._changed = changed
        self._keys: dict[str, bytes] = {}
        self._retained: dict[str, int] = {}
        self._gone: dict[str, int] = {}
        """0 for each tenant that was removed: a supervisor that did not hear it, because the connection was lost, is
        told when it is there again."""
        self._to_ask: list[list[str]] = []
        """Questions for a supervisor that came anew, one after the other: its socket has no room for all answers."""
        self._arrived = asyncio.Event()

    async def fetch(self, tenants: list[str], timeout_s: float = 30.0) -> dict[str, bytes]:
        """Return the keys of these tenants; keys of others are forgotten.

        Raises:
            ControlError: the supervisor did not answer in time.
        """
        deadline = time.monotonic() + timeout_s
        while missing := [tenant for tenant in tenants if tenant not in self._keys]:
            self._arrived.clear()
            self._tell(NamespaceQuery(missing[:TENANTS_PER_QUERY]))
            try:
                async with asyncio.timeout(min(1.0, deadline - time.monotonic())):
                    await self._arrived.wait()
            except TimeoutError:
                if time.monotonic() >= deadline:
                    raise ControlError("the supervisor did not give namespace keys in time") from None
        self._keys = {tenant: self._keys[tenant] for tenant in tenants}
        return dict(self._keys)

    def set_retention(self, retained: dict[str, int]) -> None:
        """Tell the supervisor, now and whenever it comes anew, whose KV may be stored outside of an engine and
        of this machine (``retention_of``); tenants that are named no more may not. The supervisor is told what has
        changed: most reloads change nothing of this, and 10,000 tenants are 20 messages."""
        before, self._retained = self._retained, retained
        gone = {tenant: 0 for tenant in before if tenant not in retained}
        changed = {tenant: kept for tenant, kept in retained.items() if before.get(tenant) != kept}
        self._gone = {name: 0 for name in [*self._gone, *gone][-MAX_GONE:] if name not in retained}
        self._send_retention({**gone, **changed})

    def attached(self, _welcome: Welcome) -> None:
        """Tell a supervisor that came anew what it does not know, and ask for its keys: it has drawn others."""
        known = list(self._keys)
        self._to_ask = [known[start : start + TENANTS_PER_QUERY] for start in range(0, len(known), TENANTS_PER_QUERY)]
        self._ask_next()
        self._send_retention({**self._gone, **self._retained})

    def take(self, message: Namespaces) -> None:
        """Take keys that have come."""
        self._keys.update((name, bytes.fromhex(key)) for name, key in message.keys.items())
        self._arrived.set()
        self._changed(dict(self._keys))
        self._ask_next()

    def _ask_next(self) -> None:
        if self._to_ask:
            self._tell(NamespaceQuery(self._to_ask.pop(0)))

    def _send_retention(self, retained: dict[str, int]) -> None:
        items = list(retained.items())
        for start in range(0, len(items), TENANTS_PER_QUERY):
            self._tell(Retention(dict(items[start : start + TENANTS_PER_QUERY])))


def retention_of(policy: policy_model.PolicySet) -> dict[str, int]:
    """Return whether the KV of each account may be stored outside of an engine (1), and outside of this machine too
    (``LEAVES``) or be used by the fleet (``SHARED``), or none of these (0).

    The policy lets no tenant without retention into a sharing group. A group has what all its members have.
    """
    tenants = {name: _kept(tenant) for name, tenant in policy.tenants.items()}
    groups = {group_account(name): SHARED for name in policy.groups}
    for name, tenant in policy.tenants.items():
        if tenant.group is not None:
            account = group_account(tenant.group)
            groups[account] = max(1, min(groups[account], tenants[name]))
    return tenants | groups


def _kept(tenant: policy_model.Tenant) -> int:
    if leaves_for_fleet(tenant):
        return SHARED
    if leaves_machine(tenant):
        return LEAVES
    return int(tenant.retention is policy_model.Retention.STANDARD)
