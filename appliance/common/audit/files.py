"""Files of the audit log: names, format, reading.

A folder with ``public.key`` (the verifier key, one line), ``lock`` and *segments*. A segment is a pair of files named
by the number of its first entry: ``000000000000.log`` holds a header and then one entry a line,
``000000000000.checkpoints`` checkpoints of five lines each. The header says the log's name and the tree as it was
before the segment, so that old segments may be moved away: of what is left the first checkpoint signs that tree.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from appliance.common.audit.merkle import MAX_PEAKS, Tree

VERSION = 1
LOG_SUFFIX, CHECKPOINT_SUFFIX = ".log", ".checkpoints"
PUBLIC_KEY = "public.key"
SIGNING_KEY = "signing.key"
LOCK = "lock"
CHECKPOINT_LINES = 5

MAX_SEGMENT_BYTES = 64 << 20
"""Most bytes of a file that is read as a segment: four times the size at which the writer closes one, with room for one
batch."""

MAX_HEADER_BYTES = 8_192
"""Most bytes of a header; one with the most possible subtrees has half of it."""

_SEGMENT = re.compile(r"[0-9]{12}\.log")


class LogFormatError(ValueError):
    """A file of the log does not have the writer's format; the message says where."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment as read from the disk; nothing of it is verified."""

    path: Path
    name: str
    start: int
    """Number of its first entry."""
    peaks: list[bytes]
    """Subtrees of the tree before it."""
    lines: list[bytes]
    """Entries without their ends; a last line without an end is in ``torn``."""
    torn: bytes
    checkpoints: list[str]
    torn_checkpoint: str
    log_bytes: int
    """Length of the log file without ``torn``."""
    checkpoint_bytes: int
    """Length of the checkpoint file without ``torn_checkpoint``."""

    def tree(self) -> Tree:
        """Tree before the segment.

        Raises:
            LogFormatError: its header's subtrees are not those of a tree of that size.
        """
        try:
            return Tree(self.start, self.peaks)
        except ValueError as error:
            raise LogFormatError(f"{self.path.name}: the header's tree cannot be") from error


def segment_path(directory: Path, start: int) -> Path:
    """Path of the segment whose first entry is ``start``."""
    return directory / f"{start:012d}{LOG_SUFFIX}"


def segment_paths(directory: Path) -> list[Path]:
    """The segments of a folder, the oldest first."""
    return sorted(path for path in directory.iterdir() if _SEGMENT.fullmatch(path.name))


def drop_headless(directory: Path) -> None:
    """Remove a newest segment whose header was incomplete when its writer ended: it has no entries."""
    for path in segment_paths(directory)[-1:]:
        with path.open("rb") as file:
            headless = b"\n" not in file.read(MAX_HEADER_BYTES)
        if headless:
            path.with_suffix(CHECKPOINT_SUFFIX).unlink(missing_ok=True)
            path.unlink()


def header(name: str, tree: Tree) -> bytes:
    """The first line of a segment, with its end."""
    return _header(name, tree.size, tree.peaks)


def _header(name: str, start: int, peaks: list[bytes]) -> bytes:
    values = {"audit": VERSION, "name": name, "start": start, "peaks": [peak.hex() for peak in peaks]}
    return json.dumps(values, separators=(",", ":")).encode() + b"\n"


def read_segment(path: Path) -> Segment:
    """Read a segment and its checkpoints.

    Raises:
        LogFormatError: the header is none, or a file is too large.
        OSError: a file cannot be read.
    """
    # The checkpoints first: of a log that is being written they then cover no more than what is read of it.
    beside = path.with_suffix(CHECKPOINT_SUFFIX)
    text = _read(beside).decode("utf-8", "replace") if beside.exists() else ""
    data = _read(path)
    first, _, rest = data.partition(b"\n")
    name, start, peaks = _read_header(path, first)
    body, end, torn = rest.rpartition(b"\n")
    parts = text.split("\n")
    whole = (len(parts) - 1) // CHECKPOINT_LINES * CHECKPOINT_LINES
    notes = ["\n".join(parts[at : at + CHECKPOINT_LINES]) + "\n" for at in range(0, whole, CHECKPOINT_LINES)]
    left = "\n".join(parts[whole:])
    return Segment(
        path=path,
        name=name,
        start=start,
        peaks=peaks,
        lines=body.split(b"\n") if end else [],
        torn=torn,
        checkpoints=notes,
        torn_checkpoint=left,
        log_bytes=len(data) - len(torn),
        checkpoint_bytes=sum(len(note.encode()) for note in notes),
    )


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        data = file.read(MAX_SEGMENT_BYTES + 1)
    if len(data) > MAX_SEGMENT_BYTES:
        raise LogFormatError(f"{path.name} is larger than {MAX_SEGMENT_BYTES} bytes")
    return data


def _read_header(path: Path, line: bytes) -> tuple[str, int, list[bytes]]:
    problem = LogFormatError(f"{path.name}: the header is not one of an audit log")
    try:
        values = json.loads(line)
        name, start, peaks = values["name"], values["start"], [bytes.fromhex(peak) for peak in values["peaks"]]
    except (ValueError, RecursionError, TypeError, KeyError) as error:
        raise problem from error
    named = path.name == f"{start:012d}{LOG_SUFFIX}" if type(start) is int else False
    if not named or not isinstance(name, str) or len(peaks) > MAX_PEAKS:
        raise problem
    if line + b"\n" != _header(name, start, peaks):
        # The same values in other bytes, digits in capitals for example: nobody of ours wrote it.
        raise problem
    return name, start, peaks
