"""Pure: the history of a policy as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from appliance.common.figures import counted, printable
from appliance.operator.cli.policy_diff_view import LEGEND, changes_view
from appliance.operator.cli.tables import table

if TYPE_CHECKING:
    from policy.changes import Change

DIGEST_CHARACTERS = 12


def history_view(rows: Sequence[Mapping[str, Any]], total: int) -> RenderableType:
    """Return the table of versions, the newest first; ``total`` is the number of all."""
    if not rows:
        return Text("no policy was kept yet; the supervisor keeps each that comes into force")
    shown = table("VERSION", "IN FORCE SINCE", "BY", "DIGEST", "FILES")
    for index, row in enumerate(rows):
        since = _moment(row)
        files = ", ".join(map(printable, row["files"])) or "not read in time"
        mark = Text(str(row["version"]), "bold green" if index == 0 else "")
        by, digest = printable(row["by"]), Text(row["digest"][:DIGEST_CHARACTERS], "dim")
        shown.add_row(mark, since, by, digest, files)
    rest = f", the newest {len(rows)} shown" if total > len(rows) else ""
    note = Text(f"{counted(total, 'version')}{rest}; athanor policy history VERSION tells what one changed", "dim")
    return Group(shown, "", note)


def since_view(
    told: Sequence[tuple[Mapping[str, Any], Sequence[Change], str]], begin: datetime, width: int
) -> RenderableType:
    """Return what versions changed, the oldest first: a row, its changes, and a note where these are not known."""
    time = f"{begin:%Y-%m-%d %H:%M} UTC"
    if not told:
        return Text(f"no policy came into force since {time}")
    parts: list[RenderableType] = []
    for row, changed, note in told:
        heading = Text.assemble(
            (f"version {row['version']}", "bold"), (f"   {_moment(row)}   {printable(row['by'])}".rstrip(), "dim")
        )
        nothing = Text(f"  {printable(note) or 'the same rules as before'}", "dim")
        parts += [heading, changes_view(changed, width) if changed else Group(nothing, "")]
    return Group(*parts, Text(f"{counted(len(told), 'version')} since {time}", "dim"), Text(LEGEND, "dim"))


def _moment(row: Mapping[str, Any]) -> str:
    return f"{row['since'][:10]} {row['since'][11:16]} UTC"
