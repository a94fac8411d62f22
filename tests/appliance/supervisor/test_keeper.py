"""A keeper through boots that hang and ends that fail."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from appliance.common.control import Control, Frozen, SandboxDown, SandboxUse
from appliance.common.control_cards import GPU_LOST, EngineEnds
from appliance.supervisor import keeper as keeper_module
from appliance.supervisor import sandbox_looks
from appliance.supervisor.boot import Booted, BootPlan
from appliance.supervisor.cards.judge import CardVerdict, EngineOnCards
from appliance.supervisor.keeper import Keeper
from isolation.errors import SandboxStartError, SandboxTimeoutError
from isolation.gvisor.runtime import Ending
from isolation.ipc.messages import Role


class Sandbox:
    """A sandbox of which only the descriptor for its end is real."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.pidfd, self._write = os.pipe()
        self.settled: list[bool] = []
        self.held = 0
        self.used_s: Callable[[], float] | None = None
        self.frozen = False

    def freeze(self) -> bool:
        """Note it."""
        self.frozen = True
        return True

    def thaw(self) -> None:
        """Note it."""
        self.frozen = False

    def die(self) -> None:
        """Its descriptor becomes readable."""
        os.close(self._write)

    def wait(self, _timeout_s: float) -> int:
        """It has ended."""
        return -9

    def ending(self) -> None:
        """Not known."""

    def settle(self, *, busy: bool = False) -> None:
        """Note it."""
        self.settled.append(busy)

    def processor_s(self) -> float:
        """What the test says."""
        return self.used_s() if self.used_s is not None else 0.0

    def memory_bytes(self) -> int:
        """What the test says."""
        return self.held

    def output_tail(self) -> tuple[str, ...]:
        """Nothing was said."""
        return ()


def make(published: list[Control]) -> Keeper:
    """A keeper that tells us what it publishes."""
    plan: Any = BootPlan("engine-m", "m", Role.ENGINE, None, None, b"{}")  # type: ignore[arg-type]

    def publish(message: Control, _fds: tuple[int, ...]) -> bool:
        published.append(message)
        return True

    return Keeper(plan, None, publish)  # type: ignore[arg-type]


async def test_a_stop_reaches_a_boot_in_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keeper ends as soon as the boot has looked at its stop, not when the boot would have ended."""
    begun = threading.Event()

    def hang(_plan: object, _runtime: object, stop: threading.Event, **_: object) -> Booted:
        begun.set()
        assert stop.wait(10)
        raise SandboxStartError("not wanted")

    monkeypatch.setattr(keeper_module, "boot", hang)
    keeper = make([])
    running = asyncio.create_task(keeper.run())
    await asyncio.to_thread(begun.wait)
    keeper.stop()
    async with asyncio.timeout(20):
        await running
    assert await keeper.first_boot == "not wanted"


async def test_the_log_shows_an_engines_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line of a ready engine has the number with its reason, and its processors if it is pinned; a text sandbox's
    line has neither."""

    def quick(_plan: object, _runtime: object, _stop: threading.Event, **_: object) -> Booted:
        return Booted(Sandbox(), None, None, "", {}, 0.0)  # type: ignore[arg-type]

    monkeypatch.setattr(keeper_module, "boot", quick)
    monkeypatch.setattr(keeper_module, "end", lambda _booted: None)
    reason = "2 threads: 3 physical cores of NUMA node 1"
    cases = [("", (), {}), (reason, (), {"threads": reason})]
    cases += [(reason, (4, 5, 6), {"threads": reason, "pinned_to": "4-6"})]
    for threads, cpus, expected in cases:
        keeper = make([])
        keeper.plan = replace(keeper.plan, threads=threads, spec=SimpleNamespace(cpus=cpus))  # type: ignore[arg-type]
        with capture_logs() as lines:
            running = asyncio.create_task(keeper.run())
            async with asyncio.timeout(20):
                await keeper.first_boot
                keeper.stop()
                await running
        ready = next(line for line in lines if line["event"] == "sandbox is ready")
        assert {name: ready[name] for name in ("threads", "pinned_to") if name in ready} == expected


