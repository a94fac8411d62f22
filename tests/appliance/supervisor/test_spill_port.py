"""The supervisor's end of a spill channel against an engine that rings and floods, and a machine that refuses."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from appliance.common.audit.entry import Entry
from appliance.common.control import Control, SandboxDown
from appliance.common.errors import SpillBreachError, SpillOverrunError, SpillPortError
from appliance.supervisor import keeper as keeper_module
from appliance.supervisor import lifecycle, spill_port
from appliance.supervisor import spill_port as port_module
from appliance.supervisor.audit import watching
from appliance.supervisor.boot import Booted
from appliance.supervisor.keeper import Keeper
from appliance.supervisor.namespaces import Namespace
from appliance.supervisor.spill_port import PORT_BURST_S, SpillPort
from appliance.supervisor.spill_service import Vault
from appliance.supervisor.spill_store import SpillStore
from appliance.supervisor.spill_tiers import SpillLimits
from isolation.ipc.codec import encode
from isolation.ipc.doorbell import ThreadBell
from isolation.ipc.errors import RingFull
from isolation.ipc.frame import HEADER_BYTES
from isolation.ipc.messages import NAMESPACE_KEY_BYTES, PROTOCOL_VERSION, Hello, Role
from isolation.ipc.segment import GUEST_TO_HOST
from isolation.ipc.spill import Fetch, Fetched, Forget, Keep, Share, mark_of
from isolation.keys.keyring import Keyring
from tests.appliance.supervisor.test_fleet_kv import LIFE, Fleet, fleet
from tests.appliance.supervisor.test_keeper import Sandbox, make
from tests.isolation.ipc.wire import Wire, connect

__all__ = ["fleet"]

KEY = bytes(range(NAMESPACE_KEY_BYTES))
BLOCK = b"block name 16 by"

RINGER = """
import os, sys
while True:
    try:
        os.write(int(sys.argv[1]), b"0" * 64)
    except BlockingIOError:
        pass
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[tuple[Keyring, SpillStore]]:
    """A store in memory with a keyring of its own."""
    ring = Keyring(tmp_path / "keys", os.urandom(32))
    kept = SpillStore(SpillLimits(1 << 20), ring)
    yield ring, kept
    kept.close()
    ring.close()


@dataclass(frozen=True, slots=True)
class Lives:
    """A keeper, what it served, and what it told."""

    keeper: Keeper
    vault: Vault
    wires: list[Wire]
    """Spill channel of each life."""
    recorded: list[Entry]
    published: list[Control]

    @property
    def downs(self) -> list[SandboxDown]:
        """Ends of lives, as the gateway is told them."""
        return [message for message in self.published if isinstance(message, SandboxDown)]

    def told(self) -> list[str]:
        """Causes of these ends in the audit log."""
        downs = (one for one in self.recorded if one.kind == "sandbox" and one.fields["state"] == "down")
        return [str(one.fields["cause"]) for one in downs]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the keeper."""
        running = asyncio.create_task(self.keeper.run())
        try:
            yield
        finally:
            self.keeper.stop()
            await running

    async def serves(self, number: int) -> None:
        """Wait until a life of this number is served."""
        while len(self.wires) < number or self.keeper._ending is None:
            await asyncio.sleep(0.005)


def frame_of_no_kind(wire: Wire) -> None:
    """Send a frame that no message has."""
    wire.guest._push(HEADER_BYTES.to_bytes(4, "little") + b"\xff" * (HEADER_BYTES - 4))
    wire.guest._bell_out.ring()


def second_hello(wire: Wire) -> None:
    """Send a message that the state of the channel does not allow."""
    wire.guest._push(encode(Hello(PROTOCOL_VERSION, Role.SPILL)))
    wire.guest._bell_out.ring()


def cursor_beyond_the_ring(wire: Wire) -> None:
    """Say that more bytes were written than the ring has."""
    arena = wire.raw.arena(GUEST_TO_HOST)
    arena[:8] = (1 << 40).to_bytes(8, "little")
    wire.guest._bell_out.ring()


SHARE = 0.3
"""Share of a processor for the test: an unpaced thread uses more also on a busy machine."""


def restored(wire: Wire, content: bytes) -> bool:
    """Whether a block that is sent away comes back over the wire, within 20 seconds."""
    wire.guest.send(Keep(KEY, BLOCK, content))
    wire.guest.send(Fetch(1, KEY, (BLOCK,)))
    found = wire.guest.receive(1) if wire.guest.wait(20.0) else []
    return [one.content for one in found if isinstance(one, Fetched)] == [content]


@pytest.mark.clock
def test_an_engine_that_rings_without_end_costs_its_share_only(
    store: tuple[Keyring, SpillStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rings with nothing behind them, as fast as can be, cost at most burst and share of one second and of two, where
    an unpaced thread uses all that it gets; blocks are kept and come back meanwhile."""
    monkeypatch.setattr(spill_port, "PORT_SHARE", SHARE)
    wire = connect(Role.SPILL)
    port = SpillPort(wire.host, "00" * 32, store[1], {KEY: "acme"}.get, "engine")
    port.start()
    assert port._thread.ident is not None
    clock, bell = time.pthread_getcpuclockid(port._thread.ident), wire.guest._fds[2]
    ringer = subprocess.Popen([sys.executable, "-ISc", RINGER, str(bell)], pass_fds=(bell,))
    try:
        looks = [(time.monotonic(), time.clock_gettime(clock))]
        for _ in range(2):
            time.sleep(1.0)
            looks.append((time.monotonic(), time.clock_gettime(clock)))
        assert restored(wire, b"x" * 64)
    finally:
        ringer.kill()
        ringer.wait()
        port.close()
        wire.guest.close()
        wire.raw.close()
    spent = [(end - begin, used - before) for (begin, before), (end, used) in combinations(looks, 2)]
    assert all(used < PORT_BURST_S + 1.1 * SHARE * elapsed for elapsed, used in spent)
    assert spent[0][1] > 0.02, "control: the thread was woken all the time"


