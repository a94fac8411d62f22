"""Percentiles of the times of the last requests. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from appliance.common.outcomes import OK
from appliance.common.status import Latency, Spread
from appliance.gateway.telemetry.store import Ended

WINDOW_S = 900.0
"""Requests that ended longer ago say nothing about now."""


def latency(ended: Iterable[Ended]) -> Latency:
    """Return the times of those requests that were answered, and not longer ago than ``WINDOW_S``."""
    answered = [one for one in ended if one.summary.outcome == OK and one.age_s <= WINDOW_S]
    recent = [one.summary for one in answered]
    return Latency(
        requests=len(recent),
        window_s=max((one.age_s for one in answered), default=0.0),
        first_token=_spread([one.ttft_s for one in recent if one.ttft_s is not None]),
        each_token=_spread([one.token_s for one in recent if one.token_s is not None]),
        total=_spread([one.duration_s for one in recent]),
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the nearest-rank percentile of at least one value, in ascending order: always a value that occurred."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _spread(values: list[float]) -> Spread | None:
    if not values:
        return None
    values.sort()
    return Spread(percentile(values, 0.5), percentile(values, 0.9), percentile(values, 0.99))
