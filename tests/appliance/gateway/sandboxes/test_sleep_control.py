"""Requests of sleeping models: who wakes them, who joins, who is refused at once; words of the supervisor that come
late; the operator's commands. Times are virtual, so nothing depends on how busy the machine is."""

from __future__ import annotations

import asyncio

import pytest

from appliance.common.control_models import SleepModel, WakeModel
from appliance.common.errors import FeatureNotAllowedError, ModelAsleepError, ModelWakeError, UnavailableError
from appliance.common.model_uses import REFUSED_GAP_S
from appliance.common.sleep_rules import ASLEEP, AWAKE, MOST_WAKES_OF_MODEL, WAKING, WakeGuard
from appliance.gateway.sandboxes import sleep_control
from tests.appliance.gateway.request.virtual_time import in_virtual_time, virtual_now
from tests.appliance.gateway.sandboxes.sleep_scene import WAKE_MS, Scene, turns


@in_virtual_time
async def test_all_requests_wait_for_one_wake() -> None:
    """The first wakes the model, the others join, all go on when it is there; one that comes then waits for nothing."""
    scene = Scene()
    tasks = [scene.ask("a") for _ in range(5)]
    await turns()
    assert scene.told == [WakeModel("a", "request", "t")]
    assert not any(task.done() for task in tasks)
    scene.word("a", WAKING)
    await asyncio.sleep(2.0)
    scene.come_up("a")
    assert await asyncio.gather(*tasks) == [2.0] * 5
    assert await scene.ask("a") == 0
    assert scene.counted == [("woken", "a", "request")]


@in_virtual_time
async def test_a_deadline_that_is_too_short_is_told_at_once_and_the_wake_goes_on() -> None:
    """The estimate is what the last boot took; the refusal names it and comes within 50 ms; a request that comes when
    less is left waits."""
    scene = Scene()
    began = virtual_now()
    with pytest.raises(ModelAsleepError) as refused:
        await scene.ask("a", 1.0)
    assert virtual_now() == began
    assert refused.value.retry_after_s == pytest.approx(WAKE_MS / 1e3, abs=0.2)
    assert scene.told == [WakeModel("a", "request", "t")]
    scene.models["a"].sleep_state.since -= 4.9
    task = scene.ask("a", 1.0)
    await turns()
    assert not task.done(), "the control"
    scene.come_up("a")
    await task


@in_virtual_time
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


@in_virtual_time
async def test_a_late_word_about_the_sleep_before_ends_no_wake() -> None:
    """A request comes right after the order to sleep: that the model is asleep is told after it, and is no failure."""
    scene = Scene()
    scene.awake("a", virtual_now() - 100)
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


@in_virtual_time
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


@in_virtual_time
async def test_what_cannot_be_woken_is_refused() -> None:
    """Too many wakes in a minute, too many that wait, no supervisor: a typed error each, and no order."""
    scene = Scene()
    scene.decisions.guard = WakeGuard()
    for _ in range(MOST_WAKES_OF_MODEL):
        scene.decisions.guard.note("a", "u", virtual_now())
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


@in_virtual_time
async def test_orders_of_the_operator() -> None:
    """A model that is used is not put to sleep; one that is not is; a name of none is told."""
    scene = Scene()
    scene.awake("a", virtual_now())
    scene.live["a"] = 2
    assert scene.commands.put_to_sleep("a").message == "a is in use: 2 requests"
    scene.live["a"] = 0
    assert scene.commands.put_to_sleep("a").ok
    assert scene.told == [SleepModel("a", "operator")]
    assert not scene.commands.put_to_sleep("nothing").found
    scene.word("a", ASLEEP)
    waking = asyncio.create_task(scene.commands.wake_up("a"))
    await turns()
    scene.come_up("a")
    assert (await waking).state == AWAKE
    with pytest.raises(ValueError, match="no supervisor"):
        scene.word("a", "dreaming")


@in_virtual_time
async def test_sandboxes_of_single_tenants_end_with_a_sleeping_model() -> None:
    """A tenant's own sandboxes that were booted while their model slept end once no request has used them for its
    ``idle_s``, or by the operator's order; those with a request in them (the control) do not."""
    scene = Scene()
    sleep = scene.models["a"].sleep_state
    scene.own["a"], scene.live["a"] = 1, 1
    sleep.used_at = scene.decisions.clock() - sleep.idle_s
    scene.control.look()
    assert not scene.commands.put_to_sleep("a").ok
    assert scene.own == {"a": 1}
    scene.live["a"] = 0
    sleep.used_at = scene.decisions.clock()
    scene.control.look()
    assert scene.own == {"a": 1}, "the control: used just now"
    sleep.used_at -= sleep.idle_s
    scene.control.look()
    assert scene.own == {}
    scene.own["a"] = 2
    assert scene.commands.put_to_sleep("a").message == "a is asleep already; the sandboxes of 2 tenants end"
    assert scene.own == {}
    assert scene.commands.put_to_sleep("a").message == "a is asleep already"


@in_virtual_time
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

    scene.awake("b", virtual_now())
    scene.commands.put_to_sleep("b")
    scene.word("b", ASLEEP)
    model, task = scene.models["b"], scene.ask("b")
    order = asyncio.create_task(scene.commands.wake_up("b"))
    await turns()
    scene.come_up("b")
    model.set_engine(None)
    model.record("engine").become("failed", "the process ended")
    with pytest.raises(ModelWakeError):
        await asyncio.wait_for(task, 5.0)
    assert (await order).message == "b did not wake: the process ended"


@in_virtual_time
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


@in_virtual_time
async def test_a_model_whose_sandboxes_are_there_is_not_woken() -> None:
    """The word that a model wakes whose sandboxes are there leaves it awake: a wake that nothing ends would have its
    requests turn for ever. Control: without one of them it wakes, and its requests wait."""
    scene = Scene()
    scene.come_up("a")
    assert scene.models["a"].sleep_state.asleep
    scene.word("a", WAKING)
    assert (scene.models["a"].sleep_state.state, scene.models["a"].ready) == (AWAKE, True)
    assert await scene.ask("a") == 0
    scene.come_up("b")
    scene.models["b"].engine = None
    scene.word("b", WAKING)
    assert scene.models["b"].sleep_state.state == WAKING
    task = scene.ask("b")
    await turns()
    assert not task.done()
    scene.come_up("b")
    await task
