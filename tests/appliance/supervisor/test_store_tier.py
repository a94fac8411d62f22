"""Sealed KV in a store outside: a store that lies in every way, one that is slow or away, and a real one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from appliance.common.carrier_wire import ObjectStatus
from appliance.common.control import LEAVES
from appliance.supervisor import spill_store, store_tier
from appliance.supervisor.kv_carrier import PATIENCE_S, KvCarrier
from appliance.supervisor.namespaces import Namespace
from appliance.supervisor.spill_service import Vault
from appliance.supervisor.spill_store import SpillStore
from appliance.supervisor.spill_tiers import SpillLimits
from isolation.keys.keyring import Keyring
from isolation.keys.seal import OVERHEAD_BYTES, Binding
from tests.appliance.carrier.carrying import carrier
from tests.appliance.supervisor.test_kv_carrier import wait_until
from tests.stores import store

SIZE = 256
SEALED = SIZE + OVERHEAD_BYTES
LIMITS = SpillLimits(SEALED, store=1 << 30, store_seconds=3_600)
"""Room for one object here; everything else goes to the store."""

LIES = ("flip", "cut", "swap", "other_tenant", "other_epoch", "replay", "absent")


@pytest.fixture
def keyring(tmp_path: Path) -> Iterator[Keyring]:
    """A keyring of its own."""
    ring = Keyring(tmp_path / "keys", os.urandom(32))
    yield ring
    ring.close()


class HostileStore:
    """A store that keeps what it gets, and gives what ``lie`` makes of it."""

    def __init__(self) -> None:
        self.objects: dict[bytes, bytes] = {}
        self.written: list[bytes] = []
        """Names in the order in which they came."""
        self.dropped: set[bytes] = set()
        self.lie: Callable[[bytes, bytes], bytes] = lambda _name, body: body
        self.away = False
        self._done: list[Callable[[ObjectStatus], None]] = []

    def get(
        self, names: Sequence[bytes], sizes: Sequence[int], _wanted: Callable[[], bool] = lambda: True
    ) -> list[tuple[ObjectStatus, bytes | bytearray]]:
        """Give what the lie makes of each."""
        if self.away:
            return [(ObjectStatus.AWAY, b"")] * len(names)
        told = [self.lie(name, self.objects[name]) for name in names]
        return [(ObjectStatus.OK, body) if body else (ObjectStatus.ABSENT, b"") for body in told]

    def offer(
        self,
        name: bytes,
        body: memoryview,
        done: Callable[[ObjectStatus], None],
        _wanted: Callable[[], bool],
        *,
        owner: str,
    ) -> bool:
        """Keep an object; it is written when ``settle`` is called."""
        if self.away:
            return False
        self.objects[name] = bytes(body)
        self.written.append(name)
        self._done.append(done)
        return True

    def settle(self) -> None:
        """Tell that all is written."""
        for done in self._done:
            done(ObjectStatus.OK)
        self._done.clear()

    def drop(self, name: bytes, *, later: bool = False) -> None:
        """Note a drop, and keep the object all the same."""
        self.dropped.add(name)

    def close(self) -> None:
        """Do nothing."""


def binding(number: int, tenant: str = "alpha", epoch: bytes = b"one") -> Binding:
    """Name of a block."""
    return Binding(tenant, "00" * 32, number.to_bytes(16, "little"), epoch)


def content(number: int, salt: int = 0) -> bytes:
    """Bytes of a block."""
    return (number * 7 + salt).to_bytes(8, "little") * (SIZE // 8)


def outside(
    keyring: Keyring, may_leave: Callable[[str], bool] = lambda _tenant: True
) -> tuple[SpillStore, HostileStore]:
    """A store of sealed blocks before a hostile one."""
    hostile = HostileStore()
    return SpillStore(LIMITS, keyring, hostile, may_leave), hostile


def deceived(keyring: Keyring, kind: str, count: int) -> tuple[int, int, int]:
    """Write so many blocks and ask for them while the store lies; gives the numbers of blocks that opened to what they
    are not, that opened at all, and that the same honest store gave before."""
    kept, hostile = outside(keyring)
    draw = random.Random(kind)
    others = {"other_tenant": ("beta", b"one"), "other_epoch": ("alpha", b"two")}.get(kind, ("alpha", b"one"))
    for number in range(count):
        kept.put(binding(number, *others), content(number, salt=1))
    kept.put(binding(count), content(count))
    earlier = list(hostile.written)  # In the order of their numbers: each left when the next came.
    for number in range(count):
        kept.put(binding(number), content(number))
    kept.put(binding(count), content(count))
    hostile.settle()
    later = hostile.written[-count:]
    twin = dict(zip(later, earlier[:count], strict=True))
    neighbour = dict(zip(later, [*later[1:], later[0]], strict=True))
    honest = sum(kept.get(binding(number)) == content(number) for number in range(0, count, 7))

    def lie(name: bytes, body: bytes) -> bytes:
        if kind == "flip":
            place = draw.randrange(len(body))
            return body[:place] + bytes([body[place] ^ 1 << draw.randrange(8)]) + body[place + 1 :]
        if kind == "cut":
            return body[: draw.randrange(1, len(body))]
        if kind == "swap":
            return hostile.objects[neighbour[name]]
        return b"" if kind == "absent" else hostile.objects[twin[name]]

    hostile.lie = lie
    wrong = opened = 0
    for number in range(count):
        data = kept.get(binding(number))
        opened += data is not None
        wrong += data is not None and data != content(number)
    kept.close()
    return wrong, opened, honest


@pytest.mark.parametrize("kind", LIES)
def test_a_store_that_lies_gives_nothing(keyring: Keyring, kind: str) -> None:
    """Blocks flipped, cut, swapped with the next, with another tenant's of the same name, with one of another engine
    run, with an older one of the same name, or withheld: none opens. Control: all that were asked for before did."""
    assert deceived(keyring, kind, 140) == (0, 0, 20)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_hundred_thousand_lies_give_nothing(keyring: Keyring) -> None:
    """All kinds of lies, 100,000 objects together."""
    found = [deceived(keyring, kind, 14_288) for kind in LIES]
    assert found == [(0, 0, 2_042)] * len(LIES)


def test_what_is_forgotten_cannot_be_opened_again(keyring: Keyring) -> None:
    """After a shred, the end of an engine run or of the permission, a store that kept everything gives nothing, and was
    told to drop it; what is left of another tenant opens (control)."""
    leaving = {"alpha", "beta", "gamma", "delta"}
    kept, hostile = outside(keyring, leaving.__contains__)
    tenants = {"alpha": b"one", "beta": b"one", "gamma": b"two", "delta": b"one"}
    for tenant, epoch in tenants.items():
        kept.put(binding(0, tenant, epoch), content(0))
    kept.put(binding(1, "last"), content(1))
    hostile.settle()
    assert len(hostile.objects) == 4
    assert (kept.shred("alpha"), kept.drop_outside("beta"), kept.drop_epoch(b"two")) == (1, 1, 1)
    assert not kept.release_some()
    opened = {tenant for tenant, epoch in tenants.items() if kept.get(binding(0, tenant, epoch)) is not None}
    assert opened == {"delta"} and len(hostile.dropped) == 3
    assert kept.figures.store_objects == 1
    kept.close()


def test_what_is_withdrawn_is_not_found_while_it_is_released_in_steps(
    keyring: Keyring, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forty objects of which the store takes 1 ms each to drop: after the withdrawal none opens, whatever is released
    yet, none is written that waited to be, and each turn of the event loop takes one step. Another tenant's opens at
    every turn (control)."""
    leaving = {"alpha", "beta"}
    kept, hostile = outside(keyring, leaving.__contains__)
    wanted: list[Callable[[], bool]] = []
    offer, drop, clock = hostile.offer, hostile.drop, [0.0]

    def offer_and_note(
        name: bytes, body: memoryview, done: Callable[[ObjectStatus], None], still: Callable[[], bool], *, owner: str
    ) -> bool:
        wanted.append(still)
        return offer(name, body, done, still, owner=owner)

    def drop_slowly(name: bytes) -> None:
        clock[0] += 0.001
        drop(name)

    monkeypatch.setattr(hostile, "offer", offer_and_note)
    monkeypatch.setattr(hostile, "drop", drop_slowly)
    kept.put(binding(0, "beta"), content(0))
    for number in range(40):
        kept.put(binding(number), content(number))
    kept.put(binding(99, "gamma"), content(99))
    hostile.settle()
    for number in range(40, 42):
        kept.put(binding(number), content(number))
    monkeypatch.setattr(spill_store, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=time.sleep))
    assert [still() for still in wanted[1:]] == [True] * 41, "control: what waits is still wanted"
    vault = Vault(keyring, kept, Namespace(), leaving)
    vault._kept |= {"alpha", "beta"}

    async def withdraw() -> list[int]:
        steps = [0]
        vault.take_retention({"alpha": 1, "beta": LEAVES})
        while vault._releasing:
            steps.append(len(hostile.dropped))
            assert all(kept.get(binding(number)) is None for number in range(41))
            assert kept.get(binding(0, "beta")) == content(0)
            await asyncio.sleep(0)
        return [*steps, len(hostile.dropped)]

    steps = asyncio.run(withdraw())
    assert len(hostile.dropped) == 41
    most = max(later - earlier for earlier, later in pairwise(steps))
    assert most <= 1000 * spill_store.STEP_S + 1 and len(steps) > 10
    assert [still() for still in wanted] == [True] + [False] * 41
    kept.close()


