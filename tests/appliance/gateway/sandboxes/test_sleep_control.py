"""Requests of sleeping models: who wakes them, who joins, who is refused at once; and words of the supervisor that come
late."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from appliance.common.control_models import ModelRest, SleepModel, WakeModel
from appliance.common.errors import FeatureNotAllowedError, ModelAsleepError, ModelWakeError, UnavailableError
from appliance.common.model_uses import REFUSED_GAP_S
from appliance.common.sleep_rules import (
    ASLEEP,
    AWAKE,
    KEPT_WAKES,
    MOST_WAKES,
    MOST_WAKES_OF_MODEL,
    STAY_S,
    WAKING,
    WINDOW_S,
    WakeGuard,
)
from appliance.gateway.sandboxes import sleep_control
from appliance.gateway.sandboxes.model_sandboxes import Leaving, ModelSandboxes, SandboxRecord
from appliance.gateway.sandboxes.sleep_control import SleepControl
from appliance.gateway.sandboxes.sleep_decisions import SleepDecisions
from policy.model import ModelState

GIB = 1 << 30
WAKE_MS = 5_000
"""What the supervisor says that a boot took."""


class FakeLink:
    """A link that can be closed."""

    ready = None
    generation = 1
    hang = ""
    table = None

    def close(self) -> None:
        """Nothing is open."""

    def set_quotas(self, _quotas: object) -> None:
        """As an engine's."""


@dataclass
class Scene:
    """Models of one GiB, of which two fit, and what the supervisor was told."""

    told: list[Any] = field(default_factory=list)
    counted: list[tuple[str, str, str]] = field(default_factory=list)
    live: dict[str, int] = field(default_factory=dict)
    attached: bool = True
    own: dict[str, int] = field(default_factory=dict)
    """Tenants with sandboxes of their own, by model."""

    def __post_init__(self) -> None:
        self.models = {name: ModelSandboxes(name) for name in "abc"}
        self.decisions = SleepDecisions(
            self.models,
            lambda: self.attached,
            lambda *what: self.counted.append(what),
            lambda: {self.models[name]: count for name, count in self.live.items()},
            budget=2 * GIB,
            available=lambda: 8 * GIB,
        )
        self.control = SleepControl(self.decisions, self.told.append, lambda name: self.own.pop(name, 0))
        for name, one in self.models.items():
            one.records |= {role: SandboxRecord() for role in ("engine", "text")}
            self.word(name, ASLEEP)

    def word(self, name: str, state: str, cause: str = "") -> None:
        """Take the supervisor's word."""
        self.control.take(ModelRest(name, state, cause, GIB, WAKE_MS, "while_used", 60_000))

    def come_up(self, name: str) -> None:
        """Have the sandboxes of a waking model there."""
        one = self.models[name]
        one.engine, one.text = FakeLink(), FakeLink()  # type: ignore[assignment]
        one._tell()

    def awake(self, name: str, used_at: float) -> None:
        """Have a model awake that was woken long ago."""
        self.word(name, WAKING)
        self.come_up(name)
        self.models[name].sleep_state.since = used_at - STAY_S
        self.models[name].sleep_state.used_at = used_at

    def ask(self, name: str, seconds: float = 60.0, tenant: str = "t") -> asyncio.Task[float]:
        """A request with a deadline."""
        return asyncio.create_task(self.control.awaken(self.models[name], time.monotonic() + seconds, tenant))


