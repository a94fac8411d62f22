"""docs/reference/cli.md: every command with its arguments and options."""

from __future__ import annotations

from typing import Any

import typer

from appliance.operator.cli.app import app
from appliance.operator.install.pages import EXIT_STATUS, commands, option_names
from appliance.operator.reference.markdown import code, page, section, table


def render() -> str:
    """The page."""
    root: Any = typer.main.get_command(app)
    statuses = [line.split("  ", 1) for line in EXIT_STATUS.splitlines()]
    parts = [section("Exit status", table(("status", "meaning"), statuses))]
    parts += [_command(words, command) for words, command in commands(root)]
    return page("The athanor command", "As `athanor COMMAND --help` says; see also `man athanor`.", *parts)


def _command(words: tuple[str, ...], command: Any) -> str:
    rows = []
    for one in command.params:
        if one.hidden:
            continue
        option = one.param_type_name == "option"
        name = f"{option_names(one)} {one.metavar or ''}" if option else str(one.metavar or one.name)
        default = getattr(one.default, "value", one.default)
        shown = "required" if one.required else str(default) if one.metavar and default not in (None, (), []) else ""
        rows.append([code(name.strip()), shown, one.help or ""])
    examples = [line.partition("|")[::2] for line in (command.epilog or "").splitlines() if line.strip()]
    return section(
        code(" ".join(words)),
        "\n\n".join(" ".join(part.split()) for part in (command.help or "").split("\n\n")) + "\n",
        table(("argument or option", "default", "meaning"), rows) if rows else "",
        "".join(f"- `{typed.strip()}`: {purpose.strip()}\n" for typed, purpose in examples),
    )
