"""Manual pages and shell completions, generated from the command line and from the configuration's schema.

Pages are in the man(7) language. They say what ``--help`` says, so they cannot be older than the program.
"""

from __future__ import annotations

import copy
import gzip
import re
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from typing import Any

import typer
from typer.testing import CliRunner

from appliance.common.config_keys import keys
from appliance.common.version import VERSION
from appliance.operator.reference import policy

NAME = "athanor"

FILES = {
    "/etc/athanor/athanor.yaml": "what the installed service serves, and where; athanor.yaml(5)",
    "/etc/athanor/policy.yaml": "who may use which models, and how much; athanor-policy(5)",
    "/usr/share/doc/athanor": "documents; README.md leads to all of them, runbooks.html is for alerts",
    "/usr/share/doc/athanor/examples": "policies and configurations to begin with",
    "/usr/share/athanor/monitoring": "dashboards for Grafana and alert rules for Prometheus",
}
"""Files that the page of the program names, with what they are."""

EXIT_STATUS = """\
0  it was done
1  it was understood and could not be done
2  the command line is wrong
3  nothing answers on the admin address
4  the appliance cannot start
5  no guarantee failed, and not all could be shown here
6  nothing listens on the admin address: `athanor reload` alone tells it from 3"""


def pages(app: typer.Typer, share: PurePosixPath) -> dict[PurePosixPath, bytes]:
    """Path below the root to content, compressed as Debian's policy manual says (12.1); the same bytes every time."""
    return {
        share / "man" / f"man{name[-1]}" / f"{name}.gz": gzip.compress(text.encode(), 9, mtime=0)
        for name, text in page_texts(app).items()
    }


def page_texts(app: typer.Typer) -> dict[str, str]:
    """Name of each page, such as ``athanor-status.1``, to its text."""
    root: Any = typer.main.get_command(app)
    found = {f"{NAME}.1": main_page(root)}
    found |= {f"{page_name(words)}.1": command_page(words, command) for words, command in commands(root)}
    return found | {"athanor.yaml.5": configuration_page(), "athanor-policy.5": policy_page()}


def page_name(words: Iterable[str]) -> str:
    """Name of a command's page: ``athanor-key-create`` for ``athanor key create``."""
    return "-".join(words)


def completion_paths(share: PurePosixPath) -> dict[str, PurePosixPath]:
    """Path below the root of each shell's completion script."""
    zsh = "vendor-completions" if share.parts[:2] == ("usr", "share") else "site-functions"
    return {
        "bash": share / "bash-completion/completions/athanor",
        "zsh": share / "zsh" / zsh / "_athanor",
        "fish": share / "fish/vendor_completions.d/athanor.fish",
    }


def completions(app: typer.Typer, share: PurePosixPath) -> dict[PurePosixPath, bytes]:
    """Path below the root to the completion script of each shell, as typer prints it to a shell that asks. A script
    names no command, so none is read for it."""
    found = {}
    bare = copy.copy(app)
    bare.registered_commands, bare.registered_groups = [], []
    for shell, place in completion_paths(share).items():
        asked = CliRunner().invoke(bare, [], env={"_ATHANOR_COMPLETE": f"source_{shell}"}, prog_name=NAME)
        found[place] = f"{asked.stdout.rstrip()}\n".encode()
    return found


def main_page(root: Any) -> str:
    """athanor(1): what each command is for, and where its own page is."""
    lines = [_title(NAME.upper(), 1), ".SH NAME", f"athanor \\- {_escape(root.help.rstrip('.').lower())}"]
    lines += [".SH SYNOPSIS", ".B athanor", ".I COMMAND", "[OPTIONS]", ".SH DESCRIPTION"]
    lines += ["Each command has a page of its own; the words of a command are joined by dashes in its name:"]
    lines += [_escape("man athanor-key-create. athanor COMMAND --help says the same."), ".SH COMMANDS"]
    for words, command in commands(root):
        lines += [".TP", f".BR {_escape(page_name(words))} (1)", _escape(_summary(command))]
    lines += [*_exit_status(), ".SH FILES"]
    for path, about in FILES.items():
        lines += [".TP", f".I {path}", _escape(about)]
    lines += [".SH SEE ALSO", f".BR athanor.yaml (5), {_escape('athanor-policy')} (5)"]
    return "\n".join(lines) + "\n"