async def turns() -> None:
    """Let all tasks run that can."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_all_requests_wait_for_one_wake() -> None:
    """The first wakes the model, the others join, all go on when it is there; one that comes then waits for nothing."""
    scene = Scene()
    tasks = [scene.ask("a") for _ in range(5)]
    await turns()
    assert scene.told == [WakeModel("a", "request", "t")]
    assert not any(task.done() for task in tasks)
    scene.word("a", WAKING)
    scene.come_up("a")
    assert all(waited_s > 0 for waited_s in await asyncio.gather(*tasks))
    assert await scene.ask("a") == 0
    assert scene.counted == [("woken", "a", "request")]


async def test_a_deadline_that_is_too_short_is_told_at_once_and_the_wake_goes_on() -> None:
    """The estimate is what the last boot took; the refusal names it and comes within 50 ms; a request that comes when
    less is left waits."""
    scene = Scene()
    began = time.perf_counter()
    with pytest.raises(ModelAsleepError) as refused:
        await scene.ask("a", 1.0)
    assert time.perf_counter() - began < 0.05
    assert refused.value.retry_after_s == pytest.approx(WAKE_MS / 1e3, abs=0.2)
    assert scene.told == [WakeModel("a", "request", "t")]
    scene.models["a"].sleep_state.since -= 4.9
    task = scene.ask("a", 1.0)
    await turns()
    assert not task.done(), "the control"
    scene.come_up("a")
    await task


async def test_a_wake_that_fails_is_told_to_all_and_the_next_one_begins_anew() -> None:
    """All that waited get the typed error, the model sleeps with the cause, and the next request wakes it."""
    scene = Scene()
    tasks = [scene.ask("a") for _ in range(2)]
    await turns()
    scene.word("a", WAKING)
    scene.word("a", ASLEEP, "out of luck")
    for task in tasks:
        with pytest.raises(ModelWakeError):
            await task
    assert (scene.models["a"].sleep_state.state, scene.models["a"].sleep_state.cause) == (ASLEEP, "out of luck")
    task = scene.ask("a")
    await turns()
    assert scene.told == [WakeModel("a", "request", "t")] * 2
    scene.come_up("a")
    await task


async def test_a_late_word_about_the_sleep_before_ends_no_wake() -> None:
    """A request comes right after the order to sleep: that the model is asleep is told after it, and is no failure."""
    scene = Scene()
    scene.awake("a", time.monotonic() - 100)
    scene.control.look()
    assert scene.told == [SleepModel("a", "idle")]
    task = scene.ask("a")
    await turns()
    scene.word("a", ASLEEP)
    await turns()
    assert not task.done()
    scene.word("a", WAKING)
    scene.come_up("a")
    await task


async def test_the_least_recently_used_model_makes_room() -> None:
    """Two fit: the one that was used longer ago is put to sleep, before the order to wake; one in use never is, and the
    request waits until it is not."""
    scene = Scene()
    now = time.monotonic()
    scene.awake("a", now - 5)
    scene.awake("b", now - 9)
    scene.live["b"] = scene.live["a"] = 1
    task = scene.ask("c")
    await turns()
    assert scene.told == []
    scene.live["a"] = 0
    await asyncio.sleep(2 * sleep_control.LOOK_S)
    assert scene.told == [SleepModel("a", "memory"), WakeModel("c", "request", "t")]
    assert scene.models["a"].sleep_state.state == ASLEEP
    scene.come_up("c")
    await task
    assert scene.models["b"].sleep_state.state == AWAKE


async def test_refused_requests_count_seldom() -> None:
    """A tenant whose requests are refused, each second for minutes, gives its model one count in ten seconds; a request
    that was served (control) counts in full, though one was refused a second before."""
    scene, now = Scene(), [1_000.0]
    scene.decisions.clock = lambda: now[0]
    counted = [0.0]
    for _ in range(300):
        with pytest.raises(ModelAsleepError):
            await scene.control.awaken(scene.models["a"], now[0] + 0.1, "t")
        if (found := scene.decisions.uses.of("a")) != counted[-1]:
            counted.append(found)
        now[0] += 1.0
    # One tenant counts as sixteen uses at most, which these reach.
    assert len(counted) - 1 <= 300 / REFUSED_GAP_S
    assert counted[1] == pytest.approx(1.0)
    before = scene.decisions.uses.of("b")
    scene.control.served(scene.models["b"], "t", now[0])
    assert scene.decisions.uses.of("b") > before + 0.5


def used(scene: Scene, counts: dict[str, int], since_s: float = -1_000.0) -> None:
    """Have models used so often, long ago or soon."""
    for name, count in counts.items():
        for number in range(count):
            scene.decisions.uses.note(name, f"u-{number}", time.monotonic() + since_s + 2 * number)


async def test_a_seldom_used_model_waits_for_the_place_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside one that is used often and one that is used less and has a request, a seldom used model waits for the
    latter, and after a while takes the place of the former; one that is used most, which has no such patience here
    (the control), takes it at once. A
    wake that was counted while it waited is not refused because of others that came meanwhile, and counts once."""
    for patience_s, freed, most, slept in ((60.0, "b", 1, "b"), (0.15, "", 1, "a"), (60.0, "", 30, "a")):
        scene = Scene()
        monkeypatch.setattr(sleep_control, "GUEST_WAIT_S", patience_s)
        monkeypatch.setattr(sleep_control, "KEPT_WAIT_S", 0.0)
        used(scene, {"a": 9, "b": 2, "c": most - 1})
        for name in "ab":
            scene.awake(name, time.monotonic() - 100)
        scene.live["b"] = 1
        task = scene.ask("c")
        await turns()
        assert bool(scene.told) == (most > 1)
        for number in range(MOST_WAKES):
            scene.decisions.guard.note(f"other-{number}", "u", time.monotonic())
        if freed:
            scene.live[freed] = 0
        await asyncio.sleep(4 * sleep_control.LOOK_S)
        assert scene.told == [SleepModel(slept, "memory"), WakeModel("c", "request", "t")]
        assert [one.model for one in scene.decisions.guard._wakes].count("c") == 1
        scene.come_up("c")
        await task


