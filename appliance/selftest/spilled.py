"""Spill tier for checks: an engine's second channel, with the supervisor's real store behind it and no thread.

Every message passes the codec both ways. Answers arrive in parts of random size, and some sends meet a full ring. One
seed gives one order.
"""

from __future__ import annotations

import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from appliance.supervisor.spill_store import SpillStore
from appliance.supervisor.spill_tiers import SpillLimits
from isolation.ipc.codec import Message, decode, encode
from isolation.ipc.errors import RingFull
from isolation.ipc.spill import Fetch, Fetched, Keep
from isolation.keys.keyring import Keyring
from isolation.keys.seal import Binding

TIER_BYTES = 4 << 20
"""Bytes of each tier: everything that a load evicts."""

FULL_RING = 12
"""One send in this many meets a full ring."""


def untouched(content: bytes) -> bytes:
    """Return the stored bytes unchanged."""
    return content


@dataclass(slots=True)
class StoreChannel:
    """The engine's end of the channel; ``change`` alters returned blocks, for controls."""

    store: SpillStore
    draw: np.random.Generator
    epoch: bytes
    change: Callable[[bytes], bytes] = untouched
    _answers: deque[Fetched] = field(default_factory=deque)

    def send(self, message: Message, *, urgent: bool = True) -> None:
        """Store or fetch; sometimes the ring is full."""
        if not self.draw.integers(FULL_RING):
            raise RingFull
        heard = decode(encode(message))
        if isinstance(heard, Keep):
            self.store.put(self._name(heard.namespace, heard.block), heard.content)
        elif isinstance(heard, Fetch):
            for index, block in enumerate(heard.blocks):
                content = self.store.get(self._name(heard.namespace, block))
                self._answers.append(Fetched(heard.request, index, self.change(content or b"")))
                if content is None:
                    return

    def receive(self, limit: int) -> list[Message]:
        """Return some of the messages that have arrived, in order."""
        count = min(limit, len(self._answers), int(self.draw.integers(4)))
        return [decode(encode(self._answers.popleft())) for _ in range(count)]

    def _name(self, namespace: bytes, block: bytes) -> Binding:
        return Binding(f"tenant-{namespace[0]}", "00", block, self.epoch)


@contextmanager
def spill_store(*, disk: bool) -> Iterator[SpillStore]:
    """Build a store that keeps everything in memory, or everything on disk, in a new folder."""
    with tempfile.TemporaryDirectory(prefix="ath-spilled-") as name:
        keyring = Keyring(Path(name) / "keys", os.urandom(32))
        memory = 0 if disk else TIER_BYTES
        store = SpillStore(SpillLimits(memory, TIER_BYTES if disk else 0, Path(name) / "spill"), keyring)
        try:
            yield store
        finally:
            store.close()
            keyring.close()
