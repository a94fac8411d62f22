"""List of a fleet's members: who they are, by which keys they are known, signed by the fleet's authority. Pure.

The list is a text of few lines, with a signature (Ed25519, RFC 8032) over all that stands before it::

    athanor fleet members 1
    fleet edge-eu
    version 7
    keyserver host-a
    member host-a x25519 0bd1... ed25519 77c0...
    member host-b x25519 9f0e... ed25519 1d2a...
    signature 5ab3... e01f...

The authority's key signs offline and is on no host. There is one form of each list and no other is read: what was
signed is what was understood. A version only grows, so a host can refuse a list that it has seen replaced
(``check_successor``).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from appliance.common.errors import (
    DuplicateMemberError,
    MembersError,
    MembersSignatureError,
    MembersVersionError,
    UnknownMemberError,
)
from isolation.keys.signing import SigningKey, verifies

HEADING = "athanor fleet members 1"
"""First line of what is signed: no other signature of the appliance is one of a list of members."""

MAX_MEMBERS = 16
"""Members of one list: the key server reads a message of each in every turn."""

MAX_BYTES = 8 << 10
"""Longest list: 16 members take 3.6 kB."""

MAX_VERSION = 1 << 31

NAME = r"[a-z0-9][a-z0-9-]{0,62}"
"""Names of fleets and hosts."""

_KEY = r"[0-9a-f]{64}"
_MEMBER = re.compile(rf"member ({NAME}) x25519 ({_KEY}) ed25519 ({_KEY})")
_LIST = re.compile(
    rf"{HEADING}\nfleet ({NAME})\nversion ([1-9][0-9]{{0,9}})\nkeyserver ({NAME})\n"
    rf"((?:{_MEMBER.pattern}\n)+)signature ({_KEY}) ([0-9a-f]{{128}})\n"
)
_GROUPS = 4
"""Number of the group of ``_LIST`` that has the lines of all members; three more belong to the last one of them."""


@dataclass(frozen=True, slots=True)
class FleetMember:
    """One host of a fleet."""

    host: str
    hpke: bytes
    """Public key of X25519 to which keys are wrapped."""
    signing: bytes
    """Public key of Ed25519 by which the host signs what it says to others."""

    @property
    def line(self) -> str:
        """The member's line of a list."""
        return f"member {self.host} x25519 {self.hpke.hex()} ed25519 {self.signing.hex()}"


@dataclass(frozen=True, slots=True)
class MemberList:
    """Members of one version of a list; whether it is signed was looked at by ``read_members``."""

    fleet: str
    version: int
    key_server: str
    """Host that draws keys and gives them to all others."""
    members: tuple[FleetMember, ...]

    @property
    def text(self) -> bytes:
        """What is signed."""
        head = f"{HEADING}\nfleet {self.fleet}\nversion {self.version}\nkeyserver {self.key_server}\n"
        return (head + "".join(f"{one.line}\n" for one in self.members)).encode()

    @property
    def digest(self) -> bytes:
        """SHA-256 of what is signed, which names fleet, version and all keys."""
        return hashlib.sha256(self.text).digest()

    def member(self, host: str) -> FleetMember:
        """Return the member of a name.

        Raises:
            UnknownMemberError: there is none.
        """
        found = next((one for one in self.members if one.host == host), None)
        if found is None:
            names = ", ".join(one.host for one in self.members)
            raise UnknownMemberError(
                f"version {self.version} of the list of the fleet {self.fleet} has no member {host}: it has {names}; "
                "give kv_store.members.host one of these names, or have the authority sign a list with this host"
            )
        return found


def check_host(name: str) -> None:
    """Check the name of a host.

    Raises:
        MembersError: a list cannot have it.
    """
    if not re.fullmatch(NAME, name):
        raise MembersError(f"{name[:80]!r} names no host: small letters, digits and hyphens, 63 at most")


def read_member_line(line: str) -> FleetMember:
    """Read the line of one member.

    Raises:
        MembersError: it is none.
    """
    match = _MEMBER.fullmatch(line.strip())
    if match is None:
        raise MembersError(f"{line.strip()[:80]!r} is no line of `athanor fleet member-key`")
    return FleetMember(match[1], bytes.fromhex(match[2]), bytes.fromhex(match[3]))