async def test_one_of_those_that_wait_for_room_looks_for_all() -> None:
    """Forty requests look for room as often as one does (control), since each look takes a pass over all requests; when
    the one that looked gives up, the next one looks, and all go on once there is room."""
    counts = []
    for number in (1, 40):
        scene, looks = Scene(), [0]
        for name in "ab":
            scene.awake(name, time.monotonic() - 100)
            scene.live[name] = 1

        def available(looks: list[int] = looks) -> int:
            looks[0] += 1
            return 8 * GIB

        scene.decisions.available = available
        tasks = [scene.ask("c") for _ in range(number)]
        await turns()
        assert looks == [number]
        began = time.monotonic()
        await asyncio.sleep(5.5 * sleep_control.LOOK_S)
        counts.append((looks[0] - number, (time.monotonic() - began) / sleep_control.LOOK_S))
    # On a busy machine the sleep may take longer, and there are looks for as long.
    assert all(2 <= found <= most for found, most in counts)
    tasks.pop(0).cancel()
    scene.live.clear()
    await asyncio.sleep(2.5 * sleep_control.LOOK_S)
    assert scene.told[-1] == WakeModel("c", "request", "t")
    scene.come_up("c")
    await asyncio.gather(*tasks)
    assert not scene.models["c"].sleep_state.order


@pytest.mark.parametrize("past_s", [30.0, 61.0], ids=["counted", "forgotten"])
async def test_a_wake_that_was_counted_for_who_gave_up_is_not_kept(past_s: float) -> None:
    """A tenant whose requests wait for room and give up could collect wakes that no guard counts when they begin.
    Within the minute in which it is counted (control) the wake of one is not refused."""
    scene = Scene()
    for name in "ab":
        scene.awake(name, time.monotonic() - 100)
        scene.live[name] = 1
    task = scene.ask("c")
    await turns()
    task.cancel()
    await turns()
    scene.live.clear()
    scene.decisions.clock = lambda: time.monotonic() + past_s
    for number in range(MOST_WAKES):
        scene.decisions.guard.note(f"other-{number}", "u", scene.decisions.clock())
    task = scene.ask("c", 200.0)
    await turns()
    assert bool(scene.told) == (past_s < WINDOW_S)
    if scene.told:
        scene.come_up("c")
        await task
    else:
        with pytest.raises(ModelAsleepError, match="too often"):
            await task


