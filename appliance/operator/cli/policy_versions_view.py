"""Pure: the history of a policy as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from appliance.common.figures import counted, printable
from appliance.operator.cli.tables import table

DIGEST_CHARACTERS = 12


def history_view(rows: Sequence[Mapping[str, Any]], total: int) -> RenderableType:
    """Return the table of versions, the newest first; ``total`` is the number of all."""
    if not rows:
        return Text("no policy was kept yet; the supervisor keeps each that comes into force")
    shown = table("VERSION", "IN FORCE SINCE", "DIGEST", "FILES")
    for index, row in enumerate(rows):
        since = f"{row['since'][:10]} {row['since'][11:16]} UTC"
        files = ", ".join(map(printable, row["files"]))
        mark = Text(str(row["version"]), "bold green" if index == 0 else "")
        shown.add_row(mark, since, Text(row["digest"][:DIGEST_CHARACTERS], "dim"), files)
    rest = f", the newest {len(rows)} shown" if total > len(rows) else ""
    note = Text(f"{counted(total, 'version')}{rest}; athanor policy history VERSION tells what one changed", "dim")
    return Group(shown, "", note)
