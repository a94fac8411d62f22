"""What a request is charged, and how long it takes, where another host works on its prompt."""

from __future__ import annotations

import asyncio
import time
from array import array
from typing import Any

import pytest

from appliance.common.errors import DeadlineExceededError
from appliance.common.split_config import SplitConfig
from appliance.gateway.generate_request import TokenPrompt
from appliance.gateway.telemetry import split_names as names
from isolation.ipc.engine import Submit
from isolation.ipc.messages import Finish
from tests.appliance.gateway.fleet.test_split import Prefilling, patient, prefilling
from tests.appliance.gateway.request.test_session import Stage, hear, say, stage

__all__ = ["patient", "prefilling", "stage"]


@pytest.mark.parametrize("how", ["leaves", "deadline", "refused"])
async def test_a_prompt_that_was_computed_elsewhere_is_charged(prefilling: Prefilling, stage: Stage, how: str) -> None:
    """A client that leaves, or whose deadline passes, while another host works on its prompt is charged for it, as
    where its own host's engine does: else other hosts computed long prompts for nothing. Where the other host has
    refused, and no engine took the request up, nothing is charged (control)."""
    stage.dependencies.prefiller = prefilling.asking()
    pair, deadline = stage.boot(), time.monotonic() + (1.0 if how == "deadline" else 60.0)
    session = stage.session(prompt=TokenPrompt(array("I", [3] * 190)), max_tokens=1, deadline=deadline)
    if how == "refused":
        prefilling.service.config = SplitConfig(tls=prefilling.hosts.tls("prefill"))

    async def run() -> None:
        async for _ in session.run():
            pass

    task = asyncio.ensure_future(run())
    await hear(pair, Submit)
    assert session.life.tokens.input == 0
    async with asyncio.timeout(20):  # The other host's first word comes a moment after its engine has the prompt.
        while how == "leaves" and not session._begun:
            await asyncio.sleep(0.002)
    if how == "deadline":
        with pytest.raises(DeadlineExceededError):
            await task
    else:
        task.cancel()
        await asyncio.wait((task,))
    assert session.life.tokens.input == (0 if how == "refused" else 190)
    assert session.life.outcome.started is False


async def test_a_host_that_only_says_that_it_works_ends_no_request(prefilling: Prefilling, stage: Stage) -> None:
    """The other host says that it works on the prompt, and never ends. With half of its time left the request enters
    the local engine, which answers it before its deadline."""
    stage.dependencies.prefiller = prefilling.asking()
    pair, ids = stage.boot(), array("I", [3] * 190)
    session = stage.session(prompt=TokenPrompt(ids), max_tokens=1, deadline=time.monotonic() + 4)

    async def events() -> list[Any]:
        return [one async for one in session.run()]

    task = asyncio.ensure_future(events())
    await hear(pair, Submit)
    local = await hear(pair, Submit)
    say(pair, local.request, 7, finish=Finish.LENGTH, started=True)
    assert (await task)[-1].input_tokens == 190
    assert prefilling.asked[f"{names.SPLIT_ASKED}:late"] == 1
