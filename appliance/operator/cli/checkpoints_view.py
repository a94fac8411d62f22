"""Pure: checkpoints of sandboxes as something to look at in a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from appliance.common.checkpoint_status import CheckpointStatus
from appliance.common.figures import counted, duration, printable, size
from appliance.operator.cli.tables import table

SHOWN = 12
"""Checkpoints that are shown: the bases come first."""


def checkpoints_view(found: tuple[CheckpointStatus, ...], now: float) -> RenderableType:
    """A line a checkpoint, and one below for each that is not there or that some begin without; ``now``: Unix time."""
    shown = table("CHECKPOINT", "OF", numbers=("SIZE", "MADE"))
    for one in found[:SHOWN]:
        made = f"{duration(max(0.0, now - one.made_at))} ago" if one.made_at else "-"
        held = Text(size(one.bytes) if one.bytes else "none", "" if one.bytes else "yellow", justify="right")
        shown.add_row(Text(one.role, "bold"), _of(one), held, Text(made, justify="right"))
    return Group(shown, *_notes(found))


def _of(one: CheckpointStatus) -> str:
    return printable(one.model) if one.model else "all models"


def _notes(found: tuple[CheckpointStatus, ...]) -> Iterator[Text]:
    for one in found[:SHOWN]:
        if one.problem:
            yield Text.assemble((f"{one.role}, {_of(one)}: ", "dim"), printable(one.problem))
    if len(found) > SHOWN:
        yield Text(f"{counted(len(found) - SHOWN, 'checkpoint')} more: athanor status -o json", "dim")
