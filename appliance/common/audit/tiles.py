"""Static tiles of the audit log (C2SP tlog-tiles, height 8): names, contents, and hashes of subtrees read from them.

A folder with ``checkpoint`` (the last one that the tiles are of), ``tile/LEVEL/INDEX`` (256 hashes each, or fewer in
``INDEX.p/WIDTH``) and ``tile/entries/INDEX`` (the entries of a tile of level 0, each behind its length). Every file but
the checkpoint stays as it is for good, so a folder can be served by any server of files and copied by any program.
"""

from __future__ import annotations

import re
from pathlib import Path

from appliance.common.audit.merkle import HASH_BYTES, node_hash

CHECKPOINT = "checkpoint"
TILES = "tile"
ENTRIES = "entries"
"""Stands in place of the level in the names of bundles of entries."""

TILE_HEIGHT = 8
TILE_WIDTH = 1 << TILE_HEIGHT
LENGTH_BYTES = 2
"""Bytes of an entry's length in a bundle, big-endian."""

MAX_BUNDLE_BYTES = TILE_WIDTH * (LENGTH_BYTES + (1 << 16))
MAX_CACHED = 64
"""Tiles that a reader keeps: half a megabyte."""

TILE_NAME = re.compile(r"tile/(entries|0|[1-9][0-9]?)/((?:x[0-9]{3}/)*[0-9]{3})(?:\.p/([1-9][0-9]{0,2}))?")
"""Name of a tile or bundle below its folder, with level, index and width."""


class TileError(ValueError):
    """A tile is missing, or none of the tree; the message says which."""


def tile_name(level: int | str, index: int, width: int = TILE_WIDTH) -> str:
    """Return the name of a tile, or with the level ``ENTRIES`` of a bundle, below its folder."""
    digits = str(index)
    digits = digits.zfill(-(-len(digits) // 3) * 3)
    parts = [digits[at : at + 3] for at in range(0, len(digits), 3)]
    path = "/".join([*(f"x{part}" for part in parts[:-1]), parts[-1]])
    return f"{TILES}/{level}/{path}" if width == TILE_WIDTH else f"{TILES}/{level}/{path}.p/{width}"


def width_of(level: int, index: int, size: int) -> int:
    """Return how many hashes a tile has in a tree of ``size`` entries."""
    return max(0, min(TILE_WIDTH, (size >> TILE_HEIGHT * level) - index * TILE_WIDTH))


def tile_hash(hashes: list[bytes]) -> bytes:
    """Return the hash of the subtree whose hashes of one height these are, a power of two of them."""
    while len(hashes) > 1:
        hashes = [node_hash(*hashes[at : at + 2]) for at in range(0, len(hashes), 2)]
    return hashes[0]


def to_bundle(entries: list[bytes]) -> bytes:
    """Return entries as a bundle has them."""
    return b"".join(len(one).to_bytes(LENGTH_BYTES, "big") + one for one in entries)


def from_bundle(data: bytes) -> list[bytes]:
    """Return the entries of a bundle.

    Raises:
        TileError: it is none.
    """
    entries, at = [], 0
    while at < len(data):
        end = at + LENGTH_BYTES + int.from_bytes(data[at : at + LENGTH_BYTES], "big")
        if at + LENGTH_BYTES > len(data) or end > len(data):
            raise TileError("a bundle of entries is cut off")
        entries.append(data[at + LENGTH_BYTES : end])
        at = end
    return entries


class TileReader:
    """Hashes of the tree of ``size`` entries from its tiles. What it gives is verified by the root that it leads to."""

    def __init__(self, folder: Path, size: int) -> None:
        self._folder = folder
        self._size = size
        self._tiles: dict[tuple[int, int], bytes] = {}

    def subtree(self, height: int, index: int) -> bytes:
        """Return the hash of a perfect subtree (``proofs.SubtreeHash``).

        Raises:
            TileError: the tile is missing, or of another width.
        """
        level, rest = divmod(height, TILE_HEIGHT)
        first = index << rest
        tile, place = divmod(first, TILE_WIDTH)
        data = self.tile(level, tile)[place * HASH_BYTES : (place + (1 << rest)) * HASH_BYTES]
        if len(data) != HASH_BYTES << rest:
            raise TileError(f"{tile_name(level, tile)}: the tree has no such subtree")
        return tile_hash([data[at : at + HASH_BYTES] for at in range(0, len(data), HASH_BYTES)])

    def tile(self, level: int, index: int) -> bytes:
        """Return the hashes of a tile, as many as the tree has there.

        Raises:
            TileError: it is missing, or of another width.
        """
        found = self._tiles.get((level, index))
        if found is None:
            found = self._read(level, index, width_of(level, index, self._size))
            if len(self._tiles) >= MAX_CACHED:
                self._tiles.pop(next(iter(self._tiles)))
            self._tiles[level, index] = found
        return found

    def entries(self, index: int) -> list[bytes]:
        """Return the entries of a bundle, as many as the tree has there.

        Raises:
            TileError: it is missing, or has another number of entries.
        """
        width = width_of(0, index, self._size)
        names = [tile_name(ENTRIES, index, width), tile_name(ENTRIES, index)]
        entries = from_bundle(self._first(names, MAX_BUNDLE_BYTES))
        if len(entries) < width:
            raise TileError(f"{names[0]} has fewer entries than the tree")
        return entries[:width]

    def _read(self, level: int, index: int, width: int) -> bytes:
        names = [tile_name(level, index, width), tile_name(level, index)]
        data = self._first(names, TILE_WIDTH * HASH_BYTES)
        if len(data) % HASH_BYTES or len(data) < width * HASH_BYTES or not width:
            raise TileError(f"{names[0]} has another number of hashes than the tree")
        return data[: width * HASH_BYTES]

    def _first(self, names: list[str], most: int) -> bytes:
        """Content of the first of these files that is there: a partial tile may be gone once there is the full one."""
        for name in names:
            try:
                with (self._folder / name).open("rb") as file:
                    return file.read(most + 1)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise TileError(f"{name} cannot be read: {error.strerror}") from error
        raise TileError(f"{names[0]} is missing")
