"""The store of files and batches: pieces, lines, results, charges once, what a shred leaves, and bounds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.common.audit.entry import to_wire
from appliance.common.batches import messages as m
from appliance.common.batches.values import (
    FILE_KEEP_S,
    MAX_FILES,
    MAX_LINE_BYTES,
    MAX_LINES,
    MAX_OPEN_BATCHES,
    MAX_PROMPTS,
    PIECE_BYTES,
    LineProblem,
    line_request,
)
from appliance.common.errors import ControlError, StoreError
from appliance.supervisor.batches.book import NAME, SCHEMA
from appliance.supervisor.batches.store import BatchStore, open_store
from isolation.keys.keyring import Keyring
from tests.appliance.common.audit.entries import filled

MOST = 1 << 40
DAY_S = 86_400
NONE_OPEN = {"oldest_s": 0, "max_bytes": MOST}


class Store:
    """A store, its clock, and its calls in short."""

    def __init__(self, folder: Path, most: int = MOST) -> None:
        self.folder, self.most, self.now = folder, most, 1_800_000_000.0
        self.open()

    def open(self) -> None:
        self.keyring = Keyring(self.folder / "keys", bytes(32))
        self.store: BatchStore = open_store(self.folder / "kept", self.keyring, self.most, lambda: self.now)

    def reopen(self) -> None:
        """As after a restart."""
        self.close()
        self.open()

    def close(self) -> None:
        self.store.close()
        self.keyring.close()

    def call(self, message: m.StoreCall, payload: bytes = b"") -> m.StoreAnswer:
        """The answer to one call."""
        return self.answer(message, payload).message  # type: ignore[return-value]

    def answer(self, message: m.StoreCall, payload: bytes = b"") -> m.StoreFrame:
        sent = m.decode_frame(*parts(m.encode_frame(m.StoreFrame(7, message, payload))))
        (answer,) = self.store.answer([sent])
        assert answer.call == 7
        return m.decode_frame(*parts(m.encode_frame(answer)))

    def refusal(self, message: m.StoreCall, payload: bytes = b"") -> str:
        answer = self.call(message, payload)
        assert isinstance(answer, m.StoreRefused), answer
        assert answer.reason in m.REFUSALS
        return answer.reason

    def upload(self, data: bytes, tenant: str = "alpha", name: str = "in.jsonl", keep_s: int = 0) -> str:
        """Keep a file; gives its id."""
        begun = self.call(m.BeginUpload(tenant, f"key:{tenant}", name, MOST))
        assert isinstance(begun, m.UploadBegun)
        for at in range(0, len(data), PIECE_BYTES):
            assert self.call(m.UploadPiece(begun.file), data[at : at + PIECE_BYTES]) == m.Accepted()
        found = self.call(m.EndUpload(begun.file, keep_s))
        assert isinstance(found, m.FileFound)
        assert (found.file.name, found.file.size, found.file.purpose) == (name, len(data), "batch")
        return begun.file

    def content(self, file: str, tenant: str = "alpha") -> bytes:
        """All bytes of a file."""
        texts, after = [], 0
        while True:
            answer = self.answer(m.FileRead(tenant, file, after))
            assert isinstance(answer.message, m.FileBytes), answer
            texts.append(answer.payload)
            after = answer.message.after
            if answer.message.last:
                return b"".join(texts)

    def batch(self, file: str, tenant: str = "alpha", **metadata: str) -> m.StoredBatch:
        answer = self.call(m.BeginBatch(tenant, f"key:{tenant}", file, "/v1/completions", DAY_S, metadata))
        assert isinstance(answer, m.BatchFound), answer
        return answer.batch

    def find(self, batch: str, tenant: str = "alpha") -> m.StoredBatch:
        answer = self.call(m.BatchQuery(tenant, batch))
        assert isinstance(answer, m.BatchFound), answer
        return answer.batch

    def lines(self, batch: str, after: int = 0, count: int = 64) -> tuple[m.LinesFound, list[bytes]]:
        answer = self.answer(m.LineQuery(batch, after, count))
        assert isinstance(answer.message, m.LinesFound), answer
        texts, at = [], 0
        for size in answer.message.sizes:
            texts.append(answer.payload[at : at + size])
            at += size
        return answer.message, texts

    def entries(self) -> list[dict[str, object]]:
        """Entries that wait for the log."""
        return [{"kind": one.kind, **one.fields} for _, _, one in self.store.book.pending(-1)]


def parts(frame: bytes) -> tuple[bytes, bytes]:
    """Header and payload of a frame."""
    header, payload = m.LENGTHS.unpack(frame[: m.LENGTHS.size])
    text = frame[m.LENGTHS.size :][:header]
    data = frame[m.LENGTHS.size + header :]
    assert len(data) == payload
    return text, data


def charge(batch: str, line: int, tenant: str = "alpha", prompt: int = 0, **fields: object) -> str:
    """The entry of a line's request."""
    known = {"request": line_request(batch, line, prompt), "tenant": tenant, "operation": "chat", "outcome": "OK"}
    sums = {"input_tokens": 3, "output_tokens": 2, "cost": 5, "batch": batch}
    return to_wire(filled("request", "", **{**known, **sums, **fields}))  # type: ignore[arg-type]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A store of its own."""
    made = Store(tmp_path)
    yield made
    made.close()


