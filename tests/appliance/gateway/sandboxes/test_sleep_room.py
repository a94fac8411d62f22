"""Models that do not fit together: what makes room, and who waits for it. Times are virtual."""

from __future__ import annotations

import asyncio

import pytest

from appliance.common.control_models import SleepModel, WakeModel
from appliance.common.errors import ModelAsleepError, ModelRemovedError, UnavailableError
from appliance.common.sleep_rules import ASLEEP, AWAKE, KEPT_WAKES, MOST_WAKES, STAY_S, WINDOW_S
from appliance.gateway.sandboxes import sleep_control
from appliance.gateway.sandboxes.model_leaving import Leaving
from appliance.gateway.sandboxes.wake_waiting import LOOK_S, RELOOK_S
from policy.model import ModelState
from tests.appliance.gateway.request.virtual_time import in_virtual_time, virtual_now
from tests.appliance.gateway.sandboxes.sleep_scene import GIB, Scene, turns, used


@in_virtual_time
async def test_the_least_recently_used_model_makes_room() -> None:
    """Two fit: the one that was used longer ago is put to sleep, before the order to wake; one in use never is, and the
    request waits until it is not."""
    scene = Scene()
    now = virtual_now()
    scene.awake("a", now - 5)
    scene.awake("b", now - 9)
    scene.live["b"] = scene.live["a"] = 1
    task = scene.ask("c")
    await turns()
    assert scene.told == []
    scene.free("a")
    await turns()
    assert scene.told == [SleepModel("a", "memory"), WakeModel("c", "request", "t")]
    assert scene.models["a"].sleep_state.state == ASLEEP
    scene.come_up("c")
    await task
    assert scene.models["b"].sleep_state.state == AWAKE


@in_virtual_time
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
            scene.awake(name, virtual_now() - 100)
        scene.live["b"] = 1
        task = scene.ask("c")
        await turns()
        assert bool(scene.told) == (most > 1)
        for number in range(MOST_WAKES):
            scene.decisions.guard.note(f"other-{number}", "u", virtual_now())
        if freed:
            scene.free(freed)
        await asyncio.sleep(2 * patience_s if patience_s < 1.0 else 0.0)
        await turns()
        assert scene.told == [SleepModel(slept, "memory"), WakeModel("c", "request", "t")]
        assert [one.model for one in scene.decisions.guard._wakes].count("c") == 1
        scene.come_up("c")
        await task


@in_virtual_time
async def test_one_of_those_that_wait_for_room_looks_for_all() -> None:
    """Forty requests look for room as often as one does (control), since each look takes a pass over all requests: at
    long intervals while nothing changes, and once for all changes of a tenth of a second. When the one that looked
    gives up, the next one looks, and all go on once there is room."""
    counts = []
    for number in (1, 40):
        scene, looks = Scene(), [0]
        for name in "ab":
            scene.awake(name, virtual_now() - 100)
            scene.live[name] = 1

        def available(looks: list[int] = looks) -> int:
            looks[0] += 1
            return 8 * GIB

        scene.decisions.available = available
        tasks = [scene.ask("c") for _ in range(number)]
        await turns()
        assert looks == [number]
        await asyncio.sleep(4.5 * RELOOK_S)
        counts.append(looks[0] - number)
        for _ in range(100):
            scene.control.waits.changed()
            await asyncio.sleep(LOOK_S / 20)
        counts.append(looks[0] - number)
    assert counts == [4, 4 + 5] * 2
    tasks.pop(0).cancel()
    await turns()
    scene.free("a", "b")
    await asyncio.sleep(LOOK_S)
    assert scene.told[-1] == WakeModel("c", "request", "t")
    scene.come_up("c")
    await asyncio.gather(*tasks)
    assert not scene.control.waits.any_for(scene.models["c"])


