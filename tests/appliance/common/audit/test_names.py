"""Pseudonyms: who finds names again, what a shred leaves, and that the log and the usage book go on."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from appliance.common.audit import files, names
from appliance.common.audit.entry import Entry, from_line
from appliance.common.audit.log import AuditWriteError, open_log
from appliance.common.audit.names import PSEUDONYM, NameBook, shown_by
from appliance.common.audit.verify import verify
from appliance.common.usage.book import UsageBook, open_book
from appliance.common.usage.replay import replay
from tests.appliance.common.audit.entries import filled


def raw(folder: Path) -> bytes:
    """The bytes of all segments."""
    return b"".join(path.read_bytes() for path in files.segment_paths(folder))


def entries(folder: Path) -> list[Entry]:
    """All entries as they are written."""
    return [from_line(line)[2] for path in files.segment_paths(folder) for line in files.read_segment(path).lines]


def request(tenant: str, number: int = 0, credential: str = "key:alpha-1") -> Entry:
    """An entry of a request that a rule of its tenant decided."""
    rule = f"tenants.{tenant}.models"
    return filled("request", request=f"r{tenant}{number}", tenant=tenant, principal=credential, rule=rule, cost=1)


def test_names_are_found_again_until_the_key_is_destroyed(tmp_path: Path) -> None:
    """The files name neither tenant nor credential nor, in the rule, the tenant; readers have all of them. After the
    shred they have one pseudonym for what was written before, the log verifies, and what comes later has another."""
    log = open_log(tmp_path, pseudonyms=True)
    sent = [request("alpha", 1), request("alpha", 2, "spiffe://x/alpha"), request("beta", 3)]
    log.append([(1, one) for one in sent])
    assert b"alpha" not in raw(tmp_path).replace(b"ralpha", b"") and b"key:" not in raw(tmp_path)
    assert list(map(shown_by(tmp_path), entries(tmp_path))) == sent
    pseudonym, verifier = log.names.pseudonym("alpha"), log.verifier
    log.names.forget("alpha")
    log.append([(2, filled("order", tenant=pseudonym)), (3, request("alpha", 4))])
    log.close()
    found = list(map(shown_by(tmp_path), entries(tmp_path)))
    assert [one.fields["tenant"] for one in found] == [pseudonym, pseudonym, "beta", pseudonym, "alpha"]
    assert found[0].fields["rule"] == f"tenants.{pseudonym}.models"
    assert len({one.fields["principal"] for one in found[:2]}) == 2
    assert all(PSEUDONYM.fullmatch(str(one.fields["principal"])) for one in found[:2])
    assert entries(tmp_path)[4].fields["tenant"] not in (pseudonym, "alpha")
    assert verify(tmp_path, verifier).sound


def test_a_log_may_have_entries_of_both_forms(tmp_path: Path) -> None:
    """What was written with names before, and after the operator chose so again, is read beside pseudonyms."""
    for pseudonyms in (False, True, False):
        log = open_log(tmp_path, pseudonyms=pseudonyms)
        log.append([(1, request("alpha"))])
        log.close()
    assert [one.fields["tenant"] == "alpha" for one in entries(tmp_path)] == [True, False, True]
    assert list(map(shown_by(tmp_path), entries(tmp_path))) == [request("alpha")] * 3
    assert verify(tmp_path, log.verifier).sound


def test_calls_of_the_operator_name_tenants_by_the_same_pseudonyms(tmp_path: Path) -> None:
    """A call about a tenant has its pseudonym, so nothing leads from the calls to it after a shred. A reader's call
    about one without a key names none and makes none; that of who may change keys does."""
    book = NameBook(tmp_path)
    reader, keeper = (filled("call", tenant="alpha", roles=roles) for roles in ("viewer", "security,viewer"))
    assert book.hidden(reader).fields["tenant"] == "" and book.pseudonym("alpha") == ""
    pseudonym = book.hidden(keeper).fields["tenant"]
    assert pseudonym == book.hidden(request("alpha")).fields["tenant"] == book.hidden(reader).fields["tenant"]
    assert PSEUDONYM.fullmatch(str(pseudonym))


def test_one_credential_of_two_tenants_has_two_pseudonyms(tmp_path: Path) -> None:
    """And two names of one tenant have two; the same name has the same one after the book is opened again."""
    hidden = [
        NameBook(tmp_path).hidden(request(tenant, 0, name)) for tenant in ("a", "b") for name in ("key:1", "key:2")
    ]
    assert len({one.fields["principal"] for one in hidden}) == 4
    assert NameBook(tmp_path).hidden(request("a", 0, "key:1")) == hidden[0]


def test_what_is_no_tenant_stays_as_it_is(tmp_path: Path) -> None:
    """A gateway that was taken over makes no file by what it reports, and no pseudonym counts as a name."""
    for tenant in ("", "../x", "Alpha", "a" * 64, "anon." + "0" * 32):
        assert NameBook(tmp_path).hidden(request(tenant)) == request(tenant)
    assert not (tmp_path / names.FOLDER).exists()


def test_further_tenants_and_credentials_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound of tenants entries have names; beyond that of credentials, pseudonyms that nothing resolves."""
    monkeypatch.setattr(names, "MAX_TENANTS", 1)
    monkeypatch.setattr(names, "MAX_CREDENTIALS", 1)
    book = NameBook(tmp_path)
    one, two = book.hidden(request("a", 0, "key:1")), book.hidden(request("a", 0, "key:2"))
    assert book.hidden(request("b")) == request("b")
    assert shown_by(tmp_path)(one) == request("a", 0, "key:1")
    assert PSEUDONYM.fullmatch(str(shown_by(tmp_path)(two).fields["principal"]))