def test_who_may_not_leave_does_not(keyring: Keyring) -> None:
    """Blocks of a tenant without the policy's word are evicted, as without a store; those of another leave."""
    kept, hostile = outside(keyring, "alpha".__eq__)
    for tenant in ("beta", "alpha", "beta"):
        kept.put(binding(0, tenant), content(0))
        kept.put(binding(1, tenant), content(1))
    assert len(hostile.objects) == 2 and kept.figures.evicted == 3
    kept.close()


def test_a_store_sees_neither_owner_nor_kind(keyring: Keyring) -> None:
    """What goes out is ciphertext and tag alone: no two objects or names share 8 bytes anywhere, and no id of a key is
    in them. The file of the same object on a disk has both (control)."""
    kept, hostile = outside(keyring)
    for number in range(50):
        kept.put(binding(number), bytes(SIZE))
    parts = [data[at : at + 8] for pair in hostile.objects.items() for data in pair for at in range(len(data) - 7)]
    assert len(parts) == len(set(parts))
    kek = keyring.key_id("alpha")
    assert kek is not None and not any(kek in body for body in hostile.objects.values())
    assert {len(body) for body in hostile.objects.values()} == {SIZE + 16}
    kept.close()
    folder = Path(tempfile.mkdtemp())
    disk = SpillStore(SpillLimits(1, 1 << 20, folder), keyring)
    disk.put(binding(0), content(0))
    assert kek in next(folder.iterdir()).read_bytes()
    disk.close()


