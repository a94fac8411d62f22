"""Wakes take turns, and each request is told how long it waits. Times are virtual."""

from __future__ import annotations

import asyncio

import pytest

from appliance.common.control_models import WakeModel
from appliance.common.errors import ModelAsleepError, ModelRemovedError
from appliance.common.sleep_rules import ASLEEP, GUEST_WAIT_S, MOST_WAKES_OF_TENANT
from appliance.gateway.sandboxes import sleep_control
from appliance.gateway.sandboxes.model_sandboxes import ModelSandboxes
from appliance.gateway.sandboxes.wake_waiting import LOOK_S
from tests.appliance.gateway.request.virtual_time import in_virtual_time, virtual_now
from tests.appliance.gateway.sandboxes.sleep_scene import GIB, WAKE_MS, Scene, turns, used


@in_virtual_time
async def test_wakes_take_turns_and_each_is_told_how_long_it_waits() -> None:
    """Of three models for which there is room two wake at a time, and the third when one of them is awake. A request
    for it whose deadline is before that is refused at once, with what is left of the first two and its own wake; one
    without a deadline (the control) waits and is served."""
    scene = Scene()
    scene.decisions.budget = 8 * GIB
    tasks = [scene.ask(name) for name in "abc"]
    await turns()
    assert [one.model for one in scene.told] == ["a", "b"]
    began = virtual_now()
    with pytest.raises(ModelAsleepError, match="takes longer") as refused:
        await scene.ask("c", 1.5 * WAKE_MS / 1e3)
    assert virtual_now() == began
    assert refused.value.retry_after_s == pytest.approx(2 * WAKE_MS / 1e3, abs=0.2)
    scene.come_up("a")
    await asyncio.sleep(2 * LOOK_S)
    assert [one.model for one in scene.told] == ["a", "b", "c"]
    for name in "bc":
        scene.come_up(name)
    await asyncio.gather(*tasks)


@in_virtual_time
async def test_who_would_wait_too_long_is_refused_at_once() -> None:
    """A guest is refused while guests may not take a place for long, with the seconds until then and of its wake; with
    little left (the control) it waits, and takes the place."""
    for left_s, waits in ((sleep_control.LONGEST_WAIT_S + 2.0, False), (5.0, True)):
        scene = Scene()
        used(scene, {"a": 9, "b": 9})
        for name in "ab":
            scene.awake(name, virtual_now() - 100)
        scene.decisions.guard.note_cost(virtual_now() + left_s - scene.decisions.guard.gap_s)
        task = scene.ask("c")
        await turns()
        assert scene.told == []
        if waits:
            await asyncio.sleep(left_s + LOOK_S)
            assert scene.told[-1] == WakeModel("c", "request", "t")
            scene.come_up("c")
            await task
        else:
            with pytest.raises(ModelAsleepError, match="woken before it") as refused:
                await task
            assert refused.value.retry_after_s == pytest.approx(left_s + WAKE_MS / 1e3, abs=1.0)
        assert scene.decisions.guard.place_wait_s(virtual_now()) > 0


@in_virtual_time
async def test_a_guest_that_has_waited_for_long_takes_its_turn() -> None:
    """A guest that was let wait and whose place others take again and again is served after its patience, though no
    guest may take a place yet; before that (the control) it waits."""
    scene = Scene()
    used(scene, {"a": 9, "b": 9})
    for name in "ab":
        scene.awake(name, virtual_now() - 100)
    scene.decisions.guard.note_cost(virtual_now() - scene.decisions.guard.gap_s + 1.0)
    task = scene.ask("c")
    await turns()
    scene.decisions.guard.note_cost(virtual_now() + 60.0)
    await asyncio.sleep(GUEST_WAIT_S - LOOK_S)
    assert scene.told == [], "the control"
    await asyncio.sleep(2 * LOOK_S)
    assert scene.told[-1] == WakeModel("c", "request", "t")
    scene.come_up("c")
    await task


@in_virtual_time
async def test_the_wake_of_a_model_that_leaves_holds_up_no_other() -> None:
    """Its supervisor may not carry out the order any more, and says nothing: two such wakes take no turn from a third
    model, as two of models that stay do (the control)."""
    scene = Scene()
    scene.decisions.budget = 8 * GIB
    tasks = [scene.ask(name) for name in "abc"]
    await turns()
    assert [one.model for one in scene.told] == ["a", "b"], "the control"
    for name in "ab":
        scene.models[name].leave(again=False)
    await asyncio.sleep(LOOK_S)
    assert scene.told[-1] == WakeModel("c", "request", "t")
    scene.come_up("c")
    *gone, waited_s = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(one) for one in gone] == [ModelRemovedError] * 2
    assert waited_s == pytest.approx(LOOK_S, abs=0.01)


@in_virtual_time
async def test_a_model_that_goes_or_is_replaced_leaves_the_queue_as_it_should() -> None:
    """While requests of a model that is gone have not noticed, a request for another is estimated; when they end, a
    model that has come with the same name keeps its place, and without one (the control) nobody waits."""
    for replaced in (True, False):
        scene = Scene()
        scene.awake("a", virtual_now() - 100)
        scene.models["a"].sleep_state.need_bytes = 2 * GIB
        scene.live["a"] = 1
        gone = scene.ask("c")
        await turns()
        scene.models.pop("c").leave(again=False)
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


