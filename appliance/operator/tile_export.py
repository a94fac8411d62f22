"""Export of the audit log as static tiles: what is new since the last export is added. Blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from appliance.common.audit import files
from appliance.common.audit.checkpoint import Checkpoint, CheckpointError, Verifier, read_checkpoint
from appliance.common.audit.cosignature import first_note
from appliance.common.audit.merkle import EMPTY_ROOT, HASH_BYTES, leaf_hash
from appliance.common.audit.proofs import tree_hash
from appliance.common.audit.tiles import (
    CHECKPOINT,
    ENTRIES,
    TILE_HEIGHT,
    TILE_WIDTH,
    TileError,
    TileReader,
    tile_hash,
    tile_name,
    to_bundle,
)
from appliance.common.audit.verify import read_verifier
from appliance.common.errors import ConfigError, os_errors_as
from appliance.common.figures import counted
from isolation.host.atomic_file import write_whole

FOLDER_MODE, FILE_MODE = 0o750, 0o640
"""As the log's."""

MAX_NOTE_BYTES = 1 << 16
"""Most bytes of a checkpoint with the signatures of its witnesses."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export came to."""

    log: str
    size: int
    """Entries that the tiles have."""
    added: int


def export_tiles(directory: Path, folder: Path) -> Exported:
    """Bring the tiles in ``folder`` up to the last checkpoint of the log in ``directory``. What is written is of use
    only with the checkpoint, which is written last, and only if the tree in the tiles has its root.

    Raises:
        ConfigError: the log or the folder cannot be used, older entries were moved away, or entries are not those that
            the checkpoint covers.
    """
    with os_errors_as(f"cannot read the audit log in {directory}"):
        verifier, (checkpoint, note) = _verifier(directory), (None, "")
        checkpoint, note = _last(directory, verifier)
    with os_errors_as(f"cannot write tiles in {folder}"):
        folder.mkdir(parents=True, exist_ok=True, mode=FOLDER_MODE)
        before = _before(folder, verifier)
        if before.size > checkpoint.size:
            there, here = (counted(one.size, "entry", "entries") for one in (before, checkpoint))
            raise ConfigError(f"{folder} has {there}, and the log has {here}: it is an older copy")
        try:
            edge = _Edge(folder, before)
            for line in _lines(directory, before.size, checkpoint.size):
                edge.add(line)
            edge.close()
            root = tree_hash(0, checkpoint.size, TileReader(folder, checkpoint.size).subtree)
        except TileError as error:
            raise ConfigError(f"{folder}: {error}; export into a new folder") from error
        if edge.size != checkpoint.size or root != checkpoint.root:
            raise ConfigError(f"{directory} has other entries than its checkpoint covers; see athanor audit verify")
        write_whole(folder / files.PUBLIC_KEY, f"{verifier.line()}\n".encode(), FILE_MODE)
        if checkpoint != before:
            write_whole(folder / CHECKPOINT, note.encode(), FILE_MODE)
    return Exported(verifier.name, checkpoint.size, checkpoint.size - before.size)


