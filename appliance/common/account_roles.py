"""Accounts of this machine that call an operator's interface, by the kernel's word, and what they may do."""

from __future__ import annotations

import errno
import grp
import os
import pwd
import socket
import struct
from dataclasses import dataclass
from typing import Self

from appliance.common.errors import ConfigError
from appliance.common.operator_config import OperatorApiConfig
from appliance.common.operator_roles import EVERY, OperatorRole, with_reading

SO_PEERGROUPS = 59
"""Option of a Unix socket that gives the groups of the process at the other end (linux/socket.h); Python lacks it."""

MAX_GROUPS = 256
"""Most further groups of a process that are read: Python takes 1,024 bytes of an option. One with more has its first
group alone, so that it has a role less and none too many."""

OVERFLOW = 65_534
"""Id that the kernel tells in place of one that this user namespace does not know: anybody's, so it has no role."""

_UCRED = struct.Struct("3i")
_GID = struct.Struct("I")


@dataclass(frozen=True, slots=True)
class Caller:
    """A process at the other end of a socket."""

    user: int
    groups: frozenset[int]


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a call is by, and what that lets it do."""

    user: int
    """User id by the kernel's word; ``OVERFLOW`` where the caller is on another machine."""
    roles: frozenset[OperatorRole]
    who: str = ""
    """Credential of a caller on another machine."""
    given_by: str = "operator_api"
    """Section of the configuration that gives the roles."""


@dataclass(frozen=True, slots=True)
class Roles:
    """Roles of users and groups, by number. Pure."""

    owners: frozenset[int]
    """Users with every role."""
    users: frozenset[tuple[OperatorRole, int]] = frozenset()
    groups: frozenset[tuple[OperatorRole, int]] = frozenset()

    @classmethod
    def of(cls, config: OperatorApiConfig) -> Self:
        """Return the roles that a configuration gives; root and this process's user have every one.

        Raises:
            ConfigError: this machine does not know a user or a group.
        """
        listed = {
            OperatorRole.VIEWER: config.viewers,
            OperatorRole.OPERATOR: config.operators,
            OperatorRole.SECURITY: config.security,
        }
        users, groups = set(), set()
        for role, names in listed.items():
            for name in names:
                if name.startswith("@"):
                    groups.add((role, _group(name.removeprefix("@"))))
                else:
                    users.add((role, _user(name)))
        return cls(frozenset({0, os.geteuid()}), frozenset(users), frozenset(groups))

    def of_caller(self, caller: Caller) -> frozenset[OperatorRole]:
        """Return the roles of a caller. Each of them lets it read."""
        if caller.user in self.owners:
            return EVERY
        by_user = {role for role, user in self.users if user == caller.user != OVERFLOW}
        by_group = {role for role, group in self.groups if group in caller.groups and group != OVERFLOW}
        return with_reading(by_user | by_group)

    @property
    def open_to_others(self) -> bool:
        """Whether anybody but the owners has a role."""
        return bool(self.users or self.groups)


def caller_of(peer: socket.socket) -> Caller:
    """Return who is at the other end, from the kernel (SO_PEERCRED, unix(7)).

    Raises:
        OSError: the peer has left.
    """
    _pid, user, group = _UCRED.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    try:
        further = peer.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, MAX_GROUPS * _GID.size)
    except OSError as error:
        if error.errno != errno.ERANGE:
            raise
        further = b""
    return Caller(user, frozenset({group, *(one for (one,) in _GID.iter_unpack(further))}))


def _user(name: str) -> int:
    if name.isdigit():
        return int(name)
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        raise ConfigError(f"operator_api names the user {name}, which this machine does not know") from None


def _group(name: str) -> int:
    if name.isdigit():
        return int(name)
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise ConfigError(f"operator_api names the group {name}, which this machine does not know") from None