@in_virtual_time
async def test_a_model_without_room_keeps_no_smaller_one_back() -> None:
    """A request for a large model waits for the memory of one in use, whose requests may take minutes; a small model
    for which there is room is woken at once, also with a deadline just beyond its own wake. A small one behind one for
    which there is room (the control) waits for its turn."""
    for large in (2 * GIB, GIB // 2):
        scene = Scene()
        scene.decisions.queue.most = 1
        scene.awake("a", virtual_now() - 100)
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


@in_virtual_time
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


@in_virtual_time
async def test_guests_of_one_tenant_do_not_keep_those_of_others_waiting() -> None:
    """A guest waits for its place. That of a tenant that has begun a wake of one in the last minute keeps another
    tenant's guest not from waiting for that place, before it; that of one that has not (the control) is before it, and
    the other is refused at once."""
    for begun in (0, 1):
        scene = Scene()
        scene.decisions.budget = GIB
        used(scene, {"a": 9})
        scene.awake("a", virtual_now() - 100)
        for _ in range(begun):
            scene.decisions.guard.note("other", "hog", virtual_now(), kept=False)
        scene.decisions.guard.note_cost(virtual_now() - scene.decisions.guard.gap_s + 5.0)
        hog = scene.ask("b", 600.0, "hog")
        await turns()
        assert not hog.done()
        task = scene.ask("c", 600.0)
        await turns()
        if begun:
            assert not task.done()
            await asyncio.sleep(5.0 + LOOK_S)
            assert scene.told[-1] == WakeModel("c", "request", "t")
            scene.live["c"] = 1
            scene.come_up("c")
            await task
        else:
            with pytest.raises(ModelAsleepError, match="woken before it"):
                await task
        hog.cancel()


@in_virtual_time
async def test_a_wake_by_command_takes_no_place_of_guests() -> None:
    """A seldom used model that the operator wakes in the place of one of the most used leaves the next guest its place;
    one that a request wakes (the control) has it wait for its turn."""
    for by_command in (True, False):
        scene = Scene()
        used(scene, {"a": 9, "b": 9})
        for name in "ab":
            scene.awake(name, virtual_now() - 100)
        task = asyncio.ensure_future(scene.commands.wake_up("c")) if by_command else scene.ask("c")
        await turns()
        assert scene.told[-1].model == "c"
        scene.come_up("c")
        await task
        assert (scene.decisions.guard.place_wait_s(virtual_now()) == 0.0) is by_command


@in_virtual_time
async def test_a_guest_behind_another_is_told_what_is_expected() -> None:
    """Guests may take a place in 5 s, and one waits for it. The next one is refused, since the owner may take the place
    back in between, with those 5 s and both wakes: not with the 40 s after which the next place is sure."""
    scene = Scene()
    scene.decisions.budget = GIB
    used(scene, {"a": 9})
    scene.awake("a", virtual_now() - 100)
    scene.decisions.guard.note_cost(virtual_now() - scene.decisions.guard.gap_s + 5.0)
    first = scene.ask("b", 600.0, "u")
    await turns()
    assert not first.done()
    with pytest.raises(ModelAsleepError, match="woken before it") as refused:
        await scene.ask("c", 600.0, "t")
    assert refused.value.retry_after_s == pytest.approx(5.0 + 2 * WAKE_MS / 1e3, abs=0.1)
    first.cancel()


@in_virtual_time
async def test_a_request_that_is_refused_leaves_its_model_its_place() -> None:
    """A guest of a tenant that has begun a wake of one waits. A request for the same model of a tenant that has begun
    none is refused, because of its deadline or since that tenant had too many wakes: the model comes no earlier by it.
    Control: one that is admitted has it come earlier."""
    for how in ("deadline", "guard", "admitted"):
        scene = Scene()
        scene.decisions.budget = GIB
        used(scene, {"a": 9})
        scene.awake("a", virtual_now() - 100)
        scene.decisions.guard.note("other", "hog", virtual_now(), kept=False)
        scene.decisions.guard.note_cost(virtual_now() - scene.decisions.guard.gap_s + 5.0)
        hog = scene.ask("b", 600.0, "hog")
        await turns()
        assert scene.decisions.queue._turns["b"].begun == 1
        if how == "guard":
            scene.models["b"].sleep_state.counted_until = 0.0  # As after a minute of waiting.
            for _ in range(MOST_WAKES_OF_TENANT):
                scene.decisions.guard.note("other", "t", virtual_now())
        task = scene.ask("b", 1.0 if how == "deadline" else 600.0)
        await turns()
        assert task.done() is (how != "admitted")
        assert scene.decisions.queue._turns["b"].begun == (0 if how == "admitted" else 1)
        for one in (hog, task):
            one.cancel()
        refused = (await asyncio.gather(hog, task, return_exceptions=True))[1]
        assert isinstance(refused, asyncio.CancelledError if how == "admitted" else ModelAsleepError)
