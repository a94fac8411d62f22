"""``athanor policy check``: problems of policy files as a compiler would print them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance.common.errors import os_errors_as
from appliance.operator.cli import exits
from appliance.operator.cli.options import Output
from appliance.operator.cli.terminal import Format, output, print_data

if TYPE_CHECKING:
    from policy.errors import PolicyError
    from policy.loader import Source
    from policy.model import PolicySet

EXAMPLES = """
athanor policy check policy.yaml | one file
athanor policy check /etc/athanor/policy.d | all drop-ins together
"""


def check(
    paths: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Files or folders that make one policy together.")
    ],
    output_format: Output = Format.TABLE,
) -> None:
    """Check policy files before they are put in force.

    Prints every problem with its file, line and column, or the tenants and their limits when
    there is none. Several files are checked together, as one policy. Nothing that runs is asked
    or changed.
    """
    from policy.errors import PolicyError
    from policy.loader import load_policy

    sources: list[Source] = []
    try:
        for path in paths:
            sources += _read(path)
        policy = load_policy(sources)
    except PolicyError as error:
        _report(error, sources, output_format)
        raise typer.Exit(exits.REFUSED) from None
    _show(policy, output_format)


def _read(path: Path) -> list[Source]:
    from policy.files import read_sources

    with os_errors_as(f"cannot read {path}"):
        return read_sources(path)


def _report(error: PolicyError, sources: list[Source], output_format: Format) -> None:
    from dataclasses import asdict

    from appliance.operator.cli.policy_view import problem_view

    if print_data({"ok": False, "problems": [asdict(problem) for problem in error.problems]}, output_format):
        return
    texts = {source.name: source.text for source in sources}
    console = output()
    for problem in error.problems:
        console.print(problem_view(problem, texts.get(problem.file, ""), console.width))
    number = len(error.problems)
    console.print(f"{number} problem{'s' if number > 1 else ''}", style="bold red")


def _show(policy: PolicySet, output_format: Format) -> None:
    from dataclasses import asdict

    from appliance.operator.cli.policy_view import policy_view

    tenants = {name: asdict(tenant) for name, tenant in policy.tenants.items()}
    public = {name: asdict(prefix) for name, prefix in policy.public.items()}
    data = {"ok": True, "digest": policy.digest, "tenants": tenants, "public_prefixes": public}
    if not print_data(data, output_format):
        console = output()
        console.print(policy_view(policy, console.width))
