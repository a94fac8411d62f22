"""Rates of a store outside of the machine, sealed and not, by the same way: ``python -m bench.kv_store [ROUNDS]``.

Supervisor's books, carrier's own process, and a real store at a Unix socket. Rounds take turns, so that what else the
machine does falls on both. ``plain`` differs by one thing: nothing is encrypted.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from appliance.supervisor.kv_carrier import KvCarrier
from appliance.supervisor.spill_store import SpillStore
from appliance.supervisor.spill_tiers import SpillLimits
from isolation.keys.keyring import Keyring
from isolation.keys.seal import HEADER_BYTES, OBJECT_ID_BYTES, OVERHEAD_BYTES, Binding, Sealer
from tests.appliance.carrier.carrying import carrier
from tests.stores import store

BLOCK_BYTES = 256 << 10
BLOCKS = 1_000
WAITING = 100
"""Blocks that wait to be written before the next comes: less than the queue takes."""

BATCH = 16


class Plain(Sealer):
    """Gives objects of the same length and form, and encrypts nothing."""

    def seal(self, binding: Binding, data: bytes) -> tuple[bytes, bytes]:
        """Put header and tag of zeros around an object."""
        return bytes(HEADER_BYTES) + data + bytes(OVERHEAD_BYTES - HEADER_BYTES), os.urandom(OBJECT_ID_BYTES)

    def open(self, binding: Binding, sealed: bytes, object_id: bytes) -> bytes:
        """Take them off."""
        return sealed[HEADER_BYTES : HEADER_BYTES - OVERHEAD_BYTES]


def measured(kept: SpillStore, epoch: bytes) -> tuple[float, float]:
    """Return the rates, in GB/s, of writing all blocks and of reading them."""
    data = os.urandom(BLOCK_BYTES)
    names = [Binding("alpha", "00" * 32, number.to_bytes(16, "little"), epoch) for number in range(BLOCKS + 1)]
    figures, began = kept.figures, time.perf_counter()
    for name in names:
        kept.put(name, data)
        while figures.store_objects - figures.stored > WAITING:
            time.sleep(0.0005)
    while figures.stored < BLOCKS:
        time.sleep(0.0005)
    wrote, began = time.perf_counter() - began, time.perf_counter()
    for at in range(0, BLOCKS, BATCH):
        found = list(kept.get_many(names[at : min(at + BATCH, BLOCKS)]))
        if any(one != data for one in found) or len(found) != min(BATCH, BLOCKS - at):
            raise SystemExit("a block did not come back: the machine is too busy for the bound of a question")
    read = time.perf_counter() - began
    return tuple(BLOCKS * BLOCK_BYTES / seconds / 1e9 for seconds in (wrote, read))


def main(argv: list[str]) -> int:
    """Measure in turns and print medians and their ratio."""
    rounds = int(argv[0]) if argv else 5
    rates: dict[str, list[tuple[float, float]]] = {"sealed": [], "plain": []}
    with tempfile.TemporaryDirectory(prefix="kv-", dir="/tmp") as name:
        folder = Path(name)
        keyring = Keyring(folder / "keys", os.urandom(32))
        with store(folder) as running, carrier(folder / "c", running.address):
            print(running.version)
            for number in range(2 * rounds):
                kind = ("sealed", "plain")[(number + number // 2) % 2]
                limits = SpillLimits(BLOCK_BYTES + OVERHEAD_BYTES, store=1 << 30, store_seconds=3_600)
                kept = SpillStore(limits, keyring, KvCarrier(folder / "c", 3_600), lambda _tenant: True)
                if kind == "plain":
                    kept._sealer = Plain(keyring)
                rates[kind].append(measured(kept, number.to_bytes(16, "little")))
                kept.drop_tenant("alpha")
                while kept.release_some():
                    pass
                time.sleep(1.0)
                kept.close()
        keyring.close()
    for at, what in enumerate(("put", "get")):
        sealed, plain = (median(one[at] for one in rates[kind]) for kind in ("sealed", "plain"))
        print(f"{what}: sealed {sealed:.2f} GB/s, plain {plain:.2f} GB/s, ratio {sealed / plain:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
