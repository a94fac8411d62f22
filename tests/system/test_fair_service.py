"""Tenants beside each other on the running appliance, by counts: nothing here looks at a clock but for deadlines."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from tests.system.conftest import PLAIN, Appliance

pytestmark = pytest.mark.runsc

STREAMS = 12
MODEL = "athanor-mini"


def ask(appliance: Appliance, tenant: str, tokens: int, **extra: object) -> int:
    """One completion to its end; gives its output tokens."""
    extra["ignore_eos"] = True
    answer = appliance.openai(tenant).completions.create(
        model=MODEL, prompt="Count from one:", max_tokens=tokens, temperature=0, extra_body=extra
    )
    assert answer.usage is not None
    return answer.usage.completion_tokens


@pytest.mark.full
def test_a_light_tenant_is_served_while_another_floods(appliance: Appliance) -> None:
    """One tenant keeps 12 requests of 400 tokens going. A neighbour's ten short requests, one after the other, are
    all answered before the flood could have ended even a few of its rounds, and the flood goes on meanwhile."""
    stop = threading.Event()
    rounds = [0] * STREAMS

    def flood(number: int) -> None:
        while not stop.is_set():
            assert ask(appliance, "alpha", 400) == 400
            rounds[number] += 1

    with ThreadPoolExecutor(STREAMS) as pool:
        jobs = [pool.submit(flood, number) for number in range(STREAMS)]
        while not sum(rounds):
            assert not any(job.done() for job in jobs)
        before = sum(rounds)
        assert [ask(appliance, "beta", 4) for _ in range(10)] == [4] * 10
        during = sum(rounds) - before
        stop.set()
        for job in jobs:
            job.result()
    assert min(rounds) >= 1, "a stream of the flood starved"
    # Ten short requests are 50 steps of their own, and waiting for a place each time would be ten rounds of the flood.
    # A round is 400 steps, so that what ten HTTP requests cost on a busy machine stays far below eight of them.
    assert during <= 8 * STREAMS
    lines = httpx.get(appliance.ready["admin"] + "/metrics", timeout=10, verify=PLAIN).text.splitlines()
    defects = [line for line in lines if line.startswith("athanor_engine_defects{")]
    assert defects
    assert all(float(line.rpartition(" ")[2]) == 0 for line in defects)


@pytest.mark.parametrize("tier", ["flex", "priority", "default"])
def test_a_service_tier_is_taken(appliance: Appliance, tier: str) -> None:
    """A request may name any of OpenAI's tiers, and is served."""
    assert ask(appliance, "alpha", 3, service_tier=tier) == 3


def test_an_unknown_tier_is_refused_with_its_field(appliance: Appliance) -> None:
    """Anything else is the caller's mistake."""
    with pytest.raises(openai.BadRequestError) as caught:
        ask(appliance, "alpha", 3, service_tier="first")
    assert caught.value.param == "service_tier"
