"""Messages of ``appliance.common.control`` about what tenants have used: questions of the gateway and their answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """Gateway: asks what a tenant has used in the current day and month, by model and by end user; ``user`` is the
    digest of the name of the only one (``appliance.common.usage.pseudonyms``), or empty."""

    request: str
    tenant: str
    user: str


@dataclass(frozen=True, slots=True)
class Used:
    """Supervisor: answer to ``UsageQuery``: the day and the month by number (``appliance.common.usage.periods``), and
    the six sums of each model and of each end user in both (``appliance.common.usage.tenant_sums``); or the problem
    why there is none."""

    request: str
    day: int
    month: int
    in_day: dict[str, list[int]]
    in_month: dict[str, list[int]]
    users_in_day: dict[str, list[int]]
    users_in_month: dict[str, list[int]]
    problem: str


@dataclass(frozen=True, slots=True)
class OverviewQuery:
    """Gateway: asks for an overview of what all tenants have used in a span (``appliance.common.usage.spans``)."""

    request: str
    span: str


@dataclass(frozen=True, slots=True)
class Overview:
    """Supervisor: answer to ``OverviewQuery``; sums are the six of ``appliance.common.usage.report``: requests, input,
    cached, output, cost, reasoning. ``problem``: why there is none."""

    request: str
    since: int
    until: int
    """The span, as Unix times of whole hours."""
    step_s: int
    """Seconds of one step of ``steps``."""
    total: list[int]
    models: dict[str, list[int]]
    """Sums by model, the most first; those that are not listed are the row without a name."""
    classes: dict[str, list[int]]
    """Sums by the class that tenants have now; of tenants that the policy does not have, the row without a name."""
    steps: dict[str, list[int]]
    """Requests, tokens and cost of each step, one after the other, of the models with the most, and of all others under
    no name."""
    unusual: dict[str, list[int]]
    """Requests and tokens of an hour beside what is usual, of tenants far above it
    (``appliance.common.usage.unusual``)."""
    hours: float
    """Hours of the span in which the appliance ran."""
    price_per_hour: float
    """Price of an hour of the machine; below 0 where the configuration has none."""
    currency: str
    """Unit of that price."""
    problem: str
    reading: int = 0
    """Number of the reading of the book that the sums are from."""


@dataclass(frozen=True, slots=True)
class UsageTableQuery:
    """Gateway: asks for a part of the table of tenants, or, where ``tenant`` names one, of its models or end users."""

    request: str
    span: str
    by: str
    """``tenant``, ``model`` or ``user`` (``appliance.common.usage.report.By``)."""
    tenant: str
    find: str
    """Part of the names of tenants that are wanted; empty: all."""
    offset: int
    """Rows to leave out, which earlier answers had."""


@dataclass(frozen=True, slots=True)
class UsageTable:
    """Supervisor: answer to ``UsageTableQuery``: rows with the six sums, those with the highest cost first.
    ``matching``: how many there are in all. ``problem``: why there is none."""

    request: str
    rows: dict[str, list[int]]
    matching: int
    problem: str
    reading: int = 0
    """Number of the reading that the table of tenants is from, as in ``Overview``; 0 for the rows of one tenant."""


UsageQuestion = UsageQuery | OverviewQuery | UsageTableQuery
UsageAnswer = Used | Overview | UsageTable
