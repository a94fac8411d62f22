"""Several prompts in one request for completions: one answer, in the prompts' order, whatever their sessions do."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import openai
import pytest

from appliance.common.batches.values import MAX_PROMPTS
from appliance.common.errors import RateLimitedError, UnavailableError
from appliance.gateway.generate_request import (
    ChoiceFinished,
    Delta,
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    Started,
    TextPrompt,
    TokenPrompt,
)
from appliance.gateway.http.collecting import AT_ONCE
from tests.appliance.gateway.front.support import MODEL, Running


class Sessions:
    """The service's ``generate``: each prompt is answered with itself, later ones earlier; counts what runs at once."""

    def __init__(self, slots: int = 1_000) -> None:
        self.slots = slots
        self.asked: list[GenerateRequest] = []
        self.running = self.most = self.refused = self.ended = 0
        self.fails: Exception | None = None

    async def generate(self, _principal: object, request: GenerateRequest, *_: object) -> AsyncGenerator[Event, None]:
        """Answer, or refuse where there is no slot."""
        if self.running >= self.slots:
            self.refused += 1
            raise RateLimitedError("too many requests at once", retry_after_s=1.0)
        self.asked.append(request)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            yield Started(3, 1)
            text = (
                request.prompt.text if isinstance(request.prompt, TextPrompt) else str(list(request.prompt.token_ids))
            )
            if text == "fails" and self.fails is not None:
                raise self.fails
            await asyncio.sleep(0.001 * (30 - len(self.asked)) if text != "long" else 30)
            for choice in range(request.choices):
                yield Delta(text, (1,), choice=choice)
                if choice < request.choices - 1:
                    yield ChoiceFinished(choice, FinishReason.LENGTH)
            yield Finished(FinishReason.STOP, 3, 1, request.choices, choice=request.choices - 1)
            self.ended += 1
        finally:
            self.running -= 1


def begin(running: Running, **settings: Any) -> Sessions:
    """Have the service's sessions be these."""
    sessions = Sessions(**settings)
    running.service.generate = sessions.generate
    return sessions


def client(running: Running) -> openai.AsyncOpenAI:
    """The official client."""
    return openai.AsyncOpenAI(base_url=running.base_url + "/v1", api_key=running.key, max_retries=0)


async def test_choices_stand_in_the_order_of_the_prompts(running: Running) -> None:
    """Texts of several prompts with two choices each: indices as OpenAI counts them, usage is the sum, ids begin with
    the answer's, no two choices share a seed, and never more than ``AT_ONCE`` run."""
    sessions = begin(running)
    prompts = [f"prompt {number}" for number in range(20)]
    async with client(running) as official:
        answer = await official.completions.create(model=MODEL, prompt=prompts, n=2, seed=5)
    assert [one.index for one in answer.choices] == list(range(40))
    assert [one.text for one in answer.choices] == [prompt for prompt in prompts for _ in range(2)]
    assert {one.finish_reason for one in answer.choices} == {"length", "stop"}
    usage = answer.usage
    assert usage is not None and (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (60, 40, 100)
    assert usage.prompt_tokens_details is not None and usage.prompt_tokens_details.cached_tokens == 20
    ids = {one.prompt.text: one.request_id for one in sessions.asked}
    first = ids["prompt 0"]
    assert [ids[prompt] for prompt in prompts[1:]] == [f"{first}.{number}" for number in range(1, 20)]
    assert answer.id == "cmpl-" + first.removeprefix("req_")
    seeds = [one.sampling.seed + choice for one in sessions.asked for choice in range(2)]
    assert sorted(seeds) == list(range(5, 45))
    assert sessions.most == AT_ONCE


async def test_lists_of_token_ids(running: Running) -> None:
    """Arrays of ids are as many prompts; control: a flat array is one."""
    sessions = begin(running)
    async with client(running) as official:
        answer = await official.completions.create(model=MODEL, prompt=[[1, 2], [3]])
        await official.completions.create(model=MODEL, prompt=[1, 2])
    assert [one.text for one in answer.choices] == ["[1, 2]", "[3]"]
    assert [one.prompt for one in sessions.asked[2:]] == [TokenPrompt(array("I", [1, 2]))]


async def test_as_many_run_as_the_tenant_has_slots(running: Running) -> None:
    """With three slots, which the policy's refusals show, all prompts are answered. Control: with none, and nothing of
    the request that could end, it is refused."""
    sessions = begin(running, slots=3)
    async with client(running) as official:
        answer = await official.completions.create(model=MODEL, prompt=[str(number) for number in range(12)])
        assert [one.text for one in answer.choices] == [str(number) for number in range(12)]
        assert sessions.refused > 0 and sessions.most == 3
        sessions.slots = 0
        with pytest.raises(openai.RateLimitError):
            await official.completions.create(model=MODEL, prompt=["a", "b"])


async def test_one_that_fails_ends_all(running: Running) -> None:
    """The error is the answer, and what still ran is taken back at once."""
    sessions = begin(running)
    sessions.fails = UnavailableError("the engine's queue is full", retry_after_s=1.0)
    async with client(running) as official:
        with pytest.raises(openai.InternalServerError, match="queue is full"):
            await official.completions.create(model=MODEL, prompt=["long", "long", "fails"], timeout=10)
    assert (sessions.running, sessions.ended) == (0, 0)


async def test_a_client_that_leaves_takes_all_back(running: Running) -> None:
    """Every session is closed when the connection is."""
    sessions = begin(running)
    async with client(running) as official:
        with pytest.raises(openai.APITimeoutError):
            await official.completions.create(model=MODEL, prompt=["long"] * 4, timeout=0.3)
    async with asyncio.timeout(5):
        while sessions.running:
            await asyncio.sleep(0.01)
    assert len(sessions.asked) == 4


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ["a", "b"], "stream": True}, "stream"),
        ({"prompt": ["a", "b"], "echo": True}, "echo"),
        ({"prompt": ["a", "b"], "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": [[1], ["a"]]}, "prompt[1]"),
        ({"prompt": ["a", "\ud800"]}, "prompt[1]"),
        ({"prompt": ["a"] * (MAX_PROMPTS + 1)}, "prompt"),
    ],
)
async def test_a_mistake_is_named(running: Running, body: dict[str, Any], param: str) -> None:
    """A 400 with the field, before a session begins."""
    sessions = begin(running)
    async with httpx.AsyncClient(base_url=running.base_url, headers=running.authorization) as plain:
        answer = await plain.post("/v1/completions", content=json.dumps({"model": MODEL, **body}))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert not sessions.asked
