"""Pure: a statement as a table, and as a document for other programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from rich.console import Group, RenderableType
from rich.text import Text

from appliance.common.audit.entry import Value
from appliance.common.audit.statement import Statement, Totals, total
from appliance.common.figures import printable
from appliance.common.usage.report import By, Filter, Sum
from appliance.operator.cli.usage_view import NUMBERS, usage_view
from policy.prices import amount_text


def statement_view(statement: Statement, width: int) -> RenderableType:
    """Return the table for a terminal of so many columns: a row for each model, and whose statement it is."""
    head = statement.head
    chosen = Filter(_moment(head.since), _moment(head.until))
    rows = [_sum(model, total(requests)) for model, requests in _by_model(statement).items()]
    rows.sort(key=lambda one: (-one.cost, -one.tokens, one.keys))
    whose = Text.assemble((printable(head.tenant), "bold"), f"   {printable(head.log)}")
    return Group(whose, "", usage_view(rows, [By.MODEL], chosen, width), "")


def document(statement: Statement, found: Sequence[str], *, compared: bool) -> dict[str, object]:
    """Return what other programs read: exact amounts are texts."""
    head = statement.head
    return {
        "ok": not found,
        "log": head.log,
        "tenant": head.tenant,
        "since": f"{_moment(head.since):%Y-%m-%dT%H:%M:%SZ}",
        "until": f"{_moment(head.until):%Y-%m-%dT%H:%M:%SZ}",
        **_numbers(statement.totals),
        "models": {model: _numbers(total(requests)) for model, requests in sorted(_by_model(statement).items())},
        "compared": compared,
        "differences": list(found),
    }


def _by_model(statement: Statement) -> dict[str, list[Mapping[str, Value]]]:
    by_model: dict[str, list[Mapping[str, Value]]] = {}
    for one in statement.requests:
        by_model.setdefault(str(one["model"]), []).append(one)
    return by_model


def _numbers(totals: Totals) -> dict[str, object]:
    tokens = (totals.requests, totals.input_tokens, totals.cached_tokens, totals.output_tokens, totals.reasoning_tokens)
    return {**dict(zip(NUMBERS, tokens, strict=False)), "cost": amount_text(totals.cost)}


def _sum(model: str, totals: Totals) -> Sum:
    numbers = (totals.requests, totals.input_tokens, totals.cached_tokens, totals.output_tokens, totals.cost)
    return Sum((model,), *numbers, totals.reasoning_tokens)


def _moment(time_ms: int) -> datetime:
    return datetime.fromtimestamp(time_ms / 1_000, UTC)
