"""Verifier of the audit log: folder and public key in, problems out. Offline. It shares with the writer only the
formats of files and checkpoints.

What it proves: every entry that a checkpoint covers is what it was when it was signed, at its place, with none missing
before it. What a folder alone cannot show is that the end is missing together with its checkpoints, or that somebody
with the signing key wrote two logs: for that it takes *witnesses*, checkpoints of this log that were kept elsewhere.
"""

from __future__ import annotations

import fcntl
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from appliance.common.audit import files
from appliance.common.audit.checkpoint import Checkpoint, CheckpointError, Verifier, parse_verifier, read_checkpoint
from appliance.common.audit.entry import EntryError, from_line
from appliance.common.figures import counted

MAX_PROBLEMS = 20
"""Most problems that are reported."""


@dataclass(slots=True)
class Report:
    """Result of a verification."""

    name: str = ""
    first: int = 0
    """Number of the first entry present."""
    entries: int = 0
    checkpoints: int = 0
    witnesses: int = 0
    cosigned: list[str] = field(default_factory=list)
    """Witnesses whose cosignatures of the last checkpoint hold."""
    unsigned: int = 0
    """Entries behind the last checkpoint."""
    live: bool = False
    """Whether a writer has the log open: its last entries may wait for their checkpoint."""
    last: Checkpoint | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def blame(self, problem: str) -> None:
        """Add a problem."""
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(problem)


class Roots:
    """A growing tree as (height, hash) pairs: two of one height become one of the next."""

    def __init__(self, size: int, peaks: list[bytes]) -> None:
        heights = [height for height in reversed(range(size.bit_length())) if size >> height & 1]
        self._parts = list(zip(heights, peaks, strict=True))
        self.size = size

    def take(self, line: bytes) -> None:
        """Add an entry."""
        height, value = 0, sha256(b"\x00" + line).digest()
        while self._parts and self._parts[-1][0] == height:
            value = sha256(b"\x01" + self._parts.pop()[1] + value).digest()
            height += 1
        self._parts.append((height, value))
        self.size += 1

    @property
    def peaks(self) -> list[bytes]:
        """Hashes of its perfect subtrees, the largest first."""
        return [value for _, value in self._parts]

    def root(self) -> bytes:
        """Return the hash of the whole tree."""
        parts = [value for _, value in self._parts]
        if not parts:
            return sha256().digest()
        value = parts.pop()
        while parts:
            value = sha256(b"\x01" + parts.pop() + value).digest()
        return value


def read_verifier(path: Path) -> Verifier:
    """The verifier key in a file.

    Raises:
        CheckpointError: it holds none.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return parse_verifier(file.read(1_024).decode("utf-8", "replace"))


def verify(
    directory: Path, verifier: Verifier, witnesses: list[str] | None = None, *, archived: bool = False
) -> Report:
    """Verify a log against its public key.

    Args:
        directory: of the log.
        verifier: its public key.
        witnesses: checkpoints that were kept elsewhere.
        archived: whether the oldest segments may have been moved away.

    Raises:
        OSError: the folder cannot be read.
    """
    report = Report(name=verifier.name, live=_is_written(directory))
    expected: dict[int, set[bytes]] = {}
    kept = [_read_note(note, verifier, report, "a witness") for note in witnesses or ()]
    report.witnesses = len([one for one in kept if one is not None])
    segments = _read_segments(directory, report)
    notes = [
        (number, _read_note(note, verifier, report, segment.path.stem))
        for number, segment in enumerate(segments)
        for note in segment.checkpoints
    ]
    signed = [one for _, one in notes if one is not None]
    report.checkpoints = len(signed)
    report.last = max(signed, key=lambda one: one.size, default=None)
    for checkpoint in (*signed, *(one for one in kept if one is not None)):
        expected.setdefault(checkpoint.size, set()).add(checkpoint.root)
    if segments and segments[0].start and not archived:
        report.blame(f"missing at the beginning: {counted(segments[0].start, 'entry', 'entries')}")
    if segments:
        _walk(segments, verifier, expected, report)
    if expected:
        report.blame(f"entries up to number {max(expected)} were signed, and are missing or not the same")
    covered = report.last.size if report.last is not None else 0
    report.unsigned = max(0, report.first + report.entries - covered)
    if report.unsigned and not report.live:
        report.blame(f"covered by no checkpoint, at the end: {counted(report.unsigned, 'entry', 'entries')}")
    return report


def _walk(segments: list[files.Segment], verifier: Verifier, expected: dict[int, set[bytes]], report: Report) -> None:
    """Grow the tree entry by entry, and remove from ``expected`` each root that it reaches."""
    first = segments[0]
    report.first = first.start
    tree = Roots(first.start, first.tree().peaks)
    if first.start and tree.root() not in expected.get(first.start, ()):
        report.blame(f"{first.path.name}: no checkpoint signs what was before it")
    for segment in segments:
        if segment.name != verifier.name:
            report.blame(f"{segment.path.name} is of the log {segment.name}")
        if segment.start != tree.size:
            before = counted(tree.size, "entry", "entries")
            report.blame(f"{segment.path.name} does not follow what is before it: {before}")
            return
        if segment.peaks != tree.peaks:
            report.blame(f"{segment.path.name}: the header has another tree than the entries before it make")
        if segment.torn and not report.live:
            report.blame(f"{segment.path.name} ends in half a line")
        for line in segment.lines:
            _meet(tree, expected, report)
            number = entry_number(line)
            if number != tree.size:
                report.blame(f"entry {tree.size} is not one, or has another number")
            tree.take(line)
    report.entries = tree.size - report.first
    _meet(tree, expected, report)
    # Of what lies before the first segment nothing can be said.
    for size in [size for size in expected if size < report.first]:
        del expected[size]


def _meet(tree: Roots, expected: dict[int, set[bytes]], report: Report) -> None:
    roots = expected.pop(tree.size, None)
    if roots is not None and roots != {tree.root()}:
        report.blame(f"not what was signed, at the beginning: {counted(tree.size, 'entry', 'entries')}")


def entry_number(line: bytes) -> int | None:
    """Return the number that an entry says it has; None for what is none."""
    try:
        return from_line(line)[0]
    except EntryError:
        return None


def _read_segments(directory: Path, report: Report) -> list[files.Segment]:
    segments = []
    for path in files.segment_paths(directory):
        try:
            segment = files.read_segment(path)
            segment.tree()
        except files.LogFormatError as error:
            report.blame(str(error))
            continue
        if segment.torn_checkpoint and not report.live:
            report.blame(f"{path.stem}: the last checkpoint is not whole")
        segments.append(segment)
    if not segments:
        report.blame("there is no log")
    return segments


def _read_note(note: str, verifier: Verifier, report: Report, where: str) -> Checkpoint | None:
    try:
        return read_checkpoint(note, verifier)
    except CheckpointError as error:
        report.blame(f"{where}: {error}")
        return None


def _is_written(directory: Path) -> bool:
    """Whether a writer holds the lock."""
    try:
        with (directory / files.LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
