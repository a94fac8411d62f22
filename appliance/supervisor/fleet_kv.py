"""Sealed KV that the hosts of a fleet have in common: what this host writes there, and what it finds.

A block of a tenant that shares is sealed once more under the tenant's generation (``isolation.keys.fleet_seal``) when
its engine sends it: when it is evicted, or, of a prompt, when it is computed (``writes_computed``). It is offered to
the store under a name that each member can compute. The books have what this host wrote: they bound its bytes there,
and a block that is there is not written twice.

Nothing is used unless this host holds the generation at the beginning and at the end of what it does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from appliance.common.carrier_wire import MAX_OBJECT_BYTES, ObjectStatus
from appliance.supervisor.fleet_keys.keeper import FleetKeys
from appliance.supervisor.spill_tiers import Key, SpilledObject, SpillFigures, SpillLimits, TierBooks
from appliance.supervisor.store_tier import BATCH_BYTES, BATCH_OBJECTS, MARGIN_S, MAX_STORE_OBJECTS, ObjectCarrier
from isolation.keys.errors import SealBrokenError
from isolation.keys.fleet_seal import (
    OVERHEAD_BYTES,
    FleetBinding,
    Generation,
    fleet_name,
    open_from_fleet,
    seal_for_fleet,
)

_LACKED = frozenset({ObjectStatus.ABSENT, ObjectStatus.OTHER_LENGTH})
"""Answers of a store that serves."""


@dataclass(frozen=True, slots=True)
class EngineLife:
    """One life of an engine, as objects name it."""

    epoch: bytes
    model: str
    """Hex digest of the model's files."""
    backend: bytes
    """Digest of all else that its KV depends on (``fleet_backend``)."""


@dataclass(frozen=True, slots=True)
class FoundBlocks:
    """What a question to the store has brought."""

    contents: list[bytes]
    """Contents of the first blocks that were asked for, as many as there were."""
    lacks: bool = False
    """Whether the store serves and has not got the block behind these, or something that does not open. False where it
    does not answer or refuses: then nothing is known of the block."""


