"""This host as a member of a fleet: the signed list, this host's keys, and what it has accepted before.

What was accepted is on disk: fleet, version and digest of the newest list, the authority that signed it, and the number
of this host's lives, one for each start. A key server numbers generations of keys by it, so none comes back after a
restart. A missing file is a first start; one that is damaged is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from appliance.common.audit.entry import Entry, entry
from appliance.common.errors import MembersError, StartError, UnknownMemberError, os_errors_as, reason_of
from appliance.common.kv_store_config import KvStoreConfig, MembersConfig
from appliance.common.members import MAX_BYTES, MAX_VERSION, FleetMember, MemberList, check_successor, read_members
from isolation.host.atomic_file import write_whole
from isolation.keys.member import MemberKeyError, MemberKeys, read_member_keys

log = structlog.get_logger()

MAX_LIVES = 1 << 31
"""Starts of a host that are counted."""

_ACCEPTED = re.compile(
    r"authority ([0-9a-f]{64})\nfleet (\S{1,64})\nversion ([0-9]{1,10})\ndigest ([0-9a-f]{64})\nlives ([0-9]{1,10})\n"
)
_ACCEPTED_BYTES = 512


@dataclass(frozen=True, slots=True)
class Membership:
    """What this host is in its fleet."""

    members: MemberList
    host: str
    keys: MemberKeys
    life: int
    """Number of this start, from 1 on."""

    @property
    def own(self) -> FleetMember:
        """This host's entry."""
        return self.members.member(self.host)

    @property
    def is_key_server(self) -> bool:
        """Whether this host draws the keys."""
        return self.host == self.members.key_server

    @property
    def others(self) -> tuple[FleetMember, ...]:
        """All members but this one."""
        return tuple(one for one in self.members.members if one.host != self.host)


def join(config: MembersConfig) -> Membership:
    """Read the list and this host's keys, and record the list as accepted and one more life.

    Raises:
        MembersError: the list cannot be accepted; the class says why.
        MemberKeyError: this host's keys cannot be used.
        ConfigError: a file cannot be read or written.
    """
    with os_errors_as(f"cannot read the list of members {config.file}"), config.file.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    authority = bytes.fromhex(config.authority)
    found, keys = read_members(data, authority), read_member_keys(config.key)
    own = found.member(config.host)
    if (own.hpke, own.signing) != (keys.hpke.public, keys.signing.public):
        raise UnknownMemberError(
            f"the list of members has other keys for {config.host} than {config.key}: it is another host's file, or "
            "the list is of earlier keys. Have the authority sign a list with the line of this host's keys"
        )
    lives = _accept(config.accepted, found, authority)
    return Membership(found, config.host, keys, lives)


def check_membership(config: KvStoreConfig, record: Callable[[Entry], None]) -> Membership | None:
    """Join the fleet at a start, where the configuration says so, and record as what in the audit log.

    Raises:
        StartError: this host's keys cannot be used.
        ConfigError: as of ``join``.
    """
    if config.members is None:
        return None
    try:
        found = join(config.members)
    except MemberKeyError as error:
        raise StartError(str(error)) from error
    members = found.members
    log.info(
        "this host is a member of a fleet",
        fleet=members.fleet,
        version=members.version,
        host=found.host,
        key_server=members.key_server,
        members=len(members.members),
    )
    what = f"version {members.version} of the members of {members.fleet} accepted, key server {members.key_server}"
    record(entry("keys", what=what, count=len(members.members)))
    return found


def _accept(path: Path, found: MemberList, authority: bytes) -> int:
    """Check a list against the one accepted before and record it; gives the number of this life."""
    before, fleet, version, digest, lives = _read(path)
    if before == authority:
        if fleet != found.fleet:
            raise MembersError(
                f"the list is of the fleet {found.fleet}, and this host is a member of {fleet}: an authority may sign "
                f"for several. Give this host the list of its own fleet, or remove {path} where it moves to the other"
            )
        check_successor(found, version, digest)
    # What another authority signed before is no measure: the operator has named the new one on this host.
    life = lives + 1
    of = f"authority {authority.hex()}\nfleet {found.fleet}\n"
    text = f"{of}version {found.version}\ndigest {found.digest.hex()}\nlives {life}\n"
    with os_errors_as(f"cannot record the list of members as accepted in {path}"):
        write_whole(path, text.encode())
    return life


def _read(path: Path) -> tuple[bytes, str, int, bytes, int]:
    """Return authority, fleet, version, digest and lives that were recorded; empty and zeros at a first start."""
    try:
        with path.open("rb") as file:
            data = file.read(_ACCEPTED_BYTES + 1)
    except FileNotFoundError:
        return b"", "", 0, b"", 0
    except OSError as error:
        raise MembersError(f"cannot read {path}: {reason_of(error)}") from error
    match = _ACCEPTED.fullmatch(data.decode("ascii", "replace"))
    if match is None or int(match[3]) >= MAX_VERSION or int(match[5]) >= MAX_LIVES:
        raise MembersError(
            f"{path} is no record of an accepted list of members, so nothing tells whether the list is an older one. "
            "Restore it, or remove it if the list that is there now is the newest"
        )
    return bytes.fromhex(match[1]), match[2], int(match[3]), bytes.fromhex(match[4]), int(match[5])
