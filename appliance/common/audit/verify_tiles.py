"""Verifier of tiles: folder and public keys in, problems out. Offline. It shares with the export only the formats.

Every file below ``tile`` is compared with what the entries make, and the tree with the checkpoint, whose signatures
must all be of known keys. Files that no tree of this size has are told too, so that no byte of the folder is without a
reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from appliance.common.audit import files
from appliance.common.audit.checkpoint import Checkpoint, CheckpointError, Verifier, read_checkpoint
from appliance.common.audit.cosignature import Cosignature, Witness, first_note, read_cosignatures
from appliance.common.audit.tiles import (
    CHECKPOINT,
    ENTRIES,
    LENGTH_BYTES,
    MAX_BUNDLE_BYTES,
    TILE_NAME,
    TILE_WIDTH,
    TILES,
    tile_name,
    width_of,
)
from appliance.common.audit.verify import Report, Roots, entry_number
from appliance.common.figures import counted

MAX_CHECKPOINT_FILE_BYTES = 1 << 16


def verify_tiles(
    folder: Path, verifier: Verifier, witnesses: Sequence[Witness] = (), kept: Sequence[str] = ()
) -> tuple[Report, list[Cosignature]]:
    """Verify tiles against the log's public key; returns what was found, and the cosignatures that hold.

    Args:
        folder: of the tiles.
        verifier: the log's public key.
        witnesses: whose cosignatures the checkpoint may have.
        kept: checkpoints of this log that were kept elsewhere.

    Raises:
        OSError: the folder cannot be read.
    """
    report = Report(name=verifier.name)
    with (folder / CHECKPOINT).open("rb") as file:
        data = file.read(MAX_CHECKPOINT_FILE_BYTES)
    text = data.decode("utf-8", "replace")
    try:
        checkpoint = read_checkpoint(first_note(text), verifier)
        cosigned = read_cosignatures(text, witnesses)
    except CheckpointError as error:
        report.blame(f"{CHECKPOINT}: {error}")
        return report, []
    report.last, report.checkpoints = checkpoint, 1
    expected = {checkpoint.size: {checkpoint.root}}
    for note in kept:
        _expect(note, verifier, expected, report)
    _walk(folder, checkpoint, expected, report)
    for size in expected:
        report.blame(f"entries up to number {size} were signed, and are missing or not the same")
    _strangers(folder, checkpoint.size, report)
    return report, cosigned


def _expect(note: str, verifier: Verifier, expected: dict[int, set[bytes]], report: Report) -> None:
    try:
        one = read_checkpoint(first_note(note), verifier)
    except CheckpointError as error:
        report.blame(f"a witness: {error}")
        return
    report.witnesses += 1
    expected.setdefault(one.size, set()).add(one.root)


def _walk(folder: Path, checkpoint: Checkpoint, expected: dict[int, set[bytes]], report: Report) -> None:
    """Make the tree and its tiles from the entries, and compare."""
    tree, levels = Roots(0, []), [bytearray()]
    for bundle in range(-(-checkpoint.size // TILE_WIDTH)):
        width = width_of(0, bundle, checkpoint.size)
        entries = _entries(folder, bundle, width, report)
        if entries is None:
            return
        for line in entries:
            _meet(tree, expected, report)
            if entry_number(line) != tree.size:
                report.blame(f"entry {tree.size} is not one, or has another number")
            tree.take(line)
            levels[0] += sha256(b"\x00" + line).digest()
    report.entries = tree.size
    _meet(tree, expected, report)
    level = 0
    while levels[level]:
        hashes = bytes(levels[level])
        above = bytearray()
        for at in range(0, len(hashes), TILE_WIDTH * 32):
            part = hashes[at : at + TILE_WIDTH * 32]
            _compare(folder, level, at // (TILE_WIDTH * 32), part, report)
            if len(part) == TILE_WIDTH * 32:
                above += _root(part)
        levels.append(above)
        level += 1


def _meet(tree: Roots, expected: dict[int, set[bytes]], report: Report) -> None:
    roots = expected.pop(tree.size, None)
    if roots is not None and roots != {tree.root()}:
        report.blame(f"not what was signed, at the beginning: {counted(tree.size, 'entry', 'entries')}")


def _entries(folder: Path, bundle: int, width: int, report: Report) -> list[bytes] | None:
    """Return the entries of a bundle; None where there are none of use."""
    name = tile_name(ENTRIES, bundle, width)
    data = _read(folder / name, MAX_BUNDLE_BYTES)
    if data is None:
        report.blame(f"{name} is missing")
        return None
    entries, at = [], 0
    while at + LENGTH_BYTES <= len(data):
        end = at + LENGTH_BYTES + int.from_bytes(data[at : at + LENGTH_BYTES], "big")
        entries.append(data[at + LENGTH_BYTES : end])
        at = end
    if at != len(data) or len(entries) != width:
        report.blame(f"{name} has other entries than its tree")
        return None
    return entries


def _compare(folder: Path, level: int, index: int, hashes: bytes, report: Report) -> None:
    name = tile_name(level, index, len(hashes) // 32)
    found = _read(folder / name, TILE_WIDTH * 32)
    if found != hashes:
        report.blame(f"{name} is missing" if found is None else f"{name} is not what the entries make")


def _strangers(folder: Path, size: int, report: Report) -> None:
    """Blame files that the tree does not have, and older partial tiles that are no beginning of what is there now."""
    for path in sorted((folder / TILES).rglob("*")) if (folder / TILES).is_dir() else ():
        if path.is_dir() and not path.is_symlink():
            continue
        name = str(path.relative_to(folder))
        found = TILE_NAME.fullmatch(name)
        level = 0 if found is None or found[1] == ENTRIES else int(found[1])
        index = 0 if found is None else int(found[2].replace("x", "").replace("/", ""))
        width = 0 if found is None else int(found[3] or TILE_WIDTH)
        now = width_of(level, index, size)
        if found is None or path.is_symlink() or not 0 < width <= now or tile_name(found[1], index, width) != name:
            report.blame(f"{name} is no tile of this tree")
        elif width < now:
            data, whole = (_read(folder / tile_name(found[1], index, one), MAX_BUNDLE_BYTES) for one in (width, now))
            if data is None or whole is None or not whole.startswith(data) or _count(found[1], data) != width:
                report.blame(f"{name} is no beginning of the tile that is there now")
    for path in folder.iterdir():
        if path.name not in (CHECKPOINT, TILES, files.PUBLIC_KEY):
            report.blame(f"{path.name} is no part of tiles")


def _count(level: str, data: bytes) -> int:
    if level != ENTRIES:
        return len(data) // 32 if len(data) % 32 == 0 else -1
    count = at = 0
    while at + LENGTH_BYTES <= len(data):
        at += LENGTH_BYTES + int.from_bytes(data[at : at + LENGTH_BYTES], "big")
        count += 1
    return count if at == len(data) else -1


def _root(hashes: bytes) -> bytes:
    parts = [hashes[at : at + 32] for at in range(0, len(hashes), 32)]
    while len(parts) > 1:
        parts = [sha256(b"\x01" + parts[at] + parts[at + 1]).digest() for at in range(0, len(parts), 2)]
    return parts[0]


def _read(path: Path, most: int) -> bytes | None:
    try:
        with path.open("rb") as file:
            return file.read(most + 1)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
