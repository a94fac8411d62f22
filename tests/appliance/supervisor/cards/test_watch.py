"""Cards watched through a real process that asks a pretended driver library."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from appliance.common.control import Control, SandboxDown, decode, encode
from appliance.common.control_cards import GPU_LOST, GPU_MEMORY, CardState, EngineEnds
from appliance.supervisor import keeper as keeper_module
from appliance.supervisor.boot import Booted
from appliance.supervisor.cards.judge import CardVerdict, EngineOnCards
from appliance.supervisor.cards.watch import CardWatch, WatchPace, watch_cards
from appliance.supervisor.keeper import Keeper
from isolation.host.reaper import children
from isolation.ipc.messages import Role
from tests.appliance.supervisor.cards.conftest import CRASHES, GIB, HANGS, LOST, RESET, UNLISTED, Machine
from tests.appliance.supervisor.cards.test_judge import plan
from tests.appliance.supervisor.test_keeper import Sandbox

pytestmark = pytest.mark.timeout(60)

QUICK = WatchPace(period_s=0.02, first_s=20.0, silent_s=0.3, retry_s=0.02)
"""Samples come as fast as the process makes them; only a hang is waited for, a third of a second."""

ENGINE = EngineOnCards(
    sandbox="engine-m", model="m", tenant="", generation=1, cards=(0,), share=90, pids=frozenset({os.getpid()})
)


@dataclass
class Watched:
    """The watch, with what it said and did."""

    engines: list[EngineOnCards] = field(default_factory=lambda: [ENGINE])
    states: list[CardState] = field(default_factory=list)
    verdicts: list[CardVerdict] = field(default_factory=list)
    watch: CardWatch | None = None

    def publish(self, message: Control, _fds: tuple[int, ...]) -> bool:
        """Take a message as it travels."""
        told = decode(encode(message))
        assert isinstance(told, CardState)
        self.states.append(told)
        return True

    def act(self, verdict: CardVerdict) -> None:
        """An engine is ended: it is there no more."""
        self.verdicts.append(verdict)
        self.engines = [one for one in self.engines if one.sandbox != verdict.engine.sandbox]

    async def until(self, holds: Callable[[CardState], bool]) -> CardState:
        """The next state of which something holds."""
        begin = len(self.states)
        async with asyncio.timeout(30):
            while True:
                for state in self.states[begin:]:
                    if holds(state):
                        return state
                await asyncio.sleep(0.005)


def readers() -> list[int]:
    """Processes of ours that ask NVML."""
    lines = [(pid, Path(f"/proc/{pid}/cmdline")) for pid in children(os.getpid())]
    return [pid for pid, line in lines if line.exists() and b"cards/reader.py" in line.read_bytes()]


@contextlib.asynccontextmanager
async def watching(machine: Machine, watched: Watched, pace: WatchPace = QUICK) -> AsyncIterator[None]:
    """Watch while the block runs; afterwards no process is left."""
    watched.watch = CardWatch(lambda: watched.engines, watched.act, watched.publish, machine.places, pace)
    task = asyncio.create_task(watched.watch.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert readers() == []


def known(state: CardState) -> bool:
    """Whether a card has told its numbers."""
    return bool(state.figures.get("0"))


async def test_what_a_card_tells_arrives(machine: Machine) -> None:
    """Every number, the model's memory beside its share, and that of a process which is not ours."""
    machine.card(pid=os.getpid(), held=50 * GIB)
    watched = Watched()
    async with watching(machine, watched):
        state = await watched.until(known)
        assert len(readers()) == 1
        machine.card(pid=1, held=3 * GIB)
        other = await watched.until(lambda one: bool(one.unknown.get("0")))
    figures = state.figures["0"]
    assert state.problem == ""
    assert state.uuids["0"].startswith("GPU-0000")
    assert (figures["memory_used_bytes"], figures["busy_percent"], figures["temperature_c"]) == (60 * GIB, 93, 61)
    assert (figures["power_mw"], figures["ecc_uncorrected"], figures["clock_reasons"]) == (512_000, 0, 4)
    assert state.models == {"0": {"m": [50 * GIB, 72 * GIB]}}
    assert (other.models, other.unknown["0"]) == ({"0": {}}, 3 * GIB)
    assert watched.verdicts == []


