"""Output of the commands: results to standard output, everything else to standard error. The operator's API runs the
same commands, with ``said`` around them: nothing is printed then.

Rich is imported on first use, so that a command that prints nothing pays nothing.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from io import StringIO
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from appliance.common.figures import printable

if TYPE_CHECKING:
    from rich.console import Console


PIPE_COLUMNS = 160
"""Width without a terminal, so that output piped into grep loses no columns."""


class Format(StrEnum):
    """``--output`` of the commands that show something."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


@dataclass(slots=True)
class Said:
    """What a command said instead of printing it."""

    data: Any = None
    """Its document."""
    results: StringIO = field(default_factory=StringIO)
    notes: StringIO = field(default_factory=StringIO)
    """What would have been on standard error, but for the problem."""
    problem: str = ""
    """Why it failed, and what to do about it."""

    @property
    def lines(self) -> list[str]:
        """The lines of results and notes."""
        both = [*self.results.getvalue().splitlines(), *self.notes.getvalue().splitlines()]
        return [line.strip() for line in both if line.strip()]


_SAID: ContextVar[Said | None] = ContextVar("said", default=None)


@contextlib.contextmanager
def said() -> Iterator[Said]:
    """Have the commands that run inside the block, in this thread, print nothing; gives what they say."""
    collected = Said()
    token = _SAID.set(collected)
    try:
        yield collected
    finally:
        _SAID.reset(token)


def output() -> Console:
    """The console of standard output, as it is now: width, colour and encoding are looked up."""
    import io
    import shutil
    import sys

    from rich.console import Console

    if (collected := _SAID.get()) is not None:
        return Console(file=collected.results, width=PIPE_COLUMNS, highlight=False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Under an ASCII locale a character too many is a question mark, not a traceback.
        sys.stdout.reconfigure(errors="replace")
    width = shutil.get_terminal_size((PIPE_COLUMNS, 24)).columns
    return Console(width=width, highlight=False)


def errors() -> Console:
    """The console of standard error."""
    from rich.console import Console

    if (collected := _SAID.get()) is not None:
        return Console(file=collected.notes, width=PIPE_COLUMNS, highlight=False)
    return Console(stderr=True, highlight=False)


def print_json(data: object) -> None:
    """One JSON document to standard output, uncoloured, for other programs."""
    typer.echo(json.dumps(data, indent=2))


def print_data(data: object, output_format: Format) -> bool:
    """Print one document of ``JSON`` or ``YAML`` (1.2) to standard output. False for ``TABLE``, for which nothing is
    printed: the command draws its own."""
    if (collected := _SAID.get()) is not None:
        collected.data = data
        return True
    if output_format is Format.TABLE:
        return False
    if output_format is Format.JSON:
        print_json(data)
        return True
    from appliance.operator.cli.yaml_output import yaml_text

    # Tuples and enumerations become what JSON makes of them: both formats show the same document.
    typer.echo(yaml_text(json.loads(json.dumps(data))), nl=False)
    return True


def fail(code: int, message: str, hint: str | None = None) -> NoReturn:
    """Say what went wrong and what to do about it, and end with an exit code of ``exits``."""
    tell(message, hint)
    raise typer.Exit(code)


def tell(message: str, hint: str | None = None) -> None:
    """Say what went wrong, its further lines below it, and what to do about it."""
    from rich.text import Text

    if (collected := _SAID.get()) is not None:
        collected.problem = message if hint is None else f"{message}; {hint}"
        return
    console = errors()
    first, *rest = message.splitlines() or [""]
    console.print(Text.assemble(("error: ", "bold red"), printable(first)), soft_wrap=True)
    for line in rest:
        console.print(Text(f"       {printable(line)}"), soft_wrap=True)
    if hint is not None:
        console.print(Text.assemble(("hint:  ", "bold"), printable(hint)), soft_wrap=True)
