"""Entries on their way from the book to the audit log: each is there once, whenever the way was cut."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from appliance.common.audit import files
from appliance.common.audit.entry import Entry, from_line
from appliance.common.audit.log import AuditLog, open_log
from appliance.common.batches import messages as m
from appliance.supervisor.audit import Recorder
from appliance.supervisor.batches.outbox import GROUP, Outbox
from tests.appliance.supervisor.batches.test_store import THREE, Store, charge

LINES = (1, 4, 5)


def logged(folder: Path) -> Counter[str]:
    """Kinds and ids of the entries in the log."""
    found: Counter[str] = Counter()
    for path in files.segment_paths(folder):
        for line in files.read_segment(path).lines:
            one = from_line(line)[2]
            if one.kind in ("request", "file", "batch"):
                found[f"{one.kind} {one.fields.get('request') or one.fields.get('event')}"] += 1
    return found


class Cut(Exception):
    """The process was killed here."""


@pytest.mark.parametrize("place", ["before", "after", "never"])
async def test_a_kill_between_log_and_book_writes_nothing_twice(tmp_path: Path, place: str) -> None:
    """The writing is cut before the log has a group, or after it has it and before the book knows: the next start
    writes what is missing and nothing else; uncut (control) nothing is left."""
    store = Store(tmp_path)
    batch = store.batch(store.upload(THREE))
    store.call(m.BatchChecked(batch.id, []))
    audit = open_log(tmp_path / "audit")
    recorder = Recorder(audit, lambda _state: None)
    box = Outbox(store.store.book, audit.name, recorder.append)
    assert box.reconcile(tmp_path / "audit", audit.size) == 0
    assert await box.flush()
    for line in LINES:
        store.call(m.LineResult(batch.id, line, 1, [charge(batch.id, line)]), b"x\n")

    async def cut(group: object) -> int | None:
        if place == "before":
            raise Cut
        size = await recorder.append(group)  # type: ignore[arg-type]
        if place == "after":
            raise Cut
        return size

    broken = Outbox(store.store.book, audit.name, cut)
    if place == "never":
        assert await broken.flush()
    else:
        with pytest.raises(Cut):
            await broken.flush()
    await recorder.close()
    store.reopen()
    again: AuditLog = open_log(tmp_path / "audit")
    recorder = Recorder(again, lambda _state: None)
    box = Outbox(store.store.book, again.name, recorder.append)
    known = box.reconcile(tmp_path / "audit", again.size)
    assert known == (4 if place == "after" else 0)
    assert await box.flush()
    await recorder.close()
    found = logged(tmp_path / "audit")
    assert found == {
        "file created": 1,
        "batch created": 1,
        "batch completed": 1,
        **{f"request {batch.id}-{line}": 1 for line in LINES},
    }
    assert store.store.book.pending(GROUP) == []
    store.close()


async def test_two_that_write_at_once_write_nothing_twice(tmp_path: Path) -> None:
    """An order that waits for the entries, beside the turn of every half second, and each is in the log once."""
    store = Store(tmp_path)
    store.upload(b"x")
    audit = open_log(tmp_path / "audit")
    recorder = Recorder(audit, lambda _state: None)
    box = Outbox(store.store.book, audit.name, recorder.append)
    assert await asyncio.gather(box.flush(), box.flush()) == [True, True]
    await recorder.close()
    assert logged(tmp_path / "audit") == {"file created": 1}
    store.close()


async def test_a_log_that_takes_nothing_loses_nothing(tmp_path: Path) -> None:
    """While the log cannot be written entries stay in the book; once it can, they are there."""
    store = Store(tmp_path)
    store.upload(b"x")
    refuses = [True]
    audit = open_log(tmp_path / "audit")
    recorder = Recorder(audit, lambda _state: None)

    async def write(group: object) -> int | None:
        return None if refuses[0] else await recorder.append(group)  # type: ignore[arg-type]

    box = Outbox(store.store.book, audit.name, write)
    assert not await box.flush()
    assert len(store.store.book.pending(GROUP)) == 1
    refuses[0] = False
    assert await box.flush()
    assert store.store.book.pending(GROUP) == []
    await recorder.close()
    assert logged(tmp_path / "audit") == {"file created": 1}
    store.close()


async def test_an_entry_that_an_earlier_release_left_is_written(tmp_path: Path) -> None:
    """An entry that waited in the book while the appliance was upgraded lacks fields that came since: the log takes it,
    and tells of these what an earlier line tells. Control: one with all fields, in the same group."""
    store = Store(tmp_path)
    batch = store.batch(store.upload(THREE))
    store.call(m.BatchChecked(batch.id, []))
    for line in LINES[:2]:
        store.call(m.LineResult(batch.id, line, 1, [charge(batch.id, line)]), b"x\n")
    book = store.store.book
    earlier, *_ = [(key, one) for key, _, one in book.pending(-1) if one.kind == "request"]
    fields = {name: value for name, value in earlier[1].fields.items() if name not in ("cut_rule", "cut_policy")}
    with book.change() as connection:
        connection.execute("DELETE FROM outbox WHERE key = ?", (earlier[0],))
        book.note_entry(connection, earlier[0], Entry("request", fields))
    audit = open_log(tmp_path / "audit")
    recorder = Recorder(audit, lambda _state: None)
    assert await Outbox(book, audit.name, recorder.append).flush()
    await recorder.close()
    found = logged(tmp_path / "audit")
    assert sum(count for name, count in found.items() if name.startswith("request ")) == 2
