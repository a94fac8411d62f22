"""Search for canaries, random strings from prompts and outputs, in all memory and files that could still hold them.

A canary counts as found in any of the forms in which the appliance handles it: UTF-8, UTF-16 and UTF-32 as Python
stores wide text, and base64 at each of its three offsets. Process memory is read through ``/proc/PID/mem`` (proc(5)),
which needs root; unnamed files (memfd: the rings, and a sandbox's memory) through ``/proc/PID/fd``.
"""

from __future__ import annotations

import base64
import os
import re
import secrets
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

CHUNK = 16 << 20
"""Bytes read at a time."""

NOTHING = bytes(64 << 10)
"""Zeros of one length: memory that nobody has used. Text is found fast among them, ids are not, since most of their
bytes are zeros: ten times slower than elsewhere."""

STEM_LETTERS = 12
"""Letters that all canaries of a check have in common: 19^12 possible prefixes."""

REST_LETTERS = 12

LETTERS = "bcdfghjklmnpqrstvwxz"

MAX_EXAMPLES = 100

CONTEXT_BYTES = 24
"""Bytes shown on either side of a hit, for finding its cause."""

_MAP = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) (\S+ \S+ (\d+))\s*(.*)")
_SKIPPED = ("[vvar]", "[vsyscall]", "[vdso]")


@dataclass(slots=True)
class Hits:
    """Locations of hits, and how much was searched."""

    places: Counter[str] = field(default_factory=Counter)
    scanned_bytes: int = 0
    examples: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Return the number of all hits."""
        return self.places.total()


def forms(canary: str) -> list[bytes]:
    """Return the byte strings that represent a canary."""
    plain = canary.encode()
    found = [plain, canary.encode("utf-16-le"), canary.encode("utf-32-le")]
    for shift in range(3):
        encoded = base64.b64encode(b"\0" * shift + plain)
        # Characters that also depend on their neighbours are left out.
        found.append(encoded[4 if shift else 0 : -4])
    return found


@dataclass(frozen=True, slots=True)
class Wanted:
    """Canaries of one check. All share a prefix, so that one search for a constant finds any of them."""

    stem: str
    canaries: tuple[str, ...]
    thorough: bool = True
    """Whether every form is searched, or only UTF-8, the form of all findings so far."""
    ids: tuple[int, ...] = ()
    """Consecutive token ids common to all prompts of the check, long enough to be unique."""

    def needles(self) -> list[bytes]:
        """Return the byte strings to search for: the common prefix, in all forms."""
        return forms(self.stem) if self.thorough else [self.stem.encode()]

    def id_needles(self) -> list[bytes]:
        """Return the ids encoded as 32-bit and 64-bit integers."""
        return [array(code, self.ids).tobytes() for code in ("I", "q")] if self.ids else []


def draw(count: int, *, thorough: bool = True) -> Wanted:
    """Draw fresh canaries: letter sequences that occur in no natural word."""
    stem = _letters(STEM_LETTERS)
    return Wanted(stem, tuple(stem + _letters(REST_LETTERS) for _ in range(count)), thorough)


def _letters(number: int) -> str:
    return "".join(secrets.choice(LETTERS) for _ in range(number))


def descendants(root: int) -> list[int]:
    """Return the process and all its descendants."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
    found, fresh = [root], [root]
    while fresh:
        fresh = [pid for pid, parent in parents.items() if parent in fresh and pid not in found]
        found += fresh
    return found


