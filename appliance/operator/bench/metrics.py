"""What was seen of a load's requests to the figures that tables and plots show; pure.

Definitions (MLPerf Inference's and vLLM's): TTFT, from sending to the first event with text; TPOT, a request's time
after its first token divided by its tokens after the first; ITL, every gap between two events of one request (a stall
that TPOT hides shows here); E2E, from sending to the end. Percentiles are over requests that succeeded, ITL's over
their gaps; a figure beside failures means little, so both are always shown together. Goodput counts the requests that
met both bounds of a class: MLPerf's pair for an 8B model, ``interactive`` and ``conversational``.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from appliance.operator.bench.run import Run
from appliance.operator.bench.sample import Sample

PERCENTILES = (50, 95, 99)

TIMELINE_STEPS = 120
"""Steps of a timeline: as many as a plot can show apart."""


@dataclass(frozen=True, slots=True)
class Objective:
    """One class of service."""

    name: str
    ttft_s: float
    tpot_s: float

    def met(self, sample: Sample) -> bool:
        """The request succeeded within both bounds; one of a single token has no TPOT to miss."""
        tpot = sample.tpot_s
        return sample.ok and sample.ttft_s <= self.ttft_s and (tpot is None or tpot <= self.tpot_s)


OBJECTIVES = (Objective("500/30 ms", 0.5, 0.030), Objective("2000/100 ms", 2.0, 0.100))
"""MLPerf Inference's Llama 3.1 8B classes: interactive and server (conversational)."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """Percentiles of one quantity, in seconds, and how many values they are of."""

    count: int
    p50: float
    p95: float
    p99: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float] | array[float]) -> Distribution | None:
        """None of no values."""
        if not values:
            return None
        ordered = sorted(values)
        p50, p95, p99 = (percentile(ordered, share) for share in PERCENTILES)
        return cls(len(ordered), p50, p95, p99, ordered[-1])


@dataclass(frozen=True, slots=True)
class Good:
    """Goodput under one objective."""

    objective: str
    requests_per_s: float
    share: float
    """Share of all requests, failed ones included."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One load's figures; seconds, tokens, and rates a second."""

    load: str
    """As it was asked for."""
    label: str
    """Short name for tables and plots."""
    requests: int
    failures: dict[str, int]
    duration_s: float
    window_s: float
    """The steady window that rates are taken over."""
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    counted: bool
    """The server reported all counts itself."""
    ttft: Distribution | None
    tpot: Distribution | None
    itl: Distribution | None
    e2e: Distribution | None
    good: list[Good]
    server_us_per_token: dict[str, float]
    """Processor time by label; of all output tokens, the drain's too."""
    cost_per_million: float | None
    """Cost of a million output tokens, at the given price an hour."""
    client_us_per_token: float
    client_late: Distribution | None
    """How late the client's own timers were."""
    send_late: Distribution | None
    """How late requests were sent; of open loops only."""
    reconnects: int = 0
    by_tenant: dict[int, dict[str, float]] = field(default_factory=dict)
    timeline: dict[str, list[float]] = field(default_factory=dict)
    """``at_s``, ``in_flight``, ``tokens_per_s`` in steps of equal length, ``failed_at_s``; of open loops only."""

    @property
    def cached_share(self) -> float:
        """Cached prompt tokens of all prompt tokens."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def failed(self) -> int:
        """Requests that failed in whatever way."""
        return sum(self.failures.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, derived ones included."""
        return {**asdict(self), "cached_share": self.cached_share, "failed": self.failed}


