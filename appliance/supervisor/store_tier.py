"""Sealed KV in a store outside of this machine that need not be trusted: the books of it, and how objects go and come.

The store gets an object's ciphertext and tag under a name, and nothing else. The header, with the object's id and the
id of its KEK, stays in these books. The id is the salt of the object's key, so what is taken out of the books can be
opened by nobody any more, whatever the store keeps: neither with all keys nor by this process. A name is an HMAC of the
id under a key of this run, and no two objects have one. So an object under another's name, an older one, one of another
tenant or engine run, and one that was changed or cut do not open, as on the disk (``isolation.keys.seal``).

The store sees how many objects there are, how large they are, and when they are written, read and dropped.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from appliance.common.carrier_wire import MAX_OBJECT_BYTES, ObjectStatus
from appliance.supervisor.spill_tiers import Key, SpilledObject, SpillFigures, SpillLimits, TierBooks
from isolation.ipc.spill import KvTier
from isolation.keys.seal import HEADER_BYTES

MAX_STORE_OBJECTS = 1 << 18
"""Most objects in the books of the store: some 160 MB of this process's memory."""

MARGIN_S = 10.0
"""Seconds before the end of its time from which on an object is not asked for: its writing was queued."""

BATCH_OBJECTS = 16
BATCH_BYTES = 8 << 20
"""Most objects, and bytes unless one object has more, of one question to the store."""


@dataclass(frozen=True, slots=True)
class FoundObject:
    """An object as it was found in the books, whatever becomes of it there meanwhile."""

    id: bytes
    size: int
    sealed: bytes | None
    """None: not here yet."""
    tier: KvTier = KvTier.MEMORY
    name: bytes = b""
    header: bytes = b""


class ObjectCarrier(Protocol):
    """Way to the store (``appliance.supervisor.kv_carrier``)."""

    def get(
        self, names: Sequence[bytes], sizes: Sequence[int], wanted: Callable[[], bool] = lambda: True
    ) -> list[tuple[ObjectStatus, bytes | bytearray]]:
        """Ask for objects of these names and sizes; gives what became of each. Blocks for a bounded time, and no longer
        than ``wanted``: what had come by then is not given."""
        ...

    def offer(
        self,
        name: bytes,
        body: memoryview,
        done: Callable[[ObjectStatus], None],
        wanted: Callable[[], bool],
        *,
        owner: str,
    ) -> bool:
        """Queue an object to be written; False where it will not be, as where its ``owner`` has its part of what may
        wait. ``done`` is called from another thread; so is ``wanted``, just before the object leaves: one that is
        wanted no more is not written, and nothing is told."""
        ...

    def drop(self, name: bytes, *, later: bool = False) -> None:
        """Have the store forget an object; ``later``: what is written meanwhile does not wait for that."""
        ...

    def close(self) -> None:
        """Release the way."""
        ...


