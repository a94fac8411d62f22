"""Engines whose card falls off get another: keepers, watch and plans are real, the driver and the engines are not."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from appliance.common.audit.entry import Entry
from appliance.common.config_loader import Resolved
from appliance.common.control import Control, SandboxDown, decode, encode
from appliance.common.control_cards import GPU_LOST, CardState, EngineEnds
from appliance.common.control_models import ModelsReviewed, ReviewModels
from appliance.common.model_memory import Memory
from appliance.common.served_models import models_digest
from appliance.supervisor import gpu as gpu_module
from appliance.supervisor import keeper as keeper_module
from appliance.supervisor import lifecycle, model_changes
from appliance.supervisor.boot import Booted, BootPlan
from appliance.supervisor.cards.placement import CardPlacement
from appliance.supervisor.cards.trials import FIRST_TRIAL_S, MEMORY_S, MOST_LOSSES, CardTrials
from appliance.supervisor.cards.watch import watch_cards
from appliance.supervisor.keeper import Keeper
from appliance.supervisor.model_changes import ModelChanges, read_models
from appliance.supervisor.model_keepers import ModelKeepers, PlannedModel
from appliance.supervisor.planner import Planner
from engine.config import EngineConfig
from isolation.errors import SandboxStartError
from isolation.gpu.gpu_facts import GpuFacts, look_at_gpus
from isolation.gvisor.unsafe_runtime import UnsafeRuntime, host_environment
from isolation.ipc.messages import Role
from policy.model import PolicySet
from tests.appliance.common.cards import machine as facts_of
from tests.appliance.supervisor.cards.conftest import GIB, LOST, Machine
from tests.appliance.supervisor.cards.test_watch import QUICK, readers
from tests.appliance.supervisor.test_gpu import appliance
from tests.appliance.supervisor.test_keeper import Sandbox

pytestmark = pytest.mark.timeout(60)

EMPTY = {"used": 0}


@dataclass
class House:
    """Keepers of some models on a machine with two cards, with all that is told and recorded."""

    models: ModelKeepers
    placement: CardPlacement
    told: list[Control] = field(default_factory=list)
    audited: list[Entry] = field(default_factory=list)
    booted: list[BootPlan] = field(default_factory=list)
    now: float = 0.0
    hangs_on: int = -1
    """Card on which a boot comes to no end by itself."""

    def publish(self, message: Control, _fds: tuple[int, ...]) -> bool:
        """Take a message as it travels."""
        self.told.append(decode(encode(message)))
        return True

    def boot(self, plan: BootPlan, _runtime: object, stop: threading.Event, **_: object) -> Booted:
        """An engine is ready at once, unless it hangs in the driver of its card."""
        self.booted.append(plan)
        if plan.card is not None and plan.card.card == self.hangs_on:
            assert stop.wait(20)
            raise SandboxStartError("was not wanted any more")
        return Booted(Sandbox(), None, None, "", {}, 0.0)  # type: ignore[arg-type]

    def engine(self, model: str) -> Keeper:
        """The keeper of a model's engine."""
        return next(one for one in self.models.keepers if (one.plan.model, one.plan.role) == (model, Role.ENGINE))

    def use(self, model: str) -> tuple[int, int]:
        """The card of a model's engine, and what it may hold of it in percent."""
        plan = self.engine(model).plan
        assert plan.card is not None
        return plan.card.card, plan.card.percent

    def of(self, kind: type[Control], model: str) -> list[Control]:
        """What was told of a model's engine."""
        return [one for one in self.told if type(one) is kind and getattr(one, "model", "") == model]

    def events(self) -> list[tuple[object, ...]]:
        """What was recorded of cards."""
        return [tuple(one.fields[name] for name in ("event", "card", "model", "to")) for one in self.audited]

    def trusts(self, state: CardState) -> bool:
        """Whether all cards get engines and all engines have cards; time goes on until then, since a reader that is
        silent under load begins a trial anew."""
        if any(state.out.values()):
            self.now += FIRST_TRIAL_S
        return not state.unplaced and not any(state.out.values())

    async def until(self, holds: Callable[[CardState], bool]) -> CardState:
        """The next state of the cards of which something holds."""
        begin = len(self.told)
        async with asyncio.timeout(30):
            while True:
                for one in self.told[begin:]:
                    if isinstance(one, CardState) and holds(one):
                        return one
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def serving(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    *models: dict[str, object],
    well: dict[str, str] | None = None,
) -> AsyncIterator[House]:
    """Serve these models on two cards while the block runs, which begins when the cards are as ``well`` says."""

    def look() -> GpuFacts:
        # Device nodes need root; driver, library and memory are the pretended ones.
        seen = facts_of(2)
        return replace(look_at_gpus(machine.places), nodes=seen.nodes, models=seen.models)

    monkeypatch.setattr(gpu_module, "look_at_gpus", look)
    monkeypatch.setattr(lifecycle, "BASE_DELAY_S", 0.05)
    monkeypatch.setattr(lifecycle, "MAX_DELAY_S", 0.3)
    runtime = UnsafeRuntime(folder / "unsafe")
    kept = ModelKeepers(lambda plan: Keeper(plan, runtime, publish, placement=placement), lambda: None)
    planner = Planner(kept, runtime, lambda: PolicySet(tenants={}))
    placement = CardPlacement(planner.replan, lambda one: house.audited.append(one), lambda: house.now)
    house = House(kept, placement)
    watch = watch_cards(lambda: kept.keepers, house.publish, machine.places, replace(QUICK, period_s=0.1), placement)
    publish = watch.explaining(house.publish)
    monkeypatch.setattr(keeper_module, "boot", house.boot)
    monkeypatch.setattr(keeper_module, "end", lambda _booted: None)
    for planned in await asyncio.to_thread(lambda: list(read_models(appliance(folder, *models), runtime))):
        kept.add(planned)
    watching = asyncio.create_task(watch.run())
    try:
        for name in kept.names:
            kept.start(name)
        await asyncio.gather(*(keeper.first_boot for keeper in kept.keepers))
        await house.until(lambda one: one.states == well if well else set(one.states.values()) == {"ok"})
        yield house
    finally:
        await kept.close()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        runtime.close()
        assert readers() == []


