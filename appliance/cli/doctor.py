"""``athanor doctor``: what is wrong with a machine or an installation, and how it is mended."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance.cli import exits
from appliance.cli.admin_client import SilentError, UnreachableError, try_ask
from appliance.cli.options import Output
from appliance.cli.terminal import Format, output, print_data

if TYPE_CHECKING:
    from appliance.doctor.facts import Running

EXAMPLES = """
athanor doctor | the machine, and /etc/athanor if there is one
athanor doctor --config .athanor/athanor.yaml | the demo's configuration
athanor doctor --json | for scripts; exit code 1 when something is a problem
"""

DEFAULT_CONFIG = Path("/etc/athanor/athanor.yaml")
"""Where the units look for it."""

ADMIN_S = 3.0
"""Patience for a running appliance."""


def doctor(
    config: Annotated[
        Path, typer.Option("--config", "-c", metavar="FILE", help="The appliance's athanor.yaml.")
    ] = DEFAULT_CONFIG,
    as_json: Annotated[bool, typer.Option("--json", help="The same as -o json.")] = False,
    output_format: Output = Format.TABLE,
) -> None:
    """Look for what is wrong, and say how to mend it.

    Machine, sandboxes (one is tried), configuration, addresses, models, memory, disk, clock,
    certificates, policy, keys, permissions. Nothing is changed. Exit codes: 0 all well, or notes
    and warnings only; 1 at least one problem; 2 wrong command line.
    """
    from dataclasses import asdict

    from appliance.doctor.examine import counts, gather, judge, read_config
    from appliance.doctor.finding import Level, worst

    loaded, problem = read_config(config)
    running = None if loaded is None else running_appliance(loaded.listen.admin)
    findings = judge(gather(config.absolute(), loaded, problem, running))
    if as_json or output_format is not Format.TABLE:
        document = {"summary": counts(findings), "findings": [asdict(finding) for finding in findings]}
        print_data(document, Format.JSON if as_json else output_format)
    else:
        from appliance.cli.doctor_view import doctor_view

        output().print(doctor_view(findings))
    raise typer.Exit(exits.REFUSED if worst(findings) is Level.PROBLEM else exits.OK)


def running_appliance(admin: str) -> Running:
    """What an appliance that listens there says of itself."""
    from appliance.doctor.facts import Running
    from appliance.snapshot import SnapshotError, decode
    from appliance.status import ApplianceStatus, Readiness, runs_unsafe

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
        admin=admin, answers=True, ready=ready.ready, reason=ready.reason, version=status.version,
        policy_digest=status.policy.digest, reload_error=status.policy.last_error or "", cgroup=status.cgroup,
        unsafe=runs_unsafe(status), alerts=status.alerts,
    )  # fmt: skip