class StoreTier:
    """Objects in the store. The owner holds ``lock`` around every call but ``bring`` and ``close``."""

    def __init__(
        self,
        limits: SpillLimits,
        carrier: ObjectCarrier,
        figures: SpillFigures,
        lock: threading.Lock,
        may_leave: Callable[[str], bool],
    ) -> None:
        """``may_leave``: whether the policy lets a tenant's objects leave this machine."""
        self.tier = TierBooks(limits.store)
        self._seconds = limits.store_seconds
        self._carrier = carrier
        self._figures = figures
        self._lock = lock
        self._may_leave = may_leave
        self._name_key = secrets.token_bytes(32)

    def offer(self, tenant: str, key: Key, item: SpilledObject, sealed: bytes) -> bool:
        """Take an object that leaves this machine; False where it does not."""
        if not self._may_leave(tenant) or item.size > min(self.tier.limit, MAX_OBJECT_BYTES):
            return False
        item.name = hmac.digest(self._name_key, b"athanor kv\x00" + item.id, hashlib.sha256)
        item.header, item.sealed, item.path = sealed[:HEADER_BYTES], sealed, None
        item.until = time.monotonic() + self._seconds - MARGIN_S
        body = memoryview(sealed)[HEADER_BYTES:]
        self.tier.put(tenant, key, item)  # Before it is offered: what is not in the books is not wanted.
        if not self._carrier.offer(
            item.name,
            body,
            lambda status: self._written(tenant, key, item, status),
            lambda: self._holds(tenant, key, item),
            owner=tenant,
        ):
            self.tier.pop(tenant, key)
            item.name = item.header = b""
            self._figures.store_away += 1
            return False
        while self.tier.used > self.tier.limit or self.tier.count > MAX_STORE_OBJECTS:
            full = self.tier.used > self.tier.limit
            evicted = self.tier.pop(*(self.tier.victim() if full else self.tier.victim_by_count()))
            if evicted is not None:
                self.forget(evicted)
                self._figures.evicted += 1
        return True

    def run(self, tenant: str, keys: Sequence[Key]) -> list[FoundObject]:
        """Return the objects of the first of these keys that one question brings, up to the first that is not here."""
        found, size = list[FoundObject](), 0
        for key in keys[:BATCH_OBJECTS]:
            item = self.tier.use(tenant, key)
            if item is not None and time.monotonic() > item.until:
                self.tier.pop(tenant, key)
                self.forget(item)
                item = None
            if item is None or (found and size + item.size > BATCH_BYTES):
                break
            # What is not written yet is still in memory.
            found.append(FoundObject(item.id, item.size, item.sealed, KvTier.STORE, item.name, item.header))
            size += item.size
        return found

    def bring(self, items: Sequence[FoundObject]) -> list[FoundObject]:
        """Fetch what of these is not here; gives each with its sealed bytes. None: carrier or store did not serve. What
        the store does not have gives no bytes, what it has in another length too few. Blocks for a bounded time."""
        wanted = [item for item in items if item.sealed is None]
        sizes = [item.size - HEADER_BYTES for item in wanted]
        answers = iter(self._carrier.get([item.name for item in wanted], sizes) if wanted else [])
        found = list[FoundObject]()
        for item in items:
            if item.sealed is None:
                status, body = next(answers)
                self._count(status)
                item = replace(item, sealed=_sealed(status, item.header, body))
            found.append(item)
        return found

    def forget(self, item: SpilledObject) -> None:
        """Make an object that is out of the books unreadable, and have the store forget it."""
        if item.name:
            self._carrier.drop(item.name)
        item.id = item.header = item.name = b""
        item.sealed = None

    def close(self) -> None:
        """Release the way to the store; what it has is unreadable and ends with its time."""
        self._carrier.close()

    def _holds(self, tenant: str, key: Key, item: SpilledObject) -> bool:
        """Return whether an object is in the books. The lock need not be held."""
        held = self.tier.objects.get(tenant)
        return held is not None and held.get(key) is item

    def _count(self, status: ObjectStatus) -> None:
        if status in (ObjectStatus.ABSENT, ObjectStatus.REFUSED):
            self._figures.store_lost += 1
        elif status is ObjectStatus.AWAY:
            self._figures.store_away += 1

    def _written(self, tenant: str, key: Key, item: SpilledObject, status: ObjectStatus) -> None:
        """Release the bytes of an object that the store has; take one that it has not out of the books."""
        with self._lock:
            if not self._holds(tenant, key, item):
                return
            if status is ObjectStatus.OK:
                item.sealed = None
                self._figures.stored += 1
                return
            self.tier.pop(tenant, key)
            item.id = item.header = item.name = b""
            item.sealed = None
            if status is ObjectStatus.AWAY:
                self._figures.store_away += 1
            else:
                self._figures.store_lost += 1


def _sealed(status: ObjectStatus, header: bytes, body: bytes | bytearray) -> bytes | None:
    if status is ObjectStatus.OK:
        return header + body
    if status is ObjectStatus.AWAY:
        return None
    return header if status is ObjectStatus.OTHER_LENGTH else b""
