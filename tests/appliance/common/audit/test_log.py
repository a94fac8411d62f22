"""The writer of the audit log: batches, crashes at any byte, full disks, segments, damage; judged by the verifier."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path

import pytest

from appliance.common.audit import files, log
from appliance.common.audit.entry import Entry, entry, from_line
from appliance.common.audit.log import AuditLog, AuditWriteError, open_log
from appliance.common.audit.verify import Report, read_verifier, verify
from appliance.common.errors import AuditError


def batch(count: int, start: int = 0) -> list[tuple[int, Entry]]:
    """Entries to be told apart."""
    return [
        (1_000 + number, entry("refused", outcome="X", reason="absent", count=number))
        for number in range(start, start + count)
    ]


def judge(directory: Path, *witnesses: str, archived: bool = False) -> Report:
    """What the verifier says, by the key in the folder."""
    return verify(directory, read_verifier(directory / files.PUBLIC_KEY), list(witnesses), archived=archived)


def written(directory: Path, batches: int = 3) -> AuditLog:
    """A closed log with so many batches of five."""
    audit = open_log(directory)
    for number in range(batches):
        audit.append(batch(5, 5 * number))
    audit.close()
    return audit


def counts(directory: Path) -> list[object]:
    """The counts of all entries, in order."""
    lines = [line for path in files.segment_paths(directory) for line in files.read_segment(path).lines]
    return [from_line(line)[2].fields["count"] for line in lines]


def test_what_is_appended_is_there_and_verifies(tmp_path: Path) -> None:
    """Three batches, closed and opened again, two more: all entries in order, one checkpoint each, whole."""
    written(tmp_path)
    audit = open_log(tmp_path)
    assert [one.fields["detail"] for one in audit.opening] == ["went on"]
    assert audit.size == 15
    audit.append(batch(5, 15))
    audit.close()
    report = judge(tmp_path, audit.checkpoint())
    assert (report.problems, report.entries, report.checkpoints, report.unsigned) == ([], 20, 4, 0)
    assert counts(tmp_path) == list(range(20))


def test_a_segment_is_closed_after_a_day(tmp_path: Path) -> None:
    """An entry a day behind the first one of its segment begins another, also across a restart; one a millisecond
    earlier begins none, and the older segment can be moved away and still be verified, by itself and without it."""
    day = log.SEGMENT_AGE_MS
    audit = open_log(tmp_path / "log")
    audit.append(batch(5))
    audit.append([(1_000 + day - 1, entry("refused", outcome="X", reason="absent", count=5))])
    assert len(files.segment_paths(tmp_path / "log")) == 1
    audit.close()
    audit = open_log(tmp_path / "log")
    audit.append([(1_000 + day, entry("refused", outcome="X", reason="absent", count=6))])
    audit.append([(1_001 + day, entry("refused", outcome="X", reason="absent", count=7))])
    audit.close()
    first, second = files.segment_paths(tmp_path / "log")
    assert (files.read_segment(second).start, counts(tmp_path / "log")) == (6, [*range(8)])
    assert judge(tmp_path / "log").problems == []
    (tmp_path / "archive").mkdir()
    shutil.copy(tmp_path / "log" / files.PUBLIC_KEY, tmp_path / "archive")
    for path in (first, first.with_suffix(files.CHECKPOINT_SUFFIX)):
        path.rename(tmp_path / "archive" / path.name)
    assert judge(tmp_path / "log").problems, "control: without --archived the missing segment is told"
    rest, moved = judge(tmp_path / "log", archived=True), judge(tmp_path / "archive")
    assert (rest.problems, moved.problems, moved.entries) == ([], [], 6)


def test_key_and_files_are_private(tmp_path: Path) -> None:
    """The signing key is its owner's alone, and one open to others is refused; the log is not for others."""
    audit = written(tmp_path / "log")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "log").iterdir()}
    assert modes.pop(files.SIGNING_KEY) == 0o600
    assert all(not mode & 0o007 for mode in modes.values())
    (tmp_path / "log" / files.SIGNING_KEY).chmod(0o640)
    with pytest.raises(AuditError, match="chmod 600"):
        open_log(tmp_path / "log")
    assert audit.size == 15


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    """A second writer is refused, and the verifier knows that the log is written; afterwards both are free."""
    audit = open_log(tmp_path)
    audit.append(batch(1))
    assert judge(tmp_path).live
    with pytest.raises(AuditError, match="another process"):
        open_log(tmp_path)
    audit.close()
    assert not judge(tmp_path).live
    open_log(tmp_path).close()