def test_a_disk_that_takes_no_key_takes_no_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written in clear for want of room for a key; once there is room, the entry is written."""
    log = open_log(tmp_path, pseudonyms=True)

    def full(*_given: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(names, "write_whole", full)
        with pytest.raises(AuditWriteError, match="No space left"):
            log.append([(1, request("alpha"))])
    log.append([(1, request("alpha"))])
    log.close()
    assert [shown_by(tmp_path)(one) for one in entries(tmp_path)] == [request("alpha")]


def test_a_key_that_cannot_be_destroyed_is_used_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the disk does not take it no other key is written over the file, which would leave the old one's bytes on
    the disk with nothing that overwrites them; the next order finds the same key, and destroys it (control)."""
    book = NameBook(tmp_path)
    before = book.hidden(request("alpha"))

    def refuses(_path: Path) -> bool:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(names, "destroy", refuses)
        with pytest.raises(OSError, match="Input/output"):
            book.forget("alpha")
    assert book.hidden(request("alpha")) == before
    book.forget("alpha")
    assert not (tmp_path / names.FOLDER / "alpha").exists()
    assert book.hidden(request("alpha")) != before


def used(book: UsageBook) -> dict[str, int]:
    """Requests by tenant, as the book has them."""
    rows = book._connection.execute("SELECT tenant, SUM(requests) FROM used GROUP BY tenant")
    return dict(rows.fetchall())


def test_the_usage_book_follows(tmp_path: Path) -> None:
    """A book that is made from the log counts names, after a shred a pseudonym; one that was there has the same after
    it was told, and keeps what the month's limit needs. Its file has the name no more but for that."""
    log = open_log(tmp_path, pseudonyms=True)
    log.append([(40 * 86_400_000, request(tenant, number)) for tenant in ("alpha", "beta") for number in range(3)])
    book, _ = open_book(tmp_path)
    replay(book, tmp_path, log.name)
    assert used(book) == {"alpha": 3, "beta": 3}
    pseudonym = log.names.pseudonym("alpha")
    book.rename(40 * 86_400, "alpha", pseudonym)
    log.names.forget("alpha")
    assert used(book) == {pseudonym: 3, "beta": 3}
    assert book.spent(40 * 86_400, ["alpha"])["alpha"].month == 3
    book.rename(80 * 86_400, "alpha", pseudonym)
    assert book.spent(40 * 86_400, ["alpha"]) == {}
    book.close()
    path = tmp_path / "usage" / "usage.db"
    assert b"alpha" not in path.read_bytes()
    path.unlink()
    again, _ = open_book(tmp_path)
    replay(again, tmp_path, log.name)
    assert used(again) == {pseudonym: 3, "beta": 3}
    again.close()
    log.close()
