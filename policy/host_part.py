"""Part of each limit that one of several hosts has, where a policy's limits are those of a fleet. Pure.

The parts of all hosts add up to the limit, whatever becomes of any host or of what they share, so a fleet never serves
more than its policy says. Numbers are rounded down, and at least 1: a rate of fewer units a minute than there are
hosts is exceeded by the difference.
"""

from __future__ import annotations

from dataclasses import replace

from policy.model import Limits, PolicySet

DIVIDED = (
    "requests_per_minute",
    "tokens_per_minute",
    "input_tokens_per_minute",
    "output_tokens_per_minute",
    "requests_burst",
    "tokens_burst",
    "input_tokens_burst",
    "output_tokens_burst",
    "concurrency",
    "spend_per_day",
    "spend_per_month",
)
"""Limits that are of a fleet. All others are of one request or of one host's memory and disk, and hold on each host."""


def part_of(limits: Limits, hosts: int) -> Limits:
    """Return the part of one of ``hosts`` hosts."""
    values = {name: getattr(limits, name) for name in DIVIDED}
    return replace(limits, **{name: max(1, value // hosts) for name, value in values.items() if value is not None})


def host_part(policy: PolicySet, hosts: int) -> PolicySet:
    """Return a policy with each tenant's limits as one of ``hosts`` hosts has them; its digest stays that of the
    files."""
    if hosts == 1:
        return policy
    parts: dict[int, Limits] = {}
    tenants = {}
    for name, tenant in policy.tenants.items():
        # Thousands of tenants have few different limits, whose objects they share.
        part = parts.get(id(tenant.limits))
        if part is None:
            part = parts[id(tenant.limits)] = part_of(tenant.limits, hosts)
        tenants[name] = replace(tenant, limits=part)
    return replace(policy, tenants=tenants)
