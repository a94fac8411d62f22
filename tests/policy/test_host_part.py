"""A host's part of a fleet's limits."""

from __future__ import annotations

from dataclasses import fields

from hypothesis import given
from hypothesis import strategies as st

from policy.host_part import DIVIDED, host_part, part_of
from policy.loader import Source, load_policy
from policy.model import Limits

TEXT = """
version: 1
prices: {currency: EUR, rules: [{models: ["*"], input: 1, output: 1}]}
tenants:
  one:
    credentials: ["key:a"]
    models: ["m"]
    limits: {requests_per_minute: 101, tokens_per_minute: 1000, concurrency: 3, max_context_tokens: 100,
             max_output_tokens: 50, spend_per_day: 1, kv_tokens: 500}
"""


@given(st.integers(2, 16), st.integers(1, 10**6))
def test_parts_add_up_to_the_limit_at_most(hosts: int, number: int) -> None:
    """For each limit that is divided, where it is not below the number of hosts; all others are whole."""
    numbers = {one.name: number for one in fields(Limits) if one.type in ("int", "int | None")}
    whole = Limits(**numbers)
    part = part_of(whole, hosts)
    for name in numbers:
        found = getattr(part, name)
        if name in DIVIDED:
            assert found == max(1, number // hosts)
            assert found * hosts <= number or number < hosts
        else:
            assert found == number


def test_a_policy_keeps_its_digest_and_what_has_no_limit() -> None:
    """Hosts that divide one policy do not differ by its digest; one host has the whole; no limit stays none."""
    policy = load_policy([Source("p.yaml", TEXT)])
    assert host_part(policy, 1) is policy
    part = host_part(policy, 2)
    limits = part.tenants["one"].limits
    assert part.digest == policy.digest
    assert (limits.requests_per_minute, limits.concurrency, limits.spend_per_day) == (50, 1, 500_000_000)
    assert (limits.spend_per_month, limits.requests_burst, limits.kv_tokens, limits.max_context_tokens) == (
        None,
        None,
        500,
        100,
    )
