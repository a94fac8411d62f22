"""Decisions about models that sleep: what makes room, what waits, what is refused, and how often."""

from __future__ import annotations

import pytest

from appliance.common.sleep_rules import (
    ALWAYS,
    ASLEEP,
    AWAKE,
    KEPT_WAKES,
    LEAST_STAY_S,
    MOST_WAKES,
    NEVER,
    STAY_S,
    WAKING,
    WHILE_USED,
    WINDOW_S,
    ModelFacts,
    Refuse,
    Wait,
    Wake,
    WakeGuard,
    decide,
    sleeps,
)

GIB = 1 << 30


def model(name: str, sleep_state: str = AWAKE, keep: str = WHILE_USED, **facts: object) -> ModelFacts:
    """A model of one GiB."""
    return ModelFacts(
        **{"name": name, "sleep_state": sleep_state, "keep": keep, "need_bytes": GIB, "used_at": 0.0} | facts
    )


CASES = {
    "room is there": ([], 0, 8, Wake()),
    "the budget is used up and nothing may give": ([model("a", keep=ALWAYS)], 1, 8, Refuse),
    "of those that are used alike the least recently used makes room": (
        [model("a", used_at=5.0), model("b", used_at=3.0), model("c", used_at=4.0)],
        *(3, 8, Wake(("b",), kept=False, costs=True)),
    ),
    "the least used makes room, however lately": (
        [model("a", uses=0.5, used_at=9.0), model("b", uses=2.0), model("c", uses=0.7)],
        *(3, 8, Wake(("a",))),
    ),
    "one that is used less than all others": (
        [model("a", uses=2.0), model("b", uses=3.0)],
        *(2, 8, Wake(("a",), kept=False, costs=True)),
    ),
    "one that is used less than all others, and a cheaper one is in use": (
        [model("a", uses=2.0), model("b", uses=0.1, live=1)],
        *(2, 8, Wake(("a",), cheaper_soon=True)),
    ),
    "a cheaper one in use is too small to help": (
        [model("a", uses=2.0), model("b", uses=0.1, live=1, need_bytes=GIB // 2)],
        *(1.5, 8, Wake(("a",), kept=False, costs=True)),
    ),
    "one of the most used that fit waits for the place of one that is not": (
        [model("a", uses=0.9), model("b", uses=0.1, live=1)],
        *(2, 8, Wake(("a",), cheaper_soon=True)),
    ),
    "one of the most used that fit takes the place of one that is not at once": (
        [model("a", uses=0.9), model("d", ASLEEP, uses=0.5), model("b", uses=0.2), model("c", uses=0.1, live=1)],
        *(3, 8, Wake(("b",))),
    ),
    "a guest takes the place of a guest": (
        [model("a", uses=3.0), model("b", uses=2.0, live=1), model("d", ASLEEP, uses=1.5), model("c", uses=0.5)],
        *(3, 8, Wake(("c",), kept=False)),
    ),
    "a guest waits for the place of a guest": (
        [model("a", uses=3.0), model("b", uses=2.0), model("c", ASLEEP, uses=1.5), model("d", uses=0.1, live=1)],
        *(3, 8, Wake(("b",), kept=False, costs=True, cheaper_soon=True)),
    ),
    "one that is always kept makes none": (
        [model("a", keep=ALWAYS, used_at=1.0), model("b")],
        2,
        8,
        Wake(("b",), kept=False, costs=True),
    ),
    "one that is always kept and sleeps by command reserves no room": (
        [model("a", ASLEEP, keep=ALWAYS), model("b", uses=2.0), model("c", uses=0.5)],
        *(2, 8, Wake(("c",))),
    ),
    "one that is always kept and awake does": (
        [model("a", keep=ALWAYS), model("b", ASLEEP, uses=2.0), model("c", uses=0.5)],
        *(2, 8, Wake(("c",), kept=False)),
    ),
    "one with requests makes none": (
        [model("a", live=1), model("b", used_at=9.0)],
        2,
        8,
        Wake(("b",), kept=False, costs=True),
    ),
    "all have requests": ([model("a", live=1), model("b", live=2)], 2, 8, Wait(kept=False)),
    "one that was woken just now stays": ([model("a", stays=True, gives_in_s=3.0)], 1, 8, Wait(False, 3.0)),
    "all others wake": ([model("a", WAKING, gives_in_s=2.0)], 1, 8, Wait(False, 2.0)),
    "those asleep take nothing": ([model("a", ASLEEP), model("b", ASLEEP)], 1, 8, Wake()),
    "two small ones make room for a large one": (
        [model("a", need_bytes=GIB // 2, used_at=1.0), model("b", need_bytes=GIB // 2, used_at=2.0)],
        *(1, 8, Wake(("a", "b"), kept=False, costs=True)),
    ),
    "a small one stays where the large one after it is enough": (
        [model("a", need_bytes=GIB // 4, used_at=1.0), model("b", used_at=2.0), model("c", need_bytes=3 * GIB // 4)],
        *(2, 8, Wake(("c", "a"), kept=False, costs=True)),
    ),
    "the machine has less than the budget": ([model("a", used_at=1.0)], 8, 0, Wake(("a",), kept=False, costs=True)),
    "without a budget the machine's memory counts": ([model("a", keep=ALWAYS)], 0, 0, Refuse),
    "what boots has not taken its memory yet": ([model("a", WAKING, keep=ALWAYS)], 0, 1, Refuse),
    "what ends gives its memory back": ([model("a", ASLEEP, ending=True)], 0, 0, Wake()),
    "larger than the budget": ([model("a")], 0.5, 8, Refuse),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_makes_room(case: tuple[list[ModelFacts], float, float, object]) -> None:
    """A sleeping model of one GiB beside these: who is put to sleep for it, or whether it waits or is refused. It is
    used as much as one, where those beside it are used at all."""
    others, budget, available, expected = case
    own = model("m", ASLEEP, uses=float(any(one.uses for one in others)))
    found = decide("m", [own, *others], int(budget * GIB), int(available * GIB))
    if expected is Refuse:
        assert isinstance(found, Refuse)
        assert "1.07 GB" in found.why or "GiB" in found.why, found.why
    else:
        assert found == expected


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (model("idle", used_at=0.0), True),
        (model("used lately", used_at=95.0), False),
        (model("in use", live=1), False),
        (model("always kept", keep=ALWAYS), False),
        (model("never kept", keep=NEVER, used_at=99.9), True),
        (model("never kept, in use", keep=NEVER, live=1), False),
        (model("never kept, woken just now", keep=NEVER, used_at=99.9, stays=True), False),
        (model("waking", WAKING), False),
        (model("asleep", ASLEEP), False),
    ],
    ids=lambda value: value.name if isinstance(value, ModelFacts) else "",
)
def test_what_falls_asleep(one: ModelFacts, expected: bool) -> None:
    """At 100 s, with 10 s of idleness allowed."""
    assert sleeps(one, 100.0, 10.0) is expected


def test_wakes_are_bounded_per_model_and_in_total() -> None:
    """The third wake of one model within the window waits until the first is out of it, and so does the fourth of all;
    after the window all may wake again."""
    guard = WakeGuard(of_model=2, of_all=3)
    for at in (0.0, 10.0):
        assert guard.wait_s("a", "t", at) == 0
        guard.note("a", "t", at)
    assert guard.wait_s("a", "t", 20.0) == WINDOW_S - 20.0
    assert guard.wait_s("b", "t", 20.0) == 0, "the control: another model may"
    guard.note("b", "t", 20.0)
    assert guard.wait_s("c", "t", 21.0) == WINDOW_S - 21.0
    assert guard.wait_s("a", "t", WINDOW_S) == 0
    assert guard.wait_s("c", "t", 20.0 + WINDOW_S) == 0


def test_the_last_wakes_of_a_minute_are_kept_for_models_that_are_used_more() -> None:
    """With three of which two are kept, one of a guest may begin and a second may not; one of another model may, and
    takes none of what is left for guests."""
    guard = WakeGuard(of_all=3, kept=2)
    guard.note("b", "t", 0.0)
    assert guard.wait_s("a", "t", 0.0, kept=False) == 0
    guard.note("a", "t", 5.0, kept=False)
    assert guard.wait_s("b", "t", 10.0, kept=False) == WINDOW_S - 5.0
    assert guard.wait_s("b", "t", 10.0) == 0


def test_no_two_tenants_use_up_the_wakes_that_are_not_kept() -> None:
    """Tenants that ask for as many as they may, one after the other: the first two get two each of the six that are
    not kept, and two others get one. One that is alone (control) is refused its third until the first is out of the
    window."""
    guard, found = WakeGuard(), list[int]()
    for tenant in "abcd":
        found.append(0)
        while not guard.wait_s(f"{tenant}-{found[-1]}", tenant, 0.0, kept=False):
            guard.note(f"{tenant}-{found[-1]}", tenant, 0.0, kept=False)
            found[-1] += 1
    assert found == [2, 2, 1, 1] and sum(found) == MOST_WAKES - KEPT_WAKES
    alone = WakeGuard()
    for at in (0.0, 10.0):
        assert alone.wait_s("m", "a", at, kept=False) == 0
        alone.note("m", "a", at, kept=False)
    assert alone.wait_s("m", "a", 30.0, kept=False) == WINDOW_S - 30.0
    assert alone.wait_s("m", "b", 30.0, kept=False) == 0


def test_models_that_take_turns_stay_longer_with_each_wake() -> None:
    """Requests alone keep a model after its first two wakes in the window, and it stays twice as long after each one
    more; out of the window it begins anew. One that the operator woke stays as long as any."""
    guard, found = WakeGuard(), []
    assert guard.stay_s("a", 0.0) == STAY_S
    for number in range(6):
        guard.note("a", "t", float(number))
        found.append(guard.stay_s("a", float(number)))
    assert found == [0.0, 0.0, LEAST_STAY_S, 2 * LEAST_STAY_S, 4 * LEAST_STAY_S, STAY_S]
    guard.note("a", "t", WINDOW_S + 10.0)
    assert guard.stay_s("a", WINDOW_S + 10.0) == 0.0


def test_a_tenant_that_wakes_much_is_refused_alone() -> None:
    """A tenant's third wake within the window waits, of whatever models, and another tenant's does not."""
    guard = WakeGuard(of_tenant=2)
    guard.note("a", "t", 0.0)
    guard.note("b", "t", 10.0)
    assert guard.wait_s("c", "t", 20.0) == WINDOW_S - 20.0
    assert guard.wait_s("c", "u", 20.0) == 0


def test_guests_take_a_place_now_and_then() -> None:
    """After a guest has taken the place of one of the most used models, the next waits for as long as is left of the
    gap; before the first (the control) none waits."""
    guard = WakeGuard(gap_s=30.0)
    assert guard.place_wait_s(5.0) == 0
    guard.note_cost(5.0)
    assert guard.place_wait_s(15.0) == 20.0
    assert guard.place_wait_s(35.0) == 0


def test_wakes_of_guests_are_counted_by_tenant() -> None:
    """Those of the tenant in the last minute alone; those of the most used models, of others and older ones (the
    controls) are not counted."""
    guard = WakeGuard()
    guard.note("a", "t", 0.0, kept=False)
    guard.note("b", "t", 1.0)
    guard.note("c", "u", 1.0, kept=False)
    assert (guard.guests_begun("t", 2.0), guard.guests_begun("u", 2.0), guard.guests_begun("v", 2.0)) == (1, 1, 0)
    assert guard.guests_begun("t", WINDOW_S) == 0