async def test_the_last_wakes_are_kept_for_what_is_used_more() -> None:
    """With as many wakes of a minute begun as are not kept, a model that is used less than the one that would sleep for
    it is refused at once, with the time; one that is used more (the control) is woken."""
    scene = Scene()
    used(scene, {"a": 5, "b": 5, "c": 1})
    for name in "ab":
        scene.awake(name, time.monotonic() - 100)
    for number in range(MOST_WAKES - KEPT_WAKES):
        scene.decisions.guard.note(f"other-{number}", f"u-{number}", time.monotonic(), kept=False)
    began = time.perf_counter()
    with pytest.raises(ModelAsleepError, match="too often") as refused:
        await scene.ask("c")
    assert time.perf_counter() - began < 0.05
    assert refused.value.retry_after_s == pytest.approx(60, abs=1)
    assert scene.control.route_state(scene.models["c"], "t") is ModelState.UNREADY
    used(scene, {"c": 9}, since_s=10.0)
    assert scene.control.route_state(scene.models["c"], "t") is ModelState.READY
    task = scene.ask("c")
    await turns()
    assert scene.told[-1] == WakeModel("c", "request", "t")
    scene.come_up("c")
    await task


async def test_what_cannot_be_woken_is_refused() -> None:
    """Too many wakes in a minute, too many that wait, no supervisor: a typed error each, and no order."""
    scene = Scene()
    scene.decisions.guard = WakeGuard()
    for _ in range(MOST_WAKES_OF_MODEL):
        scene.decisions.guard.note("a", "u", time.monotonic())
    with pytest.raises(ModelAsleepError, match="too often") as refused:
        await scene.ask("a")
    assert refused.value.retry_after_s == pytest.approx(60, abs=1)
    scene.models["b"].sleep_state.waiting["t"] = sleep_control.TENANT_WAITING
    with pytest.raises(ModelAsleepError, match="too many"):
        await scene.ask("b")
    scene.attached = False
    with pytest.raises(UnavailableError):
        await scene.ask("c")
    assert scene.told == []


async def test_what_was_woken_just_now_stays() -> None:
    """A model is not put to sleep for another tenant's request in its first seconds, and is after them; a request whose
    deadline is too short puts none to sleep."""
    scene = Scene()
    for name in "ab":
        scene.awake(name, time.monotonic())
        scene.models[name].sleep_state.since = time.monotonic() - STAY_S + 5.0
    task = scene.ask("c")
    await turns()
    assert scene.told == []
    scene.models["a"].sleep_state.since -= STAY_S
    with pytest.raises(ModelAsleepError, match="takes longer"):
        await scene.ask("c", 0.2)
    assert scene.told == []
    await asyncio.sleep(2 * sleep_control.LOOK_S)
    assert scene.told == [SleepModel("a", "memory"), WakeModel("c", "request", "t")]
    scene.come_up("c")
    await task


async def test_orders_of_the_operator() -> None:
    """A model that is used is not put to sleep; one that is not is; a name of none is told."""
    scene = Scene()
    scene.awake("a", time.monotonic())
    scene.live["a"] = 2
    assert scene.control.put_to_sleep("a").message == "a is in use: 2 requests"
    scene.live["a"] = 0
    assert scene.control.put_to_sleep("a").ok
    assert scene.told == [SleepModel("a", "operator")]
    assert not scene.control.put_to_sleep("nothing").found
    scene.word("a", ASLEEP)
    waking = asyncio.create_task(scene.control.wake_up("a"))
    await turns()
    scene.come_up("a")
    assert (await waking).state == AWAKE
    with pytest.raises(ValueError, match="no supervisor"):
        scene.word("a", "dreaming")


