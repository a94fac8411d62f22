"""Usage over time as a plot of text: a column for each hour, day or month, and a line for each tenant or model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from appliance.common.figures import counted, printable
from appliance.common.usage.report import COLUMNS_OF_USERS, TIMES, By, Filter, Sum, sums
from policy.prices import BILLIONTHS

ROWS = 8
"""Lines of the largest column."""

MOST_LINES = 12
"""Lines of tenants, models or end users; all others share one more."""

NAME_COLUMNS = 24
"""Columns of the longest name; a longer one is cut."""

AMOUNT_COLUMNS = 16
"""Columns kept for a line's amount."""

WIDEST = 6
"""Columns of one bar at most, with the gap behind it."""

BLOCKS = " ▁▂▃▄▅▆▇█"
"""Blocks of no to eight eighths of a line."""

LABELS = {By.HOUR: "%Y-%m-%dT%H:00Z", By.DAY: "%Y-%m-%d", By.MONTH: "%Y-%m"}
"""How the usage book's sums write the begin of a step."""


@dataclass(frozen=True, slots=True)
class Line:
    """Amounts of one tenant, model or end user, or of several of them by their values together."""

    name: str
    amounts: tuple[int, ...]
    """One for each step: billionths of the currency where anything has a cost, else tokens."""

    @property
    def total(self) -> int:
        """Sum over the whole time."""
        return sum(self.amounts)


@dataclass(frozen=True, slots=True)
class Plot:
    """Usage over time."""

    step: By
    steps: tuple[str, ...]
    """Begins of the steps, in order; those in which nothing was used are there too."""
    priced: bool
    """Whether amounts are costs; else they are tokens."""
    total: Line
    lines: tuple[Line, ...]
    """The largest first; behind ``MOST_LINES`` of them one for all others. Empty where nothing but time was asked
    for."""


def room(width: int) -> int:
    """Return how many steps a terminal of so many columns has room for."""
    return max(1, width - NAME_COLUMNS - AMOUNT_COLUMNS - 4)


def read_plot(folder: Path, names: Sequence[By], chosen: Filter, most: int) -> Plot:
    """Read usage over time from the book in the audit folder. Blocks.

    Without a time in ``names`` the step is the shortest of hour, day and month of which the time has no more than
    ``most``.

    Raises:
        ConfigError: the book cannot be read, or is not summed so.
        ValueError: the time has more steps, or ``names`` has several times; the message says so.
    """
    subjects = [name for name in names if name not in TIMES]
    step, steps = _steps(names, chosen, most)
    if By.USER in subjects or chosen.users:
        # A name of an end user chooses; its pseudonym, which a row has, does not.
        found = sums(folder, [step, *subjects], chosen)
        return _plot(step, steps, found, found)
    largest = sums(folder, subjects, chosen)[:MOST_LINES] if subjects else []
    tenants, models = (_values(largest, subjects, one) for one in (By.TENANT, By.MODEL))
    narrowed = replace(chosen, tenants=tenants or chosen.tenants, models=models or chosen.models)
    found = sums(folder, [step, *subjects], narrowed) if largest else []
    wanted = {one.keys for one in largest}
    return _plot(step, steps, [one for one in found if one.keys[1:] in wanted], sums(folder, [step], chosen))


