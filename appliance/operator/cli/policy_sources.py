"""Policies that a command reads: from paths, with problems printed as a compiler would print them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from appliance.common.collection import no_collection
from appliance.common.errors import os_errors_as
from appliance.common.figures import counted
from appliance.operator.cli import exits
from appliance.operator.cli.terminal import Format, output, print_data

if TYPE_CHECKING:
    from policy.errors import PolicyError, Problem
    from policy.loader import Source
    from policy.model import PolicySet


def read(path: Path) -> list[Source]:
    """Read a policy file with its drop-ins, or a folder of them.

    Raises:
        ConfigError: something cannot be read.
        PolicySyntaxError: a file is no text of a policy.
    """
    from policy.files import read_sources

    with os_errors_as(f"cannot read {path}"):
        return read_sources(path)


def load(path: Path, output_format: Format) -> PolicySet:
    """Load the policy at a path; print its problems and end with ``exits.REFUSED`` if it has any.

    Raises:
        ConfigError: something cannot be read.
    """
    return load_with_sources(path, output_format)[0]


def load_with_sources(path: Path, output_format: Format) -> tuple[PolicySet, list[Source]]:
    """Load the policy at a path as ``load`` does; return it with its texts.

    Raises:
        ConfigError: something cannot be read.
    """
    from policy.errors import PolicyError
    from policy.loader import load_policy

    sources: list[Source] = []
    try:
        sources = read(path)
        with no_collection():
            return load_policy(sources), sources
    except PolicyError as error:
        refuse(error, sources, output_format)


def refuse(error: PolicyError, sources: Sequence[Source], output_format: Format) -> NoReturn:
    """Print every problem of a policy, and end with ``exits.REFUSED``."""
    from dataclasses import asdict

    if not print_data({"ok": False, "problems": [asdict(problem) for problem in error.problems]}, output_format):
        print_problems(error.problems, {source.name: source.text for source in sources})
        output().print(counted(len(error.problems), "problem"), style="bold red")
    raise typer.Exit(exits.REFUSED)


def print_problems(problems: Sequence[Problem], texts: Mapping[str, str]) -> None:
    """Print problems with the lines they are in; ``texts`` are those of the files, by name."""
    from appliance.operator.cli.policy_view import problem_view

    console = output()
    for problem in problems:
        console.print(problem_view(problem, texts.get(problem.file, ""), console.width))
