"""policy.limits: the arithmetic of token buckets."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from policy.limits import Bucket, Rate, charge, full, refill, rescale, reserve, retry_after, settle

SIXTY = Rate(60)

rates = st.integers(1, 1_000_000_000).flatmap(
    lambda each: st.builds(Rate, st.just(each), st.none() | st.integers(1, min(each * 60, 1_000_000_000)))
)
times = st.floats(0, 10_000_000, allow_nan=False)
spans = st.floats(0, 100_000, allow_nan=False)


@st.composite
def filled(draw) -> tuple[Bucket, Rate]:
    """A bucket somewhere between a debt of a minute and full, with its rate."""
    rate = draw(rates)
    part = draw(st.floats(-1, 1))
    level = part * (rate.capacity if part > 0 else rate.per_minute)
    return Bucket(level, draw(times)), rate


def test_a_minute_fills_the_bucket() -> None:
    """From empty to full takes sixty seconds, and not more than full comes in."""
    empty = Bucket(0.0, 0.0)
    assert refill(empty, SIXTY, 30.0) == Bucket(30.0, 30.0)
    assert refill(empty, SIXTY, 60.0) == Bucket(60.0, 60.0)
    assert refill(empty, SIXTY, 600.0) == Bucket(60.0, 600.0)


def test_reserve_takes_or_refuses() -> None:
    """A reservation lowers the level at once; one that does not fit changes nothing."""
    assert reserve(full(SIXTY, 5.0), SIXTY, 60, 5.0) == Bucket(0.0, 5.0)
    assert reserve(full(SIXTY, 5.0), SIXTY, 61, 5.0) is None
    assert reserve(Bucket(0.0, 5.0), SIXTY, 1, 5.5) is None
    assert reserve(Bucket(0.0, 5.0), SIXTY, 1, 6.0) == Bucket(0.0, 6.0)


def test_settle_refunds_up_to_full() -> None:
    """Unused tokens flow back, but time has filled the bucket meanwhile and nothing spills
    over."""
    assert settle(Bucket(0.0, 0.0), SIXTY, reserved=10, used=4, now=0.0) == Bucket(6.0, 0.0)
    assert settle(Bucket(58.0, 0.0), SIXTY, reserved=10, used=4, now=0.0) == Bucket(60.0, 0.0)


def test_settle_makes_debt() -> None:
    """Use beyond the reservation lowers the level below zero, and the wait grows by it."""
    bucket = settle(Bucket(0.0, 0.0), SIXTY, reserved=4, used=10, now=0.0)
    assert bucket == Bucket(-6.0, 0.0)
    assert retry_after(bucket, SIXTY, 1, 0.0) == pytest.approx(7.0)


def test_a_charge_makes_debt_of_a_minute_at_most() -> None:
    """What nobody reserved is taken whole while the debt is small; debt that was deeper before is left as it is."""
    assert charge(full(SIXTY, 5.0), SIXTY, 100, 5.0) == Bucket(-40.0, 5.0)
    assert charge(full(SIXTY, 5.0), SIXTY, 1_000, 5.0) == Bucket(-60.0, 5.0)
    assert charge(Bucket(-70.0, 5.0), SIXTY, 10, 5.0) == Bucket(-70.0, 5.0)
    assert charge(Bucket(0.0, 0.0), SIXTY, 10, 5.0) == Bucket(-5.0, 5.0)


@given(filled(), st.integers(0, 2_000_000_000))
def test_debt_of_charges_is_paid_within_a_minute(pair, amount) -> None:
    """However much is charged, and the level never rises by it."""
    bucket, rate = pair
    charged = charge(bucket, rate, amount, bucket.updated_at)
    wait = retry_after(charged, rate, 0, charged.updated_at)
    assert charged.level <= bucket.level
    assert wait is not None
    assert wait <= 60.0 + 1e-3


def test_retry_after_says_never() -> None:
    """More than the bucket can hold is never available."""
    assert retry_after(full(SIXTY, 0.0), SIXTY, 61, 0.0) is None
    assert retry_after(full(SIXTY, 0.0), SIXTY, 60, 0.0) == 0


def test_a_level_above_full_is_left_to_drain() -> None:
    """After the limit was lowered without rescaling, time takes nothing away and adds nothing."""
    assert refill(Bucket(100.0, 0.0), SIXTY, 10.0) == Bucket(100.0, 10.0)
    assert settle(Bucket(100.0, 0.0), SIXTY, reserved=5, used=0, now=0.0) == Bucket(100.0, 0.0)


def test_a_burst_is_what_a_full_bucket_holds() -> None:
    """A bucket with a burst of its own fills at its rate up to the burst; the wait is the rate's, never for more than
    the burst, and an overdraft shortens it."""
    rate = Rate(60, 300)
    assert full(rate, 0.0) == Bucket(300.0, 0.0)
    assert refill(Bucket(0.0, 0.0), rate, 200.0) == Bucket(200.0, 200.0)
    assert refill(Bucket(0.0, 0.0), rate, 400.0) == Bucket(300.0, 400.0)
    assert settle(Bucket(295.0, 0.0), rate, reserved=10, used=0, now=0.0) == Bucket(300.0, 0.0)
    assert retry_after(Bucket(0.0, 0.0), rate, 300, 0.0) == pytest.approx(300.0)
    assert retry_after(Bucket(0.0, 0.0), rate, 301, 0.0) is None
    assert retry_after(Bucket(0.0, 0.0), rate, 20, 0.0, overdraft=15) == pytest.approx(5.0)
    assert retry_after(Bucket(0.0, 0.0), rate, 301, 0.0, overdraft=300) is None
    assert rescale(Bucket(150.0, 0.0), rate, SIXTY, 0.0) == Bucket(30.0, 0.0)
    assert Rate(60, 10).capacity == 10


def test_rescaling_keeps_the_filled_part() -> None:
    """A half-full bucket stays half full under a new rate; debt stays what it was."""
    assert rescale(Bucket(30.0, 0.0), SIXTY, Rate(600), 0.0) == Bucket(300.0, 0.0)
    assert rescale(Bucket(30.0, 0.0), SIXTY, Rate(6), 0.0) == Bucket(3.0, 0.0)
    assert rescale(Bucket(-6.0, 0.0), SIXTY, Rate(600), 0.0) == Bucket(-6.0, 0.0)
    assert rescale(Bucket(0.0, 0.0), SIXTY, Rate(600), 60.0) == Bucket(600.0, 60.0)


@given(filled(), spans, spans)
def test_levels_never_fall_with_time(pair, first, second) -> None:
    """A later look sees at least as much, and a clock that steps back changes nothing."""
    bucket, rate = pair
    early, late = sorted((first, second))
    at = bucket.updated_at
    assert refill(bucket, rate, at + early).level <= refill(bucket, rate, at + late).level
    assert refill(bucket, rate, at - late) == bucket


@given(filled(), spans, spans, st.integers(1, 1_000_000_000))
def test_waits_never_grow_with_time(pair, first, second, amount) -> None:
    """The later one asks, the shorter the wait; never-available stays never."""
    bucket, rate = pair
    early, late = sorted((first, second))
    before = retry_after(bucket, rate, amount, bucket.updated_at + early)
    after = retry_after(bucket, rate, amount, bucket.updated_at + late)
    if before is None:
        assert after is None
    else:
        assert after is not None
        assert after <= before


@given(filled(), st.integers(1, 1_000_000_000))
def test_waiting_as_told_suffices(pair, amount) -> None:
    """After exactly the told time the reservation succeeds, at any rate and uptime."""
    bucket, rate = pair
    wait = retry_after(bucket, rate, amount, bucket.updated_at)
    assume(wait is not None)
    assert reserve(bucket, rate, amount, bucket.updated_at + wait) is not None


@given(rates, times, st.floats(0, 1), st.floats(0, 1), st.integers(0, 2_000_000_000))
def test_reserve_and_settle_conserve_tokens(rate, now, filled_part, taken_part, used) -> None:
    """Without time passing, a request costs exactly what it used, refund or debt."""
    bucket = Bucket(filled_part * rate.capacity, now)
    amount = int(taken_part * bucket.level)
    held = reserve(bucket, rate, amount, now)
    assert held is not None
    settled = settle(held, rate, reserved=amount, used=used, now=now)
    assert settled.level == pytest.approx(bucket.level - used, abs=1e-3)


@given(filled(), rates, st.lists(rates, max_size=5))
def test_reloading_never_gains(pair, last, between) -> None:
    """Any chain of rescalings ends no fuller, in proportion, than it began."""
    bucket, rate = pair
    assume(bucket.level > 0)
    part = bucket.level / rate.capacity
    for new in [*between, last]:
        bucket = rescale(bucket, rate, new, bucket.updated_at)
        rate = new
    assert bucket.level / rate.capacity == pytest.approx(part)