def read_members(data: bytes, authority: bytes) -> MemberList:
    """Read a list that the fleet's authority has signed.

    Raises:
        MembersSignatureError: it is not signed by this public key, or was changed since.
        DuplicateMemberError: two members have one name or one key.
        UnknownMemberError: the key server is none of the members.
        MembersError: it is no list, or has too many members.
    """
    match = _LIST.fullmatch(data[: MAX_BYTES + 1].decode("ascii", "replace"))
    if len(data) > MAX_BYTES or match is None:
        raise MembersError(
            "no list of a fleet's members in the form of this release; `athanor fleet sign-members` writes it"
        )
    public, signature = match[_GROUPS + 4], match[_GROUPS + 5]
    signed = data[: match.start(_GROUPS) + len(match[_GROUPS])]
    if public != authority.hex() or not verifies(authority, bytes.fromhex(signature), signed):
        raise MembersSignatureError(
            f"the list of members is not signed by the authority {authority.hex()[:16]} as it is now: it names "
            f"{public[:16]} as its signer. Take the list as `athanor fleet sign-members` wrote it, or set "
            "kv_store.members.authority to the key that it printed"
        )
    members = tuple(read_member_line(line) for line in match[_GROUPS].splitlines())
    found = MemberList(match[1], int(match[2]), match[3], members)
    check_list(found)
    return found


def check_list(found: MemberList) -> None:
    """Check what holds of each list, signed or about to be.

    Raises:
        DuplicateMemberError, UnknownMemberError, MembersError: as of ``read_members``.
    """
    members = found.members
    if not 2 <= len(members) <= MAX_MEMBERS or not 1 <= found.version < MAX_VERSION:
        raise MembersError(f"a list has 2 to {MAX_MEMBERS} members, and a version below {MAX_VERSION}")
    if not re.fullmatch(NAME, found.fleet):
        raise MembersError(f"{found.fleet!r} names no fleet: small letters, digits and hyphens, 63 at most")
    for what, values in (
        ("one name", [one.host for one in members]),
        ("one key of X25519", [one.hpke.hex() for one in members]),
        ("one key of Ed25519", [one.signing.hex() for one in members]),
    ):
        twice = next((value for value in values if values.count(value) > 1), None)
        if twice is not None:
            hosts = " and ".join(one.host for one in members if twice in (one.host, one.hpke.hex(), one.signing.hex()))
            raise DuplicateMemberError(
                f"two members have {what}: {hosts}. Each host makes its own keys: athanor fleet member-key HOST"
            )
    if found.key_server not in (one.host for one in members):
        names = ", ".join(one.host for one in members)
        raise UnknownMemberError(f"the key server {found.key_server} is none of the members, which are {names}")


def signed_list(found: MemberList, key: SigningKey) -> bytes:
    """Return the bytes of a list with its signature.

    Raises:
        DuplicateMemberError, UnknownMemberError, MembersError: the list is none that would be read.
    """
    check_list(found)
    return found.text + f"signature {key.public.hex()} {key.sign(found.text).hex()}\n".encode()


def check_successor(found: MemberList, version: int, digest: bytes) -> None:
    """Refuse a list that is older than the version accepted before, or another one of that version.

    Raises:
        MembersVersionError: it is.
    """
    if found.version < version:
        raise MembersVersionError(
            f"the list of members has version {found.version}, and this host has accepted version {version}: an older "
            "list may name hosts that were removed. Bring the newest list, or have the authority sign the next version"
        )
    if found.version == version and found.digest != digest:
        raise MembersVersionError(
            f"this host has accepted another list of version {version}. Two lists of one version are never both in "
            "force: have the authority sign the next version, and bring it to all hosts"
        )


def with_members(members: Iterable[FleetMember], fleet: str, version: int, key_server: str) -> MemberList:
    """Return a list in the order of the hosts' names."""
    ordered = sorted(members, key=lambda one: one.host)
    return MemberList(fleet, version, key_server, tuple(ordered))
