"""The gateway's questions to the supervisor: each answer to its own, silence and refusals are typed errors."""

from __future__ import annotations

import asyncio

import pytest

from appliance.common.control import Attest, Attested, Control
from appliance.common.control_usage import UsageQuery, Used
from appliance.common.errors import UnavailableError
from appliance.gateway.sandboxes import questions as module
from appliance.gateway.sandboxes.questions import Questions, SupervisorQuestions


def attest(request: str) -> Attest:
    """A question for an attestation."""
    return Attest(request, "alpha", "m", "ab" * 8)


async def test_each_answer_goes_to_its_question() -> None:
    """Answers in another order, one that nobody waits for, and one that comes twice."""
    told: list[Control] = []
    asking = Questions[Attested](told.append, "attestation")
    tasks = [asyncio.create_task(asking.ask(attest(f"req_{number}"))) for number in range(2)]
    await asyncio.sleep(0)
    for request in ("req_1", "req_9", "req_1", "req_0"):
        asking.take(Attested(request, f"text of {request}", ""))
    assert [one.text for one in await asyncio.gather(*tasks)] == ["text of req_0", "text of req_1"]
    assert told == [attest(f"req_{number}") for number in range(2)]
    assert asking._waiting == {}


async def test_kinds_do_not_mix() -> None:
    """Two questions under one id, of two kinds: each has its own answer."""
    asking = SupervisorQuestions.to(lambda _: None)
    tasks = (
        asyncio.create_task(asking.attestations.ask(attest("req_1"))),
        asyncio.create_task(asking.usage.ask(UsageQuery("req_1", "alpha", ""))),
    )
    await asyncio.sleep(0)
    asking.usage.take(Used("req_1", 1, 2, {}, {}, {}, {}, ""))
    asking.attestations.take(Attested("req_1", "text", ""))
    attested, used = await asyncio.gather(*tasks)
    assert (attested.text, used.day) == ("text", 1)


async def test_a_refusal_and_silence_are_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor's reason reaches the caller; without an answer the wait ends, by the deadline or the bound."""
    asking = Questions[Attested](lambda _: None, "attestation")
    task = asyncio.create_task(asking.ask(attest("req_1")))
    await asyncio.sleep(0)
    asking.take(Attested("req_1", "", "no audit log"))
    with pytest.raises(UnavailableError, match="no audit log"):
        await task
    with pytest.raises(UnavailableError, match="can be made now"):
        await asking.ask(attest("req_1"), 0.01)
    monkeypatch.setattr(module, "ANSWER_S", 0.01)
    with pytest.raises(UnavailableError, match="can be made now"):
        await asking.ask(attest("req_1"), 60)
    assert asking._waiting == {}


async def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One beyond the bound is refused at once; those that wait get their answers."""
    monkeypatch.setattr(module, "MAX_WAITING", 1)
    asking = Questions[Attested](lambda _: None, "attestation")
    task = asyncio.create_task(asking.ask(attest("req_1")))
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError, match="too many"):
        await asking.ask(attest("req_2"))
    asking.take(Attested("req_1", "text", ""))
    assert (await task).text == "text"
