"""Our systemd units as they are in force, drop-ins included: who runs them, with which variables, words and folders."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from appliance.operator.doctor.facts import ServiceUnit
from appliance.operator.install.rendering import SERVICES
from appliance.operator.install.system import systemd_runs
from isolation.errors import ProcessError
from isolation.host.process import run

SHOW_S = 10.0
"""Longest that systemctl may take; it answers within milliseconds."""

PROPERTIES = (
    "Id,LoadState,ActiveState,NeedDaemonReload,FragmentPath,DropInPaths,User,Group,SupplementaryGroups,ExecStart,"
    "Environment,EnvironmentFiles,NFileDescriptorStore,ProtectSystem,ProtectHome,PrivateTmp,PrivateDevices,"
    "InaccessiblePaths,ReadOnlyPaths,ReadWritePaths,RuntimeDirectory,StateDirectory,CacheDirectory,"
    "LogsDirectory"
)
"""What is asked of systemd (org.freedesktop.systemd1(5))."""

DIRECTORIES = {
    "RuntimeDirectory": "/run",
    "StateDirectory": "/var/lib",
    "CacheDirectory": "/var/cache",
    "LogsDirectory": "/var/log",
}
"""Properties that name folders that systemd makes for a unit, and below what."""

DROP_INS = ("/etc/systemd/system", "/run/systemd/system", "/usr/local/lib/systemd/system", "/usr/lib/systemd/system")
"""Where drop-ins of a unit lie, by precedence (systemd.unit(5))."""

MAX_ENVIRONMENT_BYTES = 256 << 10
"""Bytes read of a file of variables."""


def look_at_units() -> tuple[ServiceUnit, ...]:
    """Ask systemd for the units that are installed; none where it does not run or does not answer."""
    if not systemd_runs():
        return ()
    try:
        done = run(["systemctl", "show", f"--property={PROPERTIES}", *SERVICES], timeout_s=SHOW_S)
    except ProcessError:
        return ()
    return tuple(
        replace(
            unit,
            credentials=tuple(credentials_of(map(_text, (unit.file, *unit.drop_ins))).items()),
            stale=unit.stale or has_unread_drop_in(unit, map(Path, DROP_INS)),
        )
        for unit in parse_units(done.stdout)
    )


def has_unread_drop_in(unit: ServiceUnit, folders: Iterable[Path]) -> bool:
    """Whether a drop-in lies in one of these folders that systemd has not read. Its own NeedDaemonReload does not tell
    of one in a folder that was made after systemd had looked at the unit's name."""
    found: dict[str, Path] = {}
    for folder in folders:
        for path in folder.glob(f"{unit.name}.d/*.conf"):
            found.setdefault(path.name, path)
    read = {Path(path).resolve() for path in unit.drop_ins}
    return any(path.resolve() not in read for path in found.values() if path.resolve() != Path(os.devnull))


def parse_units(shown: str) -> Iterator[ServiceUnit]:
    """Units that are loaded, from the output of ``systemctl show``: a block of ``KEY=VALUE`` for each. Pure."""
    for block in shown.strip().split("\n\n"):
        values: dict[str, list[str]] = {}
        for line in block.splitlines():
            key, _, value = line.partition("=")
            values.setdefault(key, []).append(value)
        if values.get("LoadState") == ["loaded"]:
            yield _unit({key: "\n".join(lines) for key, lines in values.items()})


def credentials_of(texts: Iterable[str]) -> dict[str, str]:
    """Credentials by name, with the file that each is loaded from (empty: it stands in the unit), from the texts of a
    unit's files in their order; ``systemctl show`` does not print them. Pure."""
    found: dict[str, str] = {}
    for text in texts:
        for key, value in re.findall(r"^\s*((?:Load|Set)Credential(?:Encrypted)?)\s*=[ \t]*(.*?)\s*$", text, re.M):
            name, _, source = value.partition(":")
            if not value:
                found.clear()
            else:
                found[name] = source if key.startswith("Load") else ""
    return found


def _text(file: str) -> str:
    try:
        return Path(file).read_text(errors="replace")
    except OSError:
        return ""


def _unit(values: Mapping[str, str]) -> ServiceUnit:
    def words(key: str) -> tuple[str, ...]:
        return tuple(_split(values.get(key, "")))

    made = tuple(f"{place}/{name.partition(':')[0]}" for key, place in DIRECTORIES.items() for name in words(key))
    command = re.search(r"argv\[\]=(.*?) ; ignore_errors=", values.get("ExecStart", ""))
    return ServiceUnit(
        name=values.get("Id", ""),
        active=values.get("ActiveState", "") == "active",
        stale=values.get("NeedDaemonReload", "") == "yes",
        file=values.get("FragmentPath", ""),
        drop_ins=words("DropInPaths"),
        user=values.get("User", "") or "root",
        group=values.get("Group", ""),
        groups=words("SupplementaryGroups"),
        command=tuple(_split(command[1])) if command else (),
        environment=tuple(tuple(one.split("=", 1)) for one in words("Environment") if "=" in one),  # type: ignore[misc]
        environment_files=tuple(re.findall(r"^(\S.*?) \(ignore_errors=", values.get("EnvironmentFiles", ""), re.M)),
        kept=int(values.get("NFileDescriptorStore", "") or 0),
        protect_system=values.get("ProtectSystem", "no"),
        hidden=(*_plain(words("InaccessiblePaths")), *_private(values)),
        read_only=_plain(words("ReadOnlyPaths")),
        writable=(*_plain(words("ReadWritePaths")), *made),
        made=made,
    )


def _split(text: str) -> list[str]:
    """Words as systemd quotes them; a text that is not so quoted is split at spaces."""
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _plain(paths: tuple[str, ...]) -> tuple[str, ...]:
    """Paths without the marks that say to ignore an absent one, or to take it below the unit's root."""
    return tuple(path.lstrip("-+") for path in paths)


def _private(values: Mapping[str, str]) -> tuple[str, ...]:
    """Folders of the machine that a unit sees empty, or its own in their place (systemd.exec(5))."""
    homes = ("/home", "/root", "/run/user") if values.get("ProtectHome") in ("yes", "tmpfs") else ()
    temporary = ("/tmp", "/var/tmp") if values.get("PrivateTmp") in ("yes", "disconnected") else ()  # noqa: S108
    return (*homes, *temporary, *(("/dev",) if values.get("PrivateDevices") == "yes" else ()))


def environment_of(unit: ServiceUnit) -> dict[str, str]:
    """Variables of a unit, those of its files over its own; a file that cannot be read has none."""
    found = dict(unit.environment)
    for name in unit.environment_files:
        try:
            with Path(name).open(encoding="utf-8", errors="replace") as file:
                text = file.read(MAX_ENVIRONMENT_BYTES)
        except OSError:
            continue
        lines = (line.strip() for line in text.splitlines() if not line.lstrip().startswith(("#", ";")))
        found.update((key, " ".join(_split(value))) for key, _, value in (line.partition("=") for line in lines) if key)
    return found


def role_of(unit: ServiceUnit) -> str:
    """``gateway``, ``supervisor`` or ``fetch``."""
    return unit.name.removeprefix("athanor-").partition(".")[0]
