"""Output of the commands: results to standard output, everything else to standard error.

Rich is imported on first use, so that a command that prints nothing pays nothing.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import TYPE_CHECKING, NoReturn

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


def output() -> Console:
    """The console of standard output, as it is now: width, colour and encoding are looked up."""
    import io
    import shutil
    import sys

    from rich.console import Console

    if isinstance(sys.stdout, io.TextIOWrapper):
        # Under an ASCII locale a character too many is a question mark, not a traceback.
        sys.stdout.reconfigure(errors="replace")
    width = shutil.get_terminal_size((PIPE_COLUMNS, 24)).columns
    return Console(width=width, highlight=False)


def errors() -> Console:
    """The console of standard error."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def print_json(data: object) -> None:
    """One JSON document to standard output, uncoloured, for other programs."""
    typer.echo(json.dumps(data, indent=2))


def print_data(data: object, output_format: Format) -> bool:
    """Print one document of ``JSON`` or ``YAML`` (1.2) to standard output. False for ``TABLE``, for which nothing is
    printed: the command draws its own."""
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

    console = errors()
    first, *rest = message.splitlines() or [""]
    console.print(Text.assemble(("error: ", "bold red"), printable(first)), soft_wrap=True)
    for line in rest:
        console.print(Text(f"       {printable(line)}"), soft_wrap=True)
    if hint is not None:
        console.print(Text.assemble(("hint:  ", "bold"), printable(hint)), soft_wrap=True)
