"""Figures from samples that are small enough to work out by hand."""

from __future__ import annotations

from array import array

import pytest

from appliance.operator.bench.metrics import Distribution, figures, percentile
from appliance.operator.bench.run import Run
from appliance.operator.bench.sample import Sample
from appliance.operator.bench.workload import parse_load


def sample(sent: float, *arrivals: float, tenant: int = 0, tokens: int = 0, failure: str = "") -> Sample:
    """A request that ended with its last event."""
    one = Sample(tenant, tokens or len(arrivals), sent, sent)
    one.arrivals = array("d", arrivals)
    one.ended = arrivals[-1] if arrivals else sent + 1
    one.output_tokens = tokens or len(arrivals)
    one.prompt_tokens, one.cached_tokens, one.counted, one.failure = 10, 4 * tenant, True, failure
    return one


def run_of(load: str, *samples: Sample, steady: float = 10.0, ended: float = 10.0) -> Run:
    """A run from 0 to its end."""
    return Run(parse_load(load), list(samples), 0.0, steady, ended, client_cpu_s=0.001, lateness_s=[0.0, 0.002])


def test_percentiles_lie_between_neighbours() -> None:
    """The linear definition: of 1 to 5, P50 is 3 and P95 is 4.8."""
    ordered = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert percentile(ordered, 50) == 3
    assert percentile(ordered, 95) == pytest.approx(4.8)
    assert percentile([7.0], 99) == 7
    assert Distribution.of([]) is None
    assert Distribution.of(ordered[::-1]) == Distribution(5, 3.0, pytest.approx(4.8), pytest.approx(4.96), 5.0)


def test_latencies_of_one_request() -> None:
    """Sent at 1, tokens at 1.5, 1.6, 1.6 and 1.9: TTFT 500 ms, TPOT 133 ms, gaps 100, 0 and 300 ms."""
    found = figures(run_of("open:1", sample(1.0, 1.5, 1.6, 1.6, 1.9)))
    assert found.ttft is not None and found.ttft.p50 == pytest.approx(0.5)
    assert found.tpot is not None and found.tpot.p50 == pytest.approx(0.4 / 3)
    assert found.itl is not None
    assert (found.itl.count, found.itl.p50, found.itl.most) == (3, pytest.approx(0.1), pytest.approx(0.3))
    assert found.e2e is not None and found.e2e.p50 == pytest.approx(0.9)


def test_tokens_count_as_reported_not_as_events() -> None:
    """Three events that carried nine tokens: TPOT divides by eight."""
    found = figures(run_of("open:1", sample(0.0, 1.0, 2.0, 5.0, tokens=9)))
    assert found.tpot is not None and found.tpot.p50 == pytest.approx(0.5)
    assert found.output_tokens == 9


def test_goodput_needs_both_bounds() -> None:
    """Of four requests one is fast, one starts late, one goes slowly, one failed; rates are over the window."""
    fast = sample(0.0, 0.1, 0.12)
    late = sample(0.0, 0.6, 0.61)
    slow = sample(0.0, 0.1, 0.18)
    failed = sample(0.0, failure="http 429")
    found = figures(run_of("open:1", fast, late, slow, failed))
    strict, loose = found.good
    assert (strict.share, strict.requests_per_s) == (0.25, pytest.approx(0.1))
    assert (loose.share, loose.requests_per_s) == (0.75, pytest.approx(0.3))
    assert found.failures == {"http 429": 1} and found.failed == 1 and found.requests == 4


def test_a_closed_loop_counts_its_steady_window_only() -> None:
    """Until the last request starts, at 4: half of the long answer's tokens and all of the short one's."""
    long, short, last = sample(0.0, 1.0, 2.0, 5.0, 6.0), sample(0.0, 1.0, 3.0), sample(4.0, 7.0, 8.0)
    found = figures(run_of("closed:2", long, short, last, steady=4.0, ended=8.0))
    assert (found.window_s, found.duration_s) == (4.0, 8.0)
    assert found.output_tokens_per_s == pytest.approx((2 + 2) / 4)
    assert found.requests_per_s == pytest.approx(1 / 4)
    single = figures(run_of("closed:2", long, short, steady=0.0, ended=6.0))
    assert single.window_s == 6.0 and single.output_tokens_per_s == pytest.approx(1.0)


def test_cost_cache_and_own_cost() -> None:
    """One token a second at 3.6 an hour is 1,000 a million; shares and microseconds are of what was counted."""
    tokens = [float(second) for second in range(1, 11)]
    run = run_of("open:1", sample(0.0, *tokens, tenant=1))
    run.server_cpu_s = {"gateway": 0.0005}
    found = figures(run, price_per_hour=3.6)
    assert found.cost_per_million == pytest.approx(1_000)
    assert found.cached_share == 0.4
    assert found.server_us_per_token == {"gateway": pytest.approx(50)}
    assert found.client_us_per_token == pytest.approx(100)
    assert found.by_tenant[1]["cached_tokens"] == 4


def test_nothing_but_failures() -> None:
    """No latency is made up where nothing succeeded."""
    found = figures(run_of("closed:1", sample(0.0, failure="connect")), price_per_hour=1.0)
    assert found.ttft is None and found.itl is None and found.cost_per_million is None
    assert found.to_dict()["failed"] == 1


def test_a_timeline_adds_up() -> None:
    """Its tokens are all the tokens, and its requests in flight are those under way."""
    run = run_of("open:1", sample(1.0, 2.0, 4.0), sample(3.0, 9.0), sample(5.0, failure="connect"))
    line = figures(run).timeline
    step = line["at_s"][1]
    assert sum(line["tokens_per_s"]) * step == pytest.approx(3)
    assert (max(line["in_flight"]), line["in_flight"][0], line["failed_at_s"]) == (2, 0, [5.0])
