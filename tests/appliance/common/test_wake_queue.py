"""Turns of sleeping models that are to be woken, and the expected seconds until they begin."""

from __future__ import annotations

import pytest

from appliance.common.wake_queue import MOST_AT_ONCE, WakeQueue, WakeTurn, most_at_once


def left_s(queue: WakeQueue, model: str, *waking: float) -> float:
    """Expected seconds until a model's turn, where each wake takes 2 s and guests have a place every 30 s."""
    return queue.left_s(model, waking, lambda _model: 2.0, 30.0)


def test_as_many_wakes_run_as_the_cores_carry() -> None:
    """One for two cores, and never fewer than two."""
    assert [most_at_once(cores) for cores in (1, 2, 8)] == [MOST_AT_ONCE, MOST_AT_ONCE, 4]


def test_models_come_in_their_order_and_guests_behind_the_others() -> None:
    """Of three that wait two may begin, in the order in which they came; a guest that came first begins when none of
    the others waits. One that joins again keeps its place."""
    queue = WakeQueue(2)
    queue.join("guest", WakeTurn(kept=False))
    assert queue.is_turn("guest", 0), "the control: nobody else waits"
    for name in ("a", "b", "c", "a"):
        queue.join(name, WakeTurn(kept=True))
    assert [name for name in ("guest", "a", "b", "c") if queue.is_turn(name, 0)] == ["a", "b"]
    assert [name for name in ("guest", "a", "b", "c") if queue.is_turn(name, 1)] == ["a"]
    for name in ("a", "b", "c", "c"):
        queue.leave(name)
    assert queue.is_turn("guest", 1)
    assert not queue.is_turn("guest", 2)


def test_what_is_expected_counts_wakes_that_run_and_those_before() -> None:
    """Without a wake that runs the first begins at once; with two it waits for the one that ends first, and others for
    those before them. Beyond what may run, as after orders of the operator, all but the last two have to end."""
    queue = WakeQueue(2)
    for name in ("a", "b", "c"):
        queue.join(name, WakeTurn(kept=True))
    assert [left_s(queue, name) for name in ("a", "b", "c")] == [0.0, 0.0, 2.0]
    assert [left_s(queue, name, 0.5, 1.5) for name in ("a", "b", "c")] == [0.5, 1.5, 2.5]
    assert left_s(queue, "a", 0.5, 1.5, 4.0) == 1.5


@pytest.mark.parametrize(("place", "expected"), [(0, 2.0), (1, 32.0), (2, 62.0)])
def test_a_guest_expects_one_place_for_each_guest_before_it(place: int, expected: float) -> None:
    """Behind two wakes of 2 s and so many guests."""
    queue = WakeQueue(2)
    for name in ("g0", "g1", "g2"):
        queue.join(name, WakeTurn(kept=False))
    for name in ("a", "b"):
        queue.join(name, WakeTurn(kept=True))
    assert left_s(queue, f"g{place}") == expected


def test_a_guest_that_is_due_stays_so_until_it_leaves() -> None:
    """A guest that has waited for long comes before others that come after it, also when another request for it has
    come since; one that was not due (the control) and one that has left meanwhile do not."""
    for due, left in ((True, False), (False, False), (True, True)):
        queue = WakeQueue(1)
        queue.join("guest", WakeTurn(kept=False, due=due))
        queue.join("a", WakeTurn(kept=True))
        if left:
            queue.leave("guest")
        queue.join("guest", WakeTurn(kept=False))
        assert queue.is_turn("guest", 0) is (due and not left)
        assert queue.is_turn("a", 0) is not queue.is_turn("guest", 0)


def test_what_has_no_room_keeps_back_what_needs_as_much() -> None:
    """Behind two models for which there is no room a smaller one has its turn at once and expects no wait, also as a
    guest; one that needs as much waits, and so does the smaller one (control) once there is room for the others."""
    for room in (False, True):
        queue = WakeQueue(2)
        for name in ("large", "larger"):
            queue.join(name, WakeTurn(kept=True, need_bytes=2, room=room))
        for name, need, kept in (("small", 1, True), ("guest", 1, False), ("as large", 2, True)):
            queue.join(name, WakeTurn(kept=kept, need_bytes=need))
            assert queue.is_turn(name, 0) is (need == 1 and not room)
            assert left_s(queue, name) == (0.0 if need == 1 and not room else 2.0)
            queue.leave(name)


def test_what_is_held_back_for_a_larger_model_keeps_it_not_back() -> None:
    """Two models that came first and are held back by the reservation of one that needs more are not before it, nor in
    what it expects to wait. Controls: they are before one that needs as little, and before it where nothing holds them
    back."""
    for held in (True, False):
        queue = WakeQueue(2)
        for name in "ab":
            queue.join(name, WakeTurn(kept=True, need_bytes=1, held=held))
        queue.join("large", WakeTurn(kept=True, need_bytes=2))
        queue.join("small", WakeTurn(kept=True, need_bytes=1, held=held))
        assert queue.is_turn("large", 0) is held
        assert left_s(queue, "large") == (0.0 if held else 2.0)
        assert not queue.is_turn("small", 0)


def test_guests_of_who_has_begun_fewer_come_first() -> None:
    """A guest comes before one that came before it if its tenant has begun fewer wakes of guests, whatever later looks
    and other tenants' requests say; with as many (the control) it comes behind it."""
    for begun, expected in ((1, 0.0), (0, 30.0)):
        queue = WakeQueue(1)
        queue.join("first", WakeTurn(kept=False, begun=begun))
        queue.join("second", WakeTurn(kept=False))
        queue.join("second", WakeTurn(kept=False, begun=5))
        assert left_s(queue, "second") == expected
        assert left_s(queue, "first") == 30.0 - expected
        assert queue.is_turn("second", 0) is (begun == 1)


@pytest.mark.parametrize(("place", "expected"), [(0, 2.0), (1, 9.0), (2, 11.0)])
def test_a_guest_that_is_refused_is_told_that_guests_follow_each_other(place: int, expected: float) -> None:
    """Behind two wakes of 2 s: 5 s until guests have a place again, and a wake for each guest before it; the first has
    none before it (the control). The longest that it may take counts 30 s for each."""
    queue = WakeQueue(2)
    for name in ("g0", "g1", "g2"):
        queue.join(name, WakeTurn(kept=False))
    for name in ("a", "b"):
        queue.join(name, WakeTurn(kept=True))
    assert queue.expected_s(f"g{place}", (), lambda _model: 2.0, 5.0) == expected
    assert left_s(queue, f"g{place}") >= 2.0 + 30.0 * place
