"""Pure: the rows of a self-test as something to look at in a terminal, each as it ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from appliance.common.figures import counted, printable

if TYPE_CHECKING:
    from appliance.selftest.registry import Guarantee
    from appliance.selftest.result import Result

WIDE = 100
"""Columns from which on figure and bar stand side by side."""

INDENT = 4
"""Columns before each row."""

LEAST_S = 10.0
"""Estimated seconds of checks after which this machine's own pace replaces the estimate's."""

_STYLES = {"pass": "green", "fail": "bold red", "absent": "yellow", "not run": "dim"}

_VERDICT_COLUMNS = 9
_NAME_COLUMNS = 24
"""Columns of a row's verdict and name; longer names are folded."""


@dataclass(slots=True)
class Estimate:
    """How long all checks of a run take, and how much of it is done."""

    total_s: float
    """Seconds of all checks on two cores at short counts."""
    endless: bool = False
    """Whether release counts are run, for which there is no estimate."""
    done_s: float = 0.0
    """Seconds that the estimate gives for the checks that have ended."""

    def remaining(self, elapsed_s: float) -> str:
        """Return what remains in words, at this machine's pace; empty where that is not known."""
        if self.endless or not self.done_s:
            return ""
        pace = elapsed_s / self.done_s if self.done_s >= LEAST_S else 1.0
        return f"about {max(1, round((self.total_s - self.done_s) * pace))} s remain"


def beginning(checks: int, estimate: Estimate) -> RenderableType:
    """Return the first line: how many checks run and how long they take."""
    length = "hours, at release counts" if estimate.endless else f"about {estimate.total_s:.0f} s on two idle cores"
    return Text(f"{counted(checks, 'check')}, {length}", "dim")


def heading(guarantee: Guarantee, remaining: str) -> RenderableType:
    """Return the line above a guarantee's rows."""
    title = Text.assemble("\n", (f"{guarantee.id:<4}", "bold cyan"), (guarantee.promise, "bold"))
    return Text.assemble(title, (f"  ({remaining})", "dim")) if remaining else title


def line(guarantee: Guarantee, row: Result, width: int) -> RenderableType:
    """Return a row with verdict, name, figure, bar; on a narrow terminal the bar goes below the figure."""
    wide = width - INDENT >= WIDE
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False, pad_edge=False, expand=wide)
    table.add_column(width=_VERDICT_COLUMNS - 2, no_wrap=True)
    table.add_column(width=_NAME_COLUMNS - 2)
    table.add_column(ratio=3)
    if wide:
        table.add_column(ratio=2)
    name = row.id.removeprefix(guarantee.id).removeprefix(".") or "all"
    figure, bar = Text(printable(row.figure)), Text(printable(row.bar), "dim")
    below = Group(figure, Text.assemble(("bar: ", "dim"), bar)) if row.bar else figure
    # The verdict is a word as well as a colour: many terminals and readers have no colours.
    table.add_row(
        Text(row.verdict, _STYLES[row.verdict]), Text(printable(name)), *((figure, bar) if wide else (below,))
    )
    return Padding(table, (0, 0, 0, INDENT))


def summary(rows: Sequence[Result], elapsed_s: float) -> RenderableType:
    """Return what all rows come to, and how to see the failures and the rest."""
    counts: Counter[str] = Counter(row.verdict for row in rows)
    text = Text("\n")
    for verdict, style in _STYLES.items():
        if counts[verdict]:
            text.append(f"{counts[verdict]} {verdict}   ", style)
    text.append(f"in {elapsed_s:.0f} s", "dim")
    parts: list[RenderableType] = [text]
    if missing := [row.id for row in rows if row.verdict == "not run"]:
        parts.append(Text(f"not run, --full: {', '.join(map(printable, missing))}", "dim"))
    if again := dict.fromkeys(row.command for row in rows if row.verdict == "fail"):
        parts.append(Text("again, one by one:", "dim"))
        parts += [Padding(Text(printable(command)), (0, 0, 0, INDENT)) for command in again]
    return Group(*parts, "")
