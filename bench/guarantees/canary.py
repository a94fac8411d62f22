"""Looks for canaries: random strings that were in prompts and outputs, wherever this machine could still hold them.

A canary counts as found in any of the forms in which the appliance handles it: UTF-8, UTF-16 and UTF-32 as Python keeps
wide text, and base64 at each of its three offsets. Memory of a process is read through ``/proc/PID/mem`` (proc(5)),
which needs root; files without a name (memfd: the rings, and the memory of a sandbox) through ``/proc/PID/fd``.
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

STEM_LETTERS = 12
"""Letters that all canaries of a check have in common: 19^12 possible ones."""

REST_LETTERS = 12

LETTERS = "bcdfghjklmnpqrstvwxz"

MAX_EXAMPLES = 100

CONTEXT_BYTES = 24
"""Bytes shown on either side of a hit, for people who look for the cause."""

_MAP = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ (\d+)\s*(.*)")
_SKIPPED = ("[vvar]", "[vsyscall]", "[vdso]")


@dataclass(slots=True)
class Hits:
    """Where canaries were found, and how much was looked at."""

    places: Counter[str] = field(default_factory=Counter)
    scanned_bytes: int = 0
    examples: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        """All hits."""
        return self.places.total()


def forms(canary: str) -> list[bytes]:
    """The byte strings that stand for a canary."""
    plain = canary.encode()
    found = [plain, canary.encode("utf-16-le"), canary.encode("utf-32-le")]
    for shift in range(3):
        encoded = base64.b64encode(b"\0" * shift + plain)
        # Characters that also depend on what stands before or behind are left out.
        found.append(encoded[4 if shift else 0 : -4])
    return found


@dataclass(frozen=True, slots=True)
class Wanted:
    """Canaries of one check. They all begin alike, so that one search, which is a search for a constant, finds any."""

    stem: str
    canaries: tuple[str, ...]
    thorough: bool = True
    """Whether every form is looked for, or UTF-8 alone, which is where findings have been."""
    ids: tuple[int, ...] = ()
    """Token ids that all prompts of the check have in a row, long enough to be nobody else's."""

    def needles(self) -> list[bytes]:
        """What to search for: the beginning, in all forms."""
        return forms(self.stem) if self.thorough else [self.stem.encode()]

    def id_needles(self) -> list[bytes]:
        """The ids, of 32 and of 64 bits."""
        return [array(code, self.ids).tobytes() for code in ("I", "q")] if self.ids else []


def draw(count: int, *, thorough: bool = True) -> Wanted:
    """Fresh canaries: letters that no word of any language has in this order."""
    stem = _letters(STEM_LETTERS)
    return Wanted(stem, tuple(stem + _letters(REST_LETTERS) for _ in range(count)), thorough)


def _letters(number: int) -> str:
    return "".join(secrets.choice(LETTERS) for _ in range(number))


def descendants(root: int) -> list[int]:
    """The process and all below it."""
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
    """What a process is, in a word."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "gone"
    for word in ("gateway", "supervisor", "gofer", "boot", "engine.text", "engine"):
        if re.search(rf"(^|[ /-]){re.escape(word)}\b", command):
            return {"boot": "sandbox"}.get(word, word)
    return command.split(" ", 1)[0].rpartition("/")[2] or "thread"


def scan_memory(pid: int, wanted: Wanted, hits: Hits, ids: Hits) -> None:
    """Look through all that a process has mapped and may read."""
    label = name_of(pid)
    try:
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
        memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
    except OSError:
        return
    try:
        for line in maps:
            match = _MAP.match(line)
            if match is None or match[3][0] != "r" or match[5] in _SKIPPED or match[5].startswith(("/dev/", "/memfd:")):
                continue
            place = f"{label} {pid} {match[5] or 'anonymous'}"
            _scan(_pieces(memory, int(match[1], 16), int(match[2], 16)), wanted, place, hits, ids)
    finally:
        os.close(memory)


def scan_nameless_files(pid: int, wanted: Wanted, hits: Hits, ids: Hits, seen: set[tuple[int, int]]) -> None:
    """Look through the memfds that a process has open, each once."""
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
    """Look through all plain files below a folder."""
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
    for piece in pieces:
        hits.scanned_bytes += len(piece)
        for needle in wanted.needles():
            _note(piece, needle, place, hits)
        if ids is not None:
            for needle in wanted.id_needles():
                _note(piece, needle, place, ids)


def _note(piece: bytes, needle: bytes, place: str, hits: Hits) -> None:
    at = piece.find(needle)
    while at >= 0:
        hits.places[place] += 1
        if len(hits.examples) < MAX_EXAMPLES:
            around = piece[max(0, at - CONTEXT_BYTES) : at + len(needle) + CONTEXT_BYTES]
            hits.examples.append(f"{place}: {around!r}")
        at = piece.find(needle, at + 1)


def _pieces(fd: int, start: int, end: int) -> Iterator[bytes]:
    """The bytes of a range, in pieces that overlap, so that nothing is missed at a seam; holes are passed over."""
    tail = b""
    while start < end:
        try:
            data = os.pread(fd, min(CHUNK, end - start), start)
        except OSError:
            # A page that cannot be read: go on behind it.
            start, tail = start + 4096, b""
            continue
        if not data:
            return
        start += len(data)
        yield tail + data
        tail = data[-256:]


def _data(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """The ranges of a file that are no holes."""
    position = 0
    while position < size:
        try:
            start = os.lseek(fd, position, os.SEEK_DATA)
            position = os.lseek(fd, start, os.SEEK_HOLE)
        except OSError:
            return
        yield start, position
