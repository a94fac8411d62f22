"""``athanor bundle``: a support archive without secrets."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance.operator.cli.admin_client import UnreachableError, try_ask, try_text
from appliance.operator.cli.doctor import running_appliance
from appliance.operator.cli.options import DEFAULT_CONFIG, Config, Output
from appliance.operator.cli.terminal import Format, output, print_data

if TYPE_CHECKING:
    from appliance.common.config import ApplianceConfig
    from appliance.operator.bundle import Bundle, MemberCollector

EXAMPLES = """
athanor bundle | athanor-TIME.tar.gz, for whoever helps you
athanor bundle --config .athanor/athanor.yaml --file help.tar.gz | of the demo
"""

TRACES = 512
"""As many as the appliance keeps."""


def bundle(
    config: Config = DEFAULT_CONFIG,
    file: Annotated[Path | None, typer.Option(metavar="FILE", help="The archive [athanor-TIME.tar.gz, here].")] = None,
    output_format: Output = Format.TABLE,
) -> None:
    """Pack what somebody needs to help you.

    Findings of the doctor, status, traces, metrics, configuration, policy, logs. No keys, no pepper,
    no prompts, no answers; names of tenants and models are in it. Look before you send it. Exit
    codes: 0 written; 1 it could not be.
    """
    from appliance.operator import bundle as work
    from appliance.operator.doctor.examine import read_config
    from appliance.operator.doctor.service_facts import pepper_of

    now = time.time()
    path = file or Path(time.strftime("athanor-%Y%m%d-%H%M%S.tar.gz", time.localtime(now)))
    loaded, problem = read_config(config)
    into = work.MemberCollector()
    _add_findings(into, config, loaded, problem)
    work.add_configuration(into, config, loaded)
    if loaded is not None:
        _add_answers(into, loaded.listen.admin)
    work.add_journal(into)
    secrets = work.secrets_of(loaded, None if loaded is None else pepper_of(loaded))
    done = work.write_bundle(path, into, secrets, now)
    if not print_data({**asdict(done), "path": str(done.path)}, output_format):
        _show(done)


def _add_findings(into: MemberCollector, path: Path, config: ApplianceConfig | None, problem: str) -> None:
    """The doctor's facts, findings, and versions."""
    from appliance.operator.cli.version import versions
    from appliance.operator.doctor.examine import gather, judge

    into.add_json("version.json", versions())
    running = None if config is None else running_appliance(config.listen.admin)
    facts = gather(path.absolute(), config, problem, running)
    into.add_json("facts.json", asdict(facts))
    into.add_json("findings.json", [asdict(finding) for finding in judge(facts)])


def _add_answers(into: MemberCollector, admin: str) -> None:
    """What a running appliance says."""
    for name, path in (("status.json", "/status"), ("traces.json", f"/traces?limit={TRACES}")):
        try:
            into.add_json(name, try_ask(admin, path).body)
        except UnreachableError as error:
            into.left_out.append(f"{name}: {error.args[0]}")
    try:
        metrics = try_text(admin, "/metrics")
        into.add("metrics.txt", lambda: metrics)
    except UnreachableError as error:
        into.left_out.append(f"metrics.txt: {error.args[0]}")


def _show(done: Bundle) -> None:
    from rich.text import Text

    from appliance.common.figures import printable, size

    console = output()
    console.print(Text.assemble((str(done.path), "bold"), f"  {size(done.size)}"), soft_wrap=True)
    console.print(Text("  " + printable("  ".join(done.members)), "dim"))
    for reason in done.left_out:
        console.print(Text.assemble(("left out  ", "yellow"), printable(reason)), soft_wrap=True)
