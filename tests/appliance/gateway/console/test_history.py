"""Percentiles, points and rates."""

from __future__ import annotations

import random
from dataclasses import replace

from appliance.common.status import Counts, Point, Rates, Spread
from appliance.gateway.console.alerts import lasting
from appliance.gateway.console.latency import latency, percentile
from appliance.gateway.request.tenant_counts import plus
from appliance.gateway.telemetry.store import Ended
from appliance.gateway.watch.definitions import RATE_WINDOW_S
from appliance.gateway.watch.history import MAX_POINTS, History, Samples
from tests.appliance.gateway.telemetry import samples


def test_a_percentile_is_a_value_with_its_share_at_or_below() -> None:
    """Nearest rank: at least the share of all values are no larger, and fewer would be with the next smaller one."""
    dice = random.Random(3)
    for _ in range(300):
        values = sorted(dice.randint(0, 9) for _ in range(dice.randint(1, 30)))
        share = dice.choice([0.5, 0.9, 0.99])
        found = percentile(values, share)
        assert sum(value <= found for value in values) >= share * len(values)
        assert sum(value < found for value in values) < share * len(values)


def test_only_answers_of_the_last_minutes_count() -> None:
    """A refusal, a failure and an old answer are left out."""
    old = replace(samples.SUMMARY, ttft_s=9.0)
    others = (Ended(1.0, one.summary) for one in (samples.refused(), samples.failed()))
    found = latency([Ended(60.0, samples.SUMMARY), Ended(3_600.0, old), *others])
    assert (found.requests, found.window_s) == (1, 60.0)
    assert found.first_token == Spread(0.113, 0.113, 0.113)
    assert latency([]).first_token is None


def test_the_history_is_bounded_and_goes_on_where_it_was() -> None:
    """The oldest points go; a page that knows some gets the others."""
    history = History()
    for step in range(MAX_POINTS + 50):
        history.add(Point(float(step), 0, 0, 0, 0.0, 0))
    assert len(history.points) == MAX_POINTS
    assert [point.at for point in history.after(MAX_POINTS + 47.0)] == [MAX_POINTS + 48.0, MAX_POINTS + 49.0]


def sampled(samples: Samples, now: float, tenants: dict[str, Counts]) -> None:
    """Take a sample; the sum is that of the tenants."""
    total = Counts()
    for one in tenants.values():
        total = plus(total, one)
    samples.take(now, lambda: (tenants, total))


def test_rates_are_of_the_last_ten_seconds() -> None:
    """A rate is what came in the window; a tenant that is new counts from nothing; a load that has ended is no more."""
    found = Samples()
    assert found.rates == Rates()
    for step in range(31):
        sampled(found, 500.0 + step, {"alpha": Counts(ok=step, output_tokens=10 * step)})
        assert found.rates.over_s == min(step, RATE_WINDOW_S)
        assert found.rates_of("alpha").output_tokens == (10.0 if step else 0.0)
    sampled(found, 531.0, {"alpha": Counts(ok=31, output_tokens=310), "new": Counts(refused=20)})
    assert found.rates == Rates(over_s=10.0, requests=3.0, refused=2.0, output_tokens=10.0)
    assert found.rates_of("new").refused == 2.0
    for step in range(12):
        sampled(found, 532.0 + step, {"alpha": Counts(ok=31, output_tokens=310), "new": Counts(refused=20)})
    assert found.rates == Rates(over_s=10.0)


def test_surfaces_that_are_asked_at_once_see_one_rate() -> None:
    """Within a second no further sample is taken, so that no surface differs from another by its moment."""
    found = Samples()
    sampled(found, 0.0, {"a": Counts()})
    sampled(found, 10.0, {"a": Counts(output_tokens=100)})
    sampled(found, 10.9, {"a": Counts(output_tokens=900)})
    assert found.rates.output_tokens == 10.0
    sampled(found, 11.0, {"a": Counts(output_tokens=900)})
    assert found.rates == Rates(over_s=11.0, output_tokens=900 / 11)


def test_what_lasts_is_known_since_when() -> None:
    """The first point of the last unbroken run; None when the newest does not hold."""
    points = [Point(float(at), 0, 0, waiting, 0.0, 0) for at, waiting in enumerate([1, 0, 1, 1, 1])]
    assert lasting(points, lambda point: point.waiting > 0) == 2.0
    assert lasting(points[:2], lambda point: point.waiting > 0) is None
