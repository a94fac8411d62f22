"""Requests drawn from the types that OpenAI and Anthropic generate from their published schemas, and answers held
against those types: each field, union and word of the official clients, with sound values and others."""

from __future__ import annotations

import asyncio
import collections.abc
import json
import random
import re
import typing
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import httpx
import openai.types
import pydantic
import typing_extensions
from anthropic.types import ErrorResponse, Message, MessageTokensCount, RawMessageStreamEvent, message_create_params
from anthropic.types.message_count_tokens_params import MessageCountTokensParams
from openai.types import chat, completion_create_params, embedding_create_params, responses
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import input_token_count_params, response_create_params

CALL_TOKENS = 160
"""Tokens of an answer that has to be a call."""

LANES = 8
"""Requests at once."""

ANSWER_S = 30.0
"""A request without an answer by then hangs; those drawn here ask for some tokens."""

TEXTS = (
    "hi",
    "What does the log say?",
    "",
    "\u00e9\U0001f600",
    "a" * 300,
    "</tool_call>",
    "\x00",
    "{}",
    "5",
    "<|im_end|>",
)
NAMES = ("now", "search", "now", "search", "a b", "")
SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "object", "properties": {}, "additionalProperties": False},
    {"type": "object", "properties": {"q": {"type": "string", "maxLength": 4}}, "required": ["q"]},
    {"type": "object", "properties": {"n": {"type": "integer"}, "of": {"enum": ["a", "b"]}}},
    {},
    {"type": "object", "$ref": "#"},
    {"type": 7},
)
IDS = ("call_1", "call_2", "", "x" * 300)
ARGUMENTS = ("{}", '{"q": "a"}', "{", "")
PLAIN = re.compile("User|Text|Easy|Function|MessageParam|InputText|Auto|ToolParam$")
"""Types that are drawn more often: texts and functions, which are served."""

FOREIGN = re.compile("Search|Computer|Shell|Mcp|Code|Image|Bash|Editor|Memory|Custom|Patch|Namespace|Deprecated")
"""Those that are not, though their names look so."""

OWN = frozenset(
    {
        "ChatCompletion.prompt_logprobs",
        "ChatCompletionMessage.reasoning_content",
        "Choice.tool_call_error",
        "CompletionChoice.prompt_logprobs",
        "ChoiceDelta.reasoning_content",
        "Response.store",
        "ResponseFunctionCallArgumentsDoneEvent.name",
    }
)
"""Fields of answers that the types do not have: vLLM's, ours, and two of OpenAI's own, of which one was in earlier
versions of its schema."""


