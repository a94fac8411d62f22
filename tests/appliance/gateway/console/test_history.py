"""Percentiles, points and rates."""

from __future__ import annotations

import random
from dataclasses import replace

from appliance.common.figures import NS
from appliance.common.status import Point, Spread
from appliance.gateway.console.alerts import lasting
from appliance.gateway.console.latency import latency, percentile
from appliance.gateway.watch.history import MAX_POINTS, NUM_MARKS, History
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
    now = samples.START_NS / NS + 60
    old = replace(samples.SUMMARY, started_ns=samples.START_NS - 3_600 * NS, ttft_s=9.0)
    found = latency([samples.SUMMARY, old, samples.refused().summary, samples.failed().summary], now)
    assert found.requests == 1
    assert found.first_token == Spread(0.113, 0.113, 0.113)
    assert latency([], now).first_token is None


def test_the_history_is_bounded_and_goes_on_where_it_was() -> None:
    """The oldest points go; a page that knows some gets the others."""
    history = History()
    for step in range(MAX_POINTS + 50):
        history.add(Point(float(step), 0, 0, 0, 0.0, 0))
    assert len(history.points) == MAX_POINTS
    assert [point.at for point in history.after(MAX_POINTS + 47.0)] == [MAX_POINTS + 48.0, MAX_POINTS + 49.0]


def test_rates_are_of_the_last_seconds() -> None:
    """A tenant's rates are what came since the oldest of few marks; one that is new counts from nothing."""
    history = History()
    for step in range(20):
        history.mark(step * 1.0, lambda: [("alpha", (step, 10 * step, 0))])
    assert history.rates("alpha", (20, 200, 0), 20.0) == (1.0, 10.0, 0.0)
    requests, _, refused = history.rates("new", (30, 0, 30), 20.0)
    assert requests == refused > 0
    assert NUM_MARKS * 5 >= 10
    assert History().rates("alpha", (5, 5, 5), 1.0) == (0.0, 0.0, 0.0)


def test_what_lasts_is_known_since_when() -> None:
    """The first point of the last unbroken run; None when the newest does not hold."""
    points = [Point(float(at), 0, 0, waiting, 0.0, 0) for at, waiting in enumerate([1, 0, 1, 1, 1])]
    assert lasting(points, lambda point: point.waiting > 0) == 2.0
    assert lasting(points[:2], lambda point: point.waiting > 0) is None
