"""Manual pages and shell completions, generated from the command line and from the configuration's schema.

Pages are in the man(7) language. They say what ``--help`` says, so they cannot be older than the program.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import typer
from typer.testing import CliRunner

from appliance.common.config_keys import keys
from appliance.common.version import VERSION

NAME = "athanor"

COMPLETIONS = {
    "bash": "usr/share/bash-completion/completions/athanor",
    "zsh": "usr/share/zsh/vendor-completions/_athanor",
    "fish": "usr/share/fish/vendor_completions.d/athanor.fish",
}
"""Paths below the root at which shells look for completions."""

EXIT_STATUS = """\
0  it was done
1  it was understood and could not be done
2  the command line is wrong
3  nothing answers on the admin address
4  the appliance cannot start
5  no guarantee failed, and not all could be shown here"""


def pages(app: typer.Typer) -> dict[PurePosixPath, bytes]:
    """Path below the root to content, compressed as Debian's policy manual says (12.1); the same bytes every time."""
    texts = {"man1/athanor.1": command_page(app), "man5/athanor.yaml.5": configuration_page()}
    return {
        PurePosixPath("usr/share/man", f"{name}.gz"): gzip.compress(text.encode(), 9, mtime=0)
        for name, text in texts.items()
    }


def completions(app: typer.Typer) -> dict[PurePosixPath, bytes]:
    """Path below the root to the completion script of each shell, as typer prints it to a shell that asks."""
    found = {}
    for shell, place in COMPLETIONS.items():
        asked = CliRunner().invoke(app, [], env={"_ATHANOR_COMPLETE": f"source_{shell}"}, prog_name=NAME)
        found[PurePosixPath(place)] = f"{asked.stdout.rstrip()}\n".encode()
    return found


def write(root: Path, app: typer.Typer) -> None:
    """Write pages and completions below a root.

    Raises:
        OSError: they cannot be written.
    """
    for path, data in (pages(app) | completions(app)).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)


def command_page(app: typer.Typer) -> str:
    """athanor(1): every command with its options and examples."""
    root: Any = typer.main.get_command(app)
    lines = [_title(NAME.upper(), 1), ".SH NAME", f"athanor \\- {_escape(root.help.rstrip('.').lower())}"]
    lines += [".SH SYNOPSIS", ".B athanor", ".I COMMAND", "[OPTIONS]", ".SH COMMANDS"]
    for words, command in commands(root):
        lines += _command(words, command)
    lines += [".SH EXIT STATUS"]
    for row in EXIT_STATUS.splitlines():
        lines += [".TP", f".B {row[0]}", _escape(row[3:])]
    lines += [".SH SEE ALSO", ".BR athanor.yaml (5)"]
    return "\n".join(lines) + "\n"


def commands(group: Any, words: tuple[str, ...] = (NAME,)) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Words and definition of every command, sorted; hidden ones left out."""
    for name, one in sorted(group.commands.items()):
        if hasattr(one, "commands"):
            yield from commands(one, (*words, name))
        elif not one.hidden:
            yield (*words, name), one


def _command(words: tuple[str, ...], command: Any) -> Iterator[str]:
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option" and not one.hidden]
    places = " ".join(f"[{_metavar(one)}]" if not one.required else _metavar(one) for one in arguments)
    usage = " ".join(part for part in (*words, "[OPTIONS]" if options else "", places) if part)
    yield f".SS {_escape(usage)}"
    for paragraph in (command.help or "").split("\n\n"):
        yield _escape(" ".join(paragraph.split()))
        yield ".PP"
    for one in (*arguments, *options):
        names = _metavar(one) if one in arguments else option_names(one)
        yield ".TP"
        yield f".B {_escape(names)}"
        yield _escape(one.help or "See the examples.")
    for line in (command.epilog or "").strip().splitlines():
        typed, _, purpose = line.partition("|")
        yield ".PP"
        yield f".B {_escape(typed.strip())}"
        yield ".br"
        yield _escape(purpose.strip())


def option_names(option: Any) -> str:
    """Spellings of an option, the shortest first."""
    return ", ".join(sorted(option.opts, key=len))


def _metavar(argument: Any) -> str:
    return str(argument.metavar or argument.name).upper()


def configuration_page() -> str:
    """Page athanor.yaml(5): every key with type, unit, default and meaning, section by section."""
    lines = [_title("ATHANOR.YAML", 5), ".SH NAME", "athanor.yaml \\- what an Athanor appliance serves, and where"]
    lines += [".SH DESCRIPTION", "YAML. Unknown keys and wrong types are refused, with line and column."]
    lines += ["Environment variables (ATHANOR_SANDBOX__CORES is sandbox.cores) stand over the file, and"]
    lines += [_escape("options --set KEY=VALUE of athanor serve over both."), ".PP"]
    lines += ["Relative paths are taken from the file's own folder.", ".SH KEYS", ".SS at the top"]
    every = keys()
    sections = {name: key for name, key in every.items() if key.is_section}
    for prefix in ("", *sections):
        if prefix:
            lines += [f".SS {_escape(prefix)}", _escape(sections[prefix].about), ".PP"]
        for name, key in every.items():
            if name.rpartition(".")[0] == prefix:
                facts = ", ".join(filter(None, (f"{key.type} {key.unit}".strip(), key.default_note)))
                lines += [".TP", f".B {_escape(name.removesuffix('[]'))}", _escape(f"{key.meaning} ({facts})")]
    lines += [".SH FILES", ".I /etc/athanor/athanor.yaml", ".SH SEE ALSO", ".BR athanor (1)"]
    return "\n".join(lines) + "\n"


def _title(name: str, section: int) -> str:
    return f'.TH {name} {section} "" "Athanor {VERSION}" "Athanor"'


def _escape(text: str) -> str:
    """Text as man(7) prints it: no line of it is a request, no dash a hyphen."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^(?=[.'])", r"\\&", escaped, flags=re.MULTILINE)
