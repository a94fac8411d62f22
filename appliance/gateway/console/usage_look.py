"""What the console's page of usage shows: a question of the page and the values that answer it.

Lists are bounded at their source and say how much they leave out. Costs are billionths of the currency's unit.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_TENANT_ROWS = 20
"""Tenants of one look, a page of the table."""

MAX_BUDGETS = 10
"""Tenants of one look whose spend is limited, those with the least left first."""

MAX_DETAIL_ROWS = 12
"""Models or end users of one tenant that are shown."""


@dataclass(frozen=True, slots=True)
class UsageAsked:
    """One look as the page asks for it."""

    span: str
    """One of ``appliance.common.usage.spans.Span``."""
    find: str = ""
    """Part of the names of tenants to show; empty: all."""
    offset: int = 0
    """Number of tenants to skip."""
    tenant: str = ""
    """The one whose models or end users are asked about."""


@dataclass(frozen=True, slots=True)
class UsageRow:
    """Sums of one name."""

    name: str
    """Empty in the row of all that is not listed."""
    requests: int
    input: int
    cached: int
    """A part of the input."""
    output: int
    reasoning: int
    """A part of the output."""
    cost: int


@dataclass(frozen=True, slots=True)
class TenantUsageRow(UsageRow):
    """Sums of one tenant."""

    isolation_class: str
    """Empty where the policy does not have the tenant."""


@dataclass(frozen=True, slots=True)
class ModelUsageRow(UsageRow):
    """Sums of one model, and its part of the machine's cost; None where the configuration has no price."""

    host_share: float | None
    host_cost: float | None
    host_per_million: float | None
    """Units of the machine's currency for a million output tokens; None also without output."""


@dataclass(frozen=True, slots=True)
class UsageDetail:
    """Models or end users of one tenant, the ones with the highest cost first."""

    rows: tuple[UsageRow, ...]
    matching: int
    """How many there are in all."""


@dataclass(frozen=True, slots=True)
class TenantUsagePage:
    """A page of tenants, the ones with the highest cost first."""

    rows: tuple[TenantUsageRow, ...]
    offset: int
    matching: int


@dataclass(frozen=True, slots=True)
class Budget:
    """What a tenant has spent of one of its limits."""

    tenant: str
    period: str
    """``day`` or ``month``."""
    limit: int
    spent: int
    reserved: int
    """Most that running requests may cost."""


@dataclass(frozen=True, slots=True)
class Budgets:
    """Limits of spend, the ones with the least left first."""

    rows: tuple[Budget, ...]
    matching: int
    """Tenants with a limit, among those that are searched for."""


@dataclass(frozen=True, slots=True)
class UnusualTenant:
    """A tenant that sends ten times what is usual for it, or more: amounts of an hour."""

    tenant: str
    requests: int
    usual_requests: int
    tokens: int
    usual_tokens: int


@dataclass(frozen=True, slots=True)
class MachineCost:
    """What the machine cost in the span."""

    hours: float
    price_per_hour: float
    currency: str
    cost: float


@dataclass(frozen=True, slots=True)
class UsageLook:
    """Usage of a span as one look shows it; all times are Unix times."""

    now: float
    version: str
    page: str
    """Digest of the page's files, as in ``Look``."""
    span: str
    since: int
    until: int
    step_s: int
    currency: str
    """Unit of the policy's prices; may be empty."""
    priced: bool
    """Whether the policy has prices, or something in the span had a cost."""
    total: UsageRow
    tenants: TenantUsagePage
    models: tuple[ModelUsageRow, ...]
    classes: tuple[UsageRow, ...]
    steps: dict[str, list[int]]
    """Requests, tokens and cost of each step, one after the other, by model."""
    budgets: Budgets
    unusual: tuple[UnusualTenant, ...]
    machine: MachineCost | None
    """None where the configuration has no price of the machine."""
