"""When tokens wait for each other: pure arithmetic over given times."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from appliance.gateway.sandboxes.flush_interval import CHUNK_S, LATE_FACTOR, MOST_S, SHARE, FlushInterval

MANY = 10_000
"""Streams enough for the bound."""


def test_a_lone_stream_waits_for_nothing() -> None:
    """One stream is handed each token at once, however fast they come and however late the passes are."""
    cadence = FlushInterval()
    cadence.passed(5.0, late_s=1.0)
    assert cadence.wait_s(5.0, streams=1) == 0.0
    assert cadence.wait_s(5.0, streams=2) > 0.0


def test_the_first_pass_is_at_once() -> None:
    """After a pause of any length nothing is owed."""
    assert FlushInterval().wait_s(0.0, MANY) == 0.0
    cadence = FlushInterval()
    cadence.passed(1.0, late_s=0.0)
    assert cadence.wait_s(1.0 + MOST_S, MANY) == 0.0


def test_steps_that_are_slow_enough_are_handed_on_one_by_one() -> None:
    """32 streams at ten steps a second cost little: no step waits; at a thousand steps a second they do."""
    cadence = FlushInterval()
    cadence.passed(0.0, late_s=0.0)
    assert cadence.wait_s(0.1, streams=32) == 0.0
    assert cadence.wait_s(0.001, streams=32) > 0.0


def test_passes_keep_to_their_share_until_the_bound() -> None:
    """Between two passes lies the time in which the chunks of one are earned, but never more than the bound."""
    cadence = FlushInterval()
    assert cadence.interval_s(8) == 8 * CHUNK_S / SHARE
    assert cadence.interval_s(MANY) == MOST_S


@given(st.lists(st.floats(0, 10), max_size=20), st.integers(0, 5_000))
def test_nothing_waits_longer_than_the_bound(late: list[float], streams: int) -> None:
    """Whatever the passes were late, and however many streams there are."""
    cadence = FlushInterval()
    for delay_s in late:
        cadence.passed(0.0, delay_s)
    assert 0.0 <= cadence.wait_s(0.0, streams) <= MOST_S


def test_lateness_makes_passes_rarer_and_is_forgotten() -> None:
    """While others have the processor passes are further apart; when it is quiet again they are as before."""
    cadence = FlushInterval()
    quiet_s = cadence.interval_s(4)
    for _ in range(20):
        cadence.passed(0.0, late_s=0.005)
    assert cadence.interval_s(4) > quiet_s
    assert abs(cadence.interval_s(4) - LATE_FACTOR * 0.005) < 1e-3
    for _ in range(60):
        cadence.passed(0.0, late_s=0.0)
    assert cadence.interval_s(4) == quiet_s
