"""``athanor doctor``: what is wrong with a machine or an installation, and how it is mended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from appliance.operator.cli import exits
from appliance.operator.cli.admin_client import SilentError, UnreachableError, try_ask
from appliance.operator.cli.options import DEFAULT_CONFIG, Config, Output, Settings
from appliance.operator.cli.terminal import Format, output, print_data

if TYPE_CHECKING:
    from appliance.operator.doctor.facts import Running

EXAMPLES = """
athanor doctor | the machine, and /etc/athanor if there is one
athanor doctor --config .athanor/athanor.yaml | the demo's configuration
athanor doctor --json | for scripts; exit code 1 when something is a problem
"""

ADMIN_S = 3.0
"""Patience for a running appliance."""


def doctor(
    config: Config = DEFAULT_CONFIG,
    settings: Settings = None,
    as_json: Annotated[bool, typer.Option("--json", help="The same as -o json.")] = False,
    output_format: Output = Format.TABLE,
) -> None:
    """Look for what is wrong, and say how to mend it.

    Machine, sandboxes (one is tried), configuration, addresses, models, memory, disk, clock,
    certificates, policy, keys, permissions. Nothing is changed. Exit codes: 0 all well, or notes
    and warnings only; 1 at least one problem; 2 wrong command line.
    """
    from dataclasses import asdict

    from appliance.operator.doctor.examine import counts, gather, judge, read_config
    from appliance.operator.doctor.finding import Severity, worst

    loaded, problem = read_config(config, settings or ())
    running = None if loaded is None else running_appliance(loaded.listen.admin)
    findings = judge(gather(config.absolute(), loaded, problem, running, settings or ()))
    document = {"summary": counts(findings), "findings": [asdict(finding) for finding in findings]}
    if not print_data(document, Format.JSON if as_json else output_format):
        from appliance.operator.cli.doctor_view import doctor_view

        output().print(doctor_view(findings))
    raise typer.Exit(exits.REFUSED if worst(findings) is Severity.PROBLEM else exits.OK)


def running_appliance(admin: str) -> Running:
    """What an appliance that listens there says of itself."""
    from appliance.common.json_codec import SnapshotError, decode
    from appliance.common.status import ApplianceStatus, Readiness, runs_unsafe
    from appliance.operator.doctor.facts import Running

    if admin.endswith(":0"):
        return Running(admin=admin)
    try:
        status = decode(ApplianceStatus, try_ask(admin, "/status", timeout_s=ADMIN_S).body)
        ready = decode(Readiness, try_ask(admin, "/health/ready", timeout_s=ADMIN_S).body)
    except SilentError:
        return Running(admin=admin, silent_s=ADMIN_S)
    except (UnreachableError, SnapshotError):
        return Running(admin=admin)
    return Running(
        admin=admin,
        answers=True,
        ready=ready.ready,
        reason=ready.reason,
        version=status.version,
        policy_digest=status.policy.digest,
        reload_error=status.policy.last_error or "",
        cgroup=status.cgroup,
        unsafe=runs_unsafe(status),
        alerts=status.alerts,
        weights=tuple((one.name, one.engine.weights) for one in status.models if one.engine.weights),
        batches=status.batches,
        checkpoints=status.checkpoints,
        engine_cards=tuple((model, card.index) for card in status.cards for model in card.engines),
    )
