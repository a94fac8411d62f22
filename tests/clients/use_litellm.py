"""LiteLLM: chat, a stream, tools and typed answers over three APIs; prints what came, as JSON."""

from __future__ import annotations

import json
from typing import Any, Literal

import litellm
from pydantic import BaseModel

litellm.suppress_debug_info = True
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Oslo and in Bonn?"}]
CITY = {"type": "string", "enum": ["Oslo", "Bonn"]}
PARAMETERS = {"type": "object", "properties": {"city": CITY}, "required": ["city"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "weather", "strict": True, "parameters": PARAMETERS}}]
SEEDS = 12


class Verdict(BaseModel):
    """A typed answer."""

    allowed: bool
    because: Literal["yes", "no"]


def arguments(message: Any) -> list[Any]:
    """The arguments of a message's calls."""
    return [json.loads(call.function.arguments) for call in message.tool_calls]


def turn(model: str) -> dict[str, Any]:
    """Two calls or more of one message, whole and streamed, and the typed answer to what they gave."""
    for seed in range(SEEDS):
        given: dict[str, Any] = {"tools": TOOLS, "temperature": 1.0, "extra_body": {"seed": seed}}
        said = litellm.completion(model, QUESTION, tool_choice="required", max_tokens=400, **given).choices[0].message
        if len(said.tool_calls) > 1:
            break
    chunks = list(litellm.completion(model, QUESTION, tool_choice="required", max_tokens=400, stream=True, **given))
    streamed = litellm.stream_chunk_builder(chunks)
    results = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in said.tool_calls]
    told = [*QUESTION, said.model_dump(), *results]
    answer = litellm.completion(model, told, tool_choice="none", response_format=Verdict, **given)
    return {
        "calls": arguments(said),
        "streamed_calls": arguments(streamed.choices[0].message),
        "answer": json.loads(answer.choices[0].message.content),
    }


def use() -> dict[str, Any]:
    """All of it over chat completions."""
    model, asked = "openai/athanor-mini", [{"role": "user", "content": "What is a tenant?"}]
    typed = litellm.completion(model, asked, response_format=Verdict)
    return {
        "chat": litellm.completion(model, asked).choices[0].message.content,
        "stream": [chunk.choices[0].delta.content or "" for chunk in litellm.completion(model, asked, stream=True)],
        "structured": json.loads(typed.choices[0].message.content),
        **turn("openai/several"),
    }


def messages() -> dict[str, Any]:
    """Chat and a stream over Anthropic's API."""
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "What is a tenant?"}], "max_tokens": 100}
    chunks = litellm.completion("anthropic/athanor-mini", stream=True, **asked)
    return {
        "chat": litellm.completion("anthropic/athanor-mini", **asked).choices[0].message.content,
        "stream": [chunk.choices[0].delta.content or "" for chunk in chunks],
    }


def responses() -> dict[str, Any]:
    """Chat over the Responses API."""
    return {"chat": litellm.responses(model="openai/athanor-mini", input="What is a tenant?").output_text}


def refused() -> str:
    """The type of the error for a model that is not there."""
    try:
        litellm.completion("openai/nothing", QUESTION)
    except litellm.NotFoundError as error:
        return type(error).__name__
    return ""


print(
    json.dumps({"chat completions": {**use(), "refused": refused()}, "messages": messages(), "responses": responses()})
)