async def test_a_sandbox_that_cannot_be_removed_does_not_end_its_keeper(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next boot is tried all the same, and the cause is told."""
    sandboxes: list[Sandbox] = []

    def quick(_plan: object, _runtime: object, _stop: threading.Event, **_: object) -> Booted:
        sandboxes.append(Sandbox())
        return Booted(sandboxes[-1], None, None, "", {}, 0.0)  # type: ignore[arg-type]

    def stuck(_booted: Booted) -> None:
        raise SandboxTimeoutError("it does not end")

    monkeypatch.setattr(keeper_module, "boot", quick)
    monkeypatch.setattr(keeper_module, "end", stuck)
    published: list[Control] = []
    keeper = make(published)
    running = asyncio.create_task(keeper.run())
    async with asyncio.timeout(20):
        assert await keeper.first_boot is None
        sandboxes[0].die()
        while len(sandboxes) < 2:
            await asyncio.sleep(0.005)
        assert any("it does not end" in getattr(message, "cause", "") for message in published)
        keeper.stop()
        await running


async def test_the_gateway_hears_what_a_sandbox_holds_and_why_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory beside its limit while it lives; then a reason that can be counted beside the cause in words."""
    sandboxes: list[Sandbox] = []

    def quick(_plan: object, _runtime: object, _stop: threading.Event, **_: object) -> Booted:
        sandboxes.append(Sandbox())
        sandboxes[-1].held = 7 << 20
        return Booted(sandboxes[-1], None, None, "", {}, 0.0)  # type: ignore[arg-type]

    monkeypatch.setattr(keeper_module, "boot", quick)
    monkeypatch.setattr(keeper_module, "end", lambda _booted: None)
    published: list[Control] = []
    keeper = make(published)
    keeper.plan = replace(keeper.plan, spec=SimpleNamespace(limits=SimpleNamespace(memory_bytes=8 << 20)))
    running = asyncio.create_task(keeper.run())
    async with asyncio.timeout(20):
        while not any(isinstance(message, SandboxUse) for message in published):
            await asyncio.sleep(0.005)
        keeper.fault(1, "it hangs")
        while not any(isinstance(message, SandboxDown) for message in published):
            await asyncio.sleep(0.005)
        keeper.stop()
        await running
    assert SandboxUse("m", "engine", 7 << 20, 8 << 20) in published
    down = next(message for message in published if isinstance(message, SandboxDown))
    assert (down.reason, "it hangs" in down.cause) == ("fault", True)


async def test_an_engine_that_ends_because_of_its_gpu_is_told_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway is told why before it is told that the sandbox is down, whose reason is the same; a verdict about an
    earlier generation ends nothing, nor does one while nothing runs."""

    def quick(_plan: object, _runtime: object, _stop: threading.Event, **_: object) -> Booted:
        return Booted(Sandbox(), None, None, "", {}, 0.0)  # type: ignore[arg-type]

    monkeypatch.setattr(keeper_module, "boot", quick)
    monkeypatch.setattr(keeper_module, "end", lambda _booted: None)
    published: list[Control] = []
    keeper = make(published)
    keeper.plan = replace(keeper.plan, spec=SimpleNamespace(limits=SimpleNamespace(memory_bytes=1), gpu=None))
    assert keeper.on_cards is None
    engine = EngineOnCards(sandbox="engine-m", model="m", tenant="", generation=1, cards=(0,), share=0)
    verdict = CardVerdict(engine, GPU_LOST, 0, "card 0 is lost")
    keeper.lose_card(verdict)
    running = asyncio.create_task(keeper.run())
    async with asyncio.timeout(20):
        assert await keeper.first_boot is None
        await asyncio.sleep(0)  # The keeper waits for the end from its next turn on.
        keeper.lose_card(replace(verdict, engine=replace(engine, generation=7)))
        assert published == []
        keeper.lose_card(verdict)
        while len(published) < 2:
            await asyncio.sleep(0.005)
        keeper.stop()
        await running
    assert published[0] == EngineEnds("m", 1, GPU_LOST, 0)
    down = published[1]
    assert isinstance(down, SandboxDown)
    assert (down.reason, down.cause) == (GPU_LOST, "card 0 is lost")


async def test_a_sandbox_is_told_when_it_becomes_busy_and_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told once at each change, by its own processor time; nobody looks any more once it has ended."""
    sandbox = Sandbox()
    busy = [True]
    used = [0.0, time.monotonic()]

    def used_s() -> float:
        now = time.monotonic()
        used[0] += (now - used[1]) * busy[0]
        used[1] = now
        return used[0]

    sandbox.used_s = used_s
    monkeypatch.setattr(sandbox_looks, "LOOK_S", 0.01)
    monkeypatch.setattr(keeper_module, "boot", lambda *_, **__: Booted(sandbox, None, None, "", {}, 0.0))  # type: ignore[arg-type]
    monkeypatch.setattr(keeper_module, "end", lambda _: None)
    keeper = make([])
    running = asyncio.create_task(keeper.run())
    async with asyncio.timeout(20):
        while sandbox.settled != [True]:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        assert sandbox.settled == [True]
        busy[0] = False
        while sandbox.settled != [True, False]:
            await asyncio.sleep(0.005)
        keeper.stop()
        await running
    busy[0] = True
    await asyncio.sleep(0.05)
    assert sandbox.settled == [True, False]
    assert [task.get_name() for task in asyncio.all_tasks() if "load of" in task.get_name()] == []


async def test_an_idle_sandbox_is_frozen_and_a_busy_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen and thawed at the gateway's word, which hears what became of it; a sandbox that computes stays as it is;
    a word about an earlier one means nothing. The load of one that is frozen is not read."""
    sandbox, reads = Sandbox(), list[int]()

    def read() -> float:
        reads.append(1)
        return 0.0

    monkeypatch.setattr(keeper_module, "boot", lambda *_, **__: Booted(sandbox, None, None, "", {}, 0.0))  # type: ignore[arg-type]
    monkeypatch.setattr(keeper_module, "end", lambda _: None)
    monkeypatch.setattr(sandbox_looks, "LOOK_S", 0.01)
    published: list[Control] = []
    keeper = make(published)
    running = asyncio.create_task(keeper.run())
    async with asyncio.timeout(20):
        while keeper._ending is None:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0)  # The load is read first in the keeper's next turn.
        keeper.freeze(7, frozen=True)
        assert (sandbox.frozen, published) == (False, [])
        keeper.freeze(1, frozen=True)
        assert sandbox.frozen
        sandbox.used_s = read
        await asyncio.sleep(0.05)
        assert reads == []
        keeper.freeze(1, frozen=False)
        assert not sandbox.frozen
        while not reads:
            await asyncio.sleep(0.005)
        sandbox.used_s = time.monotonic  # all of a core
        while sandbox.settled != [True]:
            await asyncio.sleep(0.005)
        keeper.freeze(1, frozen=True)
        assert not sandbox.frozen
        keeper.stop()
        await running
    assert [one.frozen for one in published if isinstance(one, Frozen)] == [1, 0, 0]


@dataclass
class Ended:
    """What became of a sandbox that ended."""

    causes: list[str]
    failures: int
    took_s: float


async def ended(
    monkeypatch: pytest.MonkeyPatch, how: Ending, then: Callable[[Keeper], None], *, offered: bool = True
) -> Ended:
    """End a sandbox, after which something else happens in the next turn but one of the loop; returns once it was told
    that it is down."""
    sandboxes: list[Sandbox] = []

    def quick(_plan: object, _runtime: object, _stop: threading.Event, **_: object) -> Booted:
        sandboxes.append(Sandbox())
        sandboxes[-1].ending = lambda: how  # type: ignore[assignment, method-assign, return-value]
        channel = SimpleNamespace(fds=tuple, close=lambda: None)
        return Booted(sandboxes[-1], None if offered else channel, None, "", {}, 0.0)  # type: ignore[arg-type]

    monkeypatch.setattr(keeper_module, "boot", quick)
    monkeypatch.setattr(keeper_module, "end", lambda _booted: None)
    keeper = Keeper(make([]).plan, None, lambda message, _fds: published.append(message) or False)  # type: ignore[arg-type, func-returns-value]
    published: list[Control] = []
    running = asyncio.create_task(keeper.run())
    async with asyncio.timeout(20):
        await keeper.first_boot
        while keeper._ending is None:
            await asyncio.sleep(0.001)
        began = time.monotonic()
        sandboxes[0].die()
        await asyncio.sleep(0.05)
        then(keeper)
        while not any(isinstance(one, SandboxDown) for one in published):
            await asyncio.sleep(0.001)
        found = Ended(
            [one.cause for one in published if isinstance(one, SandboxDown)],
            keeper.life.failures,
            time.monotonic() - began,
        )
        keeper.stop()
        await running
    return found


def nothing(_keeper: Keeper) -> None:
    """Nothing else happens."""


def leave(keeper: Keeper) -> None:
    """The gateway is gone."""
    keeper.gateway_left()


async def test_an_engine_that_ended_as_its_gateway_went_has_not_died(monkeypatch: pytest.MonkeyPatch) -> None:
    """With status 0, shortly before the supervisor reads that the gateway left: no failure, so that neither its
    checkpoint nor its next boot pays for it. Controls, each a death: the gateway stays, or reports a fault, whatever
    the status, so that no engine gets away with it by ending with 0; it ended by a signal, by another status, or
    because it had no memory, though the gateway left; and the gateway never had its channel."""
    monkeypatch.setattr(keeper_module, "GATEWAY_LEAVES_S", 0.5)
    clean = Ending(0, out_of_memory=False)
    found = await ended(monkeypatch, clean, leave)
    assert (found.causes, found.failures) == (["the gateway left"], 0)
    deaths = [
        await ended(monkeypatch, clean, nothing),
        await ended(monkeypatch, clean, lambda keeper: keeper.fault(1, "it lies")),
        await ended(monkeypatch, Ending(-9, out_of_memory=False), leave),
        await ended(monkeypatch, Ending(1, out_of_memory=False), leave),
        await ended(monkeypatch, Ending(0, out_of_memory=True), leave),
        await ended(monkeypatch, clean, leave, offered=False),
    ]
    assert [one.failures for one in deaths] == [1] * len(deaths)
    assert not any("the gateway left" in cause for one in deaths for cause in one.causes)
    assert deaths[0].took_s >= 0.5


def ends_cleanly(monkeypatch: pytest.MonkeyPatch) -> list[Sandbox]:
    """Have sandboxes boot at once and end with status 0; returns them as they come."""
    sandboxes: list[Sandbox] = []

    def quick(_plan: object, _runtime: object, _stop: threading.Event, **_: object) -> Booted:
        sandboxes.append(Sandbox())
        sandboxes[-1].ending = lambda: Ending(0, out_of_memory=False)  # type: ignore[assignment, method-assign, return-value]
        return Booted(sandboxes[-1], None, None, "", {}, 0.0)  # type: ignore[arg-type]

    monkeypatch.setattr(keeper_module, "boot", quick)
    monkeypatch.setattr(keeper_module, "end", lambda _booted: None)
    return sandboxes


async def test_a_stop_does_not_wait_for_a_gateway_that_may_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor stops while it is not known whether an engine ended with its gateway: the keeper ends at once."""
    monkeypatch.setattr(keeper_module, "GATEWAY_LEAVES_S", 600.0)
    sandboxes = ends_cleanly(monkeypatch)
    keeper = make([])
    running = asyncio.create_task(keeper.run())
    async with asyncio.timeout(20):
        await keeper.first_boot
        await asyncio.sleep(0.05)
        sandboxes[0].die()
        await asyncio.sleep(0.05)
        keeper.stop()
        await running


@pytest.mark.parametrize("ended_first", [True, False])
async def test_a_gateway_whose_leaving_is_read_in_the_same_turn_has_left(
    monkeypatch: pytest.MonkeyPatch, ended_first: bool
) -> None:
    """The end of the engine and that of the control socket are both there when a busy supervisor looks: it reads them
    in one turn of its loop, in either order, and no death is counted. Control, in the test above: without a gateway
    that leaves it is a death."""
    monkeypatch.setattr(keeper_module, "GATEWAY_LEAVES_S", 0.2)
    sandboxes = ends_cleanly(monkeypatch)
    published: list[Control] = []
    keeper, loop = make(published), asyncio.get_running_loop()
    running, (peer, other) = asyncio.create_task(keeper.run()), os.pipe()

    def left() -> None:
        loop.remove_reader(peer)
        keeper.gateway_left()

    loop.add_reader(peer, left)
    async with asyncio.timeout(20):
        await keeper.first_boot
        while keeper._ending is None:
            await asyncio.sleep(0.001)
        for end in (sandboxes[0].die, lambda: os.close(other))[:: 1 if ended_first else -1]:
            end()
        while not any(isinstance(one, SandboxDown) for one in published):
            await asyncio.sleep(0.001)
        assert keeper.life.failures == 0, [one.cause for one in published if isinstance(one, SandboxDown)]
        keeper.stop()
        await running
    os.close(peer)
