"""Looks of the page of usage with fixed contents, and a source of them that a test may exchange."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

from appliance.common.errors import UnavailableError
from appliance.common.usage.report import By
from appliance.common.usage.spans import Span, num_steps, step_s, times
from appliance.gateway.console.usage_look import (
    Budget,
    Budgets,
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

UNIT = 1_000_000_000
"""Billionths of one unit of the currency."""

MODELS = ("llama-3.3-70b", "qwen3-235b-a22b", "mistral-small", "embed-large")


def row(name: str, share: float = 1.0) -> UsageRow:
    """Sums of a name, so large a part of the whole."""
    numbers = (48_210, 812_400_000, 301_900_000, 96_300_000, 21_800_000, 1_284_560_000_000)
    return UsageRow(name, *(int(number * share) for number in numbers))


def tenant_row(name: str, share: float, isolation_class: str = "shared") -> TenantUsageRow:
    """Sums of one tenant."""
    one = row(name, share)
    return TenantUsageRow(
        name, one.requests, one.input, one.cached, one.output, one.reasoning, one.cost, isolation_class
    )


def model_row(name: str, share: float, per_million: float | None = 2.31) -> ModelUsageRow:
    """Sums of one model, with its part of the machine's cost."""
    one = row(name, share)
    sums = (one.requests, one.input, one.cached, one.output, one.reasoning, one.cost)
    return ModelUsageRow(name, *sums, share, 420 * share, per_million)


def usage_look(span: str = "7d", **changes: Any) -> UsageLook:
    """A week of an appliance with some tenants, limits and one tenant that is unusual."""
    now, kind = time.time(), Span(span)
    chosen = times(kind, now)
    tenants = (
        tenant_row("acme", 0.41, "dedicated"),
        tenant_row("globex", 0.22),
        tenant_row("initech", 0.14, "strict"),
        tenant_row("umbrella-research", 0.11),
        tenant_row("hooli", 0.07),
        tenant_row("a-tenant-with-a-name-of-some-length", 0.04),
        tenant_row("gone-8f31c2", 0.01, ""),
    )
    budgets = (
        Budget("initech", "day", 40 * UNIT, 39 * UNIT, UNIT // 2),
        Budget("globex", "month", 600 * UNIT, 288 * UNIT, 12 * UNIT),
        Budget("hooli", "day", 25 * UNIT, 4 * UNIT, 0),
    )
    base = UsageLook(
        now=now,
        version="0.1.0",
        page="p1",
        span=span,
        since=round(chosen.since.timestamp()),
        until=round(chosen.until.timestamp()),
        step_s=step_s(kind),
        currency="EUR",
        priced=True,
        total=row(""),
        tenants=TenantUsagePage(tenants, 0, len(tenants)),
        models=tuple(
            model_row(name, share, 2.31 if name != "embed-large" else None)
            for name, share in zip(MODELS, (0.5, 0.3, 0.15, 0.05), strict=True)
        ),
        classes=(row("shared", 0.45), row("dedicated", 0.41), row("strict", 0.13), row("", 0.01)),
        steps=_steps(kind, now),
        budgets=Budgets(budgets, len(budgets)),
        unusual=(UnusualTenant("globex", 41_200, 1_900, 88_000_000, 4_100_000),),
        machine=MachineCost(151.2, 2.5, "EUR", 378.0),
    )
    return replace(base, **changes)


def _steps(span: Span, now: float) -> dict[str, list[int]]:
    """Busy by day and calm by night, up to now."""
    begin = times(span, now).since.timestamp()
    made: dict[str, list[int]] = {}
    for number, name in enumerate(MODELS):
        values: list[int] = []
        for place in range(num_steps(span)):
            at = begin + place * step_s(span)
            wave = (
                1.15 + math.sin((at % 86_400) / 86_400 * 2 * math.pi - 2.1 + number / 4) + 0.2 * math.sin(place * 1.7)
            )
            amount = max(0.0, wave) * (0.5, 0.3, 0.15, 0.05)[number] if at <= now else 0.0
            values += [int(290 * amount), int(5_400_000 * amount), int(7.6 * UNIT * amount)]
        made[name] = values
    return made


class FakeUsage:
    """Answers the page of usage as the gateway would, by looks that a test may exchange."""

    def __init__(self) -> None:
        self.asked: list[UsageAsked] = []
        self.reset()

    def reset(self) -> None:
        """There is something to show, and everybody may see it."""
        self.problem = ""
        self.changes: dict[str, Any] = {}
        self.users: tuple[UsageRow, ...] = (row("5f1c0b9a7d3e4f60815a2b3c4d5e6f70", 0.2), row("others", 0.1))
        self.asked.clear()

    async def look(self, asked: UsageAsked, page: str) -> UsageLook:
        """A look as of now."""
        self._note(asked)
        return usage_look(asked.span, page=page, **self.changes)

    async def detail(self, asked: UsageAsked, by: By) -> UsageDetail:
        """Two models, or the end users."""
        self._note(asked)
        rows = self.users if by is By.USER else (row(MODELS[0], 0.3), row(MODELS[1], 0.1))
        return UsageDetail(rows, len(rows) + 3)

    async def csv(self, asked: UsageAsked) -> str:
        """A table with one line."""
        self._note(asked)
        return "tenant,cost\nacme,1.00\n"

    def _note(self, asked: UsageAsked) -> None:
        self.asked.append(asked)
        if self.problem:
            raise UnavailableError(self.problem)