async def test_nothing_is_read_without_a_model_that_has_a_card(machine: Machine) -> None:
    """No process is there and nothing is told; as soon as an engine has a card one is, and it goes with the engine."""
    watched = Watched(engines=[])
    async with watching(machine, watched):
        await asyncio.sleep(0.2)
        assert (readers(), watched.states) == ([], [])
        watched.engines = [ENGINE]
        await watched.until(known)
        assert len(readers()) == 1
        watched.engines = []
        await watched.until(lambda state: not state.states)
        assert readers() == []


async def test_an_engine_above_its_share_ends(machine: Machine) -> None:
    """At the share and its margin nothing happens; above it the engine ends, and its numbers are in the cause. Without
    a share none ends."""
    machine.card(pid=os.getpid(), held=72 * GIB + (512 << 20))
    watched = Watched()
    async with watching(machine, watched):
        for _ in range(4):
            await watched.until(known)
        assert watched.verdicts == []
        watched.engines = [replace(ENGINE, share=0)]
        machine.card(pid=os.getpid(), held=79 * GIB)
        for _ in range(4):
            await watched.until(known)
        assert watched.verdicts == []
        watched.engines = [ENGINE]
        await watched.until(lambda _: bool(watched.verdicts))
    (verdict,) = watched.verdicts
    assert (verdict.reason, verdict.card) == (GPU_MEMORY, 0)
    assert verdict.cause == "it holds 79 GiB of card 0, more than 72 GiB: gpu_share is 90 % of 80 GiB"


@pytest.mark.parametrize(
    ("state", "words"), [(LOST, "fallen off the bus"), (RESET, "before a reset"), (UNLISTED, "list")]
)
async def test_a_lost_card_ends_its_engines_alone(machine: Machine, state: int, words: str) -> None:
    """The cause names the card, as does what is said of a start that fails on it; the engine of another card goes on,
    and a card that is back is not lost any more."""
    machine.card(1)
    other = replace(ENGINE, sandbox="engine-n", model="n", cards=(1,) if state != UNLISTED else (0,))
    engine = ENGINE if state != UNLISTED else replace(ENGINE, cards=(1,))
    card = engine.cards[0]
    watched = Watched(engines=[engine, other])
    async with watching(machine, watched):
        await watched.until(lambda one: one.states == {"0": "ok", "1": "ok"})
        machine.card(card, state=state)
        await watched.until(lambda _: bool(watched.verdicts))
        # It is being booted again, without a process.
        watched.engines = [replace(engine, pids=frozenset()), other]
        found = await watched.until(lambda one: one.states.get(str(card)) in ("lost", "reset"))
        assert watched.watch is not None
        assert watched.watch.lost == {card}
        downs: list[Control] = []
        explain = watched.watch.explaining(lambda message, _: not downs.append(message))
        for model in ("m", "n"):
            explain(SandboxDown(model, "engine", 2, 1, "failed", "exit status 1", 0.5), ())
        machine.card(card)
        await watched.until(lambda one: one.states == {"0": "ok", "1": "ok"})
        assert watched.watch.lost == frozenset()
    assert [(one.engine.sandbox, one.reason, one.card) for one in watched.verdicts] == [("engine-m", GPU_LOST, card)]
    assert words in watched.verdicts[0].cause
    assert f"card {card} is lost" in watched.verdicts[0].cause
    assert found.uuids[str(card)].startswith(f"GPU-0000000{card}")
    explained, untouched = downs
    assert isinstance(explained, SandboxDown)
    assert isinstance(untouched, SandboxDown)
    assert (explained.reason, f"card {card} is lost" in explained.cause) == (GPU_LOST, True)
    assert (untouched.reason, untouched.cause) == ("ended", "exit status 1")


async def test_a_hung_driver_is_told_and_not_waited_for(machine: Machine) -> None:
    """The loop goes on, the silence is told, and engines are left alone; once the driver answers, all goes on."""
    watched = Watched()
    async with watching(machine, watched):
        await watched.until(known)
        machine.card(state=HANGS)
        state = await watched.until(lambda one: bool(one.problem))
        assert "has not answered for" in state.problem
        assert state.figures == {}
        machine.card()
        await watched.until(known)
    assert watched.verdicts == []


