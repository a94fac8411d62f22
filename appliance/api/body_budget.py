"""How many bytes of bodies are in memory at once: for each tenant, and for all of them.

A body is read before policy can count its tokens, so a tenant that opens every connection and sends each the largest
body would otherwise hold 4 GiB without a single request admitted. Bytes are counted as they arrive and given back when
the request is parsed or refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from appliance.errors import RateLimitedError, UnavailableError

TENANT_BYTES = 64 << 20
"""Bytes in flight for one tenant: sixteen of the largest bodies at once."""

TOTAL_BYTES = 256 << 20
"""Bytes in flight for all tenants."""

RETRY_S = 1.0
"""Reading and parsing a body takes less."""


class BodyBudget:
    """The count. Single-threaded, as the event loop is."""

    def __init__(self, tenant_bytes: int = TENANT_BYTES, total_bytes: int = TOTAL_BYTES) -> None:
        self._tenant_limit = tenant_bytes
        self._total_limit = total_bytes
        self._held: dict[str, int] = {}
        self._total = 0

    @contextmanager
    def account(self, tenant: str) -> Iterator[Account]:
        """An account for one body; what it holds is given back at the end of the block."""
        account = Account(self, tenant)
        try:
            yield account
        finally:
            self._give(tenant, account.held)

    def take(self, tenant: str, size: int) -> None:
        """Count bytes in.

        Raises:
            RateLimitedError: the tenant sends too much at once.
            UnavailableError: all tenants together do.
        """
        held = self._held.get(tenant, 0) + size
        if held > self._tenant_limit:
            raise RateLimitedError(
                "too many large requests at once; send fewer in parallel",
                retry_after_s=RETRY_S,
                details={"limit_bytes": str(self._tenant_limit)},
            )
        if self._total + size > self._total_limit:
            raise UnavailableError("too many large requests are being read; try again", retry_after_s=RETRY_S)
        self._held[tenant] = held
        self._total += size

    def _give(self, tenant: str, size: int) -> None:
        self._total -= size
        left = self._held.get(tenant, 0) - size
        if left > 0:
            self._held[tenant] = left
        else:
            self._held.pop(tenant, None)


class Account:
    """What one body holds of the budget."""

    def __init__(self, budget: BodyBudget, tenant: str) -> None:
        self._budget = budget
        self._tenant = tenant
        self.held = 0

    def take(self, size: int) -> None:
        """Count bytes in; see ``BodyBudget.take``."""
        self._budget.take(self._tenant, size)
        self.held += size