class FleetKv:
    """Blocks in common. All methods may be called from any thread."""

    def __init__(
        self,
        keys: FleetKeys,
        carrier: ObjectCarrier,
        producer: bytes,
        producers: frozenset[bytes],
        limits: SpillLimits,
        figures: SpillFigures,
        *,
        writes_computed: bool = False,
    ) -> None:
        """``producer``: digest of this host's entry in the list of members; ``producers``: those of all.
        ``writes_computed``: whether engines are to send blocks of prompts when they are computed."""
        self.writes_computed = writes_computed
        self._keys = keys
        self._carrier = carrier
        self._producer, self._producers = producer, producers
        self._seconds = limits.store_seconds
        self.lasts_s = max(1, int(limits.store_seconds - MARGIN_S))
        """Seconds after which an engine is to send a block again: before the store forgets it."""
        self._figures = figures
        self._lock = threading.Lock()
        self._books = TierBooks(limits.store)
        self._unwritten, self._refused = set[bytes](), set[bytes]()
        """Namespaces of which the store did not get, and did not take, all that engines sent; of those that share."""

    def keep(self, namespace: bytes, block: bytes, life: EngineLife, data: bytes) -> str | None:
        """Offer a block to the fleet; gives the account whose block it is, None where it does not share."""
        of, fleet = self._keys.current(namespace), self._keys.fleet_key
        size = len(data) + OVERHEAD_BYTES
        if of is None or fleet is None or size > min(self._books.limit, MAX_OBJECT_BYTES):
            return None
        binding = FleetBinding(block, life.model, life.backend)
        name = fleet_name(fleet, of, binding)
        key, now = (name, b""), time.monotonic()
        with self._lock:
            held = self._books.use(of.account, key)
            # What an engine sends again after `lasts_s` may have come here faster than it did the first time.
            if held is not None and now < held.until - MARGIN_S:
                return of.account
        sealed = seal_for_fleet(of, binding, self._producer, life.epoch, data)
        item = SpilledObject(b"", size, None, name=name, until=now + self._seconds - MARGIN_S)
        with self._lock:
            self._books.pop(of.account, key)
            self._books.put(of.account, key, item)
        if not self._carrier.offer(
            name,
            memoryview(sealed),
            lambda status: self._written(namespace, of.account, key, item, status),
            lambda: self._keys.current(namespace) == of and self._holds(of.account, key, item),
            owner=of.account,
        ):
            self._take_out(of.account, key, item)
            self._miss(namespace)
        self._shrink()
        return of.account

    def left_out(self, count: int) -> None:
        """Count blocks that an engine was to send when it computed them, and did not."""
        self._figures.fleet_left_out += count

    def withdraw(self, namespace: bytes, block: bytes, life: EngineLife) -> None:
        """Have the store forget a block that an engine calls wrong, whichever host wrote it."""
        of, fleet = self._keys.current(namespace), self._keys.fleet_key
        if of is None or fleet is None:
            return  # What was written under another generation is found by nobody.
        name = fleet_name(fleet, of, FleetBinding(block, life.model, life.backend))
        with self._lock:
            self._books.pop(of.account, (name, b""))
        self._carrier.drop(name)
        self._figures.fleet_withdrawn += 1

    def find(
        self,
        namespace: bytes,
        blocks: Sequence[bytes],
        life: EngineLife,
        size: int,
        wanted: Callable[[], bool] = lambda: True,
    ) -> FoundBlocks:
        """Return the content of the first of these blocks of ``size`` bytes each that one question to the store brings,
        up to the first that is absent or does not open. Blocks for a bounded time (``kv_carrier.PATIENCE_S``), and no
        longer than ``wanted``, which is asked between two blocks. Who asks for one again counts it as absent once it
        asks no more (``absent``)."""
        of, fleet = self._keys.current(namespace), self._keys.fleet_key
        whole = size + OVERHEAD_BYTES
        if of is None or fleet is None or not size or whole > MAX_OBJECT_BYTES:
            return FoundBlocks([])
        chosen = blocks[: min(BATCH_OBJECTS, max(1, BATCH_BYTES // whole))]
        bindings = [FleetBinding(block, life.model, life.backend) for block in chosen]
        names = [fleet_name(fleet, of, binding) for binding in bindings]
        answers = self._carrier.get(names, [whole] * len(names), wanted)
        found = self._opened(of, list(zip(bindings, answers, strict=True)))
        if self._keys.current(namespace) != of:
            return FoundBlocks([])
        self._figures.fleet_restored += len(found.contents)
        return found

    def absent(self, namespace: bytes, blocks: Sequence[bytes], life: EngineLife, *, lacks: bool) -> None:
        """Count a block of a namespace that shares, the first of these, which the store has not got (``lacks``) or did
        not give in time. What it has not got of what this host wrote counts as not written, with all behind it: behind
        the gap nobody finds it, and who computes it has it written again. Its bytes count all the same: the store may
        have it, and an engine could name what it likes behind a block that there is not. A store that is away or slow
        is sent nothing a second time, which would make it slower."""
        of, fleet = self._keys.current(namespace), self._keys.fleet_key
        if of is None or fleet is None:
            return
        self._figures.fleet_absent += 1
        if not lacks or not self.count(of.account):  # A name takes some microseconds; a long prompt has thousands.
            return
        names = [fleet_name(fleet, of, FleetBinding(block, life.model, life.backend)) for block in blocks]
        with self._lock:
            items: Mapping[Key, SpilledObject] = self._books.objects.get(of.account, {})
            for name in names:
                if (item := items.get((name, b""))) is not None:
                    item.until = 0.0

    def lose(self) -> None:
        """The store has lost what it had: nothing that this host wrote counts as written. It is dropped all the same,
        for a store that only says so, behind what is written anew: that are thousands of requests."""
        with self._lock:
            accounts = list(self._books.objects)
        for account in accounts:
            self.drop(account, later=True)

    def take_unwritten(self, *, refused: bool = True) -> set[bytes]:
        """Return the namespaces of which the store did not get all that engines sent since the last call; ``refused``:
        also those of which it did not take all, since the last call that asked for these."""
        with self._lock:
            taken, self._unwritten = self._unwritten, set()
            if refused:
                taken, self._refused = taken | self._refused, set()
        return taken

    def count(self, account: str) -> int:
        """Return how many objects the store has of what this host wrote for an account."""
        with self._lock:
            return len(self._books.objects.get(account, ()))

    def drop(self, account: str, *, later: bool = False) -> int:
        """Have the store forget what this host wrote for an account, ``later``: behind what is written meanwhile; gives
        how many."""
        with self._lock:
            items = self._books.take(account)
        for item in items.values():
            self._carrier.drop(item.name, later=later)
        return len(items)

    def _opened(
        self, of: Generation, answers: Sequence[tuple[FleetBinding, tuple[ObjectStatus, bytes | bytearray]]]
    ) -> FoundBlocks:
        found = list[bytes]()
        for binding, (status, body) in answers:
            if status is not ObjectStatus.OK:
                return FoundBlocks(found, status in _LACKED)
            try:
                found.append(open_from_fleet(of, binding, self._producers, body))
            except SealBrokenError:
                self._figures.fleet_rejected += 1
                return FoundBlocks(found, lacks=True)
        return FoundBlocks(found)

    def _shrink(self) -> None:
        """Have the store forget the objects that are beyond this host's part."""
        with self._lock:
            while self._books.used > self._books.limit or self._books.count > MAX_STORE_OBJECTS:
                full = self._books.used > self._books.limit
                item = self._books.pop(*(self._books.victim() if full else self._books.victim_by_count()))
                if item is not None:
                    self._carrier.drop(item.name)

    def _holds(self, account: str, key: Key, item: SpilledObject) -> bool:
        """Return whether an object is in the books. The lock need not be held."""
        held = self._books.objects.get(account)
        return held is not None and held.get(key) is item

    def _take_out(self, account: str, key: Key, item: SpilledObject) -> None:
        with self._lock:
            if self._holds(account, key, item):
                self._books.pop(account, key)

    def _miss(self, namespace: bytes) -> None:
        """Count a block of a namespace that the store did not get."""
        self._figures.store_away += 1
        with self._lock:
            self._unwritten.add(namespace)

    def _written(self, namespace: bytes, account: str, key: Key, item: SpilledObject, status: ObjectStatus) -> None:
        if status is ObjectStatus.OK:
            self._figures.fleet_stored += 1
            return
        self._take_out(account, key, item)
        if status is ObjectStatus.AWAY:
            self._miss(namespace)
        else:
            self._figures.store_lost += 1
            with self._lock:
                self._refused.add(namespace)
