"""KV blocks outside of engines: sealed, in host memory first, on a disk after that, in a store outside at last.

Everything kept here is sealed (``isolation.keys.seal``), also in memory. When a tier is full, the tenant that holds
most of it gives way, with its object that was not used for longest: a tenant that floods a tier evicts its own, and one
that holds less than an equal share loses nothing. What leaves memory goes to the disk, what leaves the disk to the
store outside of this machine (``store_tier``), where there is one and the policy lets the tenant's blocks leave, and
what leaves that is gone.

Nothing is fsynced, for nothing outlives the run: the keys take in a secret of this process's memory, and files of an
earlier run are removed at start. Only what a shred removes is overwritten and brought to the medium first.

Methods may be called from any thread; one lock guards the books, and is held while a disk is written or read. Sealing
and the store outside are outside of it. Many objects are dropped in steps, between which the lock is free. What a
policy withdraws is out of the books at once, so that nothing of it is found any more; its bytes are released in short
steps (``release_some``).
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from appliance.supervisor.spill_tiers import Key, SpilledObject, SpillFigures, SpillLimits, TierBooks
from appliance.supervisor.store_tier import MAX_STORE_OBJECTS, FoundObject, ObjectCarrier, StoreTier
from isolation.ipc.spill import KvTier
from isolation.keys.errors import KeyringError, KeysError, SealBrokenError
from isolation.keys.files import destroy
from isolation.keys.keyring import Keyring
from isolation.keys.seal import OVERHEAD_BYTES, Binding, Sealer

STEP_S = 0.002
"""Seconds for which objects are released before the lock, or an event loop, does something else: some 500 objects of a
store outside, some 50 files."""

PAUSE_S = 0.0002
"""Seconds between two such steps of a thread: one that took the lock again at once would let no other thread have
it."""

MAX_WITHDRAWN = 2 * MAX_STORE_OBJECTS
"""Objects that are withdrawn and not released yet; beyond that number the oldest are released at once."""

_SUFFIX = ".kv"


class SpillStore:
    """Store of sealed blocks in up to three tiers."""

    def __init__(
        self,
        limits: SpillLimits,
        keyring: Keyring,
        carrier: ObjectCarrier | None = None,
        may_leave: Callable[[str], bool] = lambda _tenant: False,
    ) -> None:
        """Empty the folder of what an earlier run left, or make it.

        Args:
            limits: bytes of each tier.
            keyring: tenants' keys.
            carrier: way to the store outside of this machine; None where there is none.
            may_leave: whether a tenant's blocks may go there.

        Raises:
            OSError: the folder cannot be used.
        """
        self.figures = SpillFigures()
        self._keyring = keyring
        self._sealer = Sealer(keyring)
        self._lock = threading.Lock()
        self._memory = TierBooks(limits.memory)
        self._disk = TierBooks(limits.disk if limits.folder is not None else 0)
        self._store = None
        if carrier is not None:
            self._store = StoreTier(limits, carrier, self.figures, self._lock, may_leave)
        self._withdrawn: deque[OrderedDict[Key, SpilledObject]] = deque()
        """Objects that are out of the books and still to be released, the oldest withdrawal first."""
        self._num_withdrawn = 0
        self._folder = limits.folder
        if limits.folder is not None:
            limits.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            limits.folder.chmod(0o700)
            for path in limits.folder.glob(f"*{_SUFFIX}"):
                path.unlink()

    def put(self, binding: Binding, data: bytes) -> bool:
        """Keep a block, in place of one with the same name; False when it cannot be kept."""
        size = len(data) + OVERHEAD_BYTES
        if size > max(self._memory.limit, self._disk.limit):
            return False
        try:
            sealed, object_id = self._sealer.seal(binding, data)
        except KeyringError:
            self.figures.failed += 1
            return False
        key = (binding.epoch, binding.block)
        with self._lock:
            self._discard(binding.tenant, key)
            self._memory.put(binding.tenant, key, SpilledObject(object_id, size, sealed))
            self.figures.kept += 1
            self._shrink()
        return True

    def get(self, binding: Binding) -> bytes | None:
        """Block of this name; None when it is absent, or is not what was kept under the name and therefore removed."""
        return next(self.get_many((binding,)), None)

    def get_many(self, bindings: Sequence[Binding]) -> Iterator[bytes]:
        """Yield the blocks of these names of one tenant, in order, up to the first that is absent or does not open."""
        return (data for data, _ in self.find_many(bindings))

    def find_many(self, bindings: Sequence[Binding]) -> Iterator[tuple[bytes, KvTier]]:
        """Yield what ``get_many`` does, each block with the tier where it was."""
        at = 0
        while at < len(bindings):
            found = self._next(bindings[at:])
            if not found:
                self.figures.absent += 1
                return
            for one in found:
                data = self._opened(bindings[at], one)
                if data is None:
                    return
                yield data, one.tier
                at += 1

    def _next(self, bindings: Sequence[Binding]) -> list[FoundObject]:
        """Find the first of these blocks; where it is in the store outside, the first few that are."""
        first = bindings[0]
        with self._lock:
            item, sealed = self._find(first.tenant, (first.epoch, first.block))
            if item is not None:
                return [FoundObject(item.id, item.size, sealed, KvTier.DISK if item.path else KvTier.MEMORY)]
            if self._store is None:
                return []
            items = self._store.run(first.tenant, [(one.epoch, one.block) for one in bindings])
        return self._store.bring(items)

    def _opened(self, binding: Binding, found: FoundObject) -> bytes | None:
        """Open a block that was found; None, and counted, where it is not what was kept."""
        if found.sealed is None:
            self.figures.absent += 1
            return None
        try:
            data = self._sealer.open(binding, found.sealed, found.id)
        except KeysError as error:
            if found.tier is KvTier.STORE and not found.sealed:
                self.figures.absent += 1
            elif isinstance(error, SealBrokenError):
                self.figures.rejected += 1
                self.figures.cut += len(found.sealed) != found.size
            else:
                self.figures.failed += 1
            with self._lock:
                self._discard(binding.tenant, (binding.epoch, binding.block))
            return None
        self.figures.restored += 1
        self.figures.store_restored += found.tier is KvTier.STORE
        return data

    def drop_tenant(self, tenant: str) -> int:
        """Forget a tenant's objects; gives how many. From now on none is found; ``release_some`` releases them."""
        return self._withdraw(tenant, self._tiers())

    def drop_outside(self, tenant: str) -> int:
        """Forget a tenant's objects in the store outside of this machine; gives how many. From now on none is found, or
        written there; ``release_some`` releases them."""
        return 0 if self._store is None else self._withdraw(tenant, (self._store.tier,))

    def drop_block(self, binding: Binding) -> None:
        """Forget one block, which is wrong."""
        with self._lock:
            self._discard(binding.tenant, (binding.epoch, binding.block))

    def release_some(self) -> bool:
        """Make what was withdrawn unreadable, and have file system and store forget it, for ``STEP_S``. Returns whether
        there is more."""
        with self._lock:
            self._release(time.monotonic() + STEP_S)
            return bool(self._withdrawn)

    def drop_epoch(self, epoch: bytes) -> int:
        """Forget what one life of an engine computed; gives how many."""
        return self._drop(lambda key: key[0] == epoch)

    def shred(self, tenant: str) -> int:
        """Destroy the tenant's key, then its objects: files are overwritten and brought to the medium. Gives how many
        objects there were.

        Raises:
            KeyringError: the medium refuses; whatever is left is unreadable from the end of this process on.
        """
        try:
            self._keyring.shred(tenant)
        finally:
            count = self._drop(lambda _key: True, tenant, thoroughly=True)
            self._release_all()
        return count

    def close(self) -> None:
        """Forget everything. The folder is removed unless it holds foreign files."""
        self._drop(lambda _key: True)
        self._release_all()
        if self._store is not None:
            self._store.close()
        if self._folder is not None:
            with suppress(OSError):
                self._folder.rmdir()

    def _tiers(self) -> tuple[TierBooks, ...]:
        return (self._memory, self._disk, *(() if self._store is None else (self._store.tier,)))

    def _withdraw(self, tenant: str, tiers: tuple[TierBooks, ...]) -> int:
        """Take a tenant's objects out of the books without a look at any object."""
        count = 0
        with self._lock:
            for tier in tiers:
                if items := tier.take(tenant):
                    self._withdrawn.append(items)
                    count += len(items)
            self._num_withdrawn += count
            self._release(0.0)
            self._count()
        return count

    def _release(self, until: float) -> None:
        """Release what was withdrawn, the oldest first, until this monotonic second, and what is beyond the bound."""
        while self._withdrawn and (self._num_withdrawn > MAX_WITHDRAWN or time.monotonic() < until):
            items = self._withdrawn[0]
            self._remove(items.popitem()[1])
            self._num_withdrawn -= 1
            if not items:
                self._withdrawn.popleft()

    def _release_all(self) -> None:
        while self.release_some():
            time.sleep(PAUSE_S)

    def _drop(self, chosen: Callable[[Key], bool], tenant: str | None = None, *, thoroughly: bool = False) -> int:
        """Forget objects of one tenant, or of all, in every tier; gives how many. Blocks."""
        count = 0
        for tier in self._tiers():
            with self._lock:
                owners = list(tier.objects) if tenant is None else [tenant]
            count += sum(self._drop_of(tier, owner, chosen, thoroughly=thoroughly) for owner in owners)
        return count

    def _drop_of(self, tier: TierBooks, owner: str, chosen: Callable[[Key], bool], *, thoroughly: bool) -> int:
        """Forget a tenant's objects in one tier, in steps between which the lock is free."""
        count = 0
        with self._lock:
            keys = [key for key in tier.objects.get(owner, ()) if chosen(key)]
        while keys:
            with self._lock:
                until = time.monotonic() + STEP_S
                while keys and time.monotonic() < until:
                    item = tier.pop(owner, keys.pop())
                    if item is not None:
                        self._remove(item, thoroughly=thoroughly)
                        count += 1
                self._count()
            if keys:
                time.sleep(PAUSE_S)
        return count

    def _find(self, tenant: str, key: Key) -> tuple[SpilledObject | None, bytes | None]:
        item = self._memory.use(tenant, key)
        if item is not None:
            return item, item.sealed
        item = self._disk.use(tenant, key)
        if item is None or item.path is None:
            return None, None
        try:
            # One byte more than there should be: what grew is not taken for whole.
            with item.path.open("rb") as file:
                return item, file.read(item.size + 1)
        except OSError:
            return item, b""  # It does not open, and is discarded as one that was changed.

    def _discard(self, tenant: str, key: Key) -> None:
        for tier in self._tiers():
            item = tier.pop(tenant, key)
            if item is not None:
                self._remove(item)
        self._count()

    def _shrink(self) -> None:
        """Evict until memory and disk are within their limits."""
        while self._memory.used > self._memory.limit:
            tenant, key = self._memory.victim()
            item = self._memory.pop(tenant, key)
            if item is None:
                break
            if item.size <= self._disk.limit and self._write(item):
                self._disk.put(tenant, key, item)
            elif not self._leave(tenant, key, item, item.sealed):
                self.figures.evicted += 1
        while self._disk.used > self._disk.limit:
            tenant, key = self._disk.victim()
            sealed = self._find(tenant, key)[1] if self._store is not None else None
            item = self._disk.pop(tenant, key)
            if item is None:
                break
            self._remove(item)
            if not self._leave(tenant, key, item, sealed):
                self.figures.evicted += 1
        self._count()

    def _leave(self, tenant: str, key: Key, item: SpilledObject, sealed: bytes | None) -> bool:
        """Hand an object without a place here to the store outside; False where it does not go there."""
        if self._store is None or sealed is None or len(sealed) != item.size:
            return False  # A file that was cut, grew or is gone would open nowhere.
        return self._store.offer(tenant, key, item, sealed)

    def _write(self, item: SpilledObject) -> bool:
        assert self._folder is not None, "a tier without a folder holds nothing"
        assert item.sealed is not None, "an object in memory has no bytes"
        try:
            item.path, item.sealed = _file_with(item.sealed, self._folder), None
        except OSError:
            self.figures.failed += 1
            return False
        return True

    def _remove(self, item: SpilledObject, *, thoroughly: bool = False) -> None:
        item.sealed = None
        if self._store is not None and item.name:
            self._store.forget(item)
        if item.path is None:
            return
        try:
            if thoroughly:
                destroy(item.path)
            else:
                item.path.unlink(missing_ok=True)
        except OSError:
            self.figures.failed += 1

    def _count(self) -> None:
        figures = self.figures
        figures.memory_bytes, figures.disk_bytes = self._memory.used, self._disk.used
        figures.memory_objects, figures.disk_objects = self._memory.count, self._disk.count
        if self._store is not None:
            figures.store_bytes, figures.store_objects = self._store.tier.used, self._store.tier.count


def _file_with(sealed: bytes, folder: Path) -> Path:
    """Make a file of an object; gives its path.

    Raises:
        OSError: it cannot be written; no file is left.
    """
    path = folder / (secrets.token_hex(16) + _SUFFIX)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        # Buffered: a disk that fills in the middle of a block is an error then, not a file that is short.
        with os.fdopen(fd, "wb") as file:
            file.write(sealed)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return path
