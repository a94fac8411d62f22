"""Percentiles of the times of the last requests. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from appliance.common.figures import NS
from appliance.common.status import Latency, Spread
from appliance.gateway.telemetry.store import TraceSummary

WINDOW_S = 900.0
"""Requests that ended longer ago say nothing about now."""


def latency(summaries: Iterable[TraceSummary], now: float) -> Latency:
    """Return the times of requests that were answered in the last ``WINDOW_S``; ``now`` is Unix time."""
    ended = [(one.started_ns / NS + one.duration_s, one) for one in summaries if one.outcome == "ok"]
    recent = [(at, one) for at, one in ended if now - at <= WINDOW_S]
    return Latency(
        requests=len(recent),
        window_s=max((now - at for at, _ in recent), default=0.0),
        first_token=_spread([one.ttft_s for _, one in recent if one.ttft_s is not None]),
        each_token=_spread([one.token_s for _, one in recent if one.token_s is not None]),
        total=_spread([one.duration_s for _, one in recent]),
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the nearest-rank percentile of at least one value, in ascending order: always a value that occurred."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _spread(values: list[float]) -> Spread | None:
    if not values:
        return None
    values.sort()
    return Spread(percentile(values, 0.5), percentile(values, 0.9), percentile(values, 0.99))
