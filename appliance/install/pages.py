"""Manual pages and shell completions, generated: from the command line itself, and from the configuration's schema.

Pages are in the man(7) language. They say what ``--help`` says, so they cannot be older than the program.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel
from typer._completion_shared import get_completion_script  # as --show-completion prints it

from appliance.config import ApplianceConfig
from appliance.version import VERSION

NAME = "athanor"

WORDS = {"Path": "path", "str": "text", "int": "whole number", "float": "number", "bool": "true or false"}
"""Python's types as the pages name them."""

COMPLETIONS = {
    "bash": "usr/share/bash-completion/completions/athanor",
    "zsh": "usr/share/zsh/vendor-completions/_athanor",
    "fish": "usr/share/fish/vendor_completions.d/athanor.fish",
}
"""Where shells look by themselves, below the root."""

EXIT_STATUS = """\
0  it was done
1  it was understood and could not be done
2  the command line is wrong
3  nothing answers on the admin address
4  the appliance cannot start
5  no guarantee failed, and not all could be shown here"""


def pages(app: typer.Typer) -> dict[PurePosixPath, bytes]:
    """Path below the root to content, compressed as Debian has it (policy manual, 12.1); the same bytes every time."""
    texts = {"man1/athanor.1": command_page(app), "man5/athanor.yaml.5": configuration_page()}
    return {
        PurePosixPath("usr/share/man", f"{name}.gz"): gzip.compress(text.encode(), 9, mtime=0)
        for name, text in texts.items()
    }


def completions() -> dict[PurePosixPath, bytes]:
    """Path below the root to the script of each shell."""
    return {
        PurePosixPath(place): _script(shell).encode()
        for shell, place in COMPLETIONS.items()
    }


def _script(shell: str) -> str:
    text = get_completion_script(prog_name=NAME, complete_var="_ATHANOR_COMPLETE", shell=shell)
    return text.rstrip() + "\n"


def write(root: Path, app: typer.Typer) -> None:
    """Write pages and completions below a root.

    Raises:
        OSError: they cannot be written.
    """
    for path, data in (pages(app) | completions()).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)


def command_page(app: typer.Typer) -> str:
    """athanor(1): every command with its options and examples."""
    root: Any = typer.main.get_command(app)
    lines = [_title(NAME.upper(), 1), ".SH NAME", f"athanor \\- {_escape(root.help.rstrip('.').lower())}"]
    lines += [".SH SYNOPSIS", ".B athanor", ".I COMMAND", "[OPTIONS]", ".SH COMMANDS"]
    for words, command in _commands((NAME,), root):
        lines += _command(words, command)
    lines += [".SH EXIT STATUS"]
    for row in EXIT_STATUS.splitlines():
        lines += [".TP", f".B {row[0]}", _escape(row[3:])]
    lines += [".SH SEE ALSO", ".BR athanor.yaml (5)"]
    return "\n".join(lines) + "\n"


def _commands(words: tuple[str, ...], group: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name in sorted(group.commands):
        one = group.commands[name]
        if hasattr(one, "commands"):
            yield from _commands((*words, name), one)
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
        names = _metavar(one) if one in arguments else ", ".join(sorted(one.opts, key=len))
        yield ".TP"
        yield f".B {_escape(names)}"
        yield _escape(one.help or "See the examples.")
    for line in (command.epilog or "").strip().splitlines():
        typed, _, purpose = line.partition("|")
        yield ".PP"
        yield f".B {_escape(typed.strip())}"
        yield ".br"
        yield _escape(purpose.strip())


def _metavar(argument: Any) -> str:
    return str(argument.metavar or argument.name).upper()


def configuration_page() -> str:
    """athanor.yaml(5): every key with its type, default and meaning, section by section."""
    lines = [_title("ATHANOR.YAML", 5), ".SH NAME", "athanor.yaml \\- what an Athanor appliance serves, and where"]
    lines += [".SH DESCRIPTION", "YAML. Unknown keys and wrong types are refused, with line and column."]
    lines += ["Relative paths are taken from the file's own folder.", ".SH KEYS"]
    for prefix, section in _sections("", ApplianceConfig):
        lines += [f".SS {_escape(prefix.rstrip('.') or 'at the top')}"]
        lines += _paragraphs(section.__doc__)
        for name, field in section.model_fields.items():
            shown = "required" if field.is_required() else f"default: {_default(field.default)}"
            lines += [".TP", f".B {_escape(prefix + name)}", _escape(f"{_kind(field.annotation)}; {shown}")]
    lines += [".SH FILES", ".I /etc/athanor/athanor.yaml", ".SH SEE ALSO", ".BR athanor (1)"]
    return "\n".join(lines) + "\n"


def _sections(prefix: str, section: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    yield prefix, section
    for name, field in section.model_fields.items():
        for inner in _models(field.annotation):
            many = "[]" if "tuple" in str(field.annotation) else ""
            yield from _sections(f"{prefix}{name}{many}.", inner)


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for one in getattr(annotation, "__args__", ()) for found in _models(one)]


def _kind(annotation: Any) -> str:
    """A type in words; bounds are in the schema."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(parts[0])
    if origin is Literal:
        return "one of " + ", ".join(map(str, parts))
    if origin in (Union, UnionType):
        return " or ".join(_kind(part) for part in parts if part is not NoneType)
    if origin is tuple:
        return f"list of {_kind(parts[0])}"
    name = getattr(annotation, "__name__", str(annotation)).replace("Config", "")
    return WORDS.get(name, name)


def _default(value: object) -> str:
    if isinstance(value, BaseModel):
        return "its keys' defaults"
    if value is None or value == ():
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value) or "empty"


def _paragraphs(text: str | None) -> Iterator[str]:
    for paragraph in (text or "").split("\n\n"):
        yield _escape(" ".join(paragraph.replace("``", "").split()))
        yield ".PP"


def _title(name: str, section: int) -> str:
    return f'.TH {name} {section} "" "Athanor {VERSION}" "Athanor"'


def _escape(text: str) -> str:
    """Text as man(7) prints it: no line of it is a request, no dash a hyphen."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^(?=[.'])", r"\\&", escaped, flags=re.MULTILINE)