async def test_sandboxes_of_single_tenants_end_with_a_sleeping_model() -> None:
    """A tenant's own sandboxes that were booted while their model slept end once no request has used them for its
    ``idle_s``, or by the operator's order; those with a request in them (the control) do not."""
    scene = Scene()
    sleep = scene.models["a"].sleep_state
    scene.own["a"], scene.live["a"] = 1, 1
    sleep.used_at = scene.decisions.clock() - sleep.idle_s
    scene.control.look()
    assert not scene.control.put_to_sleep("a").ok
    assert scene.own == {"a": 1}
    scene.live["a"] = 0
    sleep.used_at = scene.decisions.clock()
    scene.control.look()
    assert scene.own == {"a": 1}, "the control: used just now"
    sleep.used_at -= sleep.idle_s
    scene.control.look()
    assert scene.own == {}
    scene.own["a"] = 2
    assert scene.control.put_to_sleep("a").message == "a is asleep already; the sandboxes of 2 tenants end"
    assert scene.own == {}
    assert scene.control.put_to_sleep("a").message == "a is asleep already"


async def test_a_sandbox_that_dies_while_its_model_wakes_is_told_at_once() -> None:
    """Those that joined a wake get the typed error when one sandbox dies before the other is there, and when one dies
    in the moment in which both are there, though the supervisor boots it again and says that the model is awake; so
    does the operator's order. A wake in which none dies (the control) is waited for."""
    scene = Scene()
    model = scene.models["a"]
    tasks = [scene.ask("a") for _ in range(2)]
    await turns()
    scene.word("a", WAKING)
    assert not any(task.done() for task in tasks), "the control"
    model.set_engine(None)
    model.record("engine").become("failed", "the process ended")
    scene.word("a", AWAKE)
    model.note_failure()
    for task in tasks:
        with pytest.raises(ModelWakeError):
            await asyncio.wait_for(task, 5.0)

    scene.awake("b", time.monotonic())
    scene.control.put_to_sleep("b")
    scene.word("b", ASLEEP)
    model, task = scene.models["b"], scene.ask("b")
    order = asyncio.create_task(scene.control.wake_up("b"))
    await turns()
    scene.come_up("b")
    model.set_engine(None)
    model.record("engine").become("failed", "the process ended")
    with pytest.raises(ModelWakeError):
        await asyncio.wait_for(task, 5.0)
    assert (await order).message == "b did not wake: the process ended"


async def test_a_tenant_that_may_not_wake_a_model_joins_a_wake() -> None:
    """A model that fell asleep after the policy had decided is not woken for a tenant that may not, which is told by
    type; a wake that another has begun is waited for."""
    scene = Scene()
    until = scene.decisions.clock() + 60
    with pytest.raises(FeatureNotAllowedError):
        await scene.control.awaken(scene.models["a"], until, "t", wakes=False)
    assert scene.told == []
    other = scene.ask("a")
    await turns()
    joined = asyncio.create_task(scene.control.awaken(scene.models["a"], until, "t", wakes=False))
    await turns()
    scene.come_up("a")
    await asyncio.gather(other, joined)


async def test_wakes_take_turns_and_each_is_told_how_long_it_waits() -> None:
    """Of three models for which there is room two wake at a time, and the third when one of them is awake. A request
    for it whose deadline is before that is refused at once, with what is left of the first two and its own wake; one
    without a deadline (the control) waits and is served."""
    scene = Scene()
    scene.decisions.budget = 8 * GIB
    tasks = [scene.ask(name) for name in "abc"]
    await turns()
    assert [one.model for one in scene.told] == ["a", "b"]
    began = time.perf_counter()
    with pytest.raises(ModelAsleepError, match="takes longer") as refused:
        await scene.ask("c", 1.5 * WAKE_MS / 1e3)
    assert time.perf_counter() - began < 0.05
    assert refused.value.retry_after_s == pytest.approx(2 * WAKE_MS / 1e3, abs=0.2)
    scene.come_up("a")
    await asyncio.sleep(2 * sleep_control.LOOK_S)
    assert [one.model for one in scene.told] == ["a", "b", "c"]
    for name in "bc":
        scene.come_up(name)
    await asyncio.gather(*tasks)


