"""File that is being downloaded: allocated whole, filled in any order, with a record of what is on disk.

A piece is filled from its first byte on, so the record has one number for each piece that is not whole. It is written
after the bytes were flushed, so it never says more than the disk has, whenever the power goes.
"""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path

from appliance.common.errors import ModelCacheError
from appliance.common.model_cache.manifest import ManifestFile
from isolation.host.atomic_file import write_whole

PIECE_BYTES = 8 << 20
"""Most bytes that one request asks for."""

RECORD_EVERY_S = 1.0
"""Seconds between two records; a flush in between would cost more than the bytes that a crash may lose."""

MAX_RECORD_BYTES = 1 << 20
"""Most bytes of a record: 131,072 pieces of a file of 1 TiB take a quarter of a hexadecimal digit each."""

VERSION = 1


class PartialFile:
    """One file below ``folder / "files"``, and its record below ``folder / "records"``."""

    def __init__(self, folder: Path, file: ManifestFile) -> None:
        """Open it, or go on with what is there.

        Raises:
            ModelCacheError: it cannot be made; the disk is full.
        """
        self.file = file
        self.path = folder / "files" / file.name
        self._record = folder / "records" / file.name.replace("/", "%")
        self._identity = [VERSION, file.size, PIECE_BYTES, file.sha256, file.tag]
        self._recorded_at = time.monotonic()
        self._reached: dict[int, int] = {}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._record.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            self._done = self._read_record()
            status = os.fstat(self._fd)
            if not stat.S_ISREG(status.st_mode) or status.st_size != file.size:
                self._done, self._reached = bytearray(len(self._done)), {}
                os.ftruncate(self._fd, 0)
                if file.size:
                    os.posix_fallocate(self._fd, 0, file.size)
        except OSError as error:
            raise ModelCacheError(f"cannot make {self.path}: {(error.strerror or str(error)).lower()}") from error

    @property
    def num_pieces(self) -> int:
        """Pieces of the file."""
        return -(-self.file.size // PIECE_BYTES)

    def missing(self) -> list[int]:
        """Pieces that are not there yet."""
        return [piece for piece in range(self.num_pieces) if not self._done[piece]]

    def rest(self, piece: int) -> tuple[int, int]:
        """First byte of a piece that is missing, and the byte behind its last."""
        start, end = piece * PIECE_BYTES, min(self.file.size, (piece + 1) * PIECE_BYTES)
        return (end if self._done[piece] else start + self._reached.get(piece, 0)), end

    def write(self, piece: int, data: bytes, offset: int) -> None:
        """Write the next bytes of a piece.

        Raises:
            OSError: they cannot be written.
        """
        view = memoryview(data)
        while view:
            count = os.pwrite(self._fd, view, offset)
            view, offset = view[count:], offset + count
        self._reached[piece] = offset - piece * PIECE_BYTES

    def finish(self, piece: int) -> None:
        """Count a piece as whole; it is in the record at the next ``record``."""
        self._done[piece] = 1
        self._reached.pop(piece, None)

    def record(self, *, now: bool = False) -> None:
        """Flush the bytes, then write the record, if the last one is ``RECORD_EVERY_S`` old.

        Raises:
            OSError: it cannot be written.
        """
        if not now and time.monotonic() - self._recorded_at < RECORD_EVERY_S:
            return
        self._recorded_at = time.monotonic()
        there = {"whole": _packed(bytes(self._done)), "begun": list(self._reached.items())}
        os.fdatasync(self._fd)
        write_whole(self._record, json.dumps({"of": self._identity, **there}).encode())

    def close(self) -> None:
        """Close the file; what is there stays."""
        os.close(self._fd)

    def discard(self) -> None:
        """Remove file and record: its bytes are wrong."""
        self._record.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    def _read_record(self) -> bytearray:
        """Pieces that are on disk; none where the record is of another file, or spoilt."""
        none = bytearray(self.num_pieces)
        try:
            with self._record.open("rb") as file:
                values = json.loads(file.read(MAX_RECORD_BYTES))
            if values["of"] != self._identity:
                return none
            self._reached = {piece: _within(piece, reached, self.num_pieces) for piece, reached in values["begun"]}
            return _unpacked(str(values["whole"]), self.num_pieces)
        except (OSError, ValueError, LookupError, TypeError):
            return none


def _within(piece: int, reached: int, num_pieces: int) -> int:
    if not (0 <= piece < num_pieces and 0 <= reached <= PIECE_BYTES):
        raise ValueError("no place in the file")
    return reached


def _packed(there: bytes) -> str:
    """A hexadecimal number with a bit for each piece."""
    bits = int("".join(map(str, reversed(there))) or "0", 2)
    return f"{bits:x}"


def _unpacked(text: str, count: int) -> bytearray:
    bits = int(text, 16)
    return bytearray((bits >> piece) & 1 for piece in range(count))
