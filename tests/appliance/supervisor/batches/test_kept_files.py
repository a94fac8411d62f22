"""Files that no batch reads, and results that go sooner than others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from appliance.common.batches import messages as m
from appliance.common.batches.values import DAY_S, MAX_LINE_BYTES, PIECE_BYTES
from appliance.common.errors import ControlError
from tests.appliance.supervisor.batches.test_store import MOST, THREE, Store, store

__all__ = ["store"]


def test_results_go_when_their_batch_says_so(store: Store) -> None:
    """Results of a batch that asks for an hour are gone behind it, where those of another stay (the control); the same
    call again under one key is the same batch, and with another time is refused. Nobody asks for less than an hour."""
    ends = []
    for keep_s in (3_600, 0):
        asked = m.BeginBatch(
            "alpha", "key:alpha", store.upload(THREE), "/v1/completions", DAY_S, {}, f"0{keep_s}", keep_s
        )
        made = store.call(asked)
        assert isinstance(made, m.BatchFound) and store.call(asked) == made
        assert store.refusal(replace(asked, output_keep_s=7_200)) == "other_batch"
        store.call(m.BatchChecked(made.batch.id, []))
        for line in (1, 4, 5):
            store.call(m.LineResult(made.batch.id, line, 1, []), b"x\n")
        ends.append(store.find(made.batch.id).output_file)
    store.now += 3_600
    store.store.tidy()
    assert store.refusal(m.FileQuery("alpha", ends[0])) == "unknown"
    assert store.content(ends[1]) == b"x\n" * 3
    with pytest.raises(ControlError):
        store.store.answer([m.StoreFrame(1, replace(asked, key="", output_keep_s=60), b"")])


def test_files_of_other_purposes_are_kept_and_no_batch_reads_them(store: Store) -> None:
    """A file without lines, longer than a line may be, is kept for another purpose, found under it and given back; it
    counts as a file and its bytes count. As requests of a batch (control) it is refused, and so is a batch of it."""
    data = bytes(range(11, 256)) * ((MAX_LINE_BYTES // 245) + 2)
    data = data.replace(b"\n", b"")
    begun = store.call(m.BeginUpload("alpha", "key:alpha", "a.bin", MOST, 0))
    assert isinstance(begun, m.UploadBegun)
    for at in range(0, len(data), PIECE_BYTES):
        assert store.call(m.UploadPiece(begun.file), data[at : at + PIECE_BYTES]) == m.Accepted()
    found = store.call(m.EndUpload(begun.file, 0, "assistants"))
    assert isinstance(found, m.FileFound) and (found.file.purpose, found.file.size) == ("assistants", len(data))
    assert store.content(begun.file) == data
    lists = [store.call(m.FileList("alpha", purpose, "", 10, 0)) for purpose in ("assistants", "batch", "vision")]
    assert [len(one.files) for one in lists] == [1, 0, 0]  # type: ignore[union-attr]
    assert store.refusal(m.BeginBatch("alpha", "k", begun.file, "/v1/completions", DAY_S, {})) == "unknown"
    assert store.store.figures()["files"] == 1 and store.store.figures()["bytes"] == len(data)
    control = store.call(m.BeginUpload("alpha", "key:alpha", "a.bin", MOST))
    assert isinstance(control, m.UploadBegun)
    pieces = [data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES)]
    answers = [store.call(m.UploadPiece(control.file), piece) for piece in pieces]
    assert any(isinstance(one, m.StoreRefused) and one.reason == "line_too_long" for one in answers)
    late = store.call(m.BeginUpload("alpha", "key:alpha", "b.bin", MOST, 0))
    assert isinstance(late, m.UploadBegun)
    with pytest.raises(ControlError, match="purpose"):
        store.store.answer([m.StoreFrame(1, m.EndUpload(late.file, 0, "batch"), b"")])