def command_page(words: tuple[str, ...], command: Any) -> str:
    """The page of one command: synopsis, description, arguments and options, examples."""
    name = page_name(words)
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option" and not one.hidden]
    places = " ".join(f"[{_metavar(one)}]" if not one.required else _metavar(one) for one in arguments)
    usage = " ".join(part for part in ("[OPTIONS]" if options else "", places) if part)
    summary, _, rest = (command.help or "").partition("\n")
    lines = [_title(name.upper(), 1), ".SH NAME", f"{_escape(name)} \\- {_escape(_summary(command))}"]
    lines += [".SH SYNOPSIS", f".B {_escape(' '.join(words))}", *([_escape(usage)] if usage else []), ".SH DESCRIPTION"]
    for number, paragraph in enumerate((f"{summary}\n{rest}").split("\n\n")):
        lines += [*([".PP"] if number else []), _escape(" ".join(paragraph.split()))]
    lines += [".SH OPTIONS"] if arguments or options else []
    for one in (*arguments, *options):
        names = _metavar(one) if one in arguments else f"{option_names(one)} {one.metavar or ''}".strip()
        lines += [".TP", f".B {_escape(names)}", _escape(one.help or "See the examples.") + _escape(_default(one))]
    examples = [line.partition("|") for line in (command.epilog or "").strip().splitlines()]
    lines += [".SH EXAMPLES"] if examples else []
    for typed, _, purpose in examples:
        lines += [".TP", f".B {_escape(typed.strip())}", _escape(purpose.strip())]
    lines += [*_exit_status(), ".SH SEE ALSO", ".BR athanor (1), athanor.yaml (5)"]
    return "\n".join(lines) + "\n"


def _summary(command: Any) -> str:
    """First sentence of a command's help, without its end."""
    return str((command.help or "").strip().partition("\n")[0].partition(". ")[0]).rstrip(".")


def _default(param: Any) -> str:
    """A parameter's default, as ``--help`` shows it; empty where there is none to show."""
    default = getattr(param.default, "value", param.default)
    if param.required or not param.metavar or default in (None, (), []) or param.param_type_name == "argument":
        return ""
    return f" [{default}]"


def _exit_status() -> list[str]:
    lines = [".SH EXIT STATUS"]
    for row in EXIT_STATUS.splitlines():
        lines += [".TP", f".B {row[0]}", _escape(row[3:])]
    return lines


def commands(group: Any, words: tuple[str, ...] = (NAME,)) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Words and definition of every command, sorted; hidden ones left out."""
    for name, one in sorted(group.commands.items()):
        if hasattr(one, "commands"):
            yield from commands(one, (*words, name))
        elif not one.hidden:
            yield (*words, name), one


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
    lines += [".SH FILES", ".I /etc/athanor/athanor.yaml", ".SH SEE ALSO"]
    lines += [f".BR athanor (1), {_escape('athanor-policy')} (5)"]
    return "\n".join(lines) + "\n"


def policy_page() -> str:
    """Page athanor-policy(5): every key of a policy file with type, default and meaning, section by section."""
    lines = [_title("ATHANOR-POLICY", 5), ".SH NAME", "athanor\\-policy \\- who may use which models, and how much"]
    lines += [".SH DESCRIPTION", _escape(" ".join(policy.ABOUT.split()).replace("`", "")), ".SH KEYS"]
    for place, about, rows in policy.sections():
        lines += [f".SS {_escape(place or 'at the top')}", _escape(about), ".PP"]
        for key, kind, default, meaning in rows:
            facts = f"{meaning} ({kind}, {'' if default == 'required' else 'default '}{default})"
            lines += [".TP", f".B {_escape(key)}", _escape(facts.replace("`", ""))]
    lines += [".SH FILES", ".I /etc/athanor/policy.yaml", ".SH SEE ALSO"]
    lines += [f".BR {_escape('athanor-policy-check')} (1), athanor.yaml (5)"]
    return "\n".join(lines) + "\n"


def _title(name: str, section: int) -> str:
    return f'.TH {name} {section} "" "Athanor {VERSION}" "Athanor"'


def _escape(text: str) -> str:
    """Text as man(7) prints it: no line of it is a request, no dash a hyphen; a line may end within an expression."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("}", "}\\:")
    return re.sub(r"^(?=[.'])", r"\\&", escaped, flags=re.MULTILINE)
