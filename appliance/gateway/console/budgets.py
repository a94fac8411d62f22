"""Limits of spend with what is left of them, for the operator's page. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from appliance.gateway.console.usage_look import MAX_BUDGETS, Budget, Budgets
from appliance.gateway.request.spend import SpendParts
from policy.model import PolicySet


def budgets(policy: PolicySet, parts: Callable[[str], SpendParts], find: str) -> Budgets:
    """Return the limits of which the least is left, each tenant by the scarcer of its two.

    Args:
        policy: the one in force.
        parts: gives what a tenant has spent and reserved.
        find: part of the names of tenants that are wanted, folded; empty: all.
    """
    limited = [
        name
        for name, one in policy.tenants.items()
        if one.limits.bounds_spend and (not find or find in name.casefold())
    ]
    scarcest = (min(_limits(policy, name, parts(name)), key=_left) for name in limited)
    rows = heapq.nsmallest(MAX_BUDGETS, scarcest, key=lambda one: (_left(one), one.tenant))
    return Budgets(tuple(rows), len(limited))


def _limits(policy: PolicySet, tenant: str, parts: SpendParts) -> Iterator[Budget]:
    limits = policy.tenants[tenant].limits
    for period, limit, spent, reserved in (
        ("day", limits.spend_per_day, parts.day, parts.reserved),
        ("month", limits.spend_per_month, parts.month, parts.reserved + parts.reserved_before),
    ):
        if limit is not None:
            yield Budget(tenant, period, limit, spent, reserved)


def _left(one: Budget) -> float:
    """Part of the limit that is left; below 0 where a limit was lowered."""
    return 1 - (one.spent + one.reserved) / one.limit if one.limit else 0.0