async def test_a_crash_and_a_reload_of_the_driver_are_survived(machine: Machine) -> None:
    """The process that asks ends each time with a reason, and another one goes on."""
    watched = Watched()
    async with watching(machine, watched):
        await watched.until(known)
        machine.card(state=CRASHES)
        await watched.until(lambda one: "ended without a word" in one.problem)
        machine.card()
        await watched.until(known)
        machine.driver(9)
        await watched.until(lambda one: one.problem == "NVML: Driver Not Loaded")
        machine.driver(0)
        await watched.until(known)
    assert watched.verdicts == []


async def test_without_library_or_driver_the_reason_is_told(machine: Machine) -> None:
    """And once they are there, cards are read."""
    library = next(machine.folder.glob("libnvidia-ml.so.*"))
    library.rename(machine.folder / "away")
    version = machine.places.proc / "driver/nvidia/version"
    text = version.read_text()
    watched = Watched()
    async with watching(machine, watched):
        await watched.until(lambda one: one.problem.startswith("there is no libnvidia-ml.so."))
        version.write_text("")
        await watched.until(lambda one: one.problem == "no NVIDIA driver is loaded")
        version.write_text(text)
        (machine.folder / "away").rename(library)
        await watched.until(known)


@pytest.mark.parametrize("machine", ["old"], indirect=True)
async def test_functions_that_a_driver_lacks_are_left_out(machine: Machine) -> None:
    """ECC, remapped rows, reasons of clocks, MIG and events are not known; the rest is."""
    watched = Watched()
    async with watching(machine, watched):
        state = await watched.until(known)
    assert {"temperature_c", "memory_used_bytes"} <= state.figures["0"].keys()
    assert not {"ecc_uncorrected", "remapped_uncorrected", "clock_reasons", "mig"} & state.figures["0"].keys()
    assert state.xids == {"0": {}}


async def test_errors_and_events_are_counted(machine: Machine) -> None:
    """Uncorrected errors, a row that waits for a reset, and Xid events by kind, each of which brings a sample soon."""
    machine.card(ecc=3, remapped=1, remap_pending=1, xids=2, xid=48)
    watched = Watched()
    async with watching(machine, watched, replace(QUICK, period_s=0.1)):
        state = await watched.until(lambda one: one.xids.get("0", {}).get("memory") == 2)
    assert (state.figures["0"]["ecc_uncorrected"], state.figures["0"]["remap_pending"]) == (3, 1)
    assert (state.last_xids["0"], state.xids["0"]["bus"]) == (48, 0)


async def test_a_keepers_engine_is_ended_and_the_gateway_told_why(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the plan of its boot over the process on the card to what the gateway is told: first why, then that it is
    down; a text sandbox beside it goes on."""
    machine.card(pid=os.getpid(), held=79 * GIB)
    monkeypatch.setattr(keeper_module, "boot", lambda *_, **__: Booted(Sandbox(), None, None, "", {}, 0.0))  # type: ignore[arg-type]
    monkeypatch.setattr(keeper_module, "end", lambda _booted: None)
    told: list[Control] = []

    def publish(message: Control, _fds: tuple[int, ...]) -> bool:
        told.append(message)
        return True

    keepers = [Keeper(planned, None, publish) for planned in (plan(), replace(plan(Role.TEXT), name="text-m"))]  # type: ignore[arg-type]
    watch = watch_cards(lambda: keepers, lambda *_: True, machine.places, QUICK)
    tasks = [asyncio.create_task(work) for work in (watch.run(), *(keeper.run() for keeper in keepers))]
    async with asyncio.timeout(30):
        while not any(isinstance(message, SandboxDown) for message in told):
            await asyncio.sleep(0.005)
    tasks[0].cancel()
    for keeper in keepers:
        keeper.stop()
    await asyncio.gather(*tasks, return_exceptions=True)
    ends, down = (next(one for one in told if isinstance(one, kind)) for kind in (EngineEnds, SandboxDown))
    assert told.index(ends) < told.index(down)
    assert ends == EngineEnds("m", 1, GPU_MEMORY, 0, "a")
    assert isinstance(down, SandboxDown)
    assert (down.role, down.reason) == ("engine", GPU_MEMORY)
    assert down.cause.startswith("it holds 79 GiB of card 0, more than 48 GiB")
    assert {one.role for one in told if isinstance(one, SandboxDown)} == {"engine"}
