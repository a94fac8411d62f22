"""All orders in which the steps of two sides can happen: a bell for a sleeper is lost in none of them.

A model of ``Channel`` on x86-64: each side is a list of loads, stores, fences and system calls, and its stores leave a
queue of its own one after the other at any time (total store order). A step that drains the queue waits until it is
empty: a fence, and the write into a pipe, which takes a lock in the kernel. All states are visited that can be reached.
The control is the same without the fences.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

FRAMES = 2
MOST_STORES = 4
"""Stores in a queue: further ones wait. Those of two sends, more than a side makes between two drains."""
MOST_RINGS = 2
"""More rings in a pipe change nothing."""

Memory = dict[str, int]
Load = Callable[[str], int]


class Step(NamedTuple):
    """What one side may do next."""

    then: tuple[str, int]
    """Where its program stands afterwards, and how many frames it has pushed or taken."""
    stores: tuple[tuple[str, int], ...] = ()
    drains: bool = False
    rings: bool | None = None
    """Whether it rings the other's bell (True) or takes the rings of its own off (False)."""


Side = Callable[[str, int, Load, int], Iterator[Step]]
"""Gives the next steps of a program from its place, its count, a load of a word, and the rings of its own bell."""


class State(NamedTuple):
    """Everything that there is."""

    places: tuple[tuple[str, int], ...]
    memory: tuple[tuple[str, int], ...]
    queues: tuple[tuple[tuple[str, int], ...], ...] = ((), ())
    rings: tuple[int, int] = (0, 0)
    """Of the bell of each side."""


def after(state: State, side: int, step: Step) -> State:
    """The state behind a step of one side."""

    def put(row: tuple, place: int, value: object) -> tuple:
        return (*row[:place], value, *row[place + 1 :])

    rings = state.rings
    if step.rings is not None:
        place = 1 - side if step.rings else side
        rings = put(rings, place, min(MOST_RINGS, rings[place] + 1) if step.rings else 0)
    queues = put(state.queues, side, state.queues[side] + step.stores)
    return State(put(state.places, side, step.then), state.memory, queues, rings)


def states(sides: tuple[Side, Side], begin: State) -> Iterator[State]:
    """All states that can be reached."""
    seen, todo = {begin}, deque([begin])
    while todo:
        state = todo.popleft()
        yield state
        memory, found = dict(state.memory), []
        for number, side in enumerate(sides):
            queue = state.queues[number]
            if queue:
                stored = memory | {queue[0][0]: queue[0][1]}
                queues = (*state.queues[:number], queue[1:], *state.queues[number + 1 :])
                found.append(state._replace(memory=tuple(sorted(stored.items())), queues=queues))
            load = (memory | dict(queue)).__getitem__
            steps = side(*state.places[number], load, state.rings[number])
            for step in steps:
                if len(queue) + len(step.stores) <= (0 if step.drains else MOST_STORES):
                    found.append(after(state, number, step))
        for one in found:
            if one not in seen:
                seen.add(one)
                todo.append(one)


def sender(fence: bool) -> Side:
    """``Channel.send``, so many times: the tail, a fence, the sleeper's flag, and the bell."""

    def steps(place: str, sent: int, load: Load, _rings: int) -> Iterator[Step]:
        if place == "push" and sent < FRAMES:
            yield Step(("fence", sent + 1), (("tail", sent + 1),))
        elif place == "fence":
            yield Step(("flag", sent), drains=fence)
        elif place == "flag":
            yield Step(("take", sent)) if load("asleep") else Step(("push", sent))
        elif place == "take":
            yield Step(("ring", sent), (("asleep", 0),))
        elif place == "ring":
            yield Step(("push", sent), drains=True, rings=True)

    return steps


