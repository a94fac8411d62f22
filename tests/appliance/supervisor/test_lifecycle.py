"""The life of a sandbox as a table: counts, delays, and no transition that is not written down."""

from __future__ import annotations

import pytest

from appliance.supervisor.lifecycle import MAX_DELAY_S, STABLE_S, TRANSITIONS, Event, Life, State


def fail(life: Life, at: float, lived: float = 0.0) -> Life:
    """Boot at ``at``, become ready, die ``lived`` seconds later."""
    life = life.advance(Event.BOOT, at).advance(Event.BECAME_READY, at)
    return life.advance(Event.DIED, at + lived)


def test_the_first_death_costs_no_delay_and_later_ones_double() -> None:
    """One crash is normal; a crash loop is slowed down to a bound."""
    life, delays = Life(), []
    for turn in range(10):
        life = fail(life, float(turn))
        delays.append(life.delay_s())
    assert delays[:4] == [0.0, 0.5, 1.0, 2.0]
    assert delays[-1] == MAX_DELAY_S
    assert (life.generation, life.restarts) == (10, 9)


def test_a_stable_life_forgives_earlier_failures() -> None:
    """After a minute of service the next death is a first one."""
    life = Life()
    for turn in range(5):
        life = fail(life, float(turn))
    assert fail(life, 100.0, STABLE_S).delay_s() == 0.0


def test_a_boot_that_never_got_ready_counts_as_a_failure() -> None:
    """Dying while booting is a failure like any other."""
    life = Life().advance(Event.BOOT, 0.0).advance(Event.DIED, 1.0)
    assert (life.state, life.failures) == (State.FAILED, 1)


def test_an_end_without_fault_costs_no_delay() -> None:
    """A sandbox whose gateway left boots again at once, whatever it did before; boots and restarts go on counting."""
    life = Life()
    for turn in range(3):
        life = fail(life, float(turn))
    life = life.advance(Event.BOOT, 10.0).advance(Event.BECAME_READY, 11.0).advance(Event.ENDED, 12.0)
    assert (life.state, life.failures, life.delay_s(), life.ready_at) == (State.FAILED, 0, 0.0, None)
    again = life.advance(Event.BOOT, 13.0)
    assert (again.generation, again.restarts) == (5, 4)


@pytest.mark.parametrize("state", list(State))
@pytest.mark.parametrize("happening", list(Event))
def test_what_is_not_in_the_table_is_a_bug(state: State, happening: Event) -> None:
    """Every pair either has its row or raises."""
    life = Life(state=state)
    if (state, happening) in TRANSITIONS:
        assert life.advance(happening, 0.0).state is TRANSITIONS[state, happening]
    else:
        with pytest.raises(KeyError):
            life.advance(happening, 0.0)
