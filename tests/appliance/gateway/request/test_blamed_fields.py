"""Errors about a prompt name the field by which the caller sent it, whichever front end it came through."""

from __future__ import annotations

import asyncio
import json
import time
from array import array
from typing import Any

import pytest

from appliance.common.errors import ContextLengthError, InvalidGrammarError, InvalidRequestError
from appliance.gateway.front.request_builder import Stamp
from appliance.gateway.generate_request import EmbedRequest, GenerateRequest, Operation, TokenPrompt
from appliance.gateway.grpc.generated import inference_pb2 as pb
from appliance.gateway.grpc.message_mapping import to_embed_request, to_request
from appliance.gateway.http import openai, openai_embeddings
from appliance.gateway.sandboxes.grammars import PARAM as GRAMMAR
from appliance.gateway.sandboxes.model_sandboxes import ModelSandboxes
from appliance.gateway.sandboxes.text_client import TextClient
from isolation.ipc.engine import RequestFailure, StepOutput, Submit
from isolation.ipc.messages import Failed, FailureCode
from tests.appliance.gateway.request.test_session import Stage, hear

STAMP = Stamp("r", seed=1)


def http(operation: Operation, **fields: object) -> GenerateRequest:
    """A request over HTTP."""
    return openai.parse(operation, json.dumps({"model": "m", **fields}).encode(), STAMP).request


def http_embed(value: object) -> EmbedRequest:
    """A request for vectors over HTTP."""
    return openai_embeddings.parse(json.dumps({"model": "m", "input": value}).encode(), STAMP).request


CHAT = [{"role": "user", "content": "hi"}]
TURNS = pb.Conversation(messages=[pb.ChatMessage(role=pb.ROLE_USER, content="hi")])
IDS = pb.TokenIds(ids=[1])
GENERATE = [
    (http(Operation.CHAT, messages=CHAT), "messages"),
    (http(Operation.TEXT_COMPLETION, prompt="hi"), "prompt"),
    (http(Operation.TEXT_COMPLETION, prompt=[1]), "prompt"),
    (to_request(pb.GenerateRequest(model="m", conversation=TURNS), STAMP), "conversation.messages"),
    (to_request(pb.GenerateRequest(model="m", text="hi"), STAMP), "text"),
    (to_request(pb.GenerateRequest(model="m", token_ids=IDS), STAMP), "token_ids.ids"),
]
EMBED = [
    (http_embed("hi"), "input"),
    (http_embed([1, 2]), "input"),
    (to_embed_request(pb.EmbedRequest(model="m", inputs=[pb.EmbedInput(token_ids=IDS)]), STAMP), "inputs"),
]


@pytest.mark.parametrize(("request_", "param"), GENERATE, ids=[param for _, param in GENERATE])
def test_a_prompt_carries_its_field(request_: GenerateRequest, param: str) -> None:
    """Chat, completions, and gRPC's three kinds of prompts: each has the name of its own field."""
    assert request_.prompt.param == param


@pytest.mark.parametrize(("request_", "param"), EMBED, ids=["input", "input ids", "inputs"])
def test_texts_for_vectors_carry_their_field(request_: EmbedRequest, param: str) -> None:
    """The request names the whole list, and each text itself within it."""
    assert request_.param == param
    assert all(text.param.startswith(param) for text in request_.inputs)


