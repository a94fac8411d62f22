"""A host as a member: what it accepts at a start, what it refuses, and what it remembers of it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from appliance.common.audit.entry import Entry
from appliance.common.errors import (
    ConfigError,
    MembersError,
    MembersSignatureError,
    MembersVersionError,
    StartError,
    UnknownMemberError,
)
from appliance.common.kv_store_config import KvStoreConfig
from appliance.supervisor.fleet_keys.membership import check_membership, join
from isolation.keys.member import MemberKeyError, create_member_keys, read_member_keys
from isolation.keys.signing import key_of
from tests.appliance.supervisor.fleet_keys.fleets import HOSTS, config, joined, member_of, sign


def test_hosts_of_a_list_are_members_and_count_their_lives(tmp_path: Path) -> None:
    """One is the key server, each knows the others; a second start is a second life."""
    first, *others = joined(tmp_path)
    assert (first.is_key_server, [one.is_key_server for one in others]) == (True, [False, False])
    assert [one.host for one in first.others] == list(HOSTS[1:])
    assert first.own == member_of(tmp_path, "host-a")
    assert (first.life, join(config(tmp_path, "host-a")).life, others[0].life) == (1, 2, 1)
    assert ((tmp_path / "host-a.accepted").stat().st_mode & 0o777) == 0o600


def test_an_older_list_is_refused_after_a_newer_one(tmp_path: Path) -> None:
    """A list from before a host was removed is signed as well, and is not accepted where the newer one was; on a host
    that never had the newer one it is. Another list of the accepted version is refused too. What was accepted stays."""
    joined(tmp_path)
    old = (tmp_path / "members").read_bytes()
    sign(tmp_path, HOSTS[:2], version=2)
    join(config(tmp_path, "host-a"))
    (tmp_path / "members").write_bytes(old)
    with pytest.raises(MembersVersionError, match="accepted version 2"):
        join(config(tmp_path, "host-a"))
    assert join(config(tmp_path, "host-b")).members.version == 1
    sign(tmp_path, HOSTS, version=2)
    with pytest.raises(MembersVersionError, match="another list of version 2"):
        join(config(tmp_path, "host-a"))
    sign(tmp_path, HOSTS[:2], version=3)
    assert join(config(tmp_path, "host-a")).life == 3


def test_a_list_of_another_fleet_of_the_authority_is_refused(tmp_path: Path) -> None:
    """A host that is named in a newer list of another fleet stays in its own, whose next list is accepted (control);
    without the record it goes where the operator has put it."""
    joined(tmp_path)
    sign(tmp_path, version=5, fleet="lab")
    with pytest.raises(MembersError, match="of the fleet lab, and this host is a member of edge"):
        join(config(tmp_path, "host-a"))
    sign(tmp_path, version=2)
    assert join(config(tmp_path, "host-a")).members.version == 2
    sign(tmp_path, version=5, fleet="lab")
    (tmp_path / "host-a.accepted").unlink()
    assert join(config(tmp_path, "host-a")).members.fleet == "lab"


def test_what_is_not_this_hosts_list_is_refused(tmp_path: Path) -> None:
    """Each with an error of its own: signed by another, without this host, with other keys for it, missing, endless,
    and keys that are missing; none is recorded as accepted. Control: the right one is accepted then."""
    sign(tmp_path)
    other = key_of(bytes(32))
    with pytest.raises(MembersSignatureError, match="authority"):
        join(config(tmp_path, "host-a", authority=other))
    sign(tmp_path, HOSTS[:2])
    with pytest.raises(UnknownMemberError, match="host-c"):
        join(config(tmp_path, "host-c"))
    with pytest.raises(UnknownMemberError, match="other keys"):
        join(config(tmp_path, "host-a").model_copy(update={"key": tmp_path / "host-c.key"}))
    with pytest.raises(MemberKeyError, match="member-key"):
        join(config(tmp_path, "host-a").model_copy(update={"key": tmp_path / "none"}))
    good = (tmp_path / "members").read_bytes()
    for data in (b"", good * 100, good + b"x"):
        (tmp_path / "members").write_bytes(data)
        with pytest.raises(MembersError):
            join(config(tmp_path, "host-a"))
    (tmp_path / "members").unlink()
    with pytest.raises(ConfigError, match="cannot read"):
        join(config(tmp_path, "host-a"))
    assert not list(tmp_path.glob("*.accepted"))
    (tmp_path / "members").write_bytes(good)
    assert join(config(tmp_path, "host-a")).life == 1


def test_a_damaged_record_is_refused_and_another_authority_begins_anew(tmp_path: Path) -> None:
    """Nothing tells whether a list is older where the record is no record, or cannot be written. A new authority, which
    the operator names, begins with any version; lives are counted on."""
    sign(tmp_path, version=5)
    record = tmp_path / "host-a.accepted"
    assert join(config(tmp_path, "host-a")).life == 1
    good = record.read_bytes()
    for data in (b"", good[:-1], good.replace(b"version 5", b"version x"), good + good):
        record.write_bytes(data)
        with pytest.raises(MembersError, match="no record"):
            join(config(tmp_path, "host-a"))
    record.unlink()
    record.mkdir()
    with pytest.raises(ConfigError, match="cannot read"):
        join(config(tmp_path, "host-a"))
    record.rmdir()
    record.write_bytes(good)
    other = key_of(bytes(32))
    sign(tmp_path, version=1, key=other)
    assert join(config(tmp_path, "host-a", authority=other)).life == 2
    lost = config(tmp_path, "host-a", authority=other).model_copy(update={"accepted": tmp_path / "none" / "accepted"})
    with pytest.raises(ConfigError, match="cannot record"):
        join(lost)


def test_a_supervisor_starts_under_an_acceptable_list_alone(tmp_path: Path) -> None:
    """Without the section nothing is looked at; with it a list that cannot be accepted, and keys that cannot be used,
    end the start. Control: an acceptable one lets it go on, and is in the audit log."""
    recorded = list[Entry]()

    def checked(**values: object) -> None:
        section = config(tmp_path, "host-a").model_copy(update=values)
        check_membership(
            KvStoreConfig(store="unix:/none", size=1 << 20).model_copy(update={"members": section}), recorded.append
        )

    check_membership(KvStoreConfig(store="unix:/none", size=1 << 20), recorded.append)
    sign(tmp_path)
    assert recorded == []
    checked()
    assert [(one.kind, one.fields["count"]) for one in recorded] == [("keys", 3)]
    assert recorded[0].fields["what"] == "version 1 of the members of edge accepted, key server host-a"
    with pytest.raises(StartError, match="no member's keys"):
        checked(key=tmp_path / "none")
    with pytest.raises(MembersSignatureError):
        checked(authority="00" * 32)
    assert len(recorded) == 1


def test_keys_that_cannot_be_written_leave_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk there is no file, so the next try makes one. Control: that one is for its owner alone, and a
    third try leaves it as it is."""
    path = tmp_path / "member.key"

    def full(_fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(MemberKeyError, match="No space left"):
            create_member_keys(path)
    assert not path.exists()
    made = create_member_keys(path)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(MemberKeyError, match="already"):
        create_member_keys(path)
    assert read_member_keys(path).hpke.public == made.hpke.public