def percentile(ordered: Sequence[float], share: float) -> float:
    """The percentile of sorted values, linear between neighbours (numpy's and vLLM's default)."""
    assert ordered
    place = (len(ordered) - 1) * share / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def figures(run: Run, *, price_per_hour: float | None = None) -> Figures:
    """The figures of one load."""
    good = [one for one in run.samples if one.ok]
    open_loop = run.load.kind != "closed"
    # A closed loop is steady until its last request begins; one without more requests than streams never is.
    steady = not open_loop and len(run.samples) > run.load.streams
    window_s = (max(run.steady_end, run.began) if steady else run.ended) - run.began or 1e-9
    until = run.began + window_s
    tokens_per_s = sum(_tokens_until(one, until) for one in good) / window_s
    gaps = array("d")
    for one in good:
        times = one.arrivals
        gaps.extend(times[place + 1] - times[place] for place in range(len(times) - 1))
    output_tokens = sum(one.output_tokens for one in good)
    per_token = 1e6 / output_tokens if output_tokens else 0.0
    cost = None
    if price_per_hour is not None and tokens_per_s:
        cost = price_per_hour / (tokens_per_s * 3_600) * 1e6
    return Figures(
        load=run.load.name,
        label=run.load.label,
        requests=len(run.samples),
        failures=dict(Counter(one.failure for one in run.samples if not one.ok)),
        duration_s=run.ended - run.began,
        window_s=window_s,
        requests_per_s=sum(1 for one in good if one.ended <= until) / window_s,
        output_tokens_per_s=tokens_per_s,
        prompt_tokens=sum(one.prompt_tokens for one in good),
        cached_tokens=sum(one.cached_tokens for one in good),
        output_tokens=output_tokens,
        counted=all(one.counted for one in good),
        ttft=Distribution.of([one.ttft_s for one in good]),
        tpot=Distribution.of([one.tpot_s for one in good if one.tpot_s is not None]),
        itl=Distribution.of(gaps),
        e2e=Distribution.of([one.e2e_s for one in good]),
        good=[_good(objective, run.samples, until, window_s) for objective in OBJECTIVES],
        server_us_per_token={label: seconds * per_token for label, seconds in sorted(run.server_cpu_s.items())},
        cost_per_million=cost,
        client_us_per_token=run.client_cpu_s * per_token,
        client_late=Distribution.of(run.lateness_s),
        send_late=Distribution.of([one.sent - one.due for one in run.samples]) if open_loop else None,
        reconnects=sum(one.reconnects for one in run.samples),
        by_tenant=_by_tenant(good),
        timeline=_timeline(run) if open_loop else {},
    )


def _tokens_until(sample: Sample, until: float) -> float:
    """Output tokens that had come by then; an event's share is the same for all events of a request."""
    if sample.ended <= until:
        return sample.output_tokens
    came = sum(1 for moment in sample.arrivals if moment <= until)
    return sample.output_tokens * came / max(1, len(sample.arrivals))


def _good(objective: Objective, samples: Sequence[Sample], until: float, window_s: float) -> Good:
    met = [one for one in samples if objective.met(one)]
    in_window = sum(1 for one in met if one.ended <= until)
    return Good(objective.name, in_window / window_s, len(met) / len(samples) if samples else 0.0)


def _by_tenant(good: Sequence[Sample]) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for tenant in sorted({one.tenant for one in good}):
        own = [one for one in good if one.tenant == tenant]
        ttft = Distribution.of([one.ttft_s for one in own])
        assert ttft is not None
        found[tenant] = {
            "requests": len(own),
            "prompt_tokens": sum(one.prompt_tokens for one in own),
            "cached_tokens": sum(one.cached_tokens for one in own),
            "output_tokens": sum(one.output_tokens for one in own),
            "ttft_p50_s": ttft.p50,
            "ttft_p99_s": ttft.p99,
        }
    return found


def _timeline(run: Run) -> dict[str, list[float]]:
    step = max(run.ended - run.began, 1e-9) / TIMELINE_STEPS
    in_flight, tokens = [0.0] * TIMELINE_STEPS, [0.0] * TIMELINE_STEPS

    def place(moment: float) -> int:
        return min(TIMELINE_STEPS - 1, max(0, int((moment - run.began) / step)))

    for one in run.samples:
        for index in range(place(one.sent), place(one.ended) + 1):
            in_flight[index] += 1
        share = one.output_tokens / max(1, len(one.arrivals)) / step
        for moment in one.arrivals:
            tokens[place(moment)] += share
    return {
        "at_s": [index * step for index in range(TIMELINE_STEPS)],
        "in_flight": in_flight,
        "tokens_per_s": tokens,
        "failed_at_s": [one.sent - run.began for one in run.samples if not one.ok],
    }