class Drawer:
    """Draws values of types; ``seed`` decides all of them."""

    def __init__(self, seed: int, models: Sequence[str]) -> None:
        self._draw = random.Random(seed)
        self._models = models

    def request(self, route: Route) -> dict[str, Any]:
        """A body of a route: its required fields and a few others; what it generates is bounded."""
        made = self._typed_dict(route.request, 0)
        if route.must_call and self._draw.random() < 0.15:
            made["tools"] = self.value(_hints(route.request)[0]["tools"], "tools", 1)
        calls = bool(route.must_call and made.get("tools") and self._draw.random() < 0.5)
        if calls:
            made["tool_choice"] = route.must_call
        if route.bound:
            odd = self._draw.random() < 0.03
            made[route.bound] = CALL_TOKENS if calls else self._draw.choice((0, -1, 2**31) if odd else (1, 2, 24))
        if route.event is not None and self._draw.random() < 0.4:
            made["stream"] = True
        return made

    def choice(self, values: Sequence[Any], weights: Sequence[int]) -> Any:
        """One of some values."""
        return self._draw.choices(values, weights)[0]

    def value(self, hint: Any, name: str, depth: int) -> Any:
        """A value of a type, for a field of this name."""
        origin, parts = typing.get_origin(hint), typing.get_args(hint)
        if origin in (typing_extensions.Required, typing_extensions.NotRequired, typing.Annotated, typing.Required):
            return self.value(parts[0], name, depth)
        if name == "model":
            return self._draw.choice(self._models) if self._draw.random() < 0.95 else self._text("")
        if origin is typing.Literal:
            return self._draw.choice(parts)
        if origin is typing.Union or origin is type(int | str):
            return self.value(self._one_of(parts, depth), name, depth)
        if typing_extensions.is_typeddict(hint):
            return self._typed_dict(hint, depth)
        if origin in (dict, collections.abc.Mapping):
            return self._table(parts[1], name, depth)
        if origin is not None:  # Iterable, Sequence, List, SequenceNotStr
            number = self._draw.choice((0, *[1] * 20, 2, 2, 3)) if depth < 5 else 1
            return [self.value(parts[0], name, depth + 1) for _ in range(number)]
        return self._simple(hint, name)

    def _one_of(self, parts: Sequence[Any], depth: int) -> Any:
        there = [one for one in parts if one is not type(None)]
        if len(there) < len(parts) and self._draw.random() < 0.1:
            return type(None)
        plain = [one for one in there if one is str or _is_plain(getattr(one, "__name__", ""))]
        if plain and (depth > 4 or self._draw.random() < 0.85):
            there = plain
        return self._draw.choice(there)

    def _typed_dict(self, kind: Any, depth: int) -> dict[str, Any]:
        hints, required = _hints(kind)
        optional = [name for name in hints if name not in required]
        most = (0, 1, 1, 2, 2, 3, 6) if depth == 0 else (0, 0, 1) if depth < 4 else (0,)
        number = min(self._draw.choice(most), len(optional))
        chosen = {*required, *self._draw.sample(optional, number)}
        return {name: self.value(hint, name, depth + 1) for name, hint in hints.items() if name in chosen}

    def _table(self, hint: Any, name: str, depth: int) -> dict[str, Any]:
        if hint is object or name in ("parameters", "schema", "input_schema"):
            return self._draw.choice(SCHEMAS[:3] if self._draw.random() < 0.9 else SCHEMAS)
        keys = ("5", "300", "zz") if name == "logit_bias" else ("a", "b")
        return {self._draw.choice(keys): self.value(hint, "", depth + 1) for _ in range(self._draw.choice((0, 1, 2)))}

    def _simple(self, hint: Any, name: str) -> Any:
        if hint is bool:
            return self._draw.random() < 0.5
        if hint is int:
            odd = self._draw.random() < 0.05
            return self._draw.choice((-1, 2**31, 10**20) if odd else (1, 1, 2, 3, 0, 5, 20, 1_024))
        if hint is float:
            return self._draw.choice((0, 0.5, 1, 1.0, 0.9, 2) if self._draw.random() < 0.95 else (-3.5, 1e308))
        if hint is type(None):
            return None
        if hint is str:
            return self._text(name)
        return self._draw.choice((None, 1, "a", [], {"a": 1}))

    def _text(self, name: str) -> str:
        if name == "name":
            return self._draw.choice(NAMES)
        if name == "arguments":
            return self._draw.choice(ARGUMENTS)
        if name.endswith("id"):
            return self._draw.choice(IDS if self._draw.random() < 0.3 else IDS[:2])
        return self._draw.choice(TEXTS[:2] if self._draw.random() < 0.5 else TEXTS)


def _is_plain(name: str) -> bool:
    return PLAIN.search(name) is not None and FOREIGN.search(name) is None


@cache
def _hints(kind: Any) -> tuple[dict[str, Any], frozenset[str]]:
    hints = typing_extensions.get_type_hints(kind, include_extras=True)
    # Where annotations are texts, a class does not know which of its own are Required.
    marked = {name for name, hint in hints.items() if typing.get_origin(hint) is typing_extensions.Required}
    return hints, frozenset(kind.__required_keys__ | marked)


@dataclass(frozen=True)
class Route:
    """A route as its publisher describes it."""

    path: str
    request: Any
    answer: Any
    event: Any = None
    """Type of a stream's events; None: it does not stream."""
    bound: str = ""
    """Field that bounds what is generated, where something is."""
    must_call: Any = None
    """Value of ``tool_choice`` by which a call is required."""
    share: int = 4
    """Weight of the route among those of its API."""


OPENAI = (
    Route(
        "/v1/chat/completions",
        chat_create_params.CompletionCreateParamsBase,
        chat.ChatCompletion,
        chat.ChatCompletionChunk,
        "max_completion_tokens",
        "required",
        8,
    ),
    Route(
        "/v1/responses",
        response_create_params.ResponseCreateParamsBase,
        responses.Response,
        responses.ResponseStreamEvent,
        "max_output_tokens",
        "required",
        8,
    ),
    Route(
        "/v1/completions",
        completion_create_params.CompletionCreateParamsBase,
        openai.types.Completion,
        openai.types.Completion,
        "max_tokens",
    ),
    Route(
        "/v1/responses/input_tokens",
        input_token_count_params.InputTokenCountParams,
        responses.InputTokenCountResponse,
        share=2,
    ),
    Route(
        "/v1/embeddings", embedding_create_params.EmbeddingCreateParams, openai.types.CreateEmbeddingResponse, share=1
    ),
)
ANTHROPIC = (
    Route(
        "/v1/messages",
        message_create_params.MessageCreateParamsBase,
        Message,
        RawMessageStreamEvent,
        "max_tokens",
        {"type": "any"},
    ),
    Route("/v1/messages/count_tokens", MessageCountTokensParams, MessageTokensCount, share=1),
)