class _Edge:
    """The right edge of the tree in a folder: hashes and entries of the tiles that are not full."""

    def __init__(self, folder: Path, before: Checkpoint) -> None:
        """Read the edge of what is there.

        Raises:
            TileError: it is not what its checkpoint covers.
        """
        self._folder = folder
        self.size = before.size
        reader = TileReader(folder, before.size)
        if before.size and tree_hash(0, before.size, reader.subtree) != before.root:
            raise TileError("the tiles are not those of their checkpoint")
        self._entries = reader.entries(before.size // TILE_WIDTH) if before.size % TILE_WIDTH else []
        if [leaf_hash(one) for one in self._entries] != self._hashes(reader, 0):
            raise TileError("the last entries are not those of the tiles")
        levels = range((max(1, before.size).bit_length() - 1) // TILE_HEIGHT + 1)
        self._levels = [self._hashes(reader, level) for level in levels]

    def _hashes(self, reader: TileReader, level: int) -> list[bytes]:
        index, width = divmod(self.size >> TILE_HEIGHT * level, TILE_WIDTH)
        data = reader.tile(level, index) if width else b""
        return [data[at : at + HASH_BYTES] for at in range(0, len(data), HASH_BYTES)]

    def add(self, line: bytes) -> None:
        """Add an entry; tiles that it fills are written."""
        self._entries.append(line)
        self.size += 1
        if len(self._entries) == TILE_WIDTH:
            self._write(ENTRIES, self.size // TILE_WIDTH - 1, TILE_WIDTH, to_bundle(self._entries))
            self._entries = []
        self._push(0, leaf_hash(line))

    def close(self) -> None:
        """Write the tiles that are not full."""
        for level, hashes in enumerate(self._levels):
            if hashes:
                self._write(level, (self.size >> TILE_HEIGHT * level) // TILE_WIDTH, len(hashes), b"".join(hashes))
        if self._entries:
            self._write(ENTRIES, self.size // TILE_WIDTH, len(self._entries), to_bundle(self._entries))

    def _push(self, level: int, value: bytes) -> None:
        if level == len(self._levels):
            self._levels.append([])
        hashes = self._levels[level]
        hashes.append(value)
        if len(hashes) == TILE_WIDTH:
            index = (self.size >> TILE_HEIGHT * level) // TILE_WIDTH - 1
            self._write(level, index, TILE_WIDTH, b"".join(hashes))
            self._levels[level] = []
            self._push(level + 1, tile_hash(hashes))

    def _write(self, level: int | str, index: int, width: int, data: bytes) -> None:
        path = self._folder / tile_name(level, index, width)
        path.parent.mkdir(parents=True, exist_ok=True, mode=FOLDER_MODE)
        write_whole(path, data, FILE_MODE)
        partial = path.with_name(f"{path.name}.p")
        if width == TILE_WIDTH and partial.is_dir():
            # The full tile has all of what these have.
            for one in partial.iterdir():
                one.unlink()
            partial.rmdir()


def _verifier(directory: Path) -> Verifier:
    try:
        return read_verifier(directory / files.PUBLIC_KEY)
    except CheckpointError as error:
        raise ConfigError(f"{directory / files.PUBLIC_KEY}: {error}") from error


def _last(directory: Path, verifier: Verifier) -> tuple[Checkpoint, str]:
    """Return the last checkpoint of a log, and its text."""
    for path in reversed(files.segment_paths(directory)):
        notes = _segment(path).checkpoints
        if notes:
            try:
                return read_checkpoint(notes[-1], verifier), notes[-1]
            except CheckpointError as error:
                raise ConfigError(f"{path}: {error}") from error
    raise ConfigError(f"the audit log in {directory} has no checkpoint yet")


def _before(folder: Path, verifier: Verifier) -> Checkpoint:
    """Return the checkpoint of tiles; an empty tree's where there are none."""
    path = folder / CHECKPOINT
    if not path.exists():
        return Checkpoint(0, EMPTY_ROOT)
    with path.open("rb") as file:
        text = file.read(MAX_NOTE_BYTES).decode("utf-8", "replace")
    try:
        return read_checkpoint(first_note(text), verifier)
    except CheckpointError as error:
        raise ConfigError(f"{path}: {error}; export another log into another folder") from error


def _lines(directory: Path, first: int, end: int) -> Iterator[bytes]:
    """Read entries from ``first`` on as they are in the log, up to ``end``."""
    paths = files.segment_paths(directory)
    starts = [int(path.stem) for path in paths]
    if starts and starts[0] > first:
        message = f"the log begins at entry {starts[0]}, and the tiles end at {first}: older segments were moved away"
        raise ConfigError(f"{message}; put them into a copy of the folder, and name that with --from")
    for path, following in zip(paths, [*starts[1:], None], strict=True):
        if following is None or following > first:
            segment = _segment(path)
            yield from segment.lines[max(0, first - segment.start) : max(0, end - segment.start)]


def _segment(path: Path) -> files.Segment:
    try:
        return files.read_segment(path)
    except files.LogFormatError as error:
        raise ConfigError(str(error)) from error
