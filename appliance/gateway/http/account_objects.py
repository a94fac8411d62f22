"""A tenant's limits and usage -> the answers of ``/v1/limits`` and ``/v1/usage``; pure. Amounts are exact texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from appliance.gateway.tenant_account import (
    LimitState,
    LimitUnit,
    ModelUse,
    PeriodUse,
    TenantLimits,
    TenantUsed,
    UserUse,
)
from policy.prices import amount_text

_DIGITS_S = 3


def limits_object(found: TenantLimits) -> dict[str, Any]:
    """The answer of ``/v1/limits``."""
    return {
        "object": "limits",
        "tenant": found.tenant,
        "currency": found.currency or None,
        "limits": [_limit(one) for one in found.limits],
        "running_requests": found.running,
        "waiting_requests": found.waiting,
        "max_context_tokens": found.max_context_tokens,
        "max_output_tokens": found.max_output_tokens,
    }


def usage_object(found: TenantUsed) -> dict[str, Any]:
    """The answer of ``/v1/usage``."""
    return {
        "object": "usage",
        "tenant": found.tenant,
        "currency": found.currency or None,
        "day": _period(found.day),
        "month": _period(found.month),
    }


def _limit(one: LimitState) -> dict[str, Any]:
    money = one.unit is LimitUnit.BILLIONTHS
    numbers = {name: getattr(one, name) for name in ("limit", "most", "left")}
    return {
        "name": one.name,
        "unit": "currency" if money else one.unit.value,
        **({name: amount_text(value) for name, value in numbers.items()} if money else numbers),
        "full_in_s": None if one.full_in_s is None else round(one.full_in_s, _DIGITS_S),
        "exceeded": one.exceeded,
    }


def _period(period: PeriodUse) -> dict[str, Any]:
    return {
        "begins_at": period.begins_at,
        "ends_at": period.ends_at,
        "total": _numbers(period.models),
        "models": [{"model": one.model or None, **_numbers([one])} for one in period.models],
        "users": [{"user": one.user or None, **_numbers([one])} for one in period.users],
    }


def _numbers(uses: Sequence[ModelUse] | Sequence[UserUse]) -> dict[str, Any]:
    rows = [asdict(one) for one in uses]
    names = ("requests", "input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")
    sums: dict[str, Any] = {name: sum(row[name] for row in rows) for name in names}
    return sums | {"cost": amount_text(sum(one.cost for one in uses))}