THREE = b'{"a": 1}\n\n  \t\r\n{"b": 2}\r\n{"c": 3}'
"""Lines 1, 4 and 5 have something in them."""


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 17])
def test_a_file_comes_back_as_it_went_in(store: Store, size: int) -> None:
    """Files of no byte, of a piece, and of a little more or less; the book's own file holds nothing of them."""
    data = ((b"furnace " * 4_000 + b"\n") * (size // 32_001 + 1))[:size]
    file = store.upload(data, name="secret-name.jsonl")
    assert store.content(file) == data
    store.reopen()
    assert store.content(file) == data
    on_disk = b"".join(path.read_bytes() for path in (store.folder / "kept").iterdir())
    assert b"furnace" not in on_disk
    assert b"secret-name" not in on_disk
    assert file.encode() in on_disk  # The control: ids can be read there.


def test_lines_are_found_across_pieces_with_their_numbers(store: Store) -> None:
    """Blank lines are no requests and are counted; a line may lie in two pieces; the last needs no end."""
    batch = store.batch(store.upload(THREE))
    found, texts = store.lines(batch.id)
    assert (found.lines, found.last, batch.total) == ([1, 4, 5], 1, 3)
    assert [json.loads(text) for text in texts] == [{"a": 1}, {"b": 2}, {"c": 3}]
    long = b"x" * (PIECE_BYTES - 3)
    wide = store.batch(store.upload(long + b"\n" + b"y" * 40 + b"\n" + long + b"\n"))
    for number, line, last in ((1, long, 0), (2, b"y" * 40, 0), (3, long, 1)):
        found, texts = store.lines(wide.id, number - 1, 2)
        assert (found.lines, found.last, texts) == ([number], last, [line]), "a piece's bytes are given together"


def test_others_find_nothing(store: Store) -> None:
    """Files and batches of another tenant are like unknown ones for every call; their owner (control) finds them."""
    file = store.upload(THREE)
    batch = store.batch(file)
    for name in (file, "file-none"):
        assert store.refusal(m.FileQuery("beta", name)) == "unknown"
        assert store.refusal(m.FileRead("beta", name, 0)) == "unknown"
        assert store.refusal(m.FileDelete("beta", name, "key:beta")) == "unknown"
        assert store.refusal(m.FileList("beta", "", name, 10, 0)) == "unknown_after"
        assert store.refusal(m.BeginBatch("beta", "key:beta", name, "/v1/completions", DAY_S, {})) == "unknown"
    for name in (batch.id, "batch_none"):
        assert store.refusal(m.BatchQuery("beta", name)) == "unknown"
        assert store.refusal(m.BatchCancel("beta", name, "key:beta")) == "unknown"
        assert store.refusal(m.BatchList("beta", name, 10)) == "unknown_after"
    assert store.call(m.FileList("beta", "", "", 10, 0)) == m.FilesFound([], 0)
    assert store.call(m.BatchList("beta", "", 10)) == m.BatchesFound([], 0)
    assert store.find(batch.id).id == batch.id


def test_pages(store: Store) -> None:
    """Newest first, or oldest first, behind an id, as many as asked for."""
    files = [store.upload(b"%d" % number) for number in range(5)]
    newest = store.call(m.FileList("alpha", "", "", 2, 0))
    assert isinstance(newest, m.FilesFound)
    assert ([one.id for one in newest.files], newest.more) == ([files[4], files[3]], 1)
    rest = store.call(m.FileList("alpha", "batch", files[3], 10, 0))
    assert isinstance(rest, m.FilesFound)
    assert ([one.id for one in rest.files], rest.more) == ([files[2], files[1], files[0]], 0)
    oldest = store.call(m.FileList("alpha", "", files[0], 1, 1))
    assert isinstance(oldest, m.FilesFound)
    assert ([one.id for one in oldest.files], oldest.more) == ([files[1]], 1)
    assert store.call(m.FileList("alpha", "batch_output", "", 9, 0)) == m.FilesFound([], 0)
    batches = [store.batch(files[0], number=str(number)) for number in range(3)]
    page = store.call(m.BatchList("alpha", batches[2].id, 1))
    assert isinstance(page, m.BatchesFound)
    assert ([one.id for one in page.batches], page.more) == ([batches[1].id], 1)
    assert page.batches[0].metadata == {"number": "1"}


def test_each_line_is_answered_and_charged_once(store: Store) -> None:
    """A second result of a line changes nothing, across a restart too; the last one ends the batch, and the results
    are files in the lines' order."""
    batch = store.batch(store.upload(THREE), team="blue")
    assert store.find(batch.id).status == "validating"
    store.call(m.BatchChecked(batch.id, []))
    for again in range(2):
        answer = store.call(m.LineResult(batch.id, 5, 1, [charge(batch.id, 5)]), b"five %d\n" % again)
        assert answer == m.Accepted()
    store.reopen()
    store.call(m.LineResult(batch.id, 5, 0, [charge(batch.id, 5, cost=9)]), b"five, again\n")
    assert store.lines(batch.id)[0].lines == [1, 4]
    store.call(m.LineResult(batch.id, 4, 0, []), b"four is wrong\n")
    found = store.find(batch.id)
    assert (found.status, found.total, found.completed, found.failed) == ("in_progress", 3, 1, 1)
    store.call(m.LineResult(batch.id, 1, 1, [charge(batch.id, 1)]), b"one\n")
    done = store.find(batch.id)
    assert (done.status, done.completed, done.failed, done.metadata) == ("completed", 2, 1, {"team": "blue"})
    assert store.content(done.output_file) == b"one\nfive 0\n"
    assert store.content(done.error_file) == b"four is wrong\n"
    charged = [one for one in store.entries() if one["kind"] == "request"]
    assert [one["request"] for one in charged] == [f"{batch.id}-5", f"{batch.id}-1"]
    assert [one["event"] for one in store.entries() if one["kind"] == "batch"] == ["created", "completed"]
    store.call(m.LineResult(batch.id, 1, 1, [charge(batch.id, 1)]), b"late\n")
    assert store.content(done.output_file) == b"one\nfive 0\n"


def test_a_gateway_cannot_charge_others(store: Store) -> None:
    """An entry of another request, tenant, batch or kind, and a result of no line, are refused; nothing is taken."""
    batch = store.batch(store.upload(THREE))
    mine = charge(batch.id, 1)
    wrong = [charge(batch.id, 4), charge(batch.id, 1, "beta"), charge("batch_other", 1), "no entry", mine]
    wrong += [charge(batch.id, 1, prompt=MAX_PROMPTS), charge(batch.id, 4, prompt=1)]
    for text in wrong:
        with pytest.raises(ControlError):
            store.call(m.LineResult(batch.id, 1, 1, [mine, text]), b"x\n")
    with pytest.raises(ControlError):
        store.call(m.LineResult(batch.id, 2, 1, []), b"x\n")
    assert [one["kind"] for one in store.entries()] == ["file", "batch"]
    assert store.call(m.LineResult(batch.id, 1, 1, [charge(batch.id, 1)]), b"x\n") == m.Accepted()


def test_a_line_of_several_prompts_is_charged_for_each_once(store: Store) -> None:
    """Its result comes with an entry for each prompt, all or none; a second result changes nothing."""
    batch = store.batch(store.upload(THREE))
    entries = [charge(batch.id, 1, prompt=prompt) for prompt in range(MAX_PROMPTS)]
    for cost in (5, 9):
        again = [charge(batch.id, 1, prompt=prompt, cost=cost) for prompt in range(MAX_PROMPTS)]
        assert store.call(m.LineResult(batch.id, 1, 1, again), b"x\n") == m.Accepted()
    charged = [one for one in store.entries() if one["kind"] == "request"]
    wanted = [line_request(batch.id, 1, prompt) for prompt in range(MAX_PROMPTS)]
    assert [(one["request"], one["cost"]) for one in charged] == [(name, 5) for name in wanted]
    assert len(set(entries)) == MAX_PROMPTS


def test_cancelled_expired_and_refused_batches(store: Store) -> None:
    """A cancelled batch keeps the results that it has; the window's end is its state once each line has one; a file
    with problems makes a failed batch that has none."""
    file = store.upload(THREE)
    one, two, three = (store.batch(file) for _ in range(3))
    store.call(m.BatchChecked(one.id, []))
    store.call(m.LineResult(one.id, 1, 1, []), b"one\n")
    assert isinstance(store.call(m.BatchCancel("alpha", one.id, "key:alpha")), m.BatchFound)
    store.call(m.LineResult(one.id, 4, 1, []), b"four\n")
    store.call(m.BatchEnd(one.id, "cancelled"))
    found = store.find(one.id)
    assert (found.status, found.completed, found.error_file) == ("cancelled", 2, "")
    assert store.content(found.output_file) == b"one\nfour\n"
    assert store.refusal(m.BatchCancel("alpha", one.id, "key:alpha")) == "over"
    store.call(m.BatchChecked(two.id, []))
    store.call(m.BatchEnd(two.id, "expired"))
    assert store.find(two.id).status == "in_progress"
    for line in (1, 4, 5):
        store.call(m.LineResult(two.id, line, 0, []), b"late\n")
    assert store.find(two.id).status == "expired"
    problem = LineProblem("invalid_json_line", "not JSON", 4, "custom_id")
    store.call(m.BatchChecked(three.id, [problem]))
    assert (store.find(three.id).status, store.find(three.id).problems) == ("failed", [problem])
    listed = store.call(m.OpenBatches())
    assert listed == m.BatchesFound([], 0)


def test_bounds(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines, their lengths, bytes of tenant and appliance, files and batches: one more is refused with its reason, and
    what was refused leaves nothing; one less (control) is taken."""
    from appliance.supervisor.batches import files as module
    from appliance.supervisor.batches import lines as batches_module

    assert (MAX_LINES, MAX_FILES, MAX_OPEN_BATCHES) == (50_000, 1_000, 32)
    begun = store.call(m.BeginUpload("alpha", "key:alpha", "x", 10))
    assert isinstance(begun, m.UploadBegun)
    assert store.refusal(m.UploadPiece(begun.file), b"12345678901") == "tenant_full"
    assert store.refusal(m.EndUpload(begun.file, 0)) == "unknown"
    line = b"x" * PIECE_BYTES
    begun = store.call(m.BeginUpload("alpha", "key:alpha", "x", MOST))
    for _ in range(MAX_LINE_BYTES // PIECE_BYTES):
        assert store.call(m.UploadPiece(begun.file), line) == m.Accepted()  # type: ignore[union-attr]
    assert store.refusal(m.UploadPiece(begun.file), b"x") == "line_too_long"  # type: ignore[union-attr]
    monkeypatch.setattr(module, "MAX_LINES", 3)
    store.upload(b"a\nb\nc\n")
    begun = store.call(m.BeginUpload("alpha", "key:alpha", "x", MOST))
    assert store.refusal(m.UploadPiece(begun.file), b"a\nb\nc\nd\n") == "too_many_lines"  # type: ignore[union-attr]
    monkeypatch.setattr(module, "MAX_FILES", 2)
    file = store.upload(b"a")
    assert store.refusal(m.BeginUpload("alpha", "key:alpha", "x", MOST)) == "too_many_files"
    monkeypatch.setattr(batches_module, "MAX_OPEN_BATCHES", 1)
    store.batch(file)
    assert store.refusal(m.BeginBatch("alpha", "k", file, "/v1/completions", DAY_S, {})) == "too_many_batches"
    assert store.refusal(m.FileDelete("alpha", file, "key:alpha")) == "in_use"
    assert store.store.figures()["bytes"] == 7
    store.close()
    store.most = 10
    store.open()
    begun = store.call(m.BeginUpload("beta", "key:beta", "x", MOST))
    assert store.refusal(m.UploadPiece(begun.file), b"1234") == "appliance_full"  # type: ignore[union-attr]


def test_a_shred_overwrites_ids_in_the_books_files(store: Store) -> None:
    """Once the log has the entries, a file's id is in no page of the book and not in its write-ahead log; another
    tenant's is (control)."""
    ids = [store.upload(b"x"), store.upload(b"x", tenant="beta")]

    def found() -> list[bool]:
        files = [path.read_bytes() for path in (store.folder / "kept").iterdir()]
        return [any(one.encode() in data for data in files) for one in ids]

    store.store.book.note_logged([key for key, _, _ in store.store.book.pending(-1)], "log", 2)
    assert found() == [True, True]
    store.store.shred("alpha")
    store.store.book.note_logged([key for key, _, _ in store.store.book.pending(-1)], "log", 2)
    assert found() == [False, True]


def test_a_shred_leaves_nothing(store: Store) -> None:
    """After a shred a tenant's files and batches are gone, and a copy of the book from before opens to nobody; those of
    another tenant stay."""
    file, kept = store.upload(THREE), store.upload(b"beta's", "beta")
    batch = store.batch(file)
    store.call(m.LineResult(batch.id, 1, 1, []), b"one\n")
    store.store.book._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    copy = (store.folder / "kept" / NAME).read_bytes()
    assert store.store.shred("alpha") == 2
    assert store.refusal(m.FileQuery("alpha", file)) == "unknown"
    assert store.refusal(m.BatchQuery("alpha", batch.id)) == "unknown"
    assert store.content(kept, "beta") == b"beta's"
    store.close()
    for path in (store.folder / "kept").iterdir():
        path.unlink()
    (store.folder / "kept" / NAME).write_bytes(copy)
    store.open()
    assert store.store.forgotten == 2
    assert store.refusal(m.FileRead("alpha", file, 0)) == "unknown"
    assert store.content(kept, "beta") == b"beta's"
    again = store.upload(b"new", "alpha")
    assert store.content(again) == b"new"


def test_time_removes_files_and_batches(store: Store) -> None:
    """A file goes when its time is over, unless a batch reads it; a batch and its results thirty days after its end."""
    short = store.upload(THREE, keep_s=3_600)
    batch = store.batch(short)
    store.now += 3_600
    store.store.tidy()
    assert isinstance(store.call(m.FileQuery("alpha", short)), m.FileFound)
    store.call(m.BatchChecked(batch.id, []))
    for line in (1, 4, 5):
        store.call(m.LineResult(batch.id, line, 1, []), b"x\n")
    store.store.tidy()
    assert store.refusal(m.FileQuery("alpha", short)) == "unknown"
    output = store.find(batch.id).output_file
    store.now += FILE_KEEP_S - 1
    store.store.tidy()
    assert store.content(output) == b"x\n" * 3
    store.now += 1
    store.store.tidy()
    store.store.tidy()
    assert store.refusal(m.FileQuery("alpha", output)) == "unknown"
    assert store.refusal(m.BatchQuery("alpha", batch.id)) == "unknown"
    assert store.store.figures() == {
        "files": 0,
        "bytes": 0,
        "open_batches": 0,
        "waiting_lines": 0,
        "responses": 0,
        **NONE_OPEN,
    }


def test_a_restart_forgets_half_an_upload(store: Store) -> None:
    """An upload that nobody goes on with is gone, with its bytes; whole files (control) stay."""
    file = store.upload(b"whole")
    begun = store.call(m.BeginUpload("alpha", "key:alpha", "half", MOST))
    store.call(m.UploadPiece(begun.file), b"x" * PIECE_BYTES)  # type: ignore[union-attr]
    store.reopen()
    assert store.store.figures() == {
        "files": 1,
        "bytes": 5,
        "open_batches": 0,
        "waiting_lines": 0,
        "responses": 0,
        **NONE_OPEN,
    }
    assert store.content(file) == b"whole"
    assert store.refusal(m.UploadPiece(begun.file), b"x") == "unknown"  # type: ignore[union-attr]


def test_a_damaged_or_newer_book_is_refused_with_a_remedy(store: Store) -> None:
    """What is no book says so, and that it may be moved away; one of a later version names the version."""
    store.store.book._connection.execute(f"PRAGMA user_version = {SCHEMA + 1}")
    store.close()
    ring = Keyring(store.folder / "keys", bytes(32))
    with pytest.raises(StoreError, match="newer version"):
        open_store(store.folder / "kept", ring, MOST)
    for path in (store.folder / "kept").iterdir():
        path.unlink()
    (store.folder / "kept" / NAME).write_bytes(b"no book at all" * 1_000)
    with pytest.raises(StoreError, match="move it away"):
        open_store(store.folder / "kept", ring, MOST)
    ring.close()
    (store.folder / "kept" / NAME).unlink()
    store.open()


@pytest.mark.parametrize(
    "header",
    [
        *(b"", b"[]", b"{}", b'{"call":1,"type":"Nothing"}', b'{"call":"1","type":"OpenBatches"}'),
        *(b'{"call":1,"type":"OpenBatches","more":1}', b'{"call":1,"type":"UploadPiece","file":1}'),
        b'{"call":1,"type":"BeginBatch","tenant":"a","principal":"b","file":"c","endpoint":"d","window_s":1,'
        b'"metadata":{"a":1}}',
    ],
)
def test_malformed_frames_are_refused(header: bytes) -> None:
    """Headers that are not one of the messages, to the letter."""
    with pytest.raises(ControlError):
        m.decode_frame(header, b"")
    with pytest.raises(ControlError):
        m.check_lengths(m.MAX_HEADER_BYTES + 1, 0)
    with pytest.raises(ControlError):
        m.check_lengths(1, m.MAX_PAYLOAD_BYTES + 1)
    m.check_lengths(m.MAX_HEADER_BYTES, m.MAX_PAYLOAD_BYTES)


def test_a_key_makes_one_batch(store: Store) -> None:
    """A call that is sent again with its key gets the batch that it made, also after a restart, beyond the number of
    batches that a tenant may have; other values are refused. Another tenant's same key, another key, and none make
    batches of their own (controls). The key goes with its batch, and is nowhere in the clear."""
    file = store.upload(b"{}\n")
    first = m.BeginBatch("alpha", "key:alpha", file, "/v1/completions", DAY_S, {"a": "b"}, "00ff")
    made = store.call(first)
    assert isinstance(made, m.BatchFound)
    store.reopen()
    store.now += 60
    assert store.call(first) == made
    assert store.refusal(replace(first, metadata={})) == "other_batch"
    others = [store.call(replace(first, key=key)) for key in ("", "", "00fe")]
    theirs = store.call(replace(first, tenant="beta", file=store.upload(b"{}\n", "beta")))
    ids = {one.batch.id for one in (made, theirs, *others)}  # type: ignore[union-attr]
    assert len(ids) == 5
    for _ in range(MAX_OPEN_BATCHES - 4):
        store.batch(file)
    assert store.refusal(replace(first, key="00fd")) == "too_many_batches"
    assert store.call(first) == made
    assert b"00ff" not in (store.folder / "kept" / NAME).read_bytes()
    with store.store.book.change() as connection:
        store.store._batches.remove(connection, made.batch.id)
    again = store.call(first)
    assert isinstance(again, m.BatchFound) and again.batch.id not in ids
    with store.store.book.change() as connection:  # as an earlier release does, which knows no keys
        connection.execute("DELETE FROM batches WHERE id = ?", (again.batch.id,))
    anew = store.call(first)
    assert isinstance(anew, m.BatchFound) and anew.batch.id != again.batch.id
    assert store.call(first) == anew