def name_of(pid: int) -> str:
    """Return a one-word description of a process."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "gone"
    for word in ("gateway", "supervisor", "boot", "gofer", "engine.text", "engine"):
        if re.search(rf"(^|[ /-]){re.escape(word)}\b", command):
            return {"boot": "sandbox"}.get(word, word)
    return command.split(" ", 1)[0].rpartition("/")[2] or "thread"


def scan_memory(pid: int, wanted: Wanted, hits: Hits, ids: Hits, seen: set[str] | None = None) -> None:
    """Search all readable mappings of a process; a file's shared pages, which are the same in every mapping of them,
    once for a set ``seen``."""
    label = name_of(pid)
    seen = set() if seen is None else seen
    try:
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
        memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
    except OSError:
        return
    try:
        for line in maps:
            match = _MAP.match(line)
            if match is None or match[3][0] != "r" or match[6] in _SKIPPED or match[6].startswith(("/dev/", "/memfd:")):
                continue
            start, end = int(match[1], 16), int(match[2], 16)
            if match[3][3] == "s" and match[6].startswith("/"):
                shared = f"{match[4]} {end - start}"
                if shared in seen:
                    continue
                seen.add(shared)
            place = f"{label} {pid} {match[6] or 'anonymous'}"
            _scan(_pieces(memory, start, end), wanted, place, hits, ids)
    finally:
        os.close(memory)


def scan_nameless_files(pid: int, wanted: Wanted, hits: Hits, ids: Hits, seen: set[tuple[int, int]]) -> None:
    """Search the memfds that a process has open, each once."""
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return
    for name in names:
        path = f"/proc/{pid}/fd/{name}"
        try:
            target = os.readlink(path)
            if not target.startswith(("/memfd:", "/dev/shm/", "/tmp/")) and "(deleted)" not in target:
                continue
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            status = os.fstat(fd)
            if (status.st_dev, status.st_ino) not in seen and status.st_mode & 0o170000 == 0o100000:
                seen.add((status.st_dev, status.st_ino))
                for start, end in _data(fd, status.st_size):
                    _scan(_pieces(fd, start, end), wanted, f"{name_of(pid)} {pid} {target}", hits, ids)
        finally:
            os.close(fd)


def scan_folder(folder: Path, wanted: Wanted, hits: Hits) -> None:
    """Search all regular files below a folder."""
    for parent, _folders, files in os.walk(folder, followlinks=False):
        for name in files:
            path = Path(parent, name)
            try:
                if not path.is_file() or path.is_symlink():
                    continue
                fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            except OSError:
                continue
            try:
                _scan(_pieces(fd, 0, os.fstat(fd).st_size), wanted, str(path), hits)
            finally:
                os.close(fd)


def _scan(pieces: Iterator[bytes], wanted: Wanted, place: str, hits: Hits, ids: Hits | None = None) -> None:
    needles, id_needles = wanted.needles(), wanted.id_needles()
    for piece in pieces:
        hits.scanned_bytes += len(piece)
        for needle in needles:
            _note(piece, needle, place, hits, 0, len(piece))
        if ids is not None and id_needles:
            for start, end in used_ranges(piece):
                for needle in id_needles:
                    _note(piece, needle, place, ids, max(0, start - len(needle)), end + len(needle))


def used_ranges(piece: bytes) -> Iterator[tuple[int, int]]:
    """Yield the ranges of a piece that have anything but zeros, in steps of ``NOTHING``."""
    step, start = len(NOTHING), None
    for at in range(0, len(piece), step):
        if piece[at : at + step] == NOTHING:
            if start is not None:
                yield start, at
            start = None
        elif start is None:
            start = at
    if start is not None:
        yield start, len(piece)


def _note(piece: bytes, needle: bytes, place: str, hits: Hits, start: int, end: int) -> None:
    at = piece.find(needle, start, end)
    while at >= 0:
        hits.places[place] += 1
        if len(hits.examples) < MAX_EXAMPLES:
            around = piece[max(0, at - CONTEXT_BYTES) : at + len(needle) + CONTEXT_BYTES]
            hits.examples.append(f"{place}: {around!r}")
        at = piece.find(needle, at + 1, end)


def _pieces(fd: int, start: int, end: int) -> Iterator[bytes]:
    """Yield the bytes of a range in overlapping pieces, so that nothing is missed at a boundary; holes are skipped."""
    tail = b""
    while start < end:
        try:
            data = os.pread(fd, min(CHUNK, end - start), start)
        except OSError:
            # The page cannot be read: continue behind it.
            start, tail = start + 4096, b""
            continue
        if not data:
            return
        start += len(data)
        yield tail + data
        tail = data[-256:]


def _data(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of a file that are not holes."""
    position = 0
    while position < size:
        try:
            start = os.lseek(fd, position, os.SEEK_DATA)
            position = os.lseek(fd, start, os.SEEK_HOLE)
        except OSError:
            return
        yield start, position
