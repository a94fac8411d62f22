"""Rates of a tenant: which buckets a request takes from, and what becomes of one that exceeds a limit. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from policy.limits import Bucket, Rate, full
from policy.model import Exceeded, Limits
from policy.request import Usage

_rate = lru_cache(maxsize=4_096)(Rate)
"""Rates by their two numbers: a decision asks for up to six, and making one takes four times as long as finding it."""


def request_rate(limits: Limits) -> Rate:
    """Return the rate of requests."""
    return _rate(limits.requests_per_minute, limits.requests_burst)


def token_rate(limits: Limits) -> Rate:
    """Return the rate of prompt and output tokens together."""
    return _rate(limits.tokens_per_minute, limits.tokens_burst)


def input_rate(limits: Limits) -> Rate | None:
    """Return the rate of prompt tokens; None where they have none of their own."""
    each = limits.input_tokens_per_minute
    return None if each is None else _rate(each, limits.input_tokens_burst)


def output_rate(limits: Limits) -> Rate | None:
    """Return the rate of output tokens; None where they have none of their own."""
    each = limits.output_tokens_per_minute
    return None if each is None else _rate(each, limits.output_tokens_burst)


def filled(bucket: Bucket | None, rate: Rate, now: float) -> Bucket:
    """Return the bucket, or a full one where nothing was taken yet."""
    return full(rate, now) if bucket is None else bucket


def overdraft(exceeded: Exceeded, capacity: int) -> int:
    """Return the units that may be taken below zero: once the burst by requests that are downgraded."""
    return capacity if exceeded is Exceeded.DOWNGRADE else 0


def waits(limits: Limits, usage: Usage, exceeded: Exceeded, wait: float | None) -> bool:
    """Return whether a request that exceeds a limit, and may pass in ``wait`` seconds, waits in the gateway."""
    return (
        exceeded is Exceeded.QUEUE
        and wait is not None
        and wait <= limits.max_queue_s
        and usage.queued < limits.max_queued_requests
    )


def most_input(limits: Limits) -> int:
    """Return the tokens of the longest prompt that may ever be served."""
    capacities = [rate.capacity for rate in (token_rate(limits), input_rate(limits)) if rate is not None]
    return min(limits.max_context_tokens, *capacities)


BURSTS: Mapping[str, str] = {
    "requests_burst": "requests_per_minute",
    "tokens_burst": "tokens_per_minute",
    "input_tokens_burst": "input_tokens_per_minute",
    "output_tokens_burst": "output_tokens_per_minute",
}
"""Field of ``Limits`` with a burst -> field of its rate."""

TREATMENTS: Mapping[str, str] = {
    "requests_exceeded": "requests_per_minute",
    "tokens_exceeded": "tokens_per_minute",
    "input_tokens_exceeded": "input_tokens_per_minute",
    "output_tokens_exceeded": "output_tokens_per_minute",
    "concurrency_exceeded": "concurrency",
    "kv_tokens_exceeded": "kv_tokens",
}
"""Field of ``Limits`` with the treatment of requests beyond a limit -> field of the limit."""


def effective(limits: Limits, name: str) -> int | Exceeded | None:
    """Return a burst or a treatment in force: a burst of None as one minute's units; None where the limit is absent."""
    value: int | Exceeded | None = getattr(limits, name)
    rate: int | None = getattr(limits, BURSTS.get(name) or TREATMENTS[name])
    return value if rate is not None and value is not None else rate