def test_a_store_that_is_away_costs_a_block_and_keeps_it(keyring: Keyring) -> None:
    """While it is away nothing is found and nothing leaves; what it has is there again afterwards, until its time is
    over. What is on its way is found meanwhile."""
    kept, hostile = outside(keyring)
    for number in range(4):
        kept.put(binding(number), content(number))
    assert list(kept.get_many([binding(number) for number in range(4)])) == [content(number) for number in range(4)]
    hostile.objects.clear()  # Nothing was asked of the store: all was still here.
    hostile.away = True
    assert kept.get(binding(0)) is not None
    hostile.away = False
    kept.close()
    kept, hostile = outside(keyring)
    for number in range(4):
        kept.put(binding(number), content(number))
    hostile.settle()
    hostile.away = True
    assert [kept.get(binding(number)) is None for number in range(4)] == [True, True, True, False]
    kept.put(binding(4), content(4))
    assert kept.figures.evicted == 1 and kept.figures.store_away == 4
    hostile.away = False
    assert list(kept.get_many([binding(number) for number in range(6)])) == [content(number) for number in range(3)]
    kept.close()


def test_a_flood_of_tiny_blocks_evicts_its_own(keyring: Keyring, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the number of objects is the bound, the tenant with most objects gives way, not the one with most bytes."""
    monkeypatch.setattr(store_tier, "MAX_STORE_OBJECTS", 4)
    kept, hostile = outside(keyring)
    for number in range(2):
        kept.put(binding(number), content(number))
    for number in range(12):
        kept.put(binding(number, "beta"), b"tiny")
    hostile.settle()
    assert [kept.get(binding(number)) for number in range(2)] == [content(0), content(1)]
    assert kept.figures.evicted > 0 and kept.figures.store_objects == 4
    kept.close()


def test_a_file_that_was_cut_does_not_leave(keyring: Keyring, tmp_path: Path) -> None:
    """What a disk has lost is evicted, not sent out as what it is not. Control: the next whole file leaves."""
    hostile = HostileStore()
    limits = SpillLimits(1, SEALED, tmp_path / "disk", store=1 << 20, store_seconds=3_600)
    kept = SpillStore(limits, keyring, hostile, lambda _tenant: True)
    kept.put(binding(0), content(0))
    next((tmp_path / "disk").iterdir()).write_bytes(b"cut")
    kept.put(binding(1), content(1))
    assert (len(hostile.objects), kept.figures.evicted) == (0, 1)
    kept.put(binding(2), content(2))
    assert (len(hostile.objects), kept.figures.evicted) == (1, 1)
    kept.close()


def count_in_memory(pid: int, wanted: bytes) -> int:
    """Return how often bytes are found in a process's memory."""
    count = 0
    with Path(f"/proc/{pid}/mem").open("rb", 0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            place, rights = line.split()[:2]
            start, end = (int(number, 16) for number in place.split("-"))
            if rights.startswith("rw"):
                memory.seek(start)
                with contextlib.suppress(OSError):
                    count += memory.read(end - start).count(wanted)
    return count


def test_a_real_store_has_the_blocks_and_nothing_in_clear(keyring: Keyring, tmp_path: Path) -> None:
    """Through the carrier's own program to a real store: all blocks come back; the canary in each is in no memory of
    store or carrier, and a block written unsealed by the same way is in both (control). Without a store nothing is
    found, and nobody waits long."""
    canary = b"athanor-canary-" + os.urandom(8).hex().encode()
    plain = canary[::-1]
    with tempfile.TemporaryDirectory(prefix="kv-", dir="/tmp") as name:
        folder = Path(name)
        with store(folder) as running, carrier(folder / "c", running.address) as process:
            print(running.version)
            way = KvCarrier(folder / "c", 60)
            kept = SpillStore(LIMITS, keyring, way, lambda _tenant: True)
            blocks = [(canary * 40)[: SIZE - 4] + number.to_bytes(4, "little") for number in range(41)]
            for number, block in enumerate(blocks):
                kept.put(binding(number), block)
            wait_until(lambda: kept.figures.stored == 40)
            assert list(kept.get_many([binding(number) for number in range(41)])) == blocks
            assert (kept.figures.restored, kept.figures.store_restored) == (41, 40)
            control: list[ObjectStatus] = []
            assert way.offer(bytes(32), memoryview((plain * 40)[:SIZE]), control.append, owner="control")
            wait_until(lambda: control == [ObjectStatus.OK])
            pids = (running.process.pid, process.pid)
            assert [count_in_memory(pid, canary) for pid in pids] == [0, 0]
            assert count_in_memory(pids[0], plain) > 0 and count_in_memory(pids[1], plain) > 0
            running.process.kill()
            running.process.wait()
            began = time.monotonic()
            assert list(kept.get_many([binding(number) for number in range(41)])) == []
            assert kept.get(binding(40)) is not None
            assert time.monotonic() - began < PATIENCE_S + 0.3
            kept.close()
