"""The supervisor's end of a spill channel against an engine that rings and floods, and a machine that refuses."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from appliance.common.audit.entry import Entry
from appliance.common.control import Control, SandboxDown
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
from isolation.ipc.doorbell import ThreadBell
from isolation.ipc.messages import NAMESPACE_KEY_BYTES, Role
from isolation.ipc.spill import Fetch, Fetched, Keep
from isolation.keys.keyring import Keyring
from tests.appliance.supervisor.test_keeper import Sandbox, make
from tests.isolation.ipc.wire import Wire, connect

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


async def test_what_the_machine_refuses_a_port_ends_one_life_of_one_engine(
    store: tuple[Keyring, SpillStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor may open no more descriptors when the port starts, in the next life a disk fails in the port's
    thread: each ends that engine's life with a cause in the audit log, and the engine boots again. The third life is
    served, and the keeper runs on."""
    wires: list[Wire] = []
    recorded: list[Entry] = []
    published: list[Control] = []

    def refuse(code: int) -> Callable[..., Any]:
        def refused(*_: object) -> None:
            raise OSError(code, os.strerror(code))

        return refused

    def boot(*_: object, **__: object) -> Booted:
        wires.append(connect(Role.SPILL))
        return Booted(Sandbox(), None, Path(), "", {}, 0.0, spill=wires[-1].host)  # type: ignore[arg-type]

    def publish(message: Control, _fds: tuple[int, ...]) -> bool:
        """Take a message; a life that ended by one problem is followed by one with the next."""
        published.append(message)
        if isinstance(message, SandboxDown):
            monkeypatch.setattr(port_module, "ThreadBell", ThreadBell)
            monkeypatch.setattr(store[1], "put", refuse(errno.EIO) if len(published) == 1 else put)
        return True

    put = store[1].put
    monkeypatch.setattr(lifecycle, "BASE_DELAY_S", 0.01)
    monkeypatch.setattr(keeper_module, "boot", boot)
    monkeypatch.setattr(keeper_module, "end", lambda _booted: None)
    monkeypatch.setattr(port_module, "ThreadBell", refuse(errno.EMFILE))
    vault = Vault(store[0], store[1], Namespace())
    monkeypatch.setattr(vault, "owner", {KEY: "acme"}.get)
    plan = make([]).plan
    keeper = Keeper(plan, None, watching(publish, recorded.append, {}, {}, ""), vault)  # type: ignore[arg-type]
    running = asyncio.create_task(keeper.run())
    async with asyncio.timeout(20):
        while len(wires) < 2 or keeper._ending is None:
            await asyncio.sleep(0.005)
        wires[1].guest.send(Keep(KEY, BLOCK, b"x"))
        while len(wires) < 3 or keeper._ending is None:
            await asyncio.sleep(0.005)
        assert await asyncio.to_thread(restored, wires[2], b"y" * 64)
        keeper.stop()
        await running
    downs = [message for message in published if isinstance(message, SandboxDown)]
    told = [one.fields["cause"] for one in recorded if one.kind == "sandbox" and one.fields["state"] == "down"]
    assert [one.cause for one in downs] == told
    assert ["Too many open files" in str(told[0]), "Input/output error" in str(told[1])] == [True, True]
    assert [(one.reason, one.generation) for one in downs] == [("ended", 1), ("ended", 2)]
    assert not vault._ports and all(wire.host._closed for wire in wires)
    for wire in wires:
        wire.guest.close()
        wire.raw.close()
