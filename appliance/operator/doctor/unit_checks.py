"""Pure: facts about our units and what their users may do, to findings."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import PurePath

from appliance.common.figures import counted
from appliance.operator.doctor.facts import Refusal, ServiceFacts, ServiceUnit
from appliance.operator.doctor.finding import Area, Finding, Subject

MAX_REFUSALS = 8
"""Findings about refused paths; more have one cause, and the mend of the first shows it."""


def check_units(service: ServiceFacts) -> Iterator[Finding]:
    """Findings about the units of a service: what they start with, and what their users cannot use."""
    for unit in service.units:
        if unit.stale:
            yield Subject(Area.SERVICE, "units").warning(
                f"{unit.name} has changed on disk since systemd read it",
                means="the change is not in force, whatever the file says",
                mend="systemctl daemon-reload",
            )
    for line in service.own_settings:
        yield Subject(Area.SERVICE, "units").warning(
            line,
            means="the service does not run as it was looked at here",
            mend=f"systemctl cat {line.partition(' ')[0]}    # then: athanor doctor with the same --config and --set",
        )
    drop_ins = [name for unit in service.units for name in unit.drop_ins]
    if drop_ins:
        yield Subject(Area.SERVICE, "units").ok(f"changed by {', '.join(drop_ins)}")
    yield from check_refusals(service)


def check_refusals(service: ServiceFacts) -> Iterator[Finding]:
    """Whether the services' users can use every path of the configuration."""
    if service.untried:
        yield Subject(Area.ACCESS, "service users").note(service.untried, mend="sudo athanor doctor")
    for refusal in service.refusals[:MAX_REFUSALS]:
        yield check_refusal(refusal)
    rest = len(service.refusals) - MAX_REFUSALS
    if rest > 0:
        yield Subject(Area.ACCESS, "service users").problem(
            f"{counted(rest, 'more path')} cannot be used",
            means="as above",
            mend="mend the first, then: athanor doctor",
        )
    if service.tried and not service.refusals:
        users = ", ".join(dict.fromkeys(unit.user for unit in service.units))
        yield Subject(Area.ACCESS, "service users").ok(
            f"{users} can use the {counted(service.tried, 'path')} they need"
        )


def check_refusal(refusal: Refusal) -> Finding:
    """One path that a service cannot use."""
    subject = Subject(Area.ACCESS, refusal.purpose)
    means = f"the next start of {refusal.unit} fails, or goes on without it"
    if refusal.use == "be":
        return subject.problem(f"{refusal.unit}: {refusal.reason}", means, "systemd-sysusers athanor.conf")
    if refusal.user == "systemd":
        return subject.problem(
            f"{refusal.unit} cannot load {refusal.path}: {refusal.reason}",
            means=f"the next start of {refusal.unit} fails",
            mend=f"systemctl edit {refusal.unit}    # [Service] LoadCredential={refusal.group}:FILE, and make the file",
        )
    if refusal.withheld:
        return subject.problem(
            f"{refusal.user} cannot {refusal.use} {refusal.path}: {refusal.withheld} of {refusal.unit} withholds it",
            means,
            _unit_mend(refusal),
        )
    at = "" if refusal.culprit in ("", refusal.path) else f" at {refusal.culprit}"
    owner = f" ({refusal.mode:04o} {refusal.owner})" if refusal.owner else ""
    what = f"{refusal.user} cannot {refusal.use} {refusal.path}: {refusal.reason}{at}{owner}"
    return subject.problem(what, means, _mend(refusal))


def _unit_mend(refusal: Refusal) -> str:
    edit = f"systemctl edit {refusal.unit}"
    if refusal.withheld in ("ProtectSystem=", "ReadOnlyPaths="):
        return f"{edit}    # [Service] ReadWritePaths={refusal.path}"
    if refusal.withheld == "PrivateDevices=":
        return f"{edit}    # [Service] PrivateDevices=no and DeviceAllow={refusal.path} rw"
    return f"mv '{refusal.path}' ELSEWHERE    # below /etc/athanor or /var/lib/athanor, and name it in athanor.yaml"


def _mend(refusal: Refusal) -> str:
    """Command with the least right that lets the user on."""
    if not refusal.culprit or "permission" not in refusal.reason:
        return f"ls -ld '{refusal.culprit or refusal.path}'"
    if _is_parent(refusal.culprit, refusal.path):
        if refusal.owner.endswith(f":{refusal.group}"):
            return f"chmod g+x '{refusal.culprit}'"
        return f"chmod o+x '{refusal.culprit}'    # to pass, not to list; or move what is in it elsewhere"
    if refusal.use in ("write to", "write"):
        recursive = "-R " if refusal.use == "write to" else ""
        return f"chown {recursive}{refusal.user}:{refusal.group} '{refusal.path}'"
    rights = {"read": "g+rX", "execute": "g+rx", "open": "g+rw", "make its socket at": "g+rwx"}.get(refusal.use, "g+x")
    return f"chgrp {refusal.group} '{refusal.culprit}' && chmod {rights} '{refusal.culprit}'"


def _is_parent(culprit: str, path: str) -> bool:
    """Whether it is a folder on the way."""
    return culprit != path and path.startswith(f"{culprit.rstrip('/')}/")


def settings_beyond(
    units: tuple[ServiceUnit, ...], environments: dict[str, dict[str, str]], config: str, options: tuple[str, ...]
) -> tuple[str, ...]:
    """A line for each way in which a unit starts with another configuration than the one looked at: another file,
    ``--set`` on its command line, ``ATHANOR_*`` variables; each begins with the unit's name. Values are left out.

    Args:
        units: the units.
        environments: variables of each unit, by its name.
        config: path of the configuration that was looked at.
        options: ``KEY=VALUE`` that were given with it.
    """
    found = []
    for unit in units:
        words = [part for word in unit.command for part in (word.split("=", 1) if word[:2] == "--" else (word,))]
        named = [value for word, value in pairwise(words) if word in ("--config", "-c")]
        loaded = named[-1:] == [f"/run/credentials/{unit.name}/{PurePath(config).name}"]
        if words and named[-1:] != [config] and not loaded:
            found.append(f"{unit.name} starts with {' '.join(named[-1:]) or 'no --config'}, looked at was {config}")
        chosen = [value for word, value in pairwise(words) if word == "--set"]
        if keys := [one.partition("=")[0] for one in chosen if one not in options]:
            found.append(f"{unit.name} sets {', '.join(keys)} on its command line")
        variables = environments.get(unit.name, {})
        if names := sorted(name for name in variables if name.startswith("ATHANOR_")):
            found.append(f"{unit.name} sets {', '.join(names)}")
    return tuple(found)
