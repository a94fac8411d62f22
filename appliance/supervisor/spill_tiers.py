"""Bounds, counts and books of the places for sealed KV outside of engines. The books hold no lock: their owner does."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import asdict, dataclass, field
from pathlib import Path

Key = tuple[bytes, bytes]
"""Epoch and block id."""


@dataclass(frozen=True, slots=True)
class SpillLimits:
    """Sizes of the tiers in bytes, sealed. A tenant may use all of it as long as no other tenant needs any."""

    memory: int
    disk: int = 0
    folder: Path | None = None
    """Folder for files; needed where ``disk`` is not 0."""
    store: int = 0
    """Bytes in the store outside of this machine."""
    store_seconds: int = 0
    """Time for which that store keeps an object."""


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
    stored: int = 0
    """Blocks that the store outside of this machine has taken."""
    store_restored: int = 0
    """Restored blocks that came from there; they are counted in ``restored`` too."""
    store_lost: int = 0
    """Blocks that the store should have and has not, or did not take."""
    store_away: int = 0
    """Blocks asked for, or to be written, while carrier or store did not serve."""
    fleet_stored: int = 0
    """Blocks that the store has taken for all hosts of the fleet."""
    fleet_restored: int = 0
    """Blocks that an engine got from another host, or an earlier life of one here."""
    fleet_absent: int = 0
    """Questions for such blocks that ended at one that nobody has written, or that did not come in time."""
    fleet_rejected: int = 0
    """Such blocks that did not open: changed, swapped, or by no member."""
    fleet_left_out: int = 0
    """Blocks that engines were to send when they computed them, and did not: the supervisor lagged behind."""
    fleet_withdrawn: int = 0
    """Blocks in common that an engine called wrong, and which the store was told to forget."""
    memory_bytes: int = 0
    disk_bytes: int = 0
    memory_objects: int = 0
    disk_objects: int = 0
    store_bytes: int = 0
    store_objects: int = 0

    def told(self) -> dict[str, int]:
        """Figures by name, as the gateway exports them."""
        values = asdict(self)
        rejected, cut = values.pop("rejected"), values.pop("cut")
        return {**values, "rejected_length": cut, "rejected_seal": rejected - cut}


@dataclass(slots=True)
class SpilledObject:
    """One sealed object and where its bytes are: here, in a file, or in the store outside."""

    id: bytes
    size: int
    sealed: bytes | None
    path: Path | None = None
    header: bytes = b""
    """Header of an object in the store outside, which has the rest alone."""
    name: bytes = b""
    """Name of the object in that store; empty where it is not there."""
    until: float = 0.0
    """Time, by the monotonic clock, from which on that store may have forgotten it."""


@dataclass(slots=True)
class TierBooks:
    """Objects of one tier, by tenant, the longest unused first."""

    limit: int
    used: int = 0
    count: int = 0
    objects: dict[str, OrderedDict[Key, SpilledObject]] = field(default_factory=dict)
    bytes_of: dict[str, int] = field(default_factory=dict)

    def put(self, tenant: str, key: Key, item: SpilledObject) -> None:
        """Enter an object as the one used last; its name is free."""
        self.objects.setdefault(tenant, OrderedDict())[key] = item
        self.bytes_of[tenant] = self.bytes_of.get(tenant, 0) + item.size
        self.used += item.size
        self.count += 1

    def pop(self, tenant: str, key: Key) -> SpilledObject | None:
        """Take an object out of the books, if it is there."""
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

    def take(self, tenant: str) -> OrderedDict[Key, SpilledObject]:
        """Take all objects of a tenant out of the books, in a time that does not depend on their number."""
        items = self.objects.pop(tenant, None)
        if items is None:
            return OrderedDict()
        self.used -= self.bytes_of.pop(tenant)
        self.count -= len(items)
        return items

    def use(self, tenant: str, key: Key) -> SpilledObject | None:
        """Return an object, if it is there, and count it as used last."""
        items = self.objects.get(tenant)
        item = items.get(key) if items is not None else None
        if items is not None and item is not None:
            items.move_to_end(key)
        return item

    def victim(self) -> tuple[str, Key]:
        """Tenant and object to evict: the largest holder's longest unused."""
        tenant = max(self.bytes_of, key=self.bytes_of.__getitem__)
        return tenant, next(iter(self.objects[tenant]))

    def victim_by_count(self) -> tuple[str, Key]:
        """Tenant and object to evict where there are too many objects: the longest unused of who has most of them."""
        tenant = max(self.objects, key=lambda name: len(self.objects[name]))
        return tenant, next(iter(self.objects[tenant]))
