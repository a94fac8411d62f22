"""What each tenant has asked for since the start: what status shows, never what a decision is made by."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from appliance.errors import ApplianceError

CLIENT_LEFT = 499
"""HTTP status of a request whose client left: neither served nor refused."""


@dataclass(slots=True)
class TenantTally:
    """One tenant's counts."""

    requests: int = 0
    tokens: int = 0
    """Input and output, of requests that an engine took up."""
    refused: int = 0
    """Requests turned away for a reason of the caller's or of a limit's."""


class Tally:
    """All tenants' counts. Tenants come from verified credentials only, so there are no more than policies name."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, TenantTally] = OrderedDict()

    @property
    def seen(self) -> Iterable[tuple[str, TenantTally]]:
        """The tenants that have called, each with its counts."""
        return self._tenants.items()

    @property
    def latest(self) -> Iterator[tuple[str, TenantTally]]:
        """The same, who called last first."""
        return reversed(self._tenants.items())

    def of(self, tenant: str) -> TenantTally:
        """The tenant's counts; zeros for one that was never seen."""
        return self._tenants.get(tenant) or TenantTally()

    def add(self, tenant: str, *, error: ApplianceError | None, tokens: int = 0) -> None:
        """One request has ended."""
        one = self._tenants.setdefault(tenant, TenantTally())
        self._tenants.move_to_end(tenant)
        one.requests += 1
        one.tokens += tokens
        one.refused += error is not None and 400 <= error.wire.http < CLIENT_LEFT
