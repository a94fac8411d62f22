"""Signed lists of a fleet's members: what is read, and every list that is refused."""

from __future__ import annotations

import secrets
from dataclasses import replace

import pytest

from appliance.common.errors import (
    DuplicateMemberError,
    MembersError,
    MembersSignatureError,
    MembersVersionError,
    UnknownMemberError,
)
from appliance.common.members import (
    MAX_MEMBERS,
    FleetMember,
    MemberList,
    check_successor,
    read_member_line,
    read_members,
    signed_list,
    with_members,
)
from isolation.keys.signing import key_of

AUTHORITY = key_of(bytes(range(32)))


def member(host: str) -> FleetMember:
    """A member with keys of its own, which are as good as any as long as nothing is wrapped to them."""
    return FleetMember(host, secrets.token_bytes(32), secrets.token_bytes(32))


def members(*hosts: str, version: int = 7) -> MemberList:
    """A list whose first host is the key server."""
    return with_members([member(host) for host in hosts], "edge-eu", version, hosts[0])


def resigned(text: bytes) -> bytes:
    """A text under the authority's signature, whatever it says."""
    return text + f"signature {AUTHORITY.public.hex()} {AUTHORITY.sign(text).hex()}\n".encode()


def test_a_signed_list_is_read_as_it_was_signed() -> None:
    """All its values come back, the members in the order of their names, whatever order they were given in."""
    wanted = members("host-b", "host-a", "host-c")
    found = read_members(signed_list(wanted, AUTHORITY), AUTHORITY.public)
    assert found == wanted
    assert [one.host for one in found.members] == ["host-a", "host-b", "host-c"]
    assert found.member("host-b") == wanted.member("host-b") == read_member_line(wanted.member("host-b").line)
    assert found.digest != members("host-b", "host-a", "host-c").digest


def test_no_changed_byte_is_read() -> None:
    """Each byte of the list changed, each line left out or said twice, and each shorter text: all refused. Control: the
    list itself is read."""
    data = signed_list(members("host-a", "host-b"), AUTHORITY)
    lines = data.splitlines(keepends=True)
    broken = [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in range(len(data))]
    broken += [b"".join(lines[:at] + lines[at + 1 :]) for at in range(len(lines))]
    broken += [b"".join(lines[: at + 1] + lines[at:]) for at in range(len(lines))]
    broken += [data[:size] for size in range(len(data))] + [data + b"\n", data + lines[-1], b" " + data]
    for one in broken:
        with pytest.raises(MembersError):
            read_members(one, AUTHORITY.public)
    assert read_members(data, AUTHORITY.public)


def test_only_the_configured_authority_signs() -> None:
    """Another key's signature is refused, also where the list names that key, or the right one."""
    other, wanted = key_of(bytes(32)), members("host-a", "host-b")
    for data in (
        signed_list(wanted, other),
        wanted.text + f"signature {AUTHORITY.public.hex()} {other.sign(wanted.text).hex()}\n".encode(),
    ):
        with pytest.raises(MembersSignatureError):
            read_members(data, AUTHORITY.public)
    assert read_members(signed_list(wanted, other), other.public)


def test_two_members_are_never_one() -> None:
    """A name, an HPKE key or a signing key that two members have is refused, whether it is about to be signed or was
    signed by some other program."""
    wanted = members("host-a", "host-b")
    one, two = wanted.members
    for twin in (replace(two, host=one.host), replace(two, hpke=one.hpke), replace(two, signing=one.signing)):
        wrong = replace(wanted, members=(one, twin))
        with pytest.raises(DuplicateMemberError):
            signed_list(wrong, AUTHORITY)
        with pytest.raises(DuplicateMemberError):
            read_members(resigned(wrong.text), AUTHORITY.public)


def test_a_list_has_bounds() -> None:
    """One member, too many, a key server that is none of them, a fleet without a name, and a text that is endless."""
    wanted = members("host-a", "host-b")
    many = tuple(member(f"host-{number}") for number in range(MAX_MEMBERS + 1))
    for wrong, error in (
        (replace(wanted, members=wanted.members[:1]), MembersError),
        (replace(wanted, members=many, key_server="host-0"), MembersError),
        (replace(wanted, fleet="Edge"), MembersError),
        (replace(wanted, version=0), MembersError),
        (replace(wanted, key_server="host-z"), UnknownMemberError),
    ):
        with pytest.raises(error):
            signed_list(wrong, AUTHORITY)
        with pytest.raises(MembersError):
            read_members(resigned(wrong.text), AUTHORITY.public)
    with pytest.raises(MembersError):
        read_members(resigned(wanted.text + b"member " * 100_000), AUTHORITY.public)
    assert read_members(
        signed_list(replace(wanted, members=many[:-1], key_server="host-0"), AUTHORITY), AUTHORITY.public
    )


def test_a_version_only_grows() -> None:
    """The same list and a newer one pass; an older one, and another one of the same version, do not."""
    wanted = members("host-a", "host-b")
    check_successor(wanted, 7, wanted.digest)
    check_successor(wanted, 6, bytes(32))
    for version, digest in ((8, wanted.digest), (7, bytes(32))):
        with pytest.raises(MembersVersionError):
            check_successor(wanted, version, digest)


@pytest.mark.parametrize(
    "line", ["", "member host-a", "member Host x25519 00 ed25519 00"], ids=["empty", "cut", "form"]
)
def test_what_is_no_line_of_a_member_is_refused(line: str) -> None:
    """The error shows the line."""
    with pytest.raises(MembersError, match="no line of"):
        read_member_line(line)