@pytest.fixture
def lives(
    store: tuple[Keyring, SpillStore], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Callable[[Control], object]], Lives]]:
    """Make a keeper of an engine whose every life has a spill channel of its own; ``noted`` gets what it publishes."""
    made: list[Lives] = []

    def make_lives(noted: Callable[[Control], object] = lambda _message: None) -> Lives:
        wires, recorded, published = list[Wire](), list[Entry](), list[Control]()

        def boot(*_: object, **__: object) -> Booted:
            wires.append(connect(Role.SPILL))
            return Booted(Sandbox(), None, Path(), "", {}, 0.0, spill=wires[-1].host)  # type: ignore[arg-type]

        def publish(message: Control, _fds: tuple[int, ...]) -> bool:
            published.append(message)
            noted(message)
            return True

        monkeypatch.setattr(keeper_module, "boot", boot)
        vault = Vault(store[0], store[1], Namespace())
        monkeypatch.setattr(vault, "owner", {KEY: "acme"}.get)
        watched = watching(publish, recorded.append, {}, {}, "")
        keeper = Keeper(make([]).plan, None, watched, vault)  # type: ignore[arg-type]
        made.append(Lives(keeper, vault, wires, recorded, published))
        return made[-1]

    monkeypatch.setattr(lifecycle, "BASE_DELAY_S", 0.01)
    monkeypatch.setattr(keeper_module, "end", lambda _booted: None)
    # The plan of these lives has no configuration of an engine; what its KV depends on matters to a fleet alone.
    monkeypatch.setattr(keeper_module, "_backend", lambda _plan, _booted: b"")
    yield make_lives
    for one in made:
        assert not one.vault._ports
        assert all(wire.host._closed for wire in one.wires)
        for wire in one.wires:
            wire.guest.close()
            wire.raw.close()


