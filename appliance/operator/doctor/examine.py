"""The doctor's round: gather facts, then judge them. The two are apart, so that every judgement can be tested."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from appliance.common.config import ApplianceConfig
from appliance.common.config_loader import load_config
from appliance.common.errors import ConfigError, reason_of
from appliance.common.version import VERSION
from appliance.operator.doctor.access_checks import check_access
from appliance.operator.doctor.facts import DoctorFacts, Running
from appliance.operator.doctor.finding import ORDER, Area, Finding, Subject
from appliance.operator.doctor.gpu_checks import check_cards, check_gpu_kernels
from appliance.operator.doctor.machine_checks import check_machine
from appliance.operator.doctor.machine_facts import look_at_machine
from appliance.operator.doctor.service_checks import check_service
from appliance.operator.doctor.service_facts import look_at_service
from appliance.operator.doctor.unit_checks import check_units

AREAS = tuple(Area)


def read_config(path: Path, options: Sequence[str] = ()) -> tuple[ApplianceConfig | None, str]:
    """Configuration, or None and the reason; the reason is empty when there is no such file."""
    try:
        if not path.exists():
            return None, ""
        return load_config(path, options), ""
    except ConfigError as error:
        return None, str(error)
    except OSError as error:
        return None, f"cannot read {path}: {reason_of(error)}"


def gather(
    path: Path, config: ApplianceConfig | None, problem: str, running: Running | None, options: Sequence[str] = ()
) -> DoctorFacts:
    """Gather all facts; takes a second, most of it for a trial sandbox."""
    runsc, sandboxed = ("", True) if config is None else (config.sandbox.runsc, not config.sandbox.unsafe_no_sandbox)
    machine = look_at_machine(runsc, sandboxed=sandboxed)
    service = None
    if config is not None and running is not None:
        service = look_at_service(config, path, running, options=options, gpus=machine.gpu.found)
    return DoctorFacts(
        version=VERSION,
        machine=machine,
        service=service,
        config=str(path),
        config_problem=problem,
        config_absent=config is None and not problem,
    )


def judge(facts: DoctorFacts) -> tuple[Finding, ...]:
    """All findings, by area. Pure."""
    service = facts.service
    unsafe, limits = (False, "") if service is None else (service.unsafe, service.running.cgroup)
    findings = [*check_machine(facts.machine, unsafe=unsafe, limits_in_force=limits), _configuration(facts)]
    if service is not None:
        findings += check_service(service, facts.version, facts.machine.memory)
        findings += check_units(service)
        findings += check_cards(service.cards)
        findings += check_gpu_kernels(service.gpu_kernels, facts.machine.gpu)
        findings += check_access(service, facts.machine.clock.now)
    return tuple(sorted(findings, key=lambda one: AREAS.index(one.area)))


def _configuration(facts: DoctorFacts) -> Finding:
    if facts.config_absent:
        return Subject(Area.SERVICE, "configuration").note(
            f"no {facts.config}",
            means="only the machine was looked at",
            mend="athanor doctor --config FILE    # or: athanor install --systemd",
        )
    if facts.config_problem:
        first, *rest = facts.config_problem.splitlines()
        closed = os.strerror(errno.EACCES).lower() in first
        more = f" and {len(rest)} more" if rest else ""
        return Subject(Area.SERVICE, "configuration").problem(
            first + more,
            means="the appliance cannot start",
            mend="sudo athanor doctor" if closed else "mend the file, then: athanor doctor",
        )
    return Subject(Area.SERVICE, "configuration").ok(facts.config)


def counts(findings: tuple[Finding, ...]) -> dict[str, int]:
    """How many of each level, from the worst to the best."""
    return {level.value: sum(one.level is level for one in findings) for level in reversed(ORDER)}
