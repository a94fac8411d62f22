"""Pure: the doctor's findings as something to read in a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from appliance.common.figures import counted, printable
from appliance.operator.doctor.examine import counts
from appliance.operator.doctor.finding import Area, Finding, Severity

MARKS = {
    Severity.OK: (" ok ", "green"),
    Severity.NOTE: ("note", "cyan"),
    Severity.WARNING: ("warn", "bold yellow"),
    Severity.PROBLEM: ("FAIL", "bold white on red"),
}
"""Four letters each, so that they can be told apart without colours."""

TITLES = {Area.MACHINE: "Machine", Area.SANDBOXES: "Sandboxes", Area.SERVICE: "Service", Area.ACCESS: "Who may do what"}


def doctor_view(findings: tuple[Finding, ...]) -> RenderableType:
    """All findings by area, then how many there are of each kind."""
    width = max((len(finding.check) for finding in findings), default=0)
    parts: list[RenderableType] = []
    for area, title in TITLES.items():
        rows = [finding for finding in findings if finding.area is area]
        if rows:
            parts += ["", Text(title, "bold"), _table(rows, width)]
    return Group(*parts, "", _summary(findings))


def _table(rows: list[Finding], width: int) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, width=4)
    table.add_column(no_wrap=True, width=width)
    table.add_column(overflow="fold")
    for finding in rows:
        mark, style = MARKS[finding.level]
        name = Text(printable(finding.check), "dim" if finding.level is Severity.OK else "bold")
        table.add_row(Text(mark, style), name, Group(*_lines(finding)))
    return table


def _lines(finding: Finding) -> Iterator[RenderableType]:
    yield Text(printable(finding.what))
    if finding.means:
        yield Text(printable(finding.means), "dim")
    if finding.mend:
        yield _mend(printable(finding.mend))


def _mend(mend: str) -> Text:
    """A command; what follows ``    # `` is a remark on it."""
    command, mark, remark = mend.partition("    # ")
    return Text.assemble(("> ", "dim"), (command, "cyan"), (f"  ({remark})" if mark else "", "dim"))


def _summary(findings: tuple[Finding, ...]) -> Text:
    styles = {"problem": "bold red", "warning": "yellow", "note": "cyan", "ok": "green"}
    parts = [
        Text(counted(number, level, "ok" if level == "ok" else ""), styles[level] if number else "dim")
        for level, number in counts(findings).items()
        if number or level == "problem"
    ]
    return Text(", ").join(parts)