async def test_another_card_with_room_takes_the_model(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Requests are told why, then the engine comes up on the other card, which is half as large, by a plan of its own
    for it; the other engine and the text sandboxes go on, and everybody is told. It stays there when its old card is
    back, and so does a model that slept meanwhile."""
    machine.card(0, **EMPTY)
    machine.card(1, total=40 * GIB, **EMPTY)
    both = {"gpu_share": 0, "kv_bytes": 4 * GIB}
    models = {"name": "a", "gpu": [0, 1], **both}, {"name": "b", "gpu": [1], **both}
    async with serving(machine, monkeypatch, tmp_path, *models) as house:
        assert (house.use("a"), house.use("b")) == ((0, 7), (1, 14))
        machine.card(0, state=LOST)
        state = await house.until(lambda one: one.engines.get("1") == ["a", "b"])
        assert house.use("a") == (1, 14)
        assert state.out == {"0": "card 0 is lost: it has fallen off the bus", "1": ""}
        assert (state.states["0"], state.moved, state.unplaced) == ("lost", {"a": 1}, {})
        ends, down = house.of(EngineEnds, "a")[0], house.of(SandboxDown, "a")[0]
        assert ends == EngineEnds("a", 1, GPU_LOST, 0)
        assert isinstance(down, SandboxDown) and (down.reason, down.role) == (GPU_LOST, "engine")
        assert house.told.index(ends) < house.told.index(down)
        assert len(house.of(SandboxDown, "a")) == 1 and house.of(SandboxDown, "b") == []
        booted = next(plan for plan in reversed(house.booted) if (plan.model, plan.role) == ("a", Role.ENGINE))
        told = host_environment(booted.spec)["CUDA_VISIBLE_DEVICES"], EngineConfig.from_json(booted.configuration)
        assert (told[0][:13], told[1].max_num_seqs) == ("GPU-00000001-", 256)
        machine.card(0, **EMPTY)
        await house.until(
            lambda one: one.out["0"].startswith("card 0 was lost 1 time in a day: it gets an engine once")
        )
        house.now += FIRST_TRIAL_S
        await house.until(lambda one: not any(one.out.values()))
        assert house.use("a") == (1, 14)
        assert house.events() == [
            ("lost", 0, "", ""),
            ("moved", 0, "a", "1"),
            ("back", 0, "", ""),
            ("trusted", 0, "", ""),
        ]
        await house.models.sleep("a")
        assert house.use("a") == (1, 14)


async def test_a_model_for_which_no_card_has_room_waits(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is down with the numbers of both cards, in what is told and recorded, and asks again; the other model is not
    touched. Once its card has answered for long enough it is served there."""
    machine.card(0, **EMPTY)
    machine.card(1, **EMPTY)
    async with serving(machine, monkeypatch, tmp_path, *({"name": name, "gpu": "auto"} for name in "ab")) as house:
        assert (house.use("a"), house.use("b")) == ((0, 90), (1, 90))
        machine.card(0, state=LOST)
        state = await house.until(lambda one: "a" in one.unplaced)
        assert state.unplaced["a"] == (
            "no GPU has room for an engine of a: card 1 (NVIDIA H100 80GB HBM3) of 80 GiB: engine-b may hold 90 %, 5 % "
            "are left and 90 % (72 GiB) are asked for; card 0 is lost: it has fallen off the bus; give the models of "
            "one card a smaller gpu_share or kv_bytes, or serve fewer models, or add a card"
        )
        while len(house.of(SandboxDown, "a")) < 2:
            await asyncio.sleep(0.005)
        last = house.of(SandboxDown, "a")[-1]
        assert isinstance(last, SandboxDown) and (last.reason, last.cause) == (GPU_LOST, state.unplaced["a"])
        machine.card(0, **EMPTY)
        await house.until(lambda one: one.out["0"].startswith("card 0 was lost 1 time"))
        assert len(house.booted) == 4  # Two of each model: on the lost card none was tried.
        state = await house.until(house.trusts)
        async with asyncio.timeout(10):
            while len(house.booted) < 5:
                await asyncio.sleep(0.005)
        assert (house.use("a"), state.moved, house.of(SandboxDown, "b")) == ((0, 90), {}, [])
        events = [("lost", 0, "", ""), ("refused", 0, "a", ""), ("back", 0, "", ""), ("trusted", 0, "", "")]
        assert house.events() == events
        assert "5 % are left and 90 % (72 GiB)" in str(house.audited[1].fields["cause"])


@pytest.mark.full
@pytest.mark.parametrize("looks", [True, False], ids=["looks again", "control"])
async def test_a_reload_promises_no_room_that_another_engine_takes(
    looks: bool, machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A reload is reviewed, with a model that wants the free card, while an engine without one is given that card: the
    review refuses. Control: a review that does not look again promises the room that is taken."""
    if not looks:
        monkeypatch.setattr(ModelChanges, "_uses", lambda _: {})
    machine.card(0, **EMPTY)
    machine.card(1, **EMPTY)
    async with serving(machine, monkeypatch, tmp_path, *({"name": name, "gpu": "auto"} for name in "ab")) as house:
        machine.card(0, state=LOST)
        await house.until(lambda one: "a" in one.unplaced)
        wanted = appliance(tmp_path, {"name": "a", "gpu": "auto"}, {"name": "c", "gpu": [1]})
        moved, planned = threading.Event(), asyncio.Event()
        loop, plan = asyncio.get_running_loop(), model_changes._planned

        def slow(*given: Any) -> PlannedModel:
            found = plan(*given)
            loop.call_soon_threadsafe(planned.set)
            assert moved.wait(20)
            return found

        monkeypatch.setattr(model_changes, "_planned", slow)
        monkeypatch.setattr(model_changes, "machine_memory", lambda: Memory(64 * GIB, 64 * GIB))
        origins = {f"models[{index}].name": "athanor.yaml" for index in range(2)}
        engine = house.engine("a")
        changes = ModelChanges(
            wanted,
            house.models,
            engine._runtime,
            house.publish,
            house.audited.append,
            lambda: Resolved(wanted, origins),
        )
        changes.out = lambda: house.placement.out
        changes.turn = house.placement.turn
        async with house.placement.turn:  # Until the review has looked, the engine gets no card.
            house.models.leave("b", again=False)
            house.models.drained("b")
            await house.models.end("b", 5)
            changes.take(ReviewModels("r", models_digest(wanted.models)))
            async with asyncio.timeout(20):
                await planned.wait()
        async with asyncio.timeout(20):
            while house.use("a")[0] != 1:
                await asyncio.sleep(0.005)
            moved.set()
            while not (answers := [one for one in house.told if isinstance(one, ModelsReviewed)]):
                await asyncio.sleep(0.005)
        await changes.close()
        uses = [house.use("a"), *((one.card.card, one.card.percent) for one in house.models.coming if one.card)]
        if looks:
            assert "engine-a may hold 90 %" in answers[0].problems[0]
            assert uses == [(1, 90)]
        else:
            assert answers[0].problems == []
            assert uses == [(1, 90), (1, 90)]


async def test_a_start_with_a_lost_card_serves_what_it_can(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two models for two cards, of which one was lost before the start: the first is served on the other, the second is
    down with the numbers, and gets its card with a plan by that one's memory once it is back."""
    machine.card(0, state=LOST)
    machine.card(1, **EMPTY)
    models = ({"name": name, "gpu": "auto"} for name in "ab")
    async with serving(machine, monkeypatch, tmp_path, *models, well={"0": "lost", "1": "ok"}) as house:
        state = await house.until(lambda one: "b" in one.unplaced)
        assert house.use("a") == (1, 90)
        assert "engine-a may hold 90 %, 5 % are left" in state.unplaced["b"]
        machine.card(0, **EMPTY)
        await house.until(lambda one: one.out["0"].startswith("card 0 was lost 1 time"))
        await house.until(house.trusts)
        assert (house.use("a"), house.use("b")) == ((1, 90), (0, 90))
        rows = [EngineConfig.from_json(house.engine(name).plan.configuration).max_num_seqs for name in "ab"]
        assert rows == [256, 256]


async def test_a_boot_that_hangs_on_a_lost_card_is_given_up(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An engine that dies boots by the plan that it has, also where CUDA ended it before NVML says why. On a lost card
    it may hang for minutes: as soon as the kernel tells of a fallen card, though NVML answers once more, it is ended,
    and boots on the other one."""
    machine.card(0, **EMPTY)
    machine.card(1, **EMPTY)
    async with serving(machine, monkeypatch, tmp_path, {"name": "a", "gpu": "auto"}) as house:
        house.hangs_on = 0
        house.engine("a").fault(1, "CUDA error")
        async with asyncio.timeout(10):
            while len(house.booted) < 3:
                await asyncio.sleep(0.005)
        assert house.booted[2] in house.booted[:2] and house.events() == []
        machine.card(0, xid=79, xids=1, **EMPTY)
        state = await house.until(lambda one: one.moved == {"a": 1})
        assert house.use("a") == (1, 90)
        assert (state.xids["0"]["bus"], house.events()[0][0]) == (1, "lost")
        assert str(house.audited[0].fields["cause"]).endswith("it has fallen off the bus (Xid 79)")


def _day(trials: CardTrials, up_s: int, down_s: int) -> int:
    """How often an engine that takes the card whenever it may is ended in a day in which the card is there for ``up_s``
    seconds and away for ``down_s``, in turn; a sample every five seconds."""
    ends, has = 0, True
    for now in range(0, int(MEMORY_S), 5):
        gone = {0: "card 0 is lost"} if now % (up_s + down_s) >= up_s else {}
        trials.look(gone, () if gone else (0,), now)
        ends += has and bool(gone)
        has = 0 not in trials.out(now)
    return ends


@pytest.mark.parametrize(("up_s", "down_s"), [(5, 5), (30, 30), (100, 20), (1_000, 5), (3_600, 60)])
def test_a_card_that_comes_and_goes_ends_few_engines(up_s: int, down_s: int) -> None:
    """However it does, at most so many in a day; afterwards only the operator gives it one. The control would be ended
    each time."""
    trials = CardTrials()
    assert 1 <= _day(trials, up_s, down_s) <= MOST_LOSSES < MEMORY_S // (up_s + down_s)
    assert (
        trials.out(MEMORY_S)[0] == ("card 0 was lost 5 times in a day: it gets no engine before the appliance restarts")
        or trials.out(MEMORY_S)[0] == "card 0 is lost"
    )
    for now in range(int(MEMORY_S), int(3 * MEMORY_S), 600):
        trials.look({}, (0,), now)
    assert "before the appliance restarts" in trials.out(3 * MEMORY_S)[0]


def test_a_trial_is_twice_as_long_each_time_and_is_forgotten() -> None:
    """One minute, two, four; a card that is lost during its trial begins anew, as does one of which nothing was known
    for a while; a day without a loss clears it."""
    trials, now = CardTrials(), 0.0
    assert trials.out(now) == {}
    for wanted in (60, 120, 240):
        trials.look({0: "card 0 is lost"}, (), now)
        assert trials.out(now) == {0: "card 0 is lost"}
        trials.look({}, (0,), now)
        assert 0 in trials.out(now + wanted - 1)
        trials.unknown(now + wanted - 1)
        assert 0 in trials.out(now + wanted)
        trials.look({}, (0,), now + 10)
        assert 0 in trials.out(now + wanted)
        now += wanted + 10
        assert trials.out(now) == {}
    trials.look({}, (0,), now + MEMORY_S)
    trials.look({0: "card 0 is lost"}, (), now + MEMORY_S)
    trials.look({}, (0,), now + MEMORY_S)
    assert trials.out(now + MEMORY_S)[0].endswith(
        "lost 1 time in a day: it gets an engine once it has answered for 1 min"
    )


def test_a_loss_in_other_words_is_one_loss() -> None:
    """The driver's event comes before NVML's word, which has another text: the audit log has one loss, and one more
    once the card was back in between."""
    audited: list[Entry] = []
    placement = CardPlacement(record=audited.append)
    for gone in ({0: "it has fallen off the bus (Xid 79)"}, {0: "it has fallen off the bus"}, {}, {0: "again"}):
        placement.look(gone, [] if gone else [0])
    assert [one.fields["event"] for one in audited] == ["lost", "back", "lost"]


def test_a_trial_that_is_over_stays_over() -> None:
    """Silence of NVML begins a trial anew that is under way, and none that is over."""
    trials = CardTrials()
    trials.look({0: "lost"}, [], 0.0)
    trials.look({}, [0], 1.0)
    trials.unknown(2.0)
    trials.look({}, [0], 3.0)
    assert trials.out(2.0 + FIRST_TRIAL_S)
    assert not trials.out(3.0 + FIRST_TRIAL_S)
    trials.unknown(4.0 + FIRST_TRIAL_S)
    assert not trials.out(4.0 + FIRST_TRIAL_S)
