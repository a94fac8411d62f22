"""What a caller that sends no prompt may hold, and how long a host that works may be silent."""

from __future__ import annotations

import asyncio

import pytest

from appliance.gateway.fleet import prefill_asking, prefill_call, prefill_service
from appliance.gateway.fleet.prefill_choice import has_part
from tests.appliance.gateway.fleet.test_split import Prefilling, answered, patient, prefilling, until
from tests.appliance.gateway.request.test_session import stage

__all__ = ["patient", "prefilling", "stage"]


async def test_a_call_without_a_prompt_holds_no_place(prefilling: Prefilling, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one place to compute in, three calls that send no prompt leave it free: a fourth is computed meanwhile. They
    end with their time, and nothing stays counted. Control: while they are there they are counted as such."""
    monkeypatch.setattr(prefill_service, "MAX_RUNS", 2)
    monkeypatch.setattr(prefill_service, "MESSAGE_S", 15.0)
    pair, asking = prefilling.stage.boot(), prefilling.asking()
    plain = prefill_call._Exchange._send_body

    def send(exchange: prefill_call._Exchange) -> None:
        """Send the body of one prompt alone."""
        if b"req_sent" in bytes(exchange._body):
            plain(exchange)

    monkeypatch.setattr(prefill_call._Exchange, "_send_body", send)
    silent = [asyncio.ensure_future(asking.compute(prefilling.prompt())) for _ in range(3)]
    await until(lambda: prefilling.service._reading.total() == 3)
    assert prefilling.service.running == 0
    other = prefilling.asking()
    assert (await answered(pair, other.compute(prefilling.prompt(request_id="req_sent"))))[0] == "computed"
    for one in silent:
        one.cancel()
    await asyncio.wait(silent)
    await until(lambda: not prefilling.service._reading and not prefilling.service.running)


def test_callers_that_send_nothing_leave_room_to_others() -> None:
    """Four hosts that begin as many calls as they may hold all but some places of those in which prompts arrive: a
    fifth still gets one."""
    held = [0] * 5
    for _ in range(100):
        for host in range(4):
            held[host] += has_part(held[host], prefill_service.MAX_READING - sum(held))
    assert sum(held) < prefill_service.MAX_READING and has_part(0, prefill_service.MAX_READING - sum(held))


@pytest.mark.parametrize(("silence_s", "ask_s", "outcome"), [(30.0, 2.0, "late"), (0.2, 30.0, "silent")])
async def test_a_host_that_works_may_be_silent_for_longer(
    prefilling: Prefilling, monkeypatch: pytest.MonkeyPatch, silence_s: float, ask_s: float, outcome: str
) -> None:
    """A host that said once that it works is waited for, up to the deadline, though no second word comes. Control: one
    that is silent for longer than it may is given up."""
    monkeypatch.setattr(prefill_service, "PROGRESS_S", 60.0)
    monkeypatch.setattr(prefill_call, "WORKING_SILENCE_S", silence_s)
    monkeypatch.setattr(prefill_asking, "ASK_S", ask_s)
    prefilling.stage.boot()
    begun = list[None]()
    assert await prefilling.asking().compute(prefilling.prompt(), lambda: begun.append(None)) == outcome
    assert len(begun) == 1
