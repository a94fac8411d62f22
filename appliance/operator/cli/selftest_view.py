"""Pure: the rows of a self-test as something to look at in a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from appliance.common.figures import printable

if TYPE_CHECKING:
    from appliance.selftest.registry import Guarantee
    from appliance.selftest.result import Result

WIDE = 100
"""Columns from which on figure and bar stand side by side."""

INDENT = 4
"""Columns before each row."""

_STYLES = {"pass": "green", "fail": "bold red", "absent": "yellow"}

_NAME_COLUMNS = 22
"""Columns of a row's name; longer names are folded."""


def selftest_view(rows: Sequence[tuple[Guarantee, Sequence[Result]]], width: int) -> RenderableType:
    """Every guarantee with its rows, and below what it comes to, for a terminal of so many columns."""
    parts: list[RenderableType] = [""]
    for guarantee, results in rows:
        title = Text.assemble((f"{guarantee.id:<4}", "bold cyan"), (guarantee.promise, "bold"))
        parts += [title, Padding(_rows(guarantee.id, results, wide=width - INDENT >= WIDE), (0, 0, 1, INDENT))]
    return Group(*parts, *_summary([row for _, results in rows for row in results]))


def _rows(guarantee: str, rows: Sequence[Result], *, wide: bool) -> Table:
    """Verdict, name, figure, bar; on a narrow terminal the bar goes below the figure."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False, pad_edge=False)
    table.add_column(min_width=6, no_wrap=True)
    table.add_column(width=_NAME_COLUMNS)
    table.add_column(ratio=3)
    if wide:
        table.add_column(ratio=2)
    for row in rows:
        name = row.id.removeprefix(guarantee).removeprefix(".") or "all"
        figure, bar = Text(printable(row.figure)), Text(printable(row.bar), "dim")
        cells = (figure, bar) if wide else (Group(figure, Text.assemble(("bar: ", "dim"), bar)),)
        # The verdict is a word as well as a colour: many terminals and readers have no colours.
        table.add_row(Text(row.verdict, _STYLES[row.verdict]), Text(printable(name)), *cells)
    return table


def _summary(rows: Sequence[Result]) -> list[RenderableType]:
    counts: Counter[str] = Counter(row.verdict for row in rows)
    text = Text()
    for verdict, style in _STYLES.items():
        if counts[verdict]:
            text.append(f"{counts[verdict]} {verdict}   ", style)
    again = dict.fromkeys(row.command for row in rows if row.verdict == "fail")
    parts: list[RenderableType] = [text]
    if again:
        parts.append(Text("again, one by one:", "dim"))
        parts += [Padding(Text(printable(command)), (0, 0, 0, INDENT)) for command in again]
    return [*parts, ""]