@pytest.mark.parametrize("past_s", [30.0, 61.0], ids=["counted", "forgotten"])
@in_virtual_time
async def test_a_wake_that_was_counted_for_who_gave_up_is_not_kept(past_s: float) -> None:
    """A tenant whose requests wait for room and give up could collect wakes that no guard counts when they begin.
    Within the minute in which it is counted (control) the wake of one is not refused."""
    scene = Scene()
    for name in "ab":
        scene.awake(name, virtual_now() - 100)
        scene.live[name] = 1
    task = scene.ask("c")
    await turns()
    task.cancel()
    await turns()
    scene.live.clear()
    scene.decisions.clock = lambda: virtual_now() + past_s
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


@in_virtual_time
async def test_the_last_wakes_are_kept_for_what_is_used_more() -> None:
    """With as many wakes of a minute begun as are not kept, a model that is used less than the one that would sleep for
    it is refused at once, with the time; one that is used more (the control) is woken."""
    scene = Scene()
    used(scene, {"a": 5, "b": 5, "c": 1})
    for name in "ab":
        scene.awake(name, virtual_now() - 100)
    for number in range(MOST_WAKES - KEPT_WAKES):
        scene.decisions.guard.note(f"other-{number}", f"u-{number}", virtual_now(), kept=False)
    began = virtual_now()
    with pytest.raises(ModelAsleepError, match="too often") as refused:
        await scene.ask("c")
    assert virtual_now() == began
    assert refused.value.retry_after_s == pytest.approx(60, abs=1)
    assert scene.control.route_state(scene.models["c"], "t") is ModelState.UNREADY
    used(scene, {"c": 9}, since_s=10.0)
    assert scene.control.route_state(scene.models["c"], "t") is ModelState.READY
    task = scene.ask("c")
    await turns()
    assert scene.told[-1] == WakeModel("c", "request", "t")
    scene.come_up("c")
    await task


@in_virtual_time
async def test_what_was_woken_just_now_stays() -> None:
    """A model is not put to sleep for another tenant's request in its first seconds, and is after them; a request whose
    deadline is too short puts none to sleep."""
    scene = Scene()
    for name in "ab":
        scene.awake(name, virtual_now())
        scene.models[name].sleep_state.since = virtual_now() - STAY_S + 5.0
    task = scene.ask("c")
    await turns()
    assert scene.told == []
    scene.models["a"].sleep_state.since -= STAY_S
    with pytest.raises(ModelAsleepError, match="takes longer"):
        await scene.ask("c", 0.2)
    assert scene.told == []
    await asyncio.sleep(RELOOK_S)
    assert scene.told == [SleepModel("a", "memory"), WakeModel("c", "request", "t")]
    scene.come_up("c")
    await task


@pytest.mark.parametrize("leaving", [Leaving.NO, Leaving.AGAIN, Leaving.FOR_GOOD])
@in_virtual_time
async def test_a_model_that_leaves_is_woken_for_nobody(leaving: Leaving) -> None:
    """All requests that wait for room for a model that is taken away are told so at once, by the error that the next
    request gets, and none is put to sleep for it; one that stays (the control) is woken."""
    scene = Scene()
    for name in "ab":
        scene.awake(name, virtual_now() - 100)
        scene.live[name] = 1
    tasks = [scene.ask("c") for _ in range(3)]
    await turns()
    if leaving is not Leaving.NO:
        scene.models["c"].leave(again=leaving is Leaving.AGAIN)
    scene.free("a", "b")
    await turns()
    if leaving is Leaving.NO:
        assert scene.told[-1] == WakeModel("c", "request", "t")
        scene.come_up("c")
    else:
        assert scene.told == []
        assert all(task.done() for task in tasks)
    found = await asyncio.gather(*tasks, return_exceptions=True)
    told = {Leaving.NO: float, Leaving.AGAIN: UnavailableError, Leaving.FOR_GOOD: ModelRemovedError}
    assert [type(one) for one in found] == [told[leaving]] * 3
