"""Stored responses in the book: whose they are, bounds, entries for the audit log, time, and what a shred leaves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.common.batches import messages as m
from appliance.common.batches import values
from appliance.common.batches.values import DAY_S, MAX_RESPONSE_BYTES, RESPONSE_KEEP_S
from appliance.common.errors import ControlError
from appliance.supervisor.batches import responses as module
from tests.appliance.supervisor.batches.test_store import MOST, Store

DOCUMENT = b"furnace " * 2_000


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A store of its own."""
    made = Store(tmp_path)
    yield made
    made.close()


def keep(store: Store, response: str = "resp_1", tenant: str = "alpha", most: int = MOST) -> m.StoreAnswer:
    """Keep the document."""
    return store.call(m.ResponseKeep(tenant, f"key:{tenant}", response, most), DOCUMENT)


def read(store: Store, response: str = "resp_1", tenant: str = "alpha") -> bytes | str:
    """What a tenant reads, or why not."""
    answer = store.answer(m.ResponseRead(tenant, response, f"key:{tenant}"))
    return answer.message.reason if isinstance(answer.message, m.StoreRefused) else answer.payload


def test_it_is_read_by_its_tenant_alone_and_not_on_the_disk(store: Store) -> None:
    """Over a restart too; another tenant neither reads nor deletes it, nor takes its id. The book's file holds nothing
    of the text. Control: the id can be read there."""
    assert keep(store) == m.Accepted()
    store.reopen()
    assert (read(store), read(store, tenant="beta"), read(store, "resp_2")) == (DOCUMENT, "unknown", "unknown")
    assert store.refusal(m.ResponseDelete("beta", "resp_1", "key:beta")) == "unknown"
    assert store.refusal(m.ResponseKeep("beta", "key:beta", "resp_1", MOST), b"x") == "in_use"
    assert read(store) == DOCUMENT
    on_disk = b"".join(path.read_bytes() for path in (store.folder / "kept").iterdir())
    assert b"furnace" not in on_disk and b"resp_1" in on_disk


def test_the_audit_log_is_told_reads_once_a_day(store: Store) -> None:
    """Kept, read on two days, deleted: an entry each, with the credential and the bytes, however often it was read."""
    keep(store)
    for _ in range(2):
        assert [read(store) for _ in range(5)] == [DOCUMENT] * 5
        store.now += DAY_S
    assert store.call(m.ResponseDelete("alpha", "resp_1", "key:alpha")) == m.Accepted()
    assert read(store) == "unknown"
    told = [(one["kind"], one["event"], one["principal"], one["bytes"]) for one in store.entries()]
    assert told == [("response", event, "key:alpha", len(DOCUMENT)) for event in ("kept", "read", "read", "deleted")]
    assert store.store.figures()["bytes"] == 0


def test_it_goes_after_its_time(store: Store) -> None:
    """Not read any more from the second on at which its time is over, and then removed."""
    keep(store)
    store.now += RESPONSE_KEEP_S - 1
    assert read(store) == DOCUMENT
    store.now += 1
    assert read(store) == "unknown"
    store.store.tidy()
    assert store.entries()[-1]["event"] == "expired"
    assert {name: store.store.figures()[name] for name in ("responses", "bytes")} == {"responses": 0, "bytes": 0}


def test_bounds(store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Bytes of the tenant together with its files, bytes of all tenants, and the number; nothing of what is refused is
    counted. What no gateway sends ends the socket."""
    assert keep(store, most=len(DOCUMENT) - 1) == m.StoreRefused("tenant_full", len(DOCUMENT) - 1)
    store.upload(b"x")
    assert keep(store, most=len(DOCUMENT)) == m.StoreRefused("tenant_full", len(DOCUMENT))
    monkeypatch.setattr(module, "MAX_RESPONSES", 2)
    for number in (1, 2):
        assert keep(store, f"resp_{number}") == m.Accepted()
    assert keep(store, "resp_3") == m.StoreRefused("too_many_responses", 2)
    assert keep(store, "resp_3", "beta") == m.Accepted()
    small = Store(tmp_path / "small", len(DOCUMENT) + 1)
    assert [keep(small), keep(small, "resp_2", "beta")] == [m.Accepted(), m.StoreRefused("appliance_full")]
    small.close()
    for response, size in (("", 1), ("r" * (values.MAX_RESPONSE_ID_CHARS + 1), 1), ("resp_9", MAX_RESPONSE_BYTES + 1)):
        with pytest.raises(ControlError):
            store.call(m.ResponseKeep("alpha", "key:alpha", response, MOST), bytes(size))


def test_a_shred_leaves_nothing_of_one_tenant(store: Store) -> None:
    """Responses of the tenant are gone and its bytes free; another's are read. So it is where the key was destroyed
    while no supervisor ran, and where nothing of the tenant may be kept any more."""
    for tenant in ("alpha", "beta"):
        keep(store, f"resp_{tenant}", tenant)
    assert store.store.shred("alpha") == 1
    assert (read(store, "resp_alpha"), read(store, "resp_beta", "beta")) == ("unknown", DOCUMENT)
    keep(store, "resp_new")
    store.store.book.shred("alpha")
    assert read(store, "resp_new") == "failing"
    store.reopen()
    assert (store.store.forgotten, read(store, "resp_new")) == (1, "unknown")
    store.call(m.ForgetTenants(["beta"]))
    assert read(store, "resp_beta", "beta") == "unknown"
    assert store.store.figures()["bytes"] == 0
