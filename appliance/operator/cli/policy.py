"""``athanor policy check``: problems of policy files as a compiler would print them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from appliance.common.collection import no_collection
from appliance.common.figures import counted
from appliance.operator.cli import exits
from appliance.operator.cli.options import DEFAULT_CONFIG, Config, Output
from appliance.operator.cli.policy_sources import read, refuse
from appliance.operator.cli.terminal import Format, errors, fail, output, print_data

if TYPE_CHECKING:
    from appliance.common.config import ApplianceConfig
    from policy.errors import Problem
    from policy.loader import Source
    from policy.model import PolicySet

EXAMPLES = """
athanor policy check policy.yaml | one file, with policy.d beside it
athanor policy check /etc/athanor/policy.d | all drop-ins together
athanor policy check new.yaml --config /etc/athanor/athanor.yaml --strict | names are held against this configuration
"""

UNSAFE = "this tenant may use every model and feature, as much as it likes; write its rules out before strangers call"
"""Warning at ``unsafe_allow_all``."""

BESIDE = "athanor.yaml"
"""Name of a configuration beside a policy: there it is the policy's own, wherever both lie."""


def check(
    context: typer.Context,
    paths: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Files or folders that make one policy together.")
    ],
    config: Config = DEFAULT_CONFIG,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse what is otherwise only warned of.")] = False,
    output_format: Output = Format.TABLE,
) -> None:
    """Check policy files before they are put in force.

    Prints every problem with its file, line and column, or the tenants and their limits when
    there is none. Several files are checked together, as one policy. Warns of models and keys
    that are nowhere, by an athanor.yaml beside the policy, else by --config, of files in
    policy.d that are not read, and of unsafe_allow_all. Nothing that runs is asked or changed.
    """
    source = context.get_parameter_source("config")
    given = None if source is not None and source.name == "DEFAULT" else config
    check_policy(paths, given, strict=strict, output_format=output_format)


def check_policy(paths: list[Path], given: Path | None, *, strict: bool, output_format: Format) -> NoReturn:
    """Check the files of one policy, and end the command.

    Args:
        paths: files or folders.
        given: configuration that names are held against; None: one beside the policy, or the service's.
        strict: whether warnings are a refusal.
        output_format: of what is shown.
    """
    warnings = _checked_and_shown(paths, given, strict=strict, output_format=output_format)
    raise typer.Exit(exits.REFUSED if strict and warnings else exits.OK)


@no_collection()
def _checked_and_shown(paths: list[Path], given: Path | None, *, strict: bool, output_format: Format) -> list[Problem]:
    """Check and show the policy; returns the warnings. One that is refused ends the command."""
    from policy.errors import PolicyError
    from policy.loader import load_policy

    sources: list[Source] = []
    try:
        for path in paths:
            sources += read(path)
        policy = load_policy(sources)
    except PolicyError as error:
        refuse(error, sources, output_format)
    warnings = [*_overlooked(paths), *_unsafe(policy, sources), *_compare(policy, sources, paths, given, strict=strict)]
    _show(policy, sources, warnings, output_format)
    return warnings


def _overlooked(paths: list[Path]) -> list[Problem]:
    """Entries among the drop-ins that are not read."""
    from policy.errors import Problem
    from policy.files import overlooked

    told = [line.partition(": ") for path in paths for line in overlooked(path)]
    return [Problem(name, 0, 0, "", said) for name, _, said in told]


def _unsafe(policy: PolicySet, sources: list[Source]) -> list[Problem]:
    """Tenants that one key allows everything."""
    from policy.allow_all import KEY
    from policy.origins import written_files

    names = {name for name, tenant in policy.tenants.items() if tenant.unsafe_allow_all}
    if not names:
        return []
    return [
        file.problem(("tenants", name, KEY), UNSAFE, at_key=True)
        for file in written_files(sources)
        for name in file.content.tenants
        if name in names
    ]


def _compare(
    policy: PolicySet, sources: list[Source], paths: list[Path], given: Path | None, *, strict: bool
) -> list[Problem]:
    """Names that lead nowhere, by the configuration given or beside the policy. Without one that can be read a line on
    standard error says so; with ``strict`` that is a refusal."""
    from datetime import UTC, datetime

    from appliance.common.config_loader import load_config
    from appliance.common.credentials import read_key_records
    from appliance.common.errors import ConfigError
    from policy.references import dangling, located

    beside = paths[0].absolute().parent / BESIDE
    path = given or (beside if beside.is_file() else DEFAULT_CONFIG)
    try:
        loaded = load_config(path)
        records = read_key_records(loaded.credentials)
    except ConfigError as error:
        if strict or given is not None:
            fail(exits.REFUSED, f"names are not compared: {error}", f"athanor policy check {paths[0]} --config FILE")
        errors().print(f"models and keys are not compared: {str(error).splitlines()[0]}", style="dim", soft_wrap=True)
        return []
    now = datetime.now(UTC)
    whole = given is not None or loaded.policy.resolve() in {path.resolve() for path in paths}
    models, keys = [model.name for model in loaded.models], [name for name, one in records.items() if one.holds(now)]
    issuers = [issuer.name for issuer in loaded.tokens]
    found = dangling(policy, models, keys, whole=whole, issuers=issuers)
    loose = located(found, sources, str(loaded.credentials))
    return [*_unsigned(loaded, sources), *loose] if whole and len(paths) == 1 else loose


def _unsigned(config: ApplianceConfig, sources: list[Source]) -> list[Problem]:
    """What the appliance will say of the signatures of its own policy."""
    from appliance.common.errors import ConfigError
    from appliance.common.policy_signature import check_signed
    from policy.errors import Problem

    try:
        check_signed(sources, config.policy, config.policy_keys)
    except ConfigError as error:
        return [Problem(str(config.policy), 0, 0, "", error.message)]
    return []


def _show(policy: PolicySet, sources: list[Source], warnings: list[Problem], output_format: Format) -> None:
    from dataclasses import asdict

    from appliance.operator.cli.policy_view import policy_view, problem_view

    if output_format is not Format.TABLE:
        tenants = {name: asdict(tenant) for name, tenant in policy.tenants.items()}
        public = {name: asdict(prefix) for name, prefix in policy.public.items()}
        told = [asdict(warning) for warning in warnings]
        data = {"ok": True, "digest": policy.digest, "tenants": tenants, "public_prefixes": public}
        data |= {"routes": {name: asdict(route) for name, route in policy.routes.items()}, "warnings": told}
        print_data(data, output_format)
        return
    texts = {source.name: source.text for source in sources}
    console = output()
    for warning in warnings:
        console.print(problem_view(warning, texts.get(warning.file, ""), console.width))
    console.print(policy_view(policy, console.width))
    if warnings:
        console.print(counted(len(warnings), "warning"), style="bold yellow")