NO_EMPTY = ("/v1/responses", "/v1/responses/input_tokens")


@dataclass
class Found:
    """What came of the requests."""

    by_status: Counter[str] = field(default_factory=Counter)
    streams: int = 0
    calls: int = 0
    """Answers with a call of a tool."""
    wrong: list[str] = field(default_factory=list)
    """Answers that are against the schema, or none, with their requests."""


async def send(
    url: str, keys: Sequence[str], models: Sequence[str], api: Sequence[Route], number: int, seed: int
) -> Found:
    """Send so many requests, several at once, and judge each answer."""
    found, drawer, left = Found(), Drawer(seed, models), iter(range(number))

    async def lane(client: httpx.AsyncClient) -> None:
        for place in left:
            route = drawer.choice(api, [one.share for one in api])
            body = drawer.request(route)
            if route.path in NO_EMPTY:
                body.setdefault("input", "hi")
                body.setdefault("model", models[0])
            try:
                async with asyncio.timeout(ANSWER_S):
                    key = {"authorization": f"Bearer {keys[place % len(keys)]}"}
                    answer = await client.post(route.path, content=json.dumps(body), headers=key)
            except (TimeoutError, httpx.HTTPError) as error:
                found.wrong.append(f"{type(error).__name__}: {route.path} {json.dumps(body)}")
                continue
            problem = judge(route, answer, found)
            if problem:
                found.wrong.append(f"{problem}: {route.path} {json.dumps(body)} -> {answer.text[:2_000]}")

    async with httpx.AsyncClient(base_url=url, timeout=None) as client:
        await asyncio.gather(*(lane(client) for _ in range(LANES)))
    return found


def judge(route: Route, answer: httpx.Response, found: Found) -> str:
    """What is wrong with an answer; empty where nothing is."""
    found.by_status[str(answer.status_code)] += 1
    if answer.status_code >= 500:
        return f"status {answer.status_code}"
    if answer.status_code >= 400:
        return wrong_error(route, answer.json())
    found.calls += any(word in answer.text for word in ('"tool_calls":[{', '"type":"function_call"', '"tool_use"'))
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return against(route.answer, as_published(route, answer.json()))
    found.streams += 1
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    named = "event: " in answer.text
    if not named and events[-1:] != ["[DONE]"]:
        return (
            wrong_error(route, json.loads(events[-1])) if events and '"error"' in events[-1] else "a stream has no end"
        )
    for event in events if named else events[:-1]:
        if problem := against(route.event, as_published(route, json.loads(event))):
            return f"{problem} in {event[:500]}"
    return ""


def as_published(route: Route, document: Any) -> Any:
    """An answer of text completions with what OpenAI's own answers leave null and its schema does not: the reason of a
    choice before its end, and the log-probability of a prompt's first token."""
    for choice in document.get("choices", ()) if route.path == "/v1/completions" else ():
        choice["finish_reason"] = choice["finish_reason"] or "stop"
        scores = choice["logprobs"] or {}
        for name, missing in (("token_logprobs", 0.0), ("top_logprobs", {})):
            if scores.get(name) and scores[name][0] is None:
                scores[name][0] = missing
    return document


def wrong_error(route: Route, document: Any) -> str:
    """What is wrong with an error."""
    if "messages" in route.path:
        return against(ErrorResponse, document)
    error = document.get("error")
    if set(document) != {"error"} or set(error) != {"message", "type", "param", "code"} or not error["message"]:
        return "an error has other fields"
    return against(openai.types.shared.ErrorObject, error)


@cache
def _adapter(kind: Any) -> pydantic.TypeAdapter[Any]:
    return pydantic.TypeAdapter(kind)


def against(kind: Any, document: Any) -> str:
    """What of a document is against a type of the official client: a field missing, of another type, with a word that
    is none, or unknown."""
    try:
        made = _adapter(kind).validate_json(json.dumps(document), strict=True)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return next((f"{name} is unknown" for name in _extra(made) if name not in OWN), "")


def _extra(value: Any) -> typing.Iterator[str]:
    """Names of fields that a type does not have, in all of a value."""
    if isinstance(value, pydantic.BaseModel):
        yield from (f"{type(value).__name__}.{name}" for name in value.model_extra or ())
        for name in type(value).model_fields:
            yield from _extra(getattr(value, name))
    elif isinstance(value, list):
        for one in value:
            yield from _extra(one)


def fields_of(kind: Any) -> set[str]:
    """Names of the fields of a request."""
    return set(_hints(kind)[0])
