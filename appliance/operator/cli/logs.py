"""``athanor logs``: what the host processes have said, for people."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance.operator.cli import exits
from appliance.operator.cli.terminal import errors, fail, output

if TYPE_CHECKING:
    from rich.text import Text

    from appliance.operator.journal import LogLine

EXAMPLES = """
athanor logs -n 50 | the last lines of both services
athanor logs -f --level warning | what goes wrong, as it happens
athanor logs --request 7f3a9c | what was said about one request
athanor logs --file serve.log | of an appliance without systemd
"""

NOTHING = (
    "the journal has no such line of athanor-supervisor or athanor-gateway; without systemd the log is what standard "
    "error got: --file FILE"
)

STYLES = {"warning": "yellow", "error": "bold red", "critical": "bold white on red", "debug": "dim"}


class LogLevel(StrEnum):
    """How loud a line must be."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def logs(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as lines come, until ctrl-c.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", metavar="N", min=1, max=100_000, help="How many.")] = 100,
    level: Annotated[LogLevel, typer.Option(metavar="LEVEL", help="debug, info, warning or error.")] = LogLevel.INFO,
    request: Annotated[
        str | None, typer.Option(metavar="ID", help="Lines of one request only, by the beginning of its id.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A file of standard error, in place of the journal.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="As written, one JSON object a line.")] = False,
) -> None:
    """Show the log of gateway and supervisor.

    It never holds prompts, answers or keys. Exit codes: 0 shown; 1 there is no log to read.
    """
    from appliance.operator import journal

    if file is not None and follow:
        fail(exits.USAGE, "--follow is for the journal", f"tail -F {file} | athanor logs --file /dev/stdin")
    try:
        if file is not None:
            _show(journal.read_file(file, lines), level.value, request, raw=raw)
            return
        with journal.open_journal(lines, follow=follow, level=level.value) as found:
            shown = _show(found, level.value, request, raw=raw)
        if not shown:
            errors().print(NOTHING, style="dim")
    except KeyboardInterrupt:
        return


def _show(found: Iterable[str], level: str, request: str | None, *, raw: bool) -> int:
    """Print the lines that are wanted; gives their number."""
    from appliance.common.figures import printable
    from appliance.common.log import redact
    from appliance.operator.journal import parse_line

    console = output()
    shown = 0
    for text in found:
        line = parse_line(text)
        if line is None or not line.is_at_least(level) or (request and not line.concerns(request)):
            continue
        shown += 1
        if raw:
            typer.echo(redact(printable(text.strip())))
        else:
            console.print(_line(line), soft_wrap=True)
    return shown


def _line(line: LogLine) -> Text:
    """``12:00:01  warning  sandbox is down  sandbox=engine cause=...``."""
    from rich.text import Text

    from appliance.common.figures import printable
    from appliance.common.log import redact

    style = STYLES.get(line.level, "")
    text = Text()
    if line.time:
        text.append(f"{printable(line.time[11:19])}  ", "dim")
    if line.level:
        text.append(f"{printable(line.level):<8} ", style or "dim")
    text.append(redact(printable(line.event)), style)
    for name, value in line.fields:
        text.append(f"  {printable(name)}=", "dim")
        text.append(redact(printable(value)), "cyan")
    return text
