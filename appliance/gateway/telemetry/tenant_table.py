"""Requests and tokens of every tenant since the start, exactly: the sums behind the series, without their bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from appliance.common.status import TenantTable, TenantUse
from appliance.gateway.telemetry.store import TraceSummary


@dataclass(slots=True)
class _Sums:
    ok: int = 0
    refused: int = 0
    invalid: int = 0
    cancelled: int = 0
    failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class TenantSums:
    """Sums by tenant. There are no more tenants than policies have named: the caller adds no other name."""

    def __init__(self, started_at: float) -> None:
        self._started_at = started_at
        self._sums: dict[str, _Sums] = {}

    def add(self, tenant: str, summary: TraceSummary) -> None:
        """Add a finished request."""
        one = self._sums.setdefault(tenant, _Sums())
        match summary.outcome:
            case "ok":
                one.ok += 1
            case "refused":
                one.refused += 1
            case "invalid":
                one.invalid += 1
            case "cancelled":
                one.cancelled += 1
            case _:
                one.failed += 1
        one.input_tokens += summary.input_tokens
        one.cached_tokens += summary.cached_tokens
        one.output_tokens += summary.output_tokens

    def table(self, label: Callable[[str], str]) -> TenantTable:
        """Return the sums by tenant, in the order of their names; ``label`` gives the label of a tenant's series."""
        rows = (
            TenantUse(
                tenant=tenant,
                series=label(tenant) if tenant else "",
                ok=one.ok,
                refused=one.refused,
                invalid=one.invalid,
                cancelled=one.cancelled,
                failed=one.failed,
                input_tokens=one.input_tokens,
                cached_tokens=one.cached_tokens,
                output_tokens=one.output_tokens,
            )
            for tenant, one in sorted(self._sums.items())
        )
        return TenantTable(started_at=self._started_at, tenants=tuple(rows))
