"""The gateway's questions for attestations: each answer to its own, silence and refusals are typed errors."""

from __future__ import annotations

import asyncio

import pytest

from appliance.common.control import Attest, Attested, Control
from appliance.common.errors import UnavailableError
from appliance.gateway.sandboxes import attestations as module
from appliance.gateway.sandboxes.attestations import Attestations


async def test_each_answer_goes_to_its_question() -> None:
    """Answers in another order, one that nobody waits for, and one that comes twice."""
    told: list[Control] = []
    asking = Attestations(told.append)
    tasks = [asyncio.create_task(asking.fetch(f"req_{number}", "alpha", "m", "ab" * 8, 5)) for number in range(2)]
    await asyncio.sleep(0)
    for request in ("req_1", "req_9", "req_1", "req_0"):
        asking.take(Attested(request, f"text of {request}", ""))
    assert await asyncio.gather(*tasks) == ["text of req_0", "text of req_1"]
    assert told == [Attest(f"req_{number}", "alpha", "m", "ab" * 8) for number in range(2)]
    assert asking._waiting == {}


async def test_a_refusal_and_silence_are_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor's reason reaches the caller; without an answer the wait ends, by the deadline or the bound."""
    asking = Attestations(lambda _: None)
    task = asyncio.create_task(asking.fetch("req_1", "alpha", "m", "ab" * 8, 5))
    await asyncio.sleep(0)
    asking.take(Attested("req_1", "", "no audit log"))
    with pytest.raises(UnavailableError, match="no audit log"):
        await task
    with pytest.raises(UnavailableError, match="can be made now"):
        await asking.fetch("req_1", "alpha", "m", "ab" * 8, 0.01)
    monkeypatch.setattr(module, "ANSWER_S", 0.01)
    with pytest.raises(UnavailableError, match="can be made now"):
        await asking.fetch("req_1", "alpha", "m", "ab" * 8, 60)
    assert asking._waiting == {}


async def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One beyond the bound is refused at once; those that wait get their answers."""
    monkeypatch.setattr(module, "MAX_WAITING", 1)
    asking = Attestations(lambda _: None)
    task = asyncio.create_task(asking.fetch("req_1", "alpha", "m", "ab" * 8, 5))
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError, match="too many"):
        await asking.fetch("req_2", "alpha", "m", "ab" * 8, 5)
    asking.take(Attested("req_1", "text", ""))
    assert await task == "text"
