"""Pure: usage as a table, as comma-separated values, and as a document for other programs."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from appliance.common import spreadsheet
from appliance.common.figures import counted, printable
from appliance.common.usage.report import TIMES, By, Filter, Sum, total
from appliance.operator.cli.tables import number, table
from policy.prices import BILLIONTHS, amount_text

BAR_COLUMNS = 16
"""Columns of the longest bar."""

WIDE = 100
"""Columns from which on bars are shown."""

EIGHTHS = " ▏▎▍▌▋▊▉█"
"""Blocks of no to eight eighths of a column."""

NUMBERS = ("requests", "input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens", "cost")
"""Names of the numbers of a row in documents."""


def usage_view(found: Sequence[Sum], names: Sequence[By], chosen: Filter, width: int) -> RenderableType:
    """Return the table for a terminal of so many columns: a row for each sum, the total, and the time it is of."""
    time = Text(f"{chosen.since:%Y-%m-%d %H:%M} to {chosen.until:%Y-%m-%d %H:%M} UTC", "dim")
    if not found:
        return Group(Text("nothing was used"), time)
    priced = any(one.cost for one in found)
    thought = any(one.reasoning for one in found)
    numbers = ["REQUESTS", "INPUT", "CACHED", "OUTPUT", *(["REASONING"] if thought else [])]
    numbers += ["COST"] if priced else []
    shown = table(*(name.value.upper() for name in names), numbers=numbers)
    bars = width >= WIDE
    if bars:
        shown.add_column("", no_wrap=True)
    largest = max(_weight(one, priced=priced) for one in found)
    for one in found:
        keys = (
            Text(printable(key), "bold" if name not in TIMES else "") for key, name in zip(one.keys, names, strict=True)
        )
        bar = (Text(bar_of(_weight(one, priced=priced), largest), "cyan"),) if bars else ()
        shown.add_row(*keys, *_cells(one, priced=priced, thought=thought), *bar)
    if len(found) > 1:
        rest = [""] * (len(names) - 1)
        cells = _cells(total(found), priced=priced, thought=thought)
        shown.add_row(Text("all", "dim"), *rest, *cells, *([""] if bars else []))
    rows = counted(len(found), "row")
    note = "   cost in the currency of the policy's prices" if priced else ""
    return Group(shown, "", Text.assemble(time, (f"   {rows}{note}", "dim")))


def bar_of(value: int, largest: int) -> str:
    """Return a bar as long as the value's share of the largest, in eighths of a column; what is not 0 shows."""
    if not largest or not value:
        return ""
    eighths = max(1, value * BAR_COLUMNS * 8 // largest)
    whole, rest = divmod(eighths, 8)
    return EIGHTHS[8] * whole + (EIGHTHS[rest] if rest else "")


def csv_text(found: Sequence[Sum], names: Sequence[By]) -> str:
    """Return the rows with a line of titles; amounts are exact."""
    rows = (
        [*one.keys, one.requests, one.input, one.cached, one.output, one.reasoning, amount_text(one.cost)]
        for one in found
    )
    return spreadsheet.csv_text([*(name.value for name in names), *NUMBERS], rows, len(names))


def document(found: Sequence[Sum], names: Sequence[By], chosen: Filter) -> dict[str, object]:
    """Return what other programs read: exact amounts are texts."""
    return {
        "since": f"{chosen.since:%Y-%m-%dT%H:%M:%SZ}",
        "until": f"{chosen.until:%Y-%m-%dT%H:%M:%SZ}",
        "rows": [
            {
                **{name.value: key for name, key in zip(names, one.keys, strict=True)},
                **dict(zip(NUMBERS, (one.requests, one.input, one.cached, one.output, one.reasoning), strict=False)),
                "cost": amount_text(one.cost),
            }
            for one in found
        ],
    }


def _weight(one: Sum, *, priced: bool) -> int:
    return one.cost if priced else one.tokens


def _cells(one: Sum, *, priced: bool, thought: bool) -> list[Text]:
    values = (one.requests, one.input, one.cached, one.output, *((one.reasoning,) if thought else ()))
    cells = [number(value) for value in values]
    return [*cells, Text(f"{one.cost / BILLIONTHS:,.4f}", "" if one.cost else "dim")] if priced else cells
