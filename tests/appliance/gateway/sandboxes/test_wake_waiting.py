"""Requests that wait for a sleeping model are told of what changes, and look at nothing meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from appliance.common.control_models import SleepModel, WakeModel
from appliance.common.errors import ModelAsleepError
from appliance.common.sleep_rules import ASLEEP
from appliance.gateway.sandboxes.sleep_control import MAX_WAITING, ROOM_WAIT_S, TENANT_WAITING
from appliance.gateway.sandboxes.wake_waiting import LOOK_S, RELOOK_S
from tests.appliance.gateway.request.virtual_time import in_virtual_time, virtual_now
from tests.appliance.gateway.sandboxes.sleep_scene import Scene, turns


def full(live: int = 1) -> Scene:
    """A host whose two places are in use."""
    scene = Scene()
    for name in "ab":
        scene.awake(name, virtual_now() - 100)
        scene.live[name] = live
    return scene


@in_virtual_time
async def test_those_that_wait_do_not_look_while_nothing_changes() -> None:
    """As many requests as may wait for one model, ten seconds long: each looks once when it comes, and one of them at
    its intervals; the others run not once. Each wait that looked would look a hundred times at tenths of a second."""
    scene, looks = full(), [0]

    def attached() -> bool:
        looks[0] += 1
        return True

    scene.decisions.attached = attached
    tasks = [scene.ask("c", 600.0, f"t-{number // TENANT_WAITING}") for number in range(MAX_WAITING)]
    await turns()
    assert looks[0] == MAX_WAITING
    await asyncio.sleep(10.0)
    assert 10.0 / RELOOK_S - 1 <= looks[0] - MAX_WAITING <= 2 * (10.0 / RELOOK_S + 1)
    before = looks[0]
    scene.control.waits.changed()
    await turns()
    assert 1 <= looks[0] - before <= 2, "one looks after a change that is not their own model's"
    await asyncio.sleep(LOOK_S)
    scene.free("a")
    await turns()
    assert scene.told == [SleepModel("a", "memory"), WakeModel("c", "request", "t-0")]
    await asyncio.sleep(1.0)
    scene.come_up("c")
    assert await asyncio.gather(*tasks) == pytest.approx([11.0 + LOOK_S] * MAX_WAITING)


@pytest.mark.parametrize("change", ["ends", "awake", "gone"])
@in_virtual_time
async def test_each_change_that_makes_room_is_told(change: str) -> None:
    """A request of another model ends, one that has booted is there and idle, one is taken away and its memory is back:
    the wake begins in the same moment, before the next look that comes of itself."""
    scene = full()
    if change == "awake":
        scene.models["a"].close_links()
        scene.models["a"].begin_wake()
        scene.live["a"] = 0
    task = scene.ask("c", 600.0)
    await asyncio.sleep(RELOOK_S * 1.1)
    assert scene.told == [], "the control"
    if change == "ends":
        scene.free("a")
    elif change == "awake":
        scene.models["a"].sleep_state.wake_s = 0.0
        scene.decisions.guard.note("a", "t", virtual_now())
        scene.come_up("a")
    else:
        scene.models.pop("a")
        del scene.live["a"]
        scene.models["b"].changed()
    await turns()
    assert scene.told[-1] == WakeModel("c", "request", "t")
    scene.come_up("c")
    await task


@in_virtual_time
async def test_a_change_right_after_a_look_is_not_lost() -> None:
    """Room that comes just after a round of looks is found a tenth of a second later, not at the next interval."""
    scene = full()
    task = scene.ask("c", 600.0)
    await turns()
    scene.control.waits.changed()
    await turns()
    scene.free("a")
    await turns()
    assert scene.told == [], "the control: the looks of a tenth of a second are one"
    await asyncio.sleep(LOOK_S)
    assert scene.told[-1] == WakeModel("c", "request", "t")
    scene.come_up("c")
    await task


@in_virtual_time
async def test_who_waits_in_vain_is_told_in_time() -> None:
    """Without room a request is refused when its deadline leaves no time for the wake, also one that others look for;
    one without a deadline after the longest wait; and all when the supervisor is lost, at once."""
    scene = full()
    began = virtual_now()
    first, second, third = scene.ask("c", 600.0), scene.ask("c", 30.0), scene.ask("c", 600.0)
    with pytest.raises(ModelAsleepError, match="takes longer"):
        await second
    assert virtual_now() - began == pytest.approx(25.0, abs=0.01)
    for task in (first, third):
        with pytest.raises(ModelAsleepError, match="others use the memory"):
            await task
    assert virtual_now() - began == pytest.approx(ROOM_WAIT_S, abs=0.01)
    began, tasks = virtual_now(), [scene.ask("c", 600.0) for _ in range(3)]
    await turns()
    scene.attached = False
    scene.models["c"].fall_asleep()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert virtual_now() == began
    assert all("not available" in str(one) for one in found)
    assert scene.models["c"].sleep_state.state == ASLEEP
