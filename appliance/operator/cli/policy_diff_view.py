"""Pure: changes between two policies, and their replay, as something to look at in a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from dataclasses import replace
from datetime import UTC
from itertools import groupby

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from appliance.common.figures import NS, clock, counted, printable
from policy.changes import Change, SubjectKind
from policy.replay import Replay, not_replayed, sentences
from policy.told import Direction, listed

WIDE = 110
"""Columns from which on a rule's path stands beside its sentence."""

SIGNS = {Direction.WIDER: ("+", "green"), Direction.NARROWER: ("-", "red"), Direction.OTHER: ("~", "yellow")}
"""Direction to its sign and colour; the sign alone is enough."""

LEGEND = "+ allows more or protects less   - allows less or protects more"

DIGEST_CHARACTERS = 12

LEAST_GATHERED = 3
"""Tenants with equal changes that are shown as one: so many that reading each costs more than it tells."""

ANY_TENANT = "tenants.*"
"""Beginning of a rule's path where it stands for several tenants."""


def changes_view(found: Collection[Change], width: int) -> RenderableType:
    """Sentences by tenant, group and prefix; with the rule's path beside or below each. Tenants to which the same
    happens, such as those of a tenant group, are shown together."""
    paragraphs = [list(group) for _, group in groupby(found, key=lambda change: change.name)]
    alike: dict[Hashable, list[str]] = {}
    for rows in paragraphs:
        alike.setdefault(_likeness(rows), []).append(rows[0].subject)
    parts: list[RenderableType] = []
    for rows in paragraphs:
        subjects = alike[_likeness(rows)]
        if len(subjects) < LEAST_GATHERED:
            parts += [_heading(rows[0].kind, [rows[0].subject]), _grid(rows, wide=width >= WIDE), ""]
        elif subjects[0] == rows[0].subject:
            gathered = [_of_any(change) for change in rows]
            parts += [_heading(rows[0].kind, subjects), _grid(gathered, wide=width >= WIDE), ""]
    return Group(*parts)


def _likeness(rows: Collection[Change]) -> Hashable:
    """Return what is equal for tenants to which the same happens, and for nothing else."""
    if any(change.kind is not SubjectKind.TENANT for change in rows):
        return tuple(change.name for change in rows)
    return tuple((change.predicate, _of_any(change).path) for change in rows)


def _of_any(change: Change) -> Change:
    own = f"tenants.{change.subject}"
    path = change.path
    return replace(change, path=ANY_TENANT + path.removeprefix(own)) if path.startswith(f"{own}.") else change


def _heading(kind: SubjectKind, subjects: Sequence[str]) -> Text:
    if len(subjects) > 1:
        return Text.assemble((printable(listed(subjects)), "bold"), (f" ({counted(len(subjects), 'tenant')})", "dim"))
    noun = "" if kind is SubjectKind.TENANT else f"{kind.value} "
    return Text.assemble((noun, "dim" if subjects[0] else "bold"), (printable(subjects[0]), "bold"))


def replay_view(result: Replay, since: float, lost: int, found: Collection[Change]) -> RenderableType:
    """What the log says: findings, what makes them inexact, and rules that were not replayed."""
    total = sum(result.requests.values())
    when = f"{clock(round(since * NS), UTC, date=True)} UTC"
    parts: list[RenderableType] = [
        Text.assemble(("replay ", "dim"), (counted(total, "request"), "bold"), f" allowed since {when}")
    ]
    signs = [SIGNS[Direction.NARROWER]] * (len(result.refused) + len(result.shortened))
    signs += [SIGNS[Direction.WIDER]] * len(result.lifted)
    rows = list(zip(signs, sentences(result), strict=True))
    parts.append(_lines([(Text(sign, f"bold {style}"), Text(printable(text))) for (sign, style), text in rows]))
    if not rows:
        parts.append(_lines([(Text("="), Text("none of them, and no denied one, would have been decided otherwise"))]))
    notes = _not_replayed(found)
    if result.inexact:
        notes.append(f"left out: {counted(result.inexact, 'request')} that the old policy would have refused as well")
    if result.foreign:
        notes.append(f"decided by a policy other than the old one: {counted(result.foreign, 'request')}")
    if lost:
        notes.append(f"missing in the log: {counted(lost, 'entry', 'entries')}")
    parts.append(_lines([(Text(""), Text(printable(note), "dim")) for note in notes]))
    return Group(*parts, "")


def _not_replayed(found: Collection[Change]) -> list[str]:
    """Return a line for each rule that was not replayed, one for several tenants with the same rule."""
    rules = list(zip(not_replayed([_of_any(change) for change in found]), not_replayed(found), strict=True))
    numbers = Counter(of_any for of_any, _ in rules)
    told = (of_any if numbers[of_any] >= LEAST_GATHERED else own for of_any, own in rules)
    return [f"not replayed: {path}: {reason}" for path, reason in dict.fromkeys(told)]


def summary_view(old: str, new: str, found: Collection[Change]) -> RenderableType:
    """Counts and digests, and what the signs mean."""
    digests = f"   digest {old[:DIGEST_CHARACTERS]} to {new[:DIGEST_CHARACTERS]}"
    if not found:
        return Text.assemble(("nothing changes", "bold green"), (f"   digest {new[:DIGEST_CHARACTERS]}", "dim"))
    numbers = Counter(change.direction for change in found)
    words = ", ".join(f"{numbers[one]} {one.value}" for one in Direction if numbers[one])
    heading = Text.assemble((counted(len(found), "change"), "bold"), f": {words}", (digests, "dim"))
    return Group(heading, Text(LEGEND, "dim"))


def _grid(found: Collection[Change], *, wide: bool) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=3 if wide else None)
    if wide:
        grid.add_column(ratio=2, overflow="fold")
        grid.expand = True
    for change in found:
        sign, style = SIGNS[change.direction]
        path = Text(printable(change.path), "dim cyan")
        text = Text(printable(change.predicate))
        if wide:
            grid.add_row(Text(sign, f"bold {style}"), text, path)
        else:
            grid.add_row(Text(sign, f"bold {style}"), Group(text, path))
    return Padding(grid, (0, 0, 0, 2), expand=wide)


def _lines(rows: Collection[tuple[Text, Text]]) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True, min_width=1)
    grid.add_column()
    for sign, text in rows:
        grid.add_row(sign, text)
    return Padding(grid, (0, 0, 0, 2), expand=False)