async def test_who_would_wait_too_long_is_refused_at_once() -> None:
    """A guest is refused while guests may not take a place for long, with the seconds until then and of its wake; with
    little left (the control) it waits, and takes the place."""
    for left_s, waits in ((sleep_control.LONGEST_WAIT_S + 2.0, False), (5.0, True)):
        scene = Scene()
        used(scene, {"a": 9, "b": 9})
        for name in "ab":
            scene.awake(name, time.monotonic() - 100)
        scene.decisions.guard.note_cost(time.monotonic() + left_s - scene.decisions.guard.gap_s)
        task = scene.ask("c")
        await turns()
        assert scene.told == []
        if waits:
            scene.decisions.guard.note_cost(time.monotonic() - scene.decisions.guard.gap_s)
            await asyncio.sleep(3 * sleep_control.LOOK_S)
            assert scene.told[-1] == WakeModel("c", "request", "t")
            scene.come_up("c")
            await task
        else:
            with pytest.raises(ModelAsleepError, match="woken before it") as refused:
                await task
            assert refused.value.retry_after_s == pytest.approx(left_s + WAKE_MS / 1e3, abs=1.0)
        assert scene.decisions.guard.place_wait_s(time.monotonic()) > 0


async def test_a_guest_that_has_waited_for_long_takes_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guest that was let wait and whose place others take again and again is served after its patience, though no
    guest may take a place yet; before that (the control) it waits."""
    scene = Scene()
    used(scene, {"a": 9, "b": 9})
    for name in "ab":
        scene.awake(name, time.monotonic() - 100)
    scene.decisions.guard.note_cost(time.monotonic() - scene.decisions.guard.gap_s + 1.0)
    task = scene.ask("c")
    await turns()
    scene.decisions.guard.note_cost(time.monotonic())
    await asyncio.sleep(2 * sleep_control.LOOK_S)
    assert scene.told == [], "the control"
    monkeypatch.setattr(sleep_control, "GUEST_WAIT_S", 0.0)
    await asyncio.sleep(2 * sleep_control.LOOK_S)
    assert scene.told[-1] == WakeModel("c", "request", "t")
    scene.come_up("c")
    await task


@pytest.mark.parametrize("leaving", [Leaving.NO, Leaving.AGAIN, Leaving.FOR_GOOD])
async def test_a_model_that_leaves_is_woken_for_nobody(leaving: Leaving) -> None:
    """All requests that wait for room for a model that is taken away are told so at their next look, and none is put to
    sleep for it; one that stays (the control) is woken."""
    scene = Scene()
    for name in "ab":
        scene.awake(name, time.monotonic() - 100)
        scene.live[name] = 1
    tasks = [scene.ask("c") for _ in range(3)]
    await turns()
    scene.models["c"].leaving = leaving
    scene.live.clear()
    await asyncio.sleep(2 * sleep_control.LOOK_S)
    if leaving is Leaving.NO:
        assert scene.told[-1] == WakeModel("c", "request", "t")
        scene.come_up("c")
    else:
        assert scene.told == []
        assert all(task.done() for task in tasks)
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(one, UnavailableError) is (leaving is not Leaving.NO) for one in found)


async def test_the_wake_of_a_model_that_leaves_holds_up_no_other() -> None:
    """Its supervisor may not carry out the order any more, and says nothing: two such wakes take no turn from a third
    model, as two of models that stay do (the control)."""
    scene = Scene()
    scene.decisions.budget = 8 * GIB
    tasks = [scene.ask(name) for name in "abc"]
    await turns()
    assert [one.model for one in scene.told] == ["a", "b"], "the control"
    for name in "ab":
        scene.models[name].leaving = Leaving.FOR_GOOD
    await asyncio.sleep(2 * sleep_control.LOOK_S)
    assert scene.told[-1] == WakeModel("c", "request", "t")
    for name in "abc":
        scene.come_up(name)
    await asyncio.gather(*tasks)


async def test_a_model_that_goes_or_is_replaced_leaves_the_queue_as_it_should() -> None:
    """While requests of a model that is gone have not noticed, a request for another is estimated; when they end, a
    model that has come with the same name keeps its place, and without one (the control) nobody waits."""
    for replaced in (True, False):
        scene = Scene()
        scene.awake("a", time.monotonic() - 100)
        scene.models["a"].sleep_state.need_bytes = 2 * GIB
        scene.live["a"] = 1
        gone = scene.ask("c")
        await turns()
        scene.models.pop("c").leaving = Leaving.FOR_GOOD
        other = scene.ask("b")
        await turns()
        assert not other.done()
        other.cancel()
        await turns()
        tasks = []
        if replaced:
            scene.models["c"] = ModelSandboxes("c")
            scene.word("c", ASLEEP)
            tasks = [scene.ask("c")]
            await turns()
        gone.cancel()
        await turns()
        assert scene.decisions.queue.is_free(1) is not replaced
        for task in tasks:
            task.cancel()
        await turns()
        assert scene.decisions.queue.is_free(1)


async def test_a_model_without_room_keeps_no_smaller_one_back() -> None:
    """A request for a large model waits for the memory of one in use, whose requests may take minutes; a small model
    for which there is room is woken at once, also with a deadline just beyond its own wake. A small one behind one for
    which there is room (the control) waits for its turn."""
    for large in (2 * GIB, GIB // 2):
        scene = Scene()
        scene.decisions.queue.most = 1
        scene.awake("a", time.monotonic() - 100)
        scene.live["a"] = 1
        scene.models["c"].sleep_state.need_bytes = large
        scene.models["b"].sleep_state.need_bytes = GIB // 2
        tasks = [scene.ask("c")]
        await turns()
        if large < GIB:
            with pytest.raises(ModelAsleepError, match="takes longer"):
                await scene.ask("b", WAKE_MS / 1e3 + 1.0)
            assert scene.told == [WakeModel("c", "request", "t")], "the control"
        else:
            tasks.append(scene.ask("b", WAKE_MS / 1e3 + 1.0))
            await turns()
            assert scene.told == [WakeModel("b", "request", "t")]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_wake_behind_a_fallback_takes_no_turn_of_others() -> None:
    """With as many wakes as run at a time, or a model that waits for its turn, a model that a route has passed over is
    not woken; with one wake fewer (the control) it is."""
    for waking, told in (("ab", 2), ("a", 2)):
        scene = Scene()
        scene.decisions.budget, scene.decisions.queue.most = 8 * GIB, 2
        tasks = [scene.ask(name) for name in waking]
        await turns()
        scene.control.wake_behind("c", "t")
        assert len(scene.told) == told
        assert (scene.told[-1].model == "c") is (waking == "a")
        for name in waking:
            scene.come_up(name)
        await asyncio.gather(*tasks)


async def test_guests_of_one_tenant_do_not_keep_those_of_others_waiting() -> None:
    """A guest waits for its place. That of a tenant that has begun a wake of one in the last minute keeps another
    tenant's guest not from waiting for that place, before it; that of one that has not (the control) is before it, and
    the other is refused at once."""
    for begun in (0, 1):
        scene = Scene()
        scene.decisions.budget = GIB
        used(scene, {"a": 9})
        scene.awake("a", time.monotonic() - 100)
        for _ in range(begun):
            scene.decisions.guard.note("other", "hog", time.monotonic(), kept=False)
        scene.decisions.guard.note_cost(time.monotonic() - scene.decisions.guard.gap_s + 5.0)
        hog = scene.ask("b", 600.0, "hog")
        await turns()
        assert not hog.done()
        task = scene.ask("c", 600.0)
        await turns()
        if begun:
            assert not task.done()
            scene.decisions.guard.note_cost(time.monotonic() - scene.decisions.guard.gap_s)
            await asyncio.sleep(2 * sleep_control.LOOK_S)
            assert scene.told[-1] == WakeModel("c", "request", "t")
            scene.live["c"] = 1
            scene.come_up("c")
            await task
        else:
            with pytest.raises(ModelAsleepError, match="woken before it"):
                await task
        hog.cancel()
