"""Fuzzed requests against the real appliance, both APIs: every answer is a documented one, and nothing dies of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.selftest import deaths, fuzzed_requests, g8_service
from appliance.selftest.real_appliance import RealAppliance, real_appliance
from isolation.host.process import Child
from tests.system.conftest import Appliance

pytestmark = pytest.mark.runsc


def seen_from_bench(appliance: Appliance) -> RealAppliance:
    """The shared demo as the checks of guarantees take it."""
    return RealAppliance(Child(appliance.process), appliance.state, appliance.log, appliance.ready)


@pytest.mark.parametrize("seed", [1])
async def test_fuzzed_requests_kill_nobody(appliance: Appliance, seed: int) -> None:
    """JSON, protobuf, heads and bytes of every kind from a caller with a key: typed answers, 0 deaths; some are served,
    so the engine was met."""
    real = seen_from_bench(appliance)
    before = await real.generations()
    found = await fuzzed_requests.send(real, 200, seed)
    assert found.odd == []
    assert found.sent == 200
    assert found.by_status["200"] > 20
    assert await real.generations() == before


def test_the_fuzz_is_the_same_again() -> None:
    """The seed decides every byte; and what it makes is of both kinds, sound and not."""
    import random

    first, second = ([fuzzed_requests.body(random.Random(n)) for n in range(200)] for _ in range(2))
    assert repr(first) == repr(second)
    assert len({repr(one) for one in first}) > 150
    assert len({fuzzed_requests.message(random.Random(n)).SerializeToString() for n in range(200)}) > 80


def test_an_untyped_error_would_be_seen() -> None:
    """The judgement can fail: a plain text error, and one that shows a path."""
    ok = b'HTTP/1.1 400 Bad\r\n\r\n{"error": {"message": "no", "type": "t", "param": null, "code": "c"}}'
    assert fuzzed_requests._is_typed(ok)
    assert not fuzzed_requests._is_typed(b"HTTP/1.1 400 Bad\r\n\r\nInvalid")
    assert not fuzzed_requests._is_typed(ok.replace(b'"no"', b'"/usr/lib/x.py failed"'))
    found = fuzzed_requests.Responses()
    found.add("500", False, "x")
    assert found.odd == ["500: x"]


@pytest.mark.full
@pytest.mark.timeout(7_200)
async def test_release_counts_of_requests_and_kills(runsc_path: Path) -> None:
    """100,000 fuzzed requests and 50 kills of every process: nothing dies of a request, nothing of the dead stays."""
    with real_appliance() as real:
        before = await real.generations()
        found = await fuzzed_requests.send(real, g8_service.REQUESTS[True], g8_service.SEED)
        assert found.odd == []
        assert await real.generations() == before
        died = await deaths.kill_again_and_again(real, g8_service.KILLS[True], g8_service.SEED)
    assert (died.wrong, died.untyped, died.left) == (0, 0, [])
    assert died.boots > 0
