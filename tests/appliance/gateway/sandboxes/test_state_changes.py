"""Those who wait for a change are told a few in a turn of the loop, first come first, and nobody is forgotten."""

from __future__ import annotations

import asyncio
import random

import pytest

from appliance.common.sleep_rules import ASLEEP
from appliance.gateway.sandboxes.state_changes import TOLD_IN_TURN, InTurns, StateChanges
from tests.appliance.gateway.request.virtual_time import in_virtual_time, virtual_now
from tests.appliance.gateway.sandboxes.sleep_scene import Scene, sandboxes, turns

MANY = 256


async def turn() -> None:
    """Let one turn of the loop pass."""
    await asyncio.sleep(0)


@in_virtual_time
async def test_a_few_go_on_in_a_turn_in_the_order_in_which_they_came() -> None:
    """A model is there for which 256 requests wait: in each turn of the loop at most four go on, the first that came
    first, and another task that runs in each turn runs beside them. Control: all are done in the end, without a
    moment's wait."""
    model, order, most, beside = sandboxes("a"), list[int](), 0, 0

    async def wait(number: int) -> None:
        await model.wait_for(lambda: model.failed, virtual_now() + 60.0)
        order.append(number)

    tasks = [asyncio.create_task(wait(number)) for number in range(MANY)]
    await turns()
    began = virtual_now()
    model.note_failure()
    while len(order) < MANY:
        before = len(order)
        await turn()
        most, beside = max(most, len(order) - before), beside + 1
    await asyncio.gather(*tasks)
    assert order == list(range(MANY))
    assert virtual_now() == began
    assert 0 < most <= TOLD_IN_TURN
    assert beside >= MANY // TOLD_IN_TURN


@in_virtual_time
async def test_who_looked_in_vain_keeps_its_place() -> None:
    """Requests that are told of a change that is not theirs wait again: at the next change they still come before one
    that came later."""
    model, order, open_ = sandboxes("a"), list[str](), [False]

    async def wait(name: str) -> None:
        await model.wait_for(lambda: open_[0], virtual_now() + 60.0)
        order.append(name)

    tasks = [asyncio.create_task(wait(name)) for name in "abc"]
    await turns()
    model.note_failure()
    tasks.append(asyncio.create_task(wait("late")))
    await turns()
    open_[0] = True
    model.note_failure()
    await asyncio.gather(*tasks)
    assert order == ["a", "b", "c", "late"]


@in_virtual_time
async def test_models_look_for_room_a_few_in_a_turn() -> None:
    """Forty models wait for room and a change is told: in no turn of the loop more than four look, and each has looked
    in the end. Control: without turns all forty would look in the first."""
    scene = Scene()
    for name in "ab":
        scene.awake(name, virtual_now() - 100)
        scene.live[name] = 1
    names = [f"m-{number}" for number in range(40)]
    for name in names:
        scene.models[name] = sandboxes(name)
        scene.word(name, ASLEEP)
    scene.decisions.guard.of_all = scene.decisions.guard.of_tenant = 1_000
    waiters = [scene.control.waits.enter(scene.models[name], "t") for name in names]
    looked, most = set[int](), 0

    async def look(number: int) -> None:
        await waiters[number].wait(600.0)
        looked.add(number)

    tasks = [asyncio.create_task(look(number)) for number in range(40)]
    await turns()
    scene.control.waits.changed()
    while len(looked) < 40:
        before = len(looked)
        await turn()
        most = max(most, len(looked) - before)
    await asyncio.gather(*tasks)
    assert 0 < most <= TOLD_IN_TURN


@pytest.mark.parametrize("seed", range(20))
@in_virtual_time
async def test_no_change_is_lost(seed: int) -> None:
    """Waits for a number to be reached, of any length, some given up, beside changes at any time: whoever waits on sees
    its number in the moment in which it is reached, or its own time-out, and nobody is kept."""
    dice, changes, reached = random.Random(seed), StateChanges(), [0]
    late = list[float]()
    times = dict[int, float]()

    async def wait(number: int, longest_s: float) -> None:
        ticket, until = changes.enter(), virtual_now() + longest_s
        while reached[0] < number:
            try:
                await changes.next(until - virtual_now(), ticket)
            except TimeoutError:
                assert reached[0] < number or times[number] == virtual_now()
                return
        late.append(virtual_now() - times.get(number, virtual_now()))

    tasks = list[asyncio.Task[None]]()
    for step in range(1, 60):
        for _ in range(dice.randrange(20)):
            tasks.append(asyncio.create_task(wait(step + dice.randrange(5), dice.choice((0.5, 3.0, 1e6)))))
        for _ in range(dice.randrange(4)):
            await turn()
        if dice.random() < 0.3:
            dice.choice(tasks or [asyncio.create_task(turn())]).cancel()
        reached[0], times[step] = step, virtual_now()
        changes.tell()
        await asyncio.sleep(dice.choice((0.0, 0.0, 1.0)))
    for step in range(60, 70):
        reached[0], times[step] = step, virtual_now()
        changes.tell()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(one is None or isinstance(one, asyncio.CancelledError) for one in found)
    assert late
    assert max(late) == 0.0
    assert not changes._waiters
    assert not changes._told._left


@in_virtual_time
async def test_one_is_told_once_and_not_after_it_was_forgotten() -> None:
    """One that is added again before it was told is told once; one that is forgotten is not; later ones are told after
    a turn in which nobody was."""
    told = list[int]()
    line = InTurns(told.append, most=2)
    line.add(range(6))
    line.add([5, 0])
    line.forget(4)
    assert told == [0, 1]
    await turns()
    assert told == [0, 1, 2, 3, 5, 0]
    line.add([9])
    assert told[-1] == 9
