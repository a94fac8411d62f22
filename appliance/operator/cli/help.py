"""Help texts in reading order: purpose, commands by topic, examples, options.

Typer's own renderer prints options before commands and a box around each; this one prints plain
aligned columns, which also survive a pipe. Examples are written in a command's ``epilog``, one a
line: the command, a bar, what it is for.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from appliance.operator.cli import exits
from appliance.operator.cli.terminal import tell

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

MAX_COLUMNS = 100
"""Lines longer than this are hard to read, however wide the terminal is."""

Row = tuple[str, str]
"""What to type, and what it does."""


class HelpCommand(TyperCommand):
    """A command with this module's help."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help of the command."""
        _print(self, ctx)


class HelpGroup(TyperGroup):
    """A group of commands with this module's help. It reports a wrong command line, and the errors that a command
    does not handle itself."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run it and end the process: with ``exits.USAGE`` for a wrong command line, with ``exits.REFUSED`` for an
        error that the command raised."""
        try:
            code = super().main(*args, **{**extra, "standalone_mode": False})
        except typer.TyperException as error:
            code = _wrong(error)
        except _told() as error:
            tell(str(error.args[0]), getattr(error, "hint", None) or None)
            code = exits.REFUSED
        except typer.Abort:
            code = exits.REFUSED
        sys.exit(code if isinstance(code, int) else exits.OK)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help of the group."""
        _print(self, ctx)


def _told() -> tuple[type[Exception], ...]:
    """Errors whose messages are written for the operator. Imported only once an error is on its way."""
    from appliance.common.errors import ApplianceError
    from isolation.errors import IsolationError

    return ApplianceError, IsolationError


def _wrong(error: typer.TyperException) -> int:
    """Tell what is wrong with a command line, and which help describes it; gives the exit code."""
    message = str(error.format_message()).strip().removesuffix(".")
    if message:  # a group without a command has printed its help instead
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "athanor"
        tell(message[:1].lower() + message[1:], f"`{path} --help` has its options and examples")
    return error.exit_code


def _print(command: HelpCommand | HelpGroup, ctx: Any) -> None:
    from rich.padding import Padding
    from rich.text import Text

    from appliance.operator.cli.terminal import output

    console = output()
    console.width = min(console.width, MAX_COLUMNS)
    console.print()
    title, _, rest = (command.help or "").strip().partition("\n")
    console.print(Text(f" {title}", "bold"))
    if rest.strip():
        paragraphs = (" ".join(part.split()) for part in rest.strip().split("\n\n"))
        for paragraph in paragraphs:
            console.print(Padding(Text(paragraph), (1, 0, 0, 1), expand=False))
    params = [one for one in command.get_params(ctx) if not getattr(one, "hidden", False)]
    arguments = [one for one in params if isinstance(one, TyperArgument)]
    pieces = ["COMMAND"] if isinstance(command, HelpGroup) else map(_usage, arguments)
    _section(console, "Usage", [(" ".join([ctx.command_path, "[OPTIONS]", *pieces]), "")])
    sections: list[tuple[str, list[Row]]] = []
    if isinstance(command, HelpGroup):
        sections += _command_sections(command, ctx)
    sections.append(("Arguments", [(_name(one), one.help or "") for one in arguments]))
    examples = [_example(line) for line in (command.epilog or "").splitlines() if line.strip()]
    options = [_option(one) for one in params if isinstance(one, TyperOption)]
    if isinstance(command, HelpGroup):
        sections += [("Examples", examples), ("Options", options)]
    else:
        sections += [("Options", options), ("Examples", examples)]
    for name, rows in sections:
        _section(console, name, rows)


def _command_sections(group: HelpGroup, ctx: Any) -> Iterator[tuple[str, list[Row]]]:
    panels: dict[str, list[Row]] = {}
    for name in group.list_commands(ctx):
        command: Any = group.get_command(ctx, name)
        if command is None or command.hidden:
            continue
        panel = getattr(command, "rich_help_panel", None)
        title = panel if isinstance(panel, str) else "Commands"
        first = (command.help or "").strip().partition("\n")[0]
        panels.setdefault(title, []).append((name, first))
    yield from panels.items()


def _section(console: Console, name: str, rows: list[Row]) -> None:
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return
    console.print()
    console.print(Text(f" {name}", "bold cyan"))
    # A column of its own for what is typed, unless one entry would push all the others away.
    column = max(len(left) for left, _ in rows)
    if column > console.width // 2 or not any(right for _, right in rows):
        for text in _stacked(rows):
            console.print(Padding(text, (0, 0, 0, 3), expand=False))
        return
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column(no_wrap=True, min_width=12)
    table.add_column()
    for left, right in rows:
        table.add_row(Text(left, "bold"), Text(right))
    console.print(Padding(table, (0, 0, 0, 3), expand=False))


def _stacked(rows: Iterable[Row]) -> Iterator[Text]:
    from rich.text import Text

    for left, right in rows:
        yield Text(left)
        if right:
            yield Text(f"  {right}", "dim")


def _name(param: TyperArgument) -> str:
    return str(param.metavar or param.name)


def _usage(param: TyperArgument) -> str:
    return _name(param) if param.required else f"[{_name(param)}]"


def _option(param: TyperOption) -> Row:
    names = ", ".join(sorted(param.opts, key=len))
    left = f"{names} {param.metavar}" if param.metavar else names
    right = param.help or ""
    if param.required:
        right += " (required)"
    default = getattr(param.default, "value", param.default)
    if param.show_default and param.metavar and default not in (None, (), []):
        right += f" [{default}]"
    return left, right


def _example(line: str) -> Row:
    command, _, purpose = line.partition("|")
    return command.strip(), purpose.strip()