def test_a_crash_at_any_byte_loses_no_covered_entry(tmp_path: Path) -> None:
    """The newest batch cut off at every byte of either file: the next writer goes on behind what is whole, nothing that
    an earlier checkpoint covers is lost, and the log verifies against that checkpoint."""
    whole = tmp_path / "whole"
    audit = written(whole, 2)
    kept = audit.checkpoint()
    sizes = {path.name: path.stat().st_size for path in whole.iterdir()}
    audit = open_log(whole)
    audit.append(batch(3, 10))
    audit.close()
    for suffix, covered in ((files.LOG_SUFFIX, 10), (files.CHECKPOINT_SUFFIX, 13)):
        name = f"{0:012d}{suffix}"
        for size in range(sizes[name], (whole / name).stat().st_size, 7):
            copy = tmp_path / "copy"
            shutil.copytree(whole, copy)
            os.truncate(copy / name, size)
            if suffix == files.LOG_SUFFIX:
                # What a crash between the two writes leaves: the checkpoint comes after the entries.
                beside = f"{0:012d}{files.CHECKPOINT_SUFFIX}"
                os.truncate(copy / beside, sizes[beside])
            again = open_log(copy)
            assert again.size >= covered
            assert again.opening[0].fields["event"] in ("opened", "recovered")
            again.append([(1, one) for one in again.opening])
            again.close()
            assert judge(copy, kept).problems == []
            shutil.rmtree(copy)


def test_a_segment_whose_header_was_not_written_is_begun_again(tmp_path: Path) -> None:
    """A crash while the next segment was begun: its empty files go, the segment before it goes on."""
    written(tmp_path)
    (tmp_path / f"{15:012d}.log").write_bytes(b'{"audit":1,"na')
    audit = open_log(tmp_path)
    assert audit.size == 15
    audit.append(batch(2, 15))
    audit.close()
    assert judge(tmp_path).problems == []
    assert counts(tmp_path) == list(range(17))


