"""G9, provable forgetting: deleted data is gone, and sealed data cannot be changed.

Sealed objects are flipped, truncated, moved and replayed, and opened again after the tenant's key was destroyed.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path

from appliance.common.figures import counted
from appliance.selftest.result import Result, judged
from appliance.supervisor.spill_store import SpillStore
from appliance.supervisor.spill_tiers import SpillLimits
from isolation.keys.errors import KeysError
from isolation.keys.keyring import Keyring
from isolation.keys.seal import Binding, Sealer

COMMAND = "athanor selftest --only G9"

OBJECTS, FULL_OBJECTS = 20, 500
"""Sealed objects, in the short and the full form."""


def run(full: bool) -> list[Result]:
    """Run the rows about sealed objects."""
    return sealed_rows(FULL_OBJECTS if full else OBJECTS)


def sealed_rows(count: int) -> list[Result]:
    """Open sealed objects that were tampered with, and those of a destroyed key."""
    with tempfile.TemporaryDirectory(prefix="ath-g9-") as name:
        keyring = Keyring(Path(name) / "keys", os.urandom(32))
        try:
            return [*_tampered(keyring, count), *_shredded(Path(name), keyring, count)]
        finally:
            keyring.close()


def _tampered(keyring: Keyring, count: int) -> list[Result]:
    sealer = Sealer(keyring)
    binding = Binding("alpha", "00" * 32, b"", b"epoch")
    names = [replace(binding, block=os.urandom(16)) for _ in range(count)]
    objects = [(name, *sealer.seal(name, os.urandom(4_096))) for name in names]
    tried = refused = 0
    for number, (name, sealed, object_id) in enumerate(objects):
        bit = 1 + int.from_bytes(os.urandom(4), "little") % (8 * len(sealed) - 1)
        flipped = (int.from_bytes(sealed, "little") ^ 1 << bit).to_bytes(len(sealed), "little")
        other, other_sealed, other_id = objects[(number + 1) % count]
        newer, newer_id = sealer.seal(name, os.urandom(4_096))
        attempts = [
            (name, flipped, object_id),
            (name, sealed[: len(sealed) // 2], object_id),
            (name, sealed[:-1], object_id),
            (other, sealed, object_id),
            (other, sealed, other_id),
            (name, other_sealed, object_id),
            (name, sealed, newer_id),
            (name, newer, object_id),
            (replace(name, tenant="beta"), sealed, object_id),
            (replace(name, epoch=b"later"), sealed, object_id),
            (replace(name, model="11" * 32), sealed, object_id),
        ]
        tried += len(attempts)
        refused += sum(not _opens(sealer, *attempt) for attempt in attempts)
    opened = sum(_opens(sealer, *one) for one in objects)
    return [
        judged(
            "G9.blobs",
            refused == tried,
            figure=f"{refused} of {tried} flipped, cut, moved and replayed rejected",
            bar="100 %",
            command=COMMAND,
        ),
        judged(
            "G9.blobs.control",
            opened == count,
            figure=f"{opened} of {count} untouched ones open",
            bar="100 %",
            command=COMMAND,
        ),
    ]


def _shredded(folder: Path, keyring: Keyring, count: int) -> list[Result]:
    """Shred a store with both tiers; its files are copied before, and the wrapped key is restored afterwards."""
    store = SpillStore(SpillLimits(4_096 * count // 2, 1 << 30, folder / "spill"), keyring)
    names = [Binding("alpha", "00" * 32, os.urandom(16), b"epoch") for _ in range(count)]
    for name in names:
        store.put(name, os.urandom(4_096))
    sealer = Sealer(keyring)
    copies = [(name, *sealer.seal(name, os.urandom(64))) for name in names]
    backup = (folder / "keys" / "alpha.kek").read_bytes()
    before = sum(store.get(name) is not None for name in names) + sum(_opens(sealer, *one) for one in copies)
    store.shred("alpha")
    (folder / "keys" / "alpha.kek").write_bytes(backup)
    (folder / "keys" / "alpha.kek").chmod(0o600)
    after = sum(store.get(name) is not None for name in names) + sum(_opens(sealer, *one) for one in copies)
    left = len(list((folder / "spill").glob("*")))
    store.close()
    return [
        judged(
            "G9.shred",
            not after and not left,
            figure=f"{after} of {counted(2 * count, 'object')} open after the shred, {counted(left, 'file')} left",
            bar="0",
            command=COMMAND,
        ),
        judged(
            "G9.shred.control",
            before == 2 * count,
            figure=f"{before} of {2 * count} open before it",
            bar="100 %",
            command=COMMAND,
        ),
    ]


def _opens(sealer: Sealer, binding: Binding, sealed: bytes, object_id: bytes) -> bool:
    try:
        sealer.open(binding, sealed, object_id)
    except KeysError:
        return False
    return True
