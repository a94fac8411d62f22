"""Tries every path of the configuration as the user of the service that will use it."""

from __future__ import annotations

import grp
import json
import os
import pwd
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from appliance.common.config import ApplianceConfig
from appliance.operator.doctor.facts import Refusal, ServiceUnit
from appliance.operator.doctor.needs import PathNeed, named_credentials, needs_of, withheld
from appliance.operator.doctor.try_access import Use
from appliance.operator.doctor.units import role_of
from isolation.errors import ProcessError
from isolation.gpu.gpu_facts import look_at_gpus
from isolation.host.process import run

TRY_S = 60.0
"""Longest that the tries of one user may take: a file system that does not answer is told, and not waited for."""


MAX_TRIES = 200
"""Paths for one program: 128 KiB is the longest argument (execve(2))."""

WRITING = (Use.FILL, Use.REPLACE, Use.BIND)
"""Uses for which a path need not exist yet."""


def reach(config: ApplianceConfig, path: Path, unit: ServiceUnit) -> tuple[int, list[Refusal]]:
    """Number of paths that the service uses, and what it cannot use of them.

    Raises:
        PermissionError: only root can be another user.
    """
    devices = tuple(f"/dev/{node.name}" for node in look_at_gpus().nodes) if uses_gpus(config) else ()
    needs = list(needs_of(role_of(unit), config, path, devices))
    credentials = list(_credentials(config, unit))
    try:
        user = _Account.of(unit)
        needs = [one for one in needs if not _made_later(unit, user.uid, one.path)]
    except KeyError as error:
        missing = Refusal(unit=unit.name, user=unit.user, purpose="user", use="be", path="", reason=str(error.args[0]))
        return len(needs), [missing, *credentials]
    kept = [(one, setting) for one in needs if (setting := withheld(unit, one))]
    tried = [one for one in needs if not withheld(unit, one)]
    found = [
        Refusal(unit=unit.name, user=unit.user, purpose=one.purpose, use=one.use, path=str(one.path), withheld=setting)
        for one, setting in kept
        if os.path.exists(one.path) or one.use in WRITING
    ]
    found += [
        _refusal(unit, user, one, *said) for one, said in zip(tried, user.attempts(tried), strict=True) if said[1]
    ]
    return len(needs), [*found, *credentials]


def uses_gpus(config: ApplianceConfig) -> bool:
    """Whether a model is given a GPU."""
    return any(model.gpu != "off" for model in config.models)


def _made_later(unit: ServiceUnit, uid: int, path: Path) -> bool:
    """Whether systemd makes the folder for it with the next start, or gives it to the unit's user with all that is in
    it, as it does with one that has another owner (systemd.exec(5)): a backup was put in place, say."""

    def comes(folder: str) -> bool:
        return not os.path.exists(folder) or (not unit.active and os.stat(folder).st_uid != uid)

    return any(path.is_relative_to(folder) and comes(folder) for folder in unit.made)


class _Account:
    """User and groups of a unit, as numbers."""

    def __init__(self, uid: int, gid: int, groups: list[int]) -> None:
        self.uid, self.gid, self.groups = uid, gid, groups

    @classmethod
    def of(cls, unit: ServiceUnit) -> _Account:
        """Raises ``KeyError`` with words where there is no such user or group."""
        entry = pwd.getpwnam(unit.user) if not unit.user.isdigit() else pwd.getpwuid(int(unit.user))
        gid = _group(unit.group) if unit.group else entry.pw_gid
        return cls(entry.pw_uid, gid, [*os.getgrouplist(entry.pw_name, gid), *map(_group, unit.groups)])

    def attempts(self, needs: Sequence[PathNeed]) -> list[tuple[str, str]]:
        """Where and why each fails; empty texts for what succeeds.

        Raises:
            PermissionError: this process may not be that user.
        """
        if os.geteuid() not in (0, self.uid):
            raise PermissionError("only root can try as another user")
        return [said for at in range(0, len(needs), MAX_TRIES) for said in self._some(needs[at : at + MAX_TRIES])]

    def _some(self, needs: Sequence[PathNeed]) -> list[tuple[str, str]]:
        tries = [[str(one.path), one.use] for one in needs]
        asked = {"user": self.uid, "group": self.gid, "groups": self.groups, "tries": tries}
        argv = [sys.executable, "-m", "appliance.operator.doctor.try_access", json.dumps(asked)]
        try:
            done = run(argv, timeout_s=TRY_S, cwd=Path(__file__).parents[3])
        except ProcessError as error:
            return [("", str(error).splitlines()[-1])] * len(needs)
        return [(culprit, reason) for culprit, reason in json.loads(done.stdout)]


def _group(name: str) -> int:
    return int(name) if name.isdigit() else grp.getgrnam(name).gr_gid


def _refusal(unit: ServiceUnit, user: _Account, need: PathNeed, culprit: str, reason: str) -> Refusal:
    owner, mode = "", 0
    try:
        found = os.stat(culprit)
        owner = f"{_user_name(found.st_uid)}:{_group_name(found.st_gid)}"
        mode = stat.S_IMODE(found.st_mode)
    except OSError:
        pass
    return Refusal(
        unit=unit.name,
        user=unit.user,
        purpose=need.purpose,
        use=need.use,
        path=str(need.path),
        culprit=culprit,
        reason=reason,
        owner=owner,
        mode=mode,
        group=_group_name(user.gid),
    )


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _credentials(config: ApplianceConfig, unit: ServiceUnit) -> Iterator[Refusal]:
    """Credentials of this unit that systemd will not have for it."""
    for purpose, owner, name in named_credentials(config):
        if owner != unit.name:
            continue
        source = dict(unit.credentials).get(name)
        if source is None:
            reason = f"the unit loads no credential {name!r}"
        elif source.startswith("/") and not os.path.exists(source):
            reason = "no such file"
        else:
            continue
        yield Refusal(
            unit=unit.name, user="systemd", purpose=purpose, use="load", path=source or name, reason=reason, group=name
        )
