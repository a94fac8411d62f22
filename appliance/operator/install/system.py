"""What a running system is told after its files have changed. Below another root nothing is: its boot will see."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from appliance.common.errors import ConfigError
from appliance.operator.install.rendering import API_SERVICE, CARRIER, SERVICES, TARGET, TIMERS
from isolation.errors import ProcessError
from isolation.host.process import MINIMAL_ENVIRONMENT, run

PATIENCE_S = 120.0
"""Longest that one of these may take: a stop waits for answers that still run."""

START_S = 1_000.0
"""Longest that a start may take: the units' own limit, and a little."""

USERS = ("athanor-gateway", "athanor-supervisor", "athanor-fetch", "athanor-carrier")
GROUP = "athanor"


def systemd_runs() -> bool:
    """Whether systemd is this machine's service manager, as sd_booted(3) tells."""
    return Path("/run/systemd/system").is_dir()


def make_users() -> None:
    """Users and group of the services.

    Raises:
        ConfigError: systemd-sysusers failed.
    """
    _tell("systemd-sysusers", "athanor.conf")


def make_directories() -> None:
    """Directories, and owners and modes of what lies in them.

    Raises:
        ConfigError: systemd-tmpfiles failed.
    """
    _tell("systemd-tmpfiles", "--create", "athanor.conf")


def reload_units() -> None:
    """Have systemd read the units again.

    Raises:
        ConfigError: systemctl failed.
    """
    if systemd_runs():
        _tell("systemctl", "daemon-reload")


def stop() -> None:
    """Stop and disable the services, if they are known; waits until they have stopped.

    Raises:
        ConfigError: systemctl failed for another reason than their absence.
    """
    if not systemd_runs():
        return
    names = [TARGET, *TIMERS, API_SERVICE, *CARRIER, *SERVICES]
    known = run(["systemctl", "list-unit-files", "--no-legend", *names], timeout_s=PATIENCE_S, check=False).stdout
    present = [name for name in names if name in known]
    if present:
        _tell("systemctl", "disable", "--now", *present)
        run(["systemctl", "reset-failed", *present], timeout_s=PATIENCE_S, check=False)


def restart() -> None:
    """Start the services again, the gateway stopped first and started last; waits until they are ready.

    Raises:
        ConfigError: no systemd, the target is not installed, or a service did not come up.
    """
    if not systemd_runs():
        raise ConfigError("systemd is not this machine's service manager; start the appliance again yourself")
    try:
        run(_found(["systemctl", "restart", TARGET, *SERVICES]), timeout_s=START_S)
    except ProcessError as error:
        raise ConfigError(str(error)) from error


def remove_users() -> tuple[str, ...]:
    """Remove users and group; gives the names that are still there because no tool is."""
    left = []
    for tool, names in (("userdel", USERS), ("groupdel", (GROUP,))):
        program = shutil.which(tool, path=MINIMAL_ENVIRONMENT["PATH"])
        for name in names:
            kind = "passwd" if tool == "userdel" else "group"
            if f"\n{name}:" not in f"\n{_read(f'/etc/{kind}')}":
                continue
            if program is None or run([program, name], timeout_s=PATIENCE_S, check=False).returncode != 0:
                left.append(name)
    return tuple(left)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _tell(*argv: str) -> None:
    try:
        run(_found(argv), timeout_s=PATIENCE_S)
    except ProcessError as error:
        raise ConfigError(f"the files are in place, but the system was not told: {error}") from error


def _found(argv: Sequence[str]) -> list[str]:
    program = shutil.which(argv[0], path=MINIMAL_ENVIRONMENT["PATH"])
    if program is None:
        raise ConfigError(f"there is no {argv[0]} on this machine; athanor install --systemd needs systemd")
    return [program, *argv[1:]]
