"""Namespace keys: one for each tenant, known to supervisor, gateway and engines alone.

They are random, but for tenants whose KV the hosts of a fleet share: theirs follow from the generation that these have.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict

from appliance.common.errors import ControlError
from isolation.ipc.messages import NAMESPACE_KEY_BYTES

MAX_TENANTS = 21_000
"""Most accounts with a namespace key, twice as many as a policy may have. Beyond it the account that has been unused
longest gets a new key at its next request, and loses its cached prefixes."""

MAX_QUERY = 500
"""Most tenants of one query, as many as a gateway asks for: names of full length and keys take half of a datagram."""


class Namespace:
    """Namespace keys, one a tenant, drawn at first need and kept until the supervisor ends or they are renewed.

    ``owner`` may be called from any thread, all else from one.
    """

    def __init__(self) -> None:
        self._keys: OrderedDict[str, str] = OrderedDict()
        self._owners: dict[bytes, str] = {}

    def keys(self, tenants: list[str]) -> dict[str, str]:
        """Tenant to key in hex.

        Raises:
            ControlError: more tenants than ``MAX_QUERY``.
        """
        if len(tenants) > MAX_QUERY:
            raise ControlError(f"more than {MAX_QUERY} tenants in one question")
        for tenant in tenants:
            if tenant not in self._keys:
                self._draw(tenant)
            self._keys.move_to_end(tenant)
        while len(self._keys) > MAX_TENANTS:
            _, key = self._keys.popitem(last=False)
            del self._owners[bytes.fromhex(key)]
        return {tenant: self._keys[tenant] for tenant in tenants}

    def owner(self, key: bytes) -> str | None:
        """Tenant of a key, or None."""
        return self._owners.get(key)

    def key(self, tenant: str) -> bytes | None:
        """The tenant's key, if it has one."""
        found = self._keys.get(tenant)
        return None if found is None else bytes.fromhex(found)

    def renew(self, tenant: str) -> str:
        """Draw another key for a tenant that has one; gives it in hex."""
        del self._owners[bytes.fromhex(self._keys[tenant])]
        return self._draw(tenant)

    def adopt(self, tenant: str, key: bytes) -> str:
        """Give a tenant this key; gives it in hex."""
        old = self._keys.get(tenant)
        if old is not None:
            del self._owners[bytes.fromhex(old)]
        self._keys[tenant] = key.hex()
        self._owners[key] = tenant
        return self._keys[tenant]

    def _draw(self, tenant: str) -> str:
        key = secrets.token_bytes(NAMESPACE_KEY_BYTES)
        self._keys[tenant] = key.hex()
        self._owners[key] = tenant
        return self._keys[tenant]