@pytest.mark.parametrize(
    ("code", "kind"), [(FailureCode.TOO_LONG, ContextLengthError), (FailureCode.INVALID, InvalidRequestError)]
)
async def test_what_the_text_sandbox_refuses_is_blamed_on_the_caller_s_field(
    code: FailureCode, kind: type[InvalidRequestError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A completion or an input that has too many tokens, or cannot be used, is no fault of ``messages``."""

    async def refuse(*_: object) -> Failed:
        return Failed(1, code, "because")

    monkeypatch.setattr(TextClient, "ask", refuse)
    client = TextClient(ModelSandboxes("m"), lambda: 1, "alpha")
    for prompt in (GENERATE[0][0].prompt, GENERATE[1][0].prompt, GENERATE[4][0].prompt, EMBED[0][0].inputs[0]):
        with pytest.raises(kind) as refused:
            await client.encode(prompt, time.monotonic() + 1)
        assert refused.value.param == prompt.param


async def test_an_argument_that_the_template_lacks_is_blamed_on_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on the messages, whichever API they came by; the arguments reach the sandbox as they were sent."""

    async def refuse(*_: object) -> Failed:
        return Failed(1, FailureCode.UNKNOWN_ARGUMENT, "no argument 'effort'")

    monkeypatch.setattr(TextClient, "ask", refuse)
    client = TextClient(ModelSandboxes("m"), lambda: 1, "alpha")
    over_http = http(Operation.CHAT, messages=CHAT, chat_template_kwargs={"effort": "low", "budget": 3, "think": False})
    conversation = pb.Conversation(messages=[pb.ChatMessage(role=pb.ROLE_USER, content="hi")])
    conversation.template_arguments.update({"effort": "low", "budget": 3, "think": False})
    over_grpc = to_request(pb.GenerateRequest(model="m", conversation=conversation), STAMP)
    for request, param in ((over_http, "chat_template_kwargs"), (over_grpc, "conversation.template_arguments")):
        assert json.loads(request.prompt.source)["template_kwargs"] == {"effort": "low", "budget": 3, "think": False}
        with pytest.raises(InvalidRequestError, match="no argument 'effort'") as refused:
            await client.encode(request.prompt, time.monotonic() + 1)
        assert refused.value.param == param


def test_a_number_that_is_none_is_no_argument() -> None:
    """Protobuf carries infinities, JSON does not."""
    conversation = pb.Conversation(messages=[pb.ChatMessage(role=pb.ROLE_USER, content="hi")])
    conversation.template_arguments.update({"budget": float("inf")})
    with pytest.raises(InvalidRequestError) as refused:
        to_request(pb.GenerateRequest(model="m", conversation=conversation), STAMP)
    assert refused.value.param == "conversation.template_arguments"


LIMITS = "limits: {max_context_tokens: 8, max_output_tokens: 6}"


@pytest.mark.parametrize(
    ("tokens", "asked", "kind", "param"),
    [
        (4, 5, ContextLengthError, "conversation.messages"),
        (9, None, ContextLengthError, "conversation.messages"),
        (1, 7, InvalidRequestError, "max_output_tokens"),
    ],
)
async def test_what_the_ledger_denies_is_blamed_on_the_caller_s_field(
    stage: Stage, tokens: int, asked: int | None, kind: type[InvalidRequestError], param: str
) -> None:
    """A prompt that does not fit the tenant's context is blamed on the prompt, an output beyond the tenant's limit on
    the number asked for: each by the name that the front end gives it."""
    stage.boot()
    stage.grant(LIMITS)
    prompt = TokenPrompt(array("I", [1] * tokens), "conversation.messages")
    session = stage.session(prompt=prompt, max_tokens=asked, max_tokens_param="max_output_tokens")
    with pytest.raises(kind) as refused, session.life:
        _ = [event async for event in session.run()]
    assert type(refused.value) is kind and refused.value.param == param


@pytest.mark.parametrize(
    ("limits", "fields", "param"),
    [
        ("concurrency: 2", {"choices": 3, "choices_param": "choices"}, "choices"),
        ("tokens_per_minute: 4", {"max_tokens": 5, "max_tokens_param": "max_output_tokens"}, "max_output_tokens"),
    ],
)
async def test_what_no_wait_helps_is_blamed_on_the_caller_s_field(
    stage: Stage, limits: str, fields: dict[str, Any], param: str
) -> None:
    """More choices than may run at once, and more tokens than a minute has: refused for good, with the field."""
    stage.boot()
    stage.grant(f"limits: {{{limits}}}")
    session = stage.session(**fields)
    with pytest.raises(InvalidRequestError) as refused, session.life:
        _ = [event async for event in session.run()]
    assert refused.value.param == param


STRUCTURED = [
    (http(Operation.CHAT, messages=CHAT, guided_regex="("), "guided_regex"),
    (http(Operation.CHAT, messages=CHAT, structured_outputs={"regex": "("}), "structured_outputs.regex"),
    (
        to_request(pb.GenerateRequest(model="m", text="x", structured_output=pb.StructuredOutput(regex="(")), STAMP),
        "structured_output.regex",
    ),
]


@pytest.mark.parametrize(("request_", "param"), STRUCTURED, ids=[param for _, param in STRUCTURED])
async def test_a_grammar_that_cannot_be_used_is_blamed_on_the_caller_s_field(
    stage: Stage, request_: GenerateRequest, param: str
) -> None:
    """Whatever the text sandbox says of a grammar names the field that it came in."""
    with pytest.raises(InvalidGrammarError) as refused, stage.life(request_):
        raise InvalidGrammarError("because", param=GRAMMAR)
    assert refused.value.param == param


async def test_what_does_not_fit_the_engine_is_blamed_on_the_caller_s_field(stage: Stage) -> None:
    """The engine's own refusal of a prompt that is too long names the prompt's field too."""
    pair = stage.boot()
    session = stage.session(prompt=TokenPrompt(array("I", [1]), "messages"), max_tokens=2)

    async def ask() -> None:
        with session.life:
            _ = [event async for event in session.run()]

    asking = asyncio.ensure_future(ask())
    submit = await hear(pair, Submit)
    pair.guest.send(StepOutput(failures=(RequestFailure(submit.request, FailureCode.TOO_LONG),)))
    with pytest.raises(ContextLengthError) as refused:
        await asking
    assert refused.value.param == "messages"
