"""Several choices, echoes and log-probabilities of prompts: the official OpenAI client over a real socket."""

from __future__ import annotations

import openai

from appliance.gateway.generate_request import (
    ChoiceFinished,
    Delta,
    Finished,
    FinishReason,
    PromptToken,
    PromptTokens,
    Started,
    TokenLogprob,
)
from tests.appliance.gateway.front.support import MODEL, Running

MESSAGES = [{"role": "user", "content": "hi"}]


def _client(running: Running) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=running.base_url + "/v1", api_key=running.key, max_retries=0)


def _choices_script() -> list[object]:
    """Two choices whose tokens come in turn; the second one ends first."""
    return [
        Started(5, 0),
        Delta("a", (1,), choice=0),
        Delta("x", (2,), choice=1),
        Delta("y", (3,), choice=1),
        ChoiceFinished(1, FinishReason.STOP),
        Delta("b", (4,), choice=0),
        Finished(FinishReason.LENGTH, 5, 0, 4, choice=0),
    ]


async def test_several_choices_whole_and_streamed(running):
    """Each choice has its index, text and reason; usage counts the prompt once and all outputs."""
    running.service.script = _choices_script()
    async with _client(running) as client:
        whole = await client.chat.completions.create(model=MODEL, messages=MESSAGES, n=2)
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, n=2, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        plain = await client.completions.create(model=MODEL, prompt="p", n=2)
    assert running.service.requests[0].choices == 2
    assert [(one.index, one.message.content, one.finish_reason) for one in whole.choices] == [
        (0, "ab", "length"),
        (1, "xy", "stop"),
    ]
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (5, 4)
    assert [(one.index, one.text) for one in plain.choices] == [(0, "ab"), (1, "xy")]
    parts = [choice for chunk in chunks for choice in chunk.choices]
    assert sorted(part.index for part in parts if part.delta.role) == [0, 1]
    texts = ["".join(part.delta.content or "" for part in parts if part.index == index) for index in (0, 1)]
    assert texts == ["ab", "xy"]
    reasons = [(part.index, part.finish_reason) for part in parts if part.finish_reason]
    assert reasons == [(1, "stop"), (0, "length")]
    assert chunks[-1].usage.total_tokens == 9


def _prompt_script(text: str) -> list[object]:
    """A prompt of two tokens with one alternative, and one token of output."""
    first = PromptToken(1, b"ab", None)
    second = PromptToken(2, b"c", -0.5, ((2, b"c", -0.5), (3, b"d", -1.5)))
    output = TokenLogprob(4, b"e", -0.25, ((4, b"e", -0.25), (5, b"f", -3.0)))
    return [
        Started(2, 0),
        PromptTokens(text, (first, second)),
        Delta("e", (4,), (output,)),
        Finished(FinishReason.LENGTH, 2, 0, 1),
    ]


async def test_an_echo_with_logprobs(running):
    """As evaluation harnesses ask for it: the prompt's tokens first, the first one without a number, offsets going on;
    streamed, the echo is the first chunk."""
    running.service.script = _prompt_script("abc")
    ask = {"model": MODEL, "prompt": "abc", "echo": True, "logprobs": 2, "max_tokens": 1}
    async with _client(running) as client:
        answer = await client.completions.create(**ask)
        chunks = [chunk async for chunk in await client.completions.create(**ask, stream=True)]
    assert (running.service.requests[0].echo, running.service.requests[0].prompt_logprobs) == (True, 2)
    (choice,) = answer.choices
    assert choice.text == "abce"
    assert choice.logprobs.tokens == ["ab", "c", "e"]
    assert choice.logprobs.token_logprobs == [None, -0.5, -0.25]
    assert choice.logprobs.top_logprobs == [None, {"c": -0.5, "d": -1.5}, {"e": -0.25, "f": -3.0}]
    assert choice.logprobs.text_offset == [0, 2, 3]
    assert [chunk.choices[0].text for chunk in chunks] == ["abc", "e", ""]
    assert chunks[0].choices[0].logprobs.token_logprobs == [None, -0.5]
    assert chunks[1].choices[0].logprobs.text_offset == [3]


async def test_prompt_logprobs_as_vllm_has_them(running):
    """Beside the choices of a chat, in the choice of a completion: by id, with ranks."""
    running.service.script = _prompt_script("")
    extra = {"extra_body": {"prompt_logprobs": 2}}
    async with _client(running) as client:
        chat = await client.chat.completions.create(model=MODEL, messages=MESSAGES, **extra)
        plain = await client.completions.create(model=MODEL, prompt="abc", **extra)
    expected = [
        None,
        {
            "2": {"logprob": -0.5, "rank": 1, "decoded_token": "c"},
            "3": {"logprob": -1.5, "rank": 2, "decoded_token": "d"},
        },
    ]
    assert chat.model_extra["prompt_logprobs"] == expected
    assert plain.choices[0].model_extra["prompt_logprobs"] == expected
    assert plain.choices[0].text == "e"
