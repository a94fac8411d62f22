"""KV blocks outside of engines: sealed, in host memory first and on a disk after that, bounded, by tenant.

Everything kept here is sealed (``isolation.keys.seal``), also in memory. When a tier is full, the tenant that holds
most of it gives way, with its object that was not used for longest: a tenant that floods a tier evicts its own, and one
that holds less than an equal share loses nothing. What leaves memory goes to the disk, what leaves the disk is gone.

Nothing is fsynced, for nothing outlives the run: the keys take in a secret of this process's memory, and files of an
earlier run are removed at start. Only what a shred removes is overwritten and brought to the medium first.

Methods may be called from any thread; one lock guards the books, and is held while a disk is written or read. Sealing
is outside of it.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from isolation.keys.errors import KeyringError, KeysError, SealBrokenError
from isolation.keys.files import destroy
from isolation.keys.keyring import Keyring
from isolation.keys.seal import OVERHEAD_BYTES, Binding, Sealer

_SUFFIX = ".kv"

Key = tuple[bytes, bytes]
"""Epoch and block id."""


@dataclass(frozen=True, slots=True)
class SpillLimits:
    """Sizes of both tiers in bytes, sealed. A tenant may use all of it as long as no other tenant needs any."""

    memory: int
    disk: int = 0
    folder: Path | None = None
    """Folder for files; needed where ``disk`` is not 0."""


@dataclass(slots=True)
class SpillFigures:
    """Counts of objects since the start, and what is held now."""

    kept: int = 0
    restored: int = 0
    absent: int = 0
    """Blocks asked for and not there."""
    rejected: int = 0
    """Blocks that did not open: changed, cut, moved or replayed."""
    cut: int = 0
    """Rejected blocks that had another length."""
    evicted: int = 0
    failed: int = 0
    """Failures of the disk or the keyring."""
    memory_bytes: int = 0
    disk_bytes: int = 0
    memory_objects: int = 0
    disk_objects: int = 0

    def told(self) -> dict[str, int]:
        """Figures by name, as the gateway exports them."""
        values = asdict(self)
        rejected, cut = values.pop("rejected"), values.pop("cut")
        return {**values, "rejected_length": cut, "rejected_seal": rejected - cut}


@dataclass(slots=True)
class _Object:
    id: bytes
    size: int
    sealed: bytes | None
    path: Path | None = None


@dataclass(slots=True)
class _Tier:
    """Objects of one tier, by tenant, the longest unused first."""

    limit: int
    used: int = 0
    count: int = 0
    objects: dict[str, OrderedDict[Key, _Object]] = field(default_factory=dict)
    bytes_of: dict[str, int] = field(default_factory=dict)

    def put(self, tenant: str, key: Key, item: _Object) -> None:
        self.objects.setdefault(tenant, OrderedDict())[key] = item
        self.bytes_of[tenant] = self.bytes_of.get(tenant, 0) + item.size
        self.used += item.size
        self.count += 1

    def pop(self, tenant: str, key: Key) -> _Object | None:
        items = self.objects.get(tenant)
        item = items.pop(key, None) if items is not None else None
        if item is None or items is None:
            return None
        self.used -= item.size
        self.count -= 1
        self.bytes_of[tenant] -= item.size
        if not items:
            del self.objects[tenant], self.bytes_of[tenant]
        return item

    def use(self, tenant: str, key: Key) -> _Object | None:
        items = self.objects.get(tenant)
        item = items.get(key) if items is not None else None
        if items is not None and item is not None:
            items.move_to_end(key)
        return item

    def victim(self) -> tuple[str, Key]:
        """Tenant and object to evict: the largest holder's longest unused."""
        tenant = max(self.bytes_of, key=self.bytes_of.__getitem__)
        return tenant, next(iter(self.objects[tenant]))


class SpillStore:
    """Store of sealed blocks in two tiers."""

    def __init__(self, limits: SpillLimits, keyring: Keyring) -> None:
        """Empty the folder of what an earlier run left, or make it.

        Raises:
            OSError: the folder cannot be used.
        """
        self.figures = SpillFigures()
        self._keyring = keyring
        self._sealer = Sealer(keyring)
        self._lock = threading.Lock()
        self._memory = _Tier(limits.memory)
        self._disk = _Tier(limits.disk if limits.folder is not None else 0)
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
            self._memory.put(binding.tenant, key, _Object(object_id, size, sealed))
            self.figures.kept += 1
            self._shrink()
        return True

    def get(self, binding: Binding) -> bytes | None:
        """Block of this name; None when it is absent, or is not what was kept under the name and therefore removed."""
        key = (binding.epoch, binding.block)
        with self._lock:
            item, sealed = self._find(binding.tenant, key)
        if item is None or sealed is None:
            self.figures.absent += 1
            return None
        try:
            data = self._sealer.open(binding, sealed, item.id)
        except KeysError as error:
            if isinstance(error, SealBrokenError):
                self.figures.rejected += 1
                self.figures.cut += len(sealed) != item.size
            else:
                self.figures.failed += 1
            with self._lock:
                self._discard(binding.tenant, key)
            return None
        self.figures.restored += 1
        return data

    def drop_tenant(self, tenant: str) -> int:
        """Forget a tenant's objects; gives how many."""
        return self._drop(lambda _key: True, tenant)

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
        return count

    def close(self) -> None:
        """Forget everything. The folder is removed unless it holds foreign files."""
        self._drop(lambda _key: True)
        if self._folder is not None:
            with suppress(OSError):
                self._folder.rmdir()

    def _drop(self, chosen: Callable[[Key], bool], tenant: str | None = None, *, thoroughly: bool = False) -> int:
        """Forget objects of one tenant, or of all: a policy may take the retention of thousands, so that nobody else's
        are looked at for one."""
        count = 0
        with self._lock:
            for tier in (self._memory, self._disk):
                for owner in list(tier.objects) if tenant is None else {tenant} & tier.objects.keys():
                    for key in [key for key in tier.objects[owner] if chosen(key)]:
                        item = tier.pop(owner, key)
                        if item is not None:
                            self._remove(item, thoroughly=thoroughly)
                            count += 1
            self._count()
        return count

    def _find(self, tenant: str, key: Key) -> tuple[_Object | None, bytes | None]:
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
        for tier in (self._memory, self._disk):
            item = tier.pop(tenant, key)
            if item is not None:
                self._remove(item)
        self._count()

    def _shrink(self) -> None:
        """Evict until both tiers are within their limits."""
        while self._memory.used > self._memory.limit:
            tenant, key = self._memory.victim()
            item = self._memory.pop(tenant, key)
            if item is None:
                break
            if item.size <= self._disk.limit and self._write(item):
                self._disk.put(tenant, key, item)
            else:
                self.figures.evicted += 1
        while self._disk.used > self._disk.limit:
            tenant, key = self._disk.victim()
            item = self._disk.pop(tenant, key)
            if item is None:
                break
            self._remove(item)
            self.figures.evicted += 1
        self._count()

    def _write(self, item: _Object) -> bool:
        assert self._folder is not None, "a tier without a folder holds nothing"
        assert item.sealed is not None, "an object in memory has no bytes"
        path = self._folder / (secrets.token_hex(16) + _SUFFIX)
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            # Buffered: a disk that fills in the middle of a block is an error then, not a file that is short.
            with os.fdopen(fd, "wb") as file:
                file.write(item.sealed)
        except OSError:
            self.figures.failed += 1
            path.unlink(missing_ok=True)
            return False
        item.path, item.sealed = path, None
        return True

    def _remove(self, item: _Object, *, thoroughly: bool = False) -> None:
        item.sealed = None
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