def sleeper(fence: bool) -> Side:
    """``Channel.receive`` and ``Channel.wait`` by turns, where the sleep may also end by its time at any moment."""

    def steps(place: str, taken: int, load: Load, rings: int) -> Iterator[Step]:
        more = load("tail") > taken
        if place == "receive" and more:
            yield Step(("receive", taken + 1), (("head", taken + 1),))
            yield Step(("pending", taken + 1), (("head", taken + 1),))  # The limit of one call is reached.
        elif place == "receive":
            yield Step(("pending", taken))
        elif place == "pending":
            yield Step(("receive" if more else "arm", taken))
        elif place == "arm":
            yield Step(("fence", taken), (("asleep", 1),))
        elif place == "fence":
            yield Step(("look", taken), drains=fence)
        elif place == "look":
            yield Step(("lower" if more else "poll", taken))
        elif place == "poll":
            yield Step(("lower", taken))
            if rings:
                yield Step(("lower", taken), drains=True, rings=False)
        elif place == "lower":
            yield Step(("receive", taken), (("asleep", 0),))

    return steps


def filler(fence: bool) -> Side:
    """``Channel.send`` into a ring for one frame: where it is full, a flag, a fence, a second look, and sleep."""

    def steps(place: str, sent: int, load: Load, rings: int) -> Iterator[Step]:
        room = sent == load("head")
        if place == "push" and sent < FRAMES:
            yield Step(("withdraw", sent + 1), (("tail", sent + 1),)) if room else Step(("wish", sent))
        elif place == "wish":
            yield Step(("fence", sent), (("waiting", 1),))
        elif place == "fence":
            yield Step(("again", sent), drains=fence)
        elif place == "again":
            yield Step(("withdraw", sent + 1), (("tail", sent + 1),)) if room else Step(("poll", sent))
        elif place == "withdraw":
            yield Step(("push", sent), (("waiting", 0),))
        elif place == "poll" and rings:
            yield Step(("push", sent), drains=True, rings=False)

    return steps


def emptier(fence: bool) -> Side:
    """``Channel.receive``: the head, a fence, the waiting writer's flag, and the bell."""

    def steps(place: str, taken: int, load: Load, _rings: int) -> Iterator[Step]:
        if place == "receive" and load("tail") > taken:
            yield Step(("fence", taken + 1), (("head", taken + 1),))
        elif place == "fence":
            yield Step(("flag", taken), drains=fence)
        elif place == "flag":
            yield Step(("take" if load("waiting") else "receive", taken))
        elif place == "take":
            yield Step(("ring", taken), (("waiting", 0),))
        elif place == "ring":
            yield Step(("receive", taken), drains=True, rings=True)

    return steps


def words(**values: int) -> tuple[tuple[str, int], ...]:
    """Memory that holds these words."""
    return tuple(sorted(values.items()))


@pytest.mark.parametrize("fence", [True, False])
def test_no_order_of_steps_loses_the_bell_of_a_sleeper(fence: bool) -> None:
    """Nobody sleeps without a ring over a frame once the sender is done, also where sleeps end by their time just then.
    Without the fences (the control) that happens, and then the flag is up in every case: a reminder, which looks at the
    flag again, rings."""
    begin = State((("push", 0), ("receive", 0)), words(tail=0, head=0, asleep=0))
    lost = [
        state
        for state in states((sender(fence), sleeper(fence)), begin)
        if state.places[0] == ("push", FRAMES)
        and state.places[1][0] == "poll"
        and state.places[1][1] < FRAMES
        and not state.rings[1]
        and not any(state.queues)
    ]
    assert bool(lost) is not fence
    assert all(dict(state.memory)["asleep"] for state in lost)


@pytest.mark.parametrize("fence", [True, False])
def test_no_order_of_steps_loses_the_bell_of_a_writer_that_waits_for_room(fence: bool) -> None:
    """Nobody sleeps without a bell in front of a ring with room; without the fences (the control) that happens."""
    begin = State((("push", 0), ("receive", 0)), words(tail=0, head=0, waiting=0))
    lost = [
        state
        for state in states((filler(fence), emptier(fence)), begin)
        if state.places[0][0] == "poll"
        and state.places[1] == ("receive", state.places[0][1])
        and not state.rings[0]
        and not any(state.queues)
    ]
    assert bool(lost) is not fence
