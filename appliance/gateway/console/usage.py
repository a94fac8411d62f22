"""Usage for the operator's page: the supervisor's sums, beside what the gateway knows of policy and spend."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from appliance.common import spreadsheet
from appliance.common.control_usage import Overview, OverviewQuery, UsageTable, UsageTableQuery
from appliance.common.errors import UnavailableError
from appliance.common.ids import new_request_id
from appliance.common.usage.host_cost import HostCost, host_cost
from appliance.common.usage.report import By, Sum
from appliance.common.version import VERSION
from appliance.gateway.console.budgets import budgets
from appliance.gateway.console.usage_look import (
    MAX_DETAIL_ROWS,
    MAX_TENANT_ROWS,
    MachineCost,
    ModelUsageRow,
    TenantUsagePage,
    TenantUsageRow,
    UnusualTenant,
    UsageAsked,
    UsageDetail,
    UsageLook,
    UsageRow,
)
from appliance.gateway.request.spend import SpendParts
from appliance.gateway.sandboxes.questions import SupervisorQuestions
from policy.model import PolicySet
from policy.prices import amount_text

MAX_CSV_ROWS = 50_000
"""Most tenants of a download, 5 MB: a policy has 10,000, and a month's book also those that left."""

CSV_TITLES = ("tenant", "requests", "input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens", "cost")
"""Titles of a download, as those of ``athanor usage -o csv``."""

_RETRY_S = 5.0


class ConsoleUsage:
    """Answers the page of usage. It keeps nothing: the supervisor does."""

    def __init__(
        self,
        questions: SupervisorQuestions | None,
        policy: Callable[[], PolicySet],
        parts: Callable[[str], SpendParts],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``questions`` go to the supervisor, if there is one; ``policy`` gives the one in force; ``parts`` gives what
        a tenant has spent; ``clock`` gives Unix time."""
        self._questions, self._policy, self._parts, self._clock = questions, policy, parts, clock

    async def look(self, asked: UsageAsked, page: str) -> UsageLook:
        """Return what the page shows; ``page`` is the digest of the page's files.

        Raises:
            UnavailableError: the supervisor does not tell.
        """
        told, table = await self._overview(asked.span), await self._ask(asked, By.TENANT, "", asked.offset)
        if told.reading != table.reading:  # The book was read again in between: once more, which nobody does so soon.
            told = await self._overview(asked.span)
        policy = self._policy()
        machine = _machine(told)
        return UsageLook(
            now=self._clock(),
            version=VERSION,
            page=page,
            span=asked.span,
            since=told.since,
            until=told.until,
            step_s=told.step_s,
            currency=policy.currency,
            priced=bool(policy.prices) or told.total[4] > 0,
            total=_row("", told.total),
            tenants=_tenants(table, asked.offset, policy),
            models=tuple(_models(told, machine)),
            classes=tuple(_row(name, numbers) for name, numbers in told.classes.items()),
            steps=told.steps,
            budgets=budgets(policy, self._parts, asked.find.casefold()),
            unusual=tuple(UnusualTenant(tenant, *numbers) for tenant, numbers in told.unusual.items()),
            machine=None if machine is None else _shown(machine),
        )

    async def _overview(self, span: str) -> Overview:
        return await self._supervisor.overviews.ask(OverviewQuery(new_request_id(), span))

    async def detail(self, asked: UsageAsked, by: By) -> UsageDetail:
        """Return the models or the end users of one tenant.

        Raises:
            UnavailableError: the supervisor does not tell.
        """
        table = await self._ask(asked, by, asked.tenant, 0)
        rows = [_row(name, numbers) for name, numbers in table.rows.items()]
        return UsageDetail(tuple(rows[:MAX_DETAIL_ROWS]), table.matching)

    async def csv(self, asked: UsageAsked) -> str:
        """Return the whole table of tenants as comma-separated values, amounts exact.

        Raises:
            UnavailableError: the supervisor does not tell, or the table changed while it was read.
        """
        for _ in range(2):
            rows = await self._whole(asked)
            if rows is not None:
                return csv_text(rows)
        raise UnavailableError("the table of usage changed while it was read; try again", retry_after_s=_RETRY_S)

    async def _whole(self, asked: UsageAsked) -> Mapping[str, Sequence[int]] | None:
        """All rows; None where some may be missing because their order changed meanwhile."""
        rows: dict[str, Sequence[int]] = {}
        while len(rows) < MAX_CSV_ROWS:
            table = await self._ask(asked, By.TENANT, "", len(rows))
            if not table.rows:
                return rows if len(rows) == table.matching else None
            if rows.keys() & table.rows.keys():
                return None
            rows |= table.rows
        raise UnavailableError(
            f"the table has more than {MAX_CSV_ROWS:,} tenants; `athanor usage -o csv` writes all",
            retry_after_s=_RETRY_S,
        )

    async def _ask(self, asked: UsageAsked, by: By, tenant: str, offset: int) -> UsageTable:
        question = UsageTableQuery(new_request_id(), asked.span, by.value, tenant, asked.find, offset)
        return await self._supervisor.tables.ask(question)

    @property
    def _supervisor(self) -> SupervisorQuestions:
        if self._questions is None:
            raise UnavailableError("nothing here keeps a usage book")
        return self._questions


def csv_text(rows: Mapping[str, Sequence[int]]) -> str:
    """Return rows of sums by tenant with a line of titles. A name that a spreadsheet would take for a formula gets an
    apostrophe; the policy allows no such name."""
    values = (
        [name, requests, read, cached, output, reasoning, amount_text(cost)]
        for name, (requests, read, cached, output, cost, reasoning) in rows.items()
    )
    return spreadsheet.csv_text(CSV_TITLES, values, names=1)


def _row(name: str, numbers: Sequence[int]) -> UsageRow:
    requests, read, cached, output, cost, reasoning = numbers
    return UsageRow(name, requests, read, cached, output, reasoning, cost)


def _tenants(table: UsageTable, offset: int, policy: PolicySet) -> TenantUsagePage:
    rows = []
    for name, (requests, read, cached, output, cost, reasoning) in list(table.rows.items())[:MAX_TENANT_ROWS]:
        known = policy.tenants.get(name)
        shown = "" if known is None else known.isolation_class.value
        rows.append(TenantUsageRow(name, requests, read, cached, output, reasoning, cost, shown))
    return TenantUsagePage(tuple(rows), offset, table.matching)


def _machine(told: Overview) -> HostCost | None:
    """Cost of the machine by model, as ``athanor usage --cost`` has it; None without a price."""
    if told.price_per_hour < 0:
        return None
    sums = [Sum((name,), *numbers) for name, numbers in told.models.items()]
    return host_cost(told.hours, told.price_per_hour, told.currency, sums)


def _shown(machine: HostCost) -> MachineCost:
    return MachineCost(machine.hours, machine.price_per_hour, machine.currency, machine.cost)


def _models(told: Overview, machine: HostCost | None) -> Iterator[ModelUsageRow]:
    costs = {} if machine is None else {one.model: one for one in machine.models}
    for name, (requests, read, cached, output, cost, reasoning) in told.models.items():
        one = costs.get(name)
        own = (None, None, None) if one is None else (one.share, one.cost, one.per_million)
        yield ModelUsageRow(name, requests, read, cached, output, reasoning, cost, *own)
