"""Bytes of bodies in memory: bounded for a tenant and for all, always given back."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.common.errors import RateLimitedError, UnavailableError
from appliance.gateway.http.body import TENANT_BYTES, BodyBudget
from tests.appliance.gateway.front.support import MODEL, post, talk


def test_a_tenant_is_stopped_at_its_own_limit():
    """One tenant's bodies never take another's share, and what ends is given back."""
    budget = BodyBudget(tenant_bytes=10, total_bytes=15)
    with budget.counting("a") as first, budget.counting("b") as second:
        first(10)
        with pytest.raises(RateLimitedError):
            first(1)
        second(5)
        with pytest.raises(UnavailableError):
            second(1)
    with budget.counting("a") as again:
        again(10)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 8), max_size=4)), max_size=12))
def test_everything_is_given_back(bodies):
    """Whatever is taken and refused, an empty budget is empty: the full amounts can be taken again."""
    budget = BodyBudget(tenant_bytes=12, total_bytes=20)
    for tenant, sizes in bodies:
        try:
            with budget.counting(tenant) as count:
                for size in sizes:
                    count(size)
        except (RateLimitedError, UnavailableError):
            continue
    with budget.counting("a") as first, budget.counting("b") as second:
        first(12)
        second(8)


async def test_parallel_giants_of_one_tenant_are_bounded(running):
    """Thirty half-sent 4 MB bodies: some are refused as too many, and another tenant is served meanwhile."""
    body = b" " * 4_000_000
    head = post("/v1/chat/completions", b"", running.authorization).replace(
        b"content-length: 0", b"content-length: 4000001"
    )
    senders = [asyncio.ensure_future(talk(running.front_ends.http_port, head + body)) for _ in range(30)]
    await asyncio.wait(senders, return_when=asyncio.FIRST_COMPLETED, timeout=10)
    assert {type(error) for _, error, _ in running.service.refusals} == {RateLimitedError}
    assert 30 * len(body) > TENANT_BYTES
    good = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "x"}]}).encode()
    other = {"authorization": f"Bearer {running.other_key}"}
    answer = await talk(running.front_ends.http_port, post("/v1/chat/completions", good, other))
    assert answer.startswith(b"HTTP/1.1 200 ")
    for sender in senders:
        sender.cancel()
    await asyncio.gather(*senders, return_exceptions=True)
