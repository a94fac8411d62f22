"""Requests and tokens of each tenant since the start: shown in status, never used for a decision."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from appliance.common.errors import ApplianceError

CLIENT_LEFT = 499
"""HTTP status of a request whose client left: neither served nor refused."""


@dataclass(slots=True)
class TenantCount:
    """Counts of one tenant since the start."""

    requests: int = 0
    tokens: int = 0
    """Input and output, of requests that an engine took up."""
    refused: int = 0
    """Requests turned away because of the caller or a limit (status 400 to 498)."""


class TenantCounts:
    """Counts of all tenants. Tenants come from verified credentials only, so there are no more than policies name."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, TenantCount] = OrderedDict()

    @property
    def seen(self) -> Iterable[tuple[str, TenantCount]]:
        """Tenants that have called, each with its counts."""
        return self._tenants.items()

    @property
    def latest(self) -> Iterator[tuple[str, TenantCount]]:
        """Tenants that have called, the latest caller first."""
        return reversed(self._tenants.items())

    def of(self, tenant: str) -> TenantCount:
        """Return the tenant's counts; zeros for one that never called."""
        return self._tenants.get(tenant) or TenantCount()

    def add(self, tenant: str, *, error: ApplianceError | None, tokens: int = 0) -> None:
        """Count a request that has ended."""
        one = self._tenants.setdefault(tenant, TenantCount())
        self._tenants.move_to_end(tenant)
        one.requests += 1
        one.tokens += tokens
        one.refused += error is not None and 400 <= error.wire.http < CLIENT_LEFT
