"""A model that needs the room of several others reserves it once it has waited for long, for a bounded time."""

from __future__ import annotations

import asyncio
import random

import pytest

from appliance.common import wake_queue
from appliance.common.control_models import SleepModel, WakeModel
from appliance.common.errors import ModelAsleepError
from appliance.common.sleep_rules import ASLEEP, GUEST_WAIT_S, KEPT_WAIT_S
from appliance.common.wake_queue import LONGEST_RESERVED_S, RESERVED_S, RoomReservation
from bench.residency_host import NEED_BYTES, Host, Speed
from policy.model import ModelState
from tests.appliance.gateway.request.virtual_time import in_virtual_time, virtual_now
from tests.appliance.gateway.sandboxes.sleep_scene import GIB, WAKE_MS, Scene, sandboxes, turns

ROOM_WAIT_S = 120.0
"""Longest that a request waits for room."""


def test_a_reservation_holds_back_what_needs_less_for_a_while() -> None:
    """For ten seconds smaller models wait, and for as long nobody reserves anything; each further time is forty. Models
    that need as much are not held back, nor is it itself; another that claims meanwhile gets nothing."""
    room = RoomReservation()
    room.claim("large", 4, 100.0)
    assert room.left_s("small", 1, 100.0) == RESERVED_S
    assert (room.left_s("large", 1, 100.0), room.left_s("other", 4, 100.0)) == (0.0, 0.0)
    room.claim("other", 8, 105.0)
    assert room.left_s("small", 1, 105.0) == RESERVED_S - 5
    assert room.left_s("small", 1, 110.0) == 0.0
    now, lengths = 100.0, list[float]()
    for _ in range(3):
        now += 2 * max([RESERVED_S, *lengths[-1:]])
        room.claim("large", 4, now - 1e-6)
        assert room.left_s("small", 1, now) == 0.0, "the control: not before all others had as long"
        room.claim("large", 4, now)
        lengths.append(room.left_s("small", 1, now))
    assert lengths == [LONGEST_RESERVED_S] * 3


def test_what_is_given_up_holds_nobody_back_and_grants_no_second_one_at_once() -> None:
    """A model whose wake begins gives up what it has reserved; neither it nor another reserves anything before its
    pause has passed, and then begins with the shortest time."""
    room = RoomReservation()
    room.claim("large", 4, 0.0)
    room.release("small")
    assert room.left_s("small", 1, 1.0) > 0, "the control: another's turn ends nothing"
    room.release("large")
    assert room.left_s("small", 1, 1.0) == 0.0
    room.claim("large", 4, 1.0)
    assert room.left_s("small", 1, 1.0) == 0.0
    room.claim("large", 4, 2 * RESERVED_S)
    assert room.left_s("small", 1, 2 * RESERVED_S) == RESERVED_S


@pytest.mark.parametrize("answer_s", [8.0, 16.0])
def test_a_large_model_is_woken_though_small_ones_take_what_becomes_free(
    monkeypatch: pytest.MonkeyPatch, answer_s: float
) -> None:
    """Two places, four small models in turns, so that one place is in use at any time, and one that needs both, asked
    for once: it is woken after its patience as a guest and before it would be refused. Few others are refused for it,
    as many as come in the forty seconds that it may reserve. Control: without reservations it is refused after two
    minutes."""
    count = int(400 / answer_s)  # Up to a minute after the large one would be refused.
    small = [(answer_s * 0.55 * number, f"small-{number % 4}", f"t-{number % 7}") for number in range(count)]
    requests = sorted([*small, (20.0, "large", "big")])
    refused = {}
    for length_s in (0.0, RESERVED_S):
        monkeypatch.setattr(wake_queue, "RESERVED_S", length_s)
        monkeypatch.setattr(wake_queue, "LONGEST_RESERVED_S", 4 * length_s)
        host = Host(2, Speed(answer_s=answer_s), needs={"large": 2 * NEED_BYTES})
        host.serve(requests)
        waits = host.waits_of.get("large", [])
        refused[length_s] = host.refused_of.total() - host.refused_of["large"]
        if not length_s:
            assert not waits, "the control"
        else:
            assert len(waits) == 1
            assert GUEST_WAIT_S < waits[0] < ROOM_WAIT_S
    assert refused[RESERVED_S] <= refused[0.0] + LONGEST_RESERVED_S / (0.55 * answer_s)


def crowded() -> Scene:
    """Room for two; ``a`` is in use, ``b`` is idle, ``c`` needs the place of both and is used most, ``d`` is small."""
    scene = Scene()
    scene.models["d"] = sandboxes("d")
    scene.word("d", ASLEEP)
    scene.models["c"].sleep_state.need_bytes = 2 * GIB
    for number in range(20):
        scene.decisions.uses.note("c", f"u-{number}", virtual_now() - 900 + 2 * number)
    for name in "ab":
        scene.awake(name, virtual_now() - 100)
    scene.live["a"] = 1
    return scene


