"""Pure: files and batches as something to look at in a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from appliance.common.batch_status import REASONS, BatchQueue, Obstacle
from appliance.common.figures import count, counted, duration, printable, size
from appliance.operator.cli.tables import number, table

SHOWN = 8
"""Batches that are shown: those that have stood still longest."""

WIDE = 96
"""Columns from which on what holds a batch up stands in its line; else it has a line of its own below the table."""


def batches_view(queue: BatchQueue, width: int) -> RenderableType:
    """A line a batch for a terminal of so many columns, and one below for what is kept."""
    kept = f"{counted(queue.files, 'file')}, {counted(queue.responses, 'stored response')}: "
    kept += f"{size(queue.stored_bytes)} of {size(queue.max_bytes)}"
    if not queue.open:
        return Text(f"no batch is open; {kept}", "dim")
    wide, reasons = width >= WIDE, []
    shown = table("BATCH OF", *(("STATE",) if wide else ()), numbers=("LINES LEFT", "RUNNING", "STILL FOR"))
    for one in queue.rows[:SHOWN]:
        state = Text(REASONS[Obstacle(one.obstacle)], "yellow" if one.stuck else "")
        left = Text(f"{count(one.total - one.ended)} of {count(one.total)}", justify="right")
        cells = (left, number(one.running), Text(duration(one.still_s), justify="right"))
        shown.add_row(Text(printable(one.tenant), "bold"), *((state,) if wide else ()), *cells)
        if not wide:
            reasons.append(Text.assemble((f"{printable(one.tenant)}: ", "dim"), state))
    more = queue.open - min(SHOWN, len(queue.rows))
    note = f"{counted(queue.waiting_lines, 'line')} left in {counted(queue.open, 'batch', 'batches')}, the oldest of "
    note += duration(queue.oldest_s) + (f"; {more} are not shown" if more > 0 else "")
    return Group(shown, *reasons, Text(f"{note}; {kept}", "dim"))