def plot_view(plot: Plot, chosen: Filter, width: int) -> RenderableType:
    """Return the plot for a terminal of so many columns."""
    time = Text(f"{chosen.since:%Y-%m-%d %H:%M} to {chosen.until:%Y-%m-%d %H:%M} UTC", "dim")
    if not plot.total.total:
        return Group(Text("nothing was used"), time)
    names = [_short(line.name) for line in plot.lines]
    highest = max(plot.total.amounts)
    marks = [_amount(highest, priced=plot.priced), "", "", "", _amount(highest // 2, priced=plot.priced), "", "", ""]
    margin = max(map(len, (*names, *marks)))
    columns = min(WIDEST, max(1, (width - margin - AMOUNT_COLUMNS - 4) // len(plot.steps)))
    what = "cost in the currency of the policy's prices" if plot.priced else "prompt and output tokens"
    drawn: list[Text] = [Text(f"{what}, {plot.step.value} by {plot.step.value}", "dim")]
    for row, mark in zip(reversed(range(ROWS)), marks, strict=True):
        blocks = (_block(amount, highest, row) for amount in plot.total.amounts)
        drawn.append(_drawn(Text(mark.rjust(margin), "dim"), "".join(_wide(one, columns) for one in blocks)))
    drawn.append(Text(f"{'0'.rjust(margin)}  {'-' * (columns * len(plot.steps))}", "dim"))
    drawn.append(Text(f"{' ' * margin}  {_axis(plot.steps, columns)}", "dim"))
    for name, line in zip(names, plot.lines, strict=True):
        peak = max(line.amounts)
        blocks = (_block(amount, peak, 0, rows=1) for amount in line.amounts)
        row_ = _drawn(Text(name.ljust(margin), "bold"), "".join(_wide(one, columns) for one in blocks))
        drawn.append(row_.append(f"  {_amount(line.total, priced=plot.priced)}"))
    note = f"   {_amount(plot.total.total, priced=plot.priced)} in all"
    note += "; each line has a scale of its own" if plot.lines else ""
    return Group(*drawn, "", Text.assemble(time, (note, "dim")))


def _values(found: Sequence[Sum], names: Sequence[By], name: By) -> tuple[str, ...]:
    """Return the values that rows have of what they were summed by; none where it was not summed by this."""
    return tuple({one.keys[names.index(name)] for one in found}) if name in names else ()


def _steps(names: Sequence[By], chosen: Filter, most: int) -> tuple[By, tuple[str, ...]]:
    given = [name for name in names if name in TIMES]
    if len(given) > 1:
        raise ValueError("a plot has one time: name one of month, day and hour")
    of_users = By.USER in names or chosen.users
    for step in given or [one for one in LABELS if not of_users or one in COLUMNS_OF_USERS]:
        found = []
        for begin in _begins(step, chosen):
            found.append(f"{begin:{LABELS[step]}}")
            if len(found) > most:
                break
        else:
            return step, tuple(found)
    raise ValueError(
        f"the time has more steps than the {most} that there is room for; choose longer ones, or less time"
    )


def _begins(step: By, chosen: Filter) -> Iterator[datetime]:
    """Give the begin of each step that has a part of the time."""
    begin = chosen.since.astimezone(UTC)
    if step is not By.HOUR:
        begin = begin.replace(hour=0)
    if step is By.MONTH:
        begin = begin.replace(day=1)
    while begin < chosen.until:
        yield begin
        try:
            if step is By.MONTH:
                begin = (begin + timedelta(days=31)).replace(day=1)
            else:
                begin += timedelta(hours=1) if step is By.HOUR else timedelta(days=1)
        except OverflowError:
            return  # It was the last step before the year 10000.


def _plot(step: By, steps: tuple[str, ...], found: Sequence[Sum], whole: Sequence[Sum]) -> Plot:
    """Make the plot of the rows of single lines and of those of the whole, each with its step first."""
    priced = any(one.cost for one in whole)
    total = _line("", steps, whole, priced=priced)
    rows: dict[tuple[str, ...], list[Sum]] = {}
    for one in found:
        rows.setdefault(one.keys[1:], []).append(one)
    rows.pop((), None)
    lines = [_line(" ".join(map(printable, keys)), steps, row, priced=priced) for keys, row in rows.items()]
    lines.sort(key=lambda line: (-line.total, line.name))
    shown = lines[:MOST_LINES]
    if lines:
        rest = tuple(amount - sum(line.amounts[place] for line in shown) for place, amount in enumerate(total.amounts))
        shown += [Line("all others", rest)] if any(rest) else []
    return Plot(step, steps, priced, total, tuple(shown))


def _line(name: str, steps: Sequence[str], found: Sequence[Sum], *, priced: bool) -> Line:
    amounts = dict.fromkeys(steps, 0)
    for one in found:
        if one.keys[0] in amounts:  # of whole days of end users, one may begin before the time
            amounts[one.keys[0]] += one.cost if priced else one.tokens
    return Line(name, tuple(amounts.values()))


def _block(amount: int, highest: int, row: int, rows: int = ROWS) -> str:
    """Return the block of a bar in one line, counted from below; what is not 0 shows."""
    if not amount:
        return BLOCKS[0]
    eighths = max(1, amount * rows * 8 // highest)
    return BLOCKS[min(8, max(0, eighths - row * 8))]


def _wide(block: str, columns: int) -> str:
    """Return a block as wide as a bar, with a gap behind it where there is room."""
    return block * (columns - 1) + " " if columns > 2 else block * columns


def _drawn(head: Text, bars: str) -> Text:
    return Text.assemble(head, "  ", (bars, "cyan"))


def _axis(steps: Sequence[str], columns: int) -> str:
    """Return the begins of the first and the last step, below their bars where these are wide enough."""
    first, last, length = steps[0], steps[-1], columns * len(steps)
    gap = length - len(first) - len(last)
    if len(steps) == 1:
        return first
    return f"{first}{' ' * gap}{last}" if gap > 0 else f"{first} to {last}"


def _short(name: str) -> str:
    return name if len(name) <= NAME_COLUMNS else f"{name[: NAME_COLUMNS - 1]}…"


def _amount(value: int, *, priced: bool) -> str:
    return f"{value / BILLIONTHS:,.4f}" if priced else counted(value, "token")