def test_segments_follow_each_other_and_old_ones_may_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full segment is closed and the next begun. Without the oldest the rest verifies, where that is said to be on
    purpose; where it is not, it is a problem, and so is a missing one in the middle."""
    monkeypatch.setattr(log, "SEGMENT_BYTES", 600)
    audit = written(tmp_path, 12)
    paths = files.segment_paths(tmp_path)
    assert len(paths) > 3
    assert judge(tmp_path, audit.checkpoint()).problems == []
    again = open_log(tmp_path)
    again.append(batch(5, 60))
    again.close()
    paths[0].rename(tmp_path / "old")
    assert judge(tmp_path, again.checkpoint(), archived=True).problems == []
    assert "missing at the beginning: 10 entries" in judge(tmp_path).problems[0]
    paths[2].rename(tmp_path / "older")
    assert judge(tmp_path, archived=True).problems != []


@pytest.mark.parametrize("harm", ["entry", "checkpoint", "header", "fewer entries"])
def test_a_damaged_log_is_moved_aside_and_a_new_one_says_so(tmp_path: Path, harm: str) -> None:
    """A writer never goes on behind what contradicts a checkpoint: all of it is kept beside a new log."""
    old = written(tmp_path)
    path = tmp_path / f"{0:012d}.log"
    data = path.read_bytes()
    if harm == "checkpoint":
        path = path.with_suffix(files.CHECKPOINT_SUFFIX)
        path.write_text(path.read_text().replace("\n15\n", "\n14\n"))
    elif harm == "fewer entries":
        path.write_bytes(b"\n".join(data.split(b"\n")[:-3]) + b"\n")
    else:
        path.write_bytes(data.replace(b'"X"', b'"Y"', 1) if harm == "entry" else data.replace(b"audit", b"audet", 1))
    audit = open_log(tmp_path)
    assert (audit.size, audit.opening[0].fields["event"]) == (0, "damaged")
    assert audit.name != old.name
    audit.append([(1, one) for one in audit.opening])
    audit.close()
    assert judge(tmp_path).problems == []
    (aside,) = tmp_path.glob("damaged-*")
    assert judge(aside).problems != []


@pytest.mark.parametrize("rotate", [False, True])
def test_a_full_disk_leaves_the_log_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rotate: bool) -> None:
    """Writes that fail, or take a part only, at every place of a batch: nothing of it is there, and once there is
    room the same batch goes in."""
    audit = open_log(tmp_path)
    audit.append(batch(5))
    if rotate:
        monkeypatch.setattr(log, "SEGMENT_BYTES", 1)
    real, room = os.write, [0]

    def write(fd: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = real(fd, bytes(data)[: room[0]])
        room[0] -= taken
        return taken

    monkeypatch.setattr(os, "write", write)
    for room_left in range(0, 500, 23):
        room[0] = room_left
        with pytest.raises(AuditWriteError, match="No space left"):
            audit.append(batch(5, 5))
        assert audit.size == 5
    monkeypatch.setattr(os, "write", real)
    audit.append(batch(5, 5))
    audit.close()
    assert judge(tmp_path, audit.checkpoint()).problems == []
    assert counts(tmp_path) == list(range(10))


def test_a_disk_that_cannot_even_shorten_a_file_ends_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What could be neither written nor cut off is told as any other failure, and cut off before the next batch."""
    audit = open_log(tmp_path)
    audit.append(batch(5))
    real, broken = os.ftruncate, []

    def sync(_fd: int) -> None:
        broken.append(True)
        raise OSError(errno.EIO, "Input/output error")

    def shorten(fd: int, size: int) -> None:
        if broken:
            raise OSError(errno.EIO, "Input/output error")
        real(fd, size)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", sync)
        patch.setattr(os, "ftruncate", shorten)
        for _ in range(2):
            with pytest.raises(AuditWriteError, match="Input/output"):
                audit.append(batch(5, 100))
    audit.append(batch(5, 5))
    audit.close()
    assert judge(tmp_path).problems == []
    assert counts(tmp_path) == list(range(10))


def test_a_folder_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    """A file in the folder's place, and a key that is none, are typed errors with the reason."""
    (tmp_path / "file").write_text("")
    with pytest.raises(AuditError, match="cannot use"):
        open_log(tmp_path / "file")
    (tmp_path / "key").write_bytes(b"short")
    (tmp_path / "key").chmod(0o600)
    with pytest.raises(AuditError, match="32 bytes, not 5"):
        open_log(tmp_path / "log", tmp_path / "key")


def test_a_log_verifies_at_any_moment_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that arrives between any two reads of the verifier, with a new segment now and then, is no problem."""
    monkeypatch.setattr(log, "SEGMENT_BYTES", 2_000)
    audit = open_log(tmp_path)
    audit.append(batch(5))
    real = files._read

    def read(path: Path) -> bytes:
        data = real(path)
        audit.append(batch(3, audit.size))
        return data

    monkeypatch.setattr(files, "_read", read)
    for _ in range(12):
        report = judge(tmp_path)
        assert (report.problems, report.live) == ([], True)
    monkeypatch.undo()
    audit.close()
    assert judge(tmp_path).problems == []
    assert len(files.segment_paths(tmp_path)) > 3