async def test_what_the_machine_refuses_a_port_ends_one_life_of_one_engine(
    store: tuple[Keyring, SpillStore],
    lives: Callable[[Callable[[Control], object]], Lives],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The supervisor may open no more descriptors when the port starts, in the next life a disk fails in the port's
    thread: each ends that engine's life with a cause in the audit log, and the engine boots again. The third life is
    served, and the keeper runs on."""

    def refuse(code: int) -> Callable[..., Any]:
        def refused(*_: object) -> None:
            raise OSError(code, os.strerror(code))

        return refused

    def next_problem(message: Control) -> None:
        """A life that ended by one problem is followed by one with the next."""
        if isinstance(message, SandboxDown):
            monkeypatch.setattr(port_module, "ThreadBell", ThreadBell)
            monkeypatch.setattr(store[1], "put", refuse(errno.EIO) if len(one.published) == 1 else put)

    put = store[1].put
    monkeypatch.setattr(port_module, "ThreadBell", refuse(errno.EMFILE))
    one = lives(next_problem)
    async with asyncio.timeout(20), one.running():
        await one.serves(2)
        one.wires[1].guest.send(Keep(KEY, BLOCK, b"x"))
        await one.serves(3)
        assert await asyncio.to_thread(restored, one.wires[2], b"y" * 64)
    told = one.told()
    assert [down.cause for down in one.downs] == told
    assert ["Too many open files" in told[0], "Input/output error" in told[1]] == [True, True]
    assert [(down.reason, down.generation) for down in one.downs] == [("ended", 1), ("ended", 2)]


@pytest.mark.parametrize(
    "breach", [frame_of_no_kind, second_hello, cursor_beyond_the_ring], ids=lambda one: one.__name__
)
async def test_a_breach_of_the_spill_channel_ends_that_life_of_the_engine(
    lives: Callable[..., Lives], breach: Callable[[Wire], None]
) -> None:
    """A frame of no kind, a message out of order and a cursor that is not possible: each ends the life as the fault of
    the engine, with the cause in the audit log, and what that life kept is gone. The engine boots again and the next
    life is served; one that closes its end of the channel has broken nothing (control) and lives on."""
    one = lives()
    async with asyncio.timeout(20), one.running():
        await one.serves(1)
        assert await asyncio.to_thread(restored, one.wires[0], b"x" * 64)
        breach(one.wires[0])
        await one.serves(2)
        one.wires[1].guest.send(Fetch(2, KEY, (BLOCK,)))
        assert await asyncio.to_thread(one.wires[1].guest.wait, 20.0)
        assert [found.content for found in one.wires[1].guest.receive() if isinstance(found, Fetched)] == [b""]
        assert await asyncio.to_thread(restored, one.wires[1], b"y" * 64)
        one.wires[1].guest.close()
        (port,) = one.vault._ports
        await asyncio.to_thread(port._thread.join)
        await asyncio.sleep(0)
        assert one.keeper.life.generation == 2
        assert one.keeper._ending is not None
        assert not one.keeper._ending.done()
    assert [(down.reason, down.generation) for down in one.downs] == [("fault", 1)]
    assert [down.cause for down in one.downs] == one.told()
    assert one.downs[0].cause.startswith("broke the protocol on its spill channel: ")


def fill(wire: Wire) -> None:
    """Leave no room in the engine's ring."""
    for size in (1 << 16, 1 << 8, 1):
        with contextlib.suppress(RingFull):
            while True:
                wire.host.send(Fetched(1, 0, bytes(size)))


def test_no_word_pushes_another_one_out(
    store: tuple[Keyring, SpillStore], fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the engine reads nothing, leases end and come back again and again: of each namespace the last words wait,
    and a word to forget that came first is told first. Where more namespaces change than may wait, that life of the
    engine ends, since it would not forget: that counts as no failure, as what broke the protocol does (control), and
    ends no key of a tenant. Another control: as many as may wait do not end it."""
    monkeypatch.setattr(port_module, "SEND_PATIENCE_S", 0.0)
    monkeypatch.setattr(port_module, "MAX_MARKS", 4)
    wire, failed = connect(Role.SPILL), list[SpillPortError]()
    fill(wire)
    kv = fleet.hosts[0].kv
    port = SpillPort(wire.host, "00" * 32, store[1], lambda _key: None, "engine", failed.append, (kv, LIFE))
    try:
        port.forget(KEY)
        spaces = [bytes([number]) * NAMESPACE_KEY_BYTES for number in range(4)]
        for _ in range(3):
            for space in spaces[:3]:
                port.share(space)
                port.lose([space])
                port.forget(space)
                port.share(space)
        port._tell()
        while messages := wire.guest.receive(64):
            assert all(isinstance(one, Fetched) for one in messages)
        port._tell()
        found = wire.guest.receive(64)
        told = [(Forget(mark_of(space)), Share(mark_of(space), kv.writes_computed, kv.lasts_s)) for space in spaces[:3]]
        assert found == [Forget(mark_of(KEY)), *(word for both in told for word in both)]
        fill(wire)
        for space in (KEY, *spaces):
            port.forget(space)
        port.start()
        port._thread.join(20)
        assert [type(one) for one in failed] == [SpillOverrunError] and not port.broke
        assert not keeper_module._end_by(failed[0]).counted
        assert (
            keeper_module._end_by(SpillBreachError("x")).counted and keeper_module._end_by(SpillPortError("x")).counted
        )
    finally:
        port.close()
        wire.guest.close()
        wire.raw.close()


def test_a_word_waits_for_room_and_is_not_lost(
    store: tuple[Keyring, SpillStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the engine's ring is full for far longer than the port waits, two words to forget stay: both come, in
    their order, once the engine reads. They name namespaces by their marks, and no frame has a key."""
    monkeypatch.setattr(port_module, "SEND_PATIENCE_S", 0.02)
    wire = connect(Role.SPILL)
    for size in (1 << 16, 1 << 8, 1):
        with contextlib.suppress(RingFull):
            while True:
                wire.host.send(Fetched(1, 0, bytes(size)))
    port = SpillPort(wire.host, "00" * 32, store[1], lambda _key: None, "engine")
    port.start()
    try:
        port.forget(KEY)
        port.forget(bytes(NAMESPACE_KEY_BYTES))
        time.sleep(0.3)
        found, until = list[object](), time.monotonic() + 10
        while len(found) < 2 and time.monotonic() < until:
            found += [one for one in wire.guest.receive(64) if not isinstance(one, Fetched)]
        assert found == [Forget(mark_of(KEY)), Forget(mark_of(bytes(NAMESPACE_KEY_BYTES)))]
        assert KEY not in encode(Forget(mark_of(KEY)))
    finally:
        port.close()
        wire.guest.close()
        wire.raw.close()
