"""What the local engine is told of a prompt while another host works on it, and what is counted of it then."""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from typing import Any

import pytest

from appliance.common.split_config import SplitConfig
from appliance.gateway.fleet import prefill_call
from appliance.gateway.generate_request import TokenPrompt
from appliance.gateway.telemetry import split_names as names
from isolation.ipc.codec import Message
from isolation.ipc.engine import Abort, Started, StepOutput, Submit
from isolation.ipc.messages import Finish
from isolation.ipc.prefetch import Prefetch
from tests.appliance.gateway.fleet.test_split import Prefilling, fake, patient, prefilling, until
from tests.appliance.gateway.pairs import Pair
from tests.appliance.gateway.request.test_session import Stage, say, stage

__all__ = ["patient", "prefilling", "stage"]

LONG = array("I", [3] * 192)
"""Twelve whole blocks."""


class Heard:
    """What the one scripted engine was told, which is that of both hosts here."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.messages: list[Message] = []
        self.given = Counter[type[Message]]()

    async def next(self, kind: type[Message]) -> Any:
        """Wait for a message of this kind that was not given yet."""
        given = self.given[kind]
        await until(lambda: len(self.all(kind)) > given)
        self.given[kind] += 1
        return self.all(kind)[given]

    def all(self, kind: type[Message]) -> list[Any]:
        """All of a kind that came so far."""
        self.messages += self.pair.guest.receive(100)
        return [one for one in self.messages if isinstance(one, kind)]


def asked(stage: Stage) -> asyncio.Task[list[Any]]:
    """A request whose prompt another host may compute, as it runs."""
    session = stage.session(prompt=TokenPrompt(LONG), max_tokens=1)

    async def events() -> list[Any]:
        return [one async for one in session.run()]

    return asyncio.ensure_future(events())


async def test_the_engine_takes_a_prompt_while_another_host_computes_it(prefilling: Prefilling, stage: Stage) -> None:
    """As soon as the other host works on a prompt the local engine is told of it, once; when it is computed, the
    request follows with the word that it is coming, and what is taken ends behind it. Of twelve blocks the engine had
    eleven: one was computed again, and is counted."""
    stage.dependencies.prefiller = prefilling.asking()
    heard = Heard(stage.boot())
    task = asked(stage)
    there = await heard.next(Submit)
    taking = await heard.next(Prefetch)
    assert (taking.namespace, taking.token_ids) == (there.namespace, LONG)
    await asyncio.sleep(0.25)  # Two further words of the other host.
    assert len(heard.all(Prefetch)) == 1 and heard.all(Abort) == []
    say(heard.pair, there.request, 7, finish=Finish.LENGTH, started=True)
    here = await heard.next(Submit)
    assert here.coming and here.request != taking.request
    heard.pair.guest.send(
        StepOutput(
            array("Q", [here.request]),
            array("I", [7]),
            bytes([Finish.LENGTH]),
            starts=(Started(here.request, 176, 0, 0, 0, 160),),
        )
    )
    assert (await task)[-1].cached_tokens == 176
    assert (await heard.next(Abort)).request == taking.request
    counts = prefilling.asked
    assert (counts[f"{names.SPLIT_TOKENS}:"], counts[f"{names.SPLIT_RECOMPUTED}:"]) == (160, 1)


@pytest.mark.parametrize("how", ["refused", "away", "silent"])
async def test_nothing_is_taken_of_what_no_host_computes(
    prefilling: Prefilling, stage: Stage, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A host that refuses, is away or says nothing has the engine take nothing: the request follows alone."""
    monkeypatch.setattr(prefill_call, "SILENCE_S", 0.25 if how == "silent" else 10.0)
    if how == "refused":
        prefilling.service.config = SplitConfig(tls=prefilling.hosts.tls("prefill"))
    async with fake(prefilling.hosts, b"") as port:
        stage.dependencies.prefiller = prefilling.asking(port={"refused": 0, "away": 1, "silent": port}[how])
        heard = Heard(stage.boot())
        task = asked(stage)
        here = await heard.next(Submit)
        say(heard.pair, here.request, 7, finish=Finish.LENGTH, started=True)
        await task
    assert not here.coming and heard.all(Prefetch) == heard.all(Abort) == []


@pytest.mark.parametrize("how", ["leaves", "broken"])
async def test_what_is_taken_ends_with_the_other_host_s_work(prefilling: Prefilling, stage: Stage, how: str) -> None:
    """A client that leaves while the prompt is computed, and an engine of the other host that fails, end what the local
    engine takes; of the second the request follows, without the word that its prompt is coming."""
    stage.dependencies.prefiller = prefilling.asking()
    heard = Heard(stage.boot())
    task = asked(stage)
    there = await heard.next(Submit)
    taking = await heard.next(Prefetch)
    if how == "leaves":
        task.cancel()
        await asyncio.wait((task,))
    else:
        prefilling.service.runs._keys = lambda: None  # type: ignore[assignment,return-value]  # no keys any more
    await until(lambda: taking.request in [one.request for one in heard.all(Abort)])
    if how == "broken":
        here = await heard.next(Submit)
        assert not here.coming and here.request != there.request
        say(heard.pair, here.request, 7, finish=Finish.LENGTH, started=True)
        await task