@in_virtual_time
async def test_a_small_model_waits_while_room_is_reserved_and_no_longer() -> None:
    """A small model asked for within the reservation is woken once it ends, though there is room for it before; before
    the reservation (the control) it is woken at once. The large one gets both places when they are free."""
    scene = crowded()
    large = scene.ask("c", 600.0)
    await turns()
    began = virtual_now()
    small = scene.ask("d", 600.0)
    await turns()
    assert scene.told == [SleepModel("b", "memory"), WakeModel("d", "request", "t")], "the control"
    scene.come_up("d")
    await small
    scene.word("b", ASLEEP)
    while virtual_now() - began < KEPT_WAIT_S + 1.0:
        await scene_tick()
    small = scene.ask("b", 600.0)
    came = virtual_now()
    await turns()
    assert len(scene.told) == 2
    while len(scene.told) == 2:
        await scene_tick()
    assert scene.told[-1] == WakeModel("b", "request", "t")
    assert virtual_now() - came <= RESERVED_S
    scene.come_up("b")
    await small
    scene.free("a", "b")
    while scene.told[-1] != WakeModel("c", "request", "t"):
        await scene_tick()
    scene.come_up("c")
    await large


async def scene_tick() -> None:
    """Let a tenth of a second pass."""
    await asyncio.sleep(0.1)


@in_virtual_time
async def test_who_is_held_back_takes_no_turn_from_who_reserves_the_room() -> None:
    """Two small models that came before the large one, and find room first, are held back by its reservation: once all
    of the room is free it is woken, within the reservation, though two wakes at most run at a time and those that came
    first go first. The small ones follow."""
    scene = Scene()
    scene.decisions.queue.most = 2
    for name in "de":
        scene.models[name] = sandboxes(name)
        scene.word(name, ASLEEP)
    scene.models["c"].sleep_state.need_bytes = 2 * GIB
    for name in "ab":
        scene.awake(name, virtual_now() - 100)
        scene.live[name] = 1
    small = [scene.ask(name, 600.0) for name in "de"]
    await turns()
    large = scene.ask("c", 600.0)
    while not scene.decisions.held_s(scene.models["d"]):
        await scene_tick()
    began = virtual_now()
    for name in "ab":
        scene.free(name)
        await asyncio.sleep(1.0)
    assert WakeModel("c", "request", "t") in scene.told
    assert virtual_now() - began < RESERVED_S
    assert not any(WakeModel(name, "request", "t") in scene.told for name in "de"), "the control: they are held back"
    for one in (*small, large):
        one.cancel()


@in_virtual_time
async def test_a_reservation_ends_with_the_last_request_for_it() -> None:
    """The request for the large model gives up within its reservation: the small one that it held back is woken in the
    same moment."""
    scene = crowded()
    large = scene.ask("c", 600.0)
    while not scene.decisions.held_s(scene.models["d"]):
        await scene_tick()
    small = scene.ask("d", 600.0)
    await turns()
    assert scene.told == [], "the control"
    large.cancel()
    await scene_tick()
    await turns()
    assert scene.told[-1] == WakeModel("d", "request", "t")
    scene.come_up("d")
    await small


@in_virtual_time
async def test_who_would_be_held_back_for_long_is_refused_at_once_and_passed_over() -> None:
    """In the longer reservation a small model is busy for a route, and its request is refused at once with what is left
    of it and its wake. Control: in the first, which ends within what a request is let wait, it is ready."""
    scene = crowded()
    room = scene.decisions.queue.reservation
    room.claim("c", 2 * GIB, virtual_now())
    assert scene.control.route_state(scene.models["d"], "t") is ModelState.READY, "the control"
    await asyncio.sleep(2 * RESERVED_S)
    room.claim("c", 2 * GIB, virtual_now())
    assert scene.control.route_state(scene.models["d"], "t") is ModelState.BUSY
    began = virtual_now()
    with pytest.raises(ModelAsleepError) as refused:
        await scene.ask("d", 600.0)
    assert virtual_now() == began
    assert refused.value.retry_after_s == pytest.approx(LONGEST_RESERVED_S + WAKE_MS / 1e3)
    assert scene.told == []


@pytest.mark.parametrize("seed", range(6))
def test_models_of_all_sizes_are_served_and_memory_is_kept(seed: int) -> None:
    """Two minutes of requests for models of one to four places, where five fit: at no time is more awake than fits,
    nothing is woken twice or sleeps twice, every request is answered or refused, and none waits on at the end."""
    dice = random.Random(seed)
    needs = {f"m-{number}": NEED_BYTES * dice.randint(1, 4) for number in range(9)}
    times = sorted(dice.uniform(0.0, 120.0) for _ in range(120))
    requests = [(at, dice.choice(list(needs)), f"t-{dice.randrange(9)}") for at in times]
    host = Checked(5, Speed(answer_s=dice.choice((0.2, 2.0, 8.0))), needs=needs)
    host.serve(requests)
    answered = sum(map(len, host.waits_of.values()))
    assert answered + host.refused_of.total() == len(requests)
    assert host.most_bytes <= 5 * NEED_BYTES
    assert host.most_bytes > 2 * NEED_BYTES, "the control: there was something to count"
    assert not host._control.waits._waiters
    assert not host._control.decisions.queue._turns


class Checked(Host):
    """Counts the memory of what is awake or wakes after each order, and checks that orders follow each other."""

    __slots__ = ("most_bytes", "there")

    def _take(self, order: object) -> None:
        if not hasattr(self, "there"):
            self.there, self.most_bytes = set[str](), 0
        if isinstance(order, SleepModel):
            self.there.remove(order.model)
        elif isinstance(order, WakeModel):
            assert order.model not in self.there
            self.there.add(order.model)
        self.most_bytes = max(self.most_bytes, sum(self.needs[one] for one in self.there))
        super()._take(order)  # type: ignore[arg-type]
