"""Limits of a tenant with what is left of them, from its account. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from appliance.gateway.request.accounts import Account
from appliance.gateway.tenant_account import LimitState, LimitUnit
from policy.limits import Bucket, Rate, level
from policy.model import Exceeded, Limits
from policy.request import Spend


def limit_states(limits: Limits, account: Account, spend: Spend, now: float) -> tuple[LimitState, ...]:
    """Return every limit that there is, in the order of the policy's keys. ``now`` is the account's clock."""
    rates, unit, most = account.rates, LimitUnit.REQUESTS, limits.concurrency
    return (
        _rate(
            "requests_per_minute", LimitUnit.REQUESTS, rates.requests, account.requests, limits.requests_exceeded, now
        ),
        _rate("tokens_per_minute", LimitUnit.TOKENS, rates.tokens, account.tokens, limits.tokens_exceeded, now),
        *_own("input_tokens_per_minute", rates.input, account.input, limits.input_tokens_exceeded, now),
        *_own("output_tokens_per_minute", rates.output, account.output, limits.output_tokens_exceeded, now),
        LimitState(
            "concurrency", unit, most, most, max(0, most - account.concurrency), None, limits.concurrency_exceeded.value
        ),
        *_kv_tokens(limits, account.held_input + account.held_output),
        *_spend("spend_per_day", limits.spend_per_day, spend.day, spend.day_left_s),
        *_spend("spend_per_month", limits.spend_per_month, spend.month, spend.month_left_s),
    )


def _own(name: str, rate: Rate | None, bucket: Bucket | None, exceeded: Exceeded, now: float) -> Iterator[LimitState]:
    if rate is not None and bucket is not None:
        yield _rate(name, LimitUnit.TOKENS, rate, bucket, exceeded, now)


def _kv_tokens(limits: Limits, held: int) -> Iterator[LimitState]:
    most = limits.kv_tokens
    if most is not None:
        treatment = limits.kv_tokens_exceeded.value
        yield LimitState("kv_tokens", LimitUnit.TOKENS, most, most, max(0, most - held), None, treatment)


def _rate(name: str, unit: LimitUnit, rate: Rate, bucket: Bucket, exceeded: Exceeded, now: float) -> LimitState:
    left = level(bucket, rate, now)
    wait = max(0.0, rate.capacity - left) / rate.per_second
    return LimitState(name, unit, rate.per_minute, rate.capacity, max(0, int(left)), wait, exceeded.value)


def _spend(name: str, limit: int | None, spent: int, left_s: float) -> Iterator[LimitState]:
    if limit is not None:
        yield LimitState(name, LimitUnit.BILLIONTHS, limit, limit, max(0, limit - spent), left_s, Exceeded.REFUSE.value)
