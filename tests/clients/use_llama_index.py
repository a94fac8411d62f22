"""LlamaIndex: chat, a stream, tools, an agent and a typed answer; prints what came, as JSON."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any, Literal

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

QUESTION = "What is the weather in Oslo and in Bonn?"
SEEDS = 12


class Verdict(BaseModel):
    """A typed answer."""

    allowed: bool
    because: Literal["yes", "no"]


def weather(city: Literal["Oslo", "Bonn"]) -> str:
    """The weather of a city."""
    return f"{city}: rain"


class Place(BaseModel):
    """The tool's arguments: LlamaIndex does not resolve annotations that are texts."""

    city: Literal["Oslo", "Bonn"]


TOOL = FunctionTool.from_defaults(weather, fn_schema=Place)


def model(name: str, **options: Any) -> OpenAILike:
    """The client of one model."""
    address: dict[str, Any] = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
    return OpenAILike(model=name, is_chat_model=True, context_window=4_096, **address, **options)


def turn() -> dict[str, Any]:
    """Two calls or more of one message, whole and streamed, and the answer to what they gave."""
    options: dict[str, Any] = {"tool_required": True, "allow_parallel_tool_calls": True}
    for seed in range(SEEDS):
        calling = model(
            "several", is_function_calling_model=True, temperature=1.0, additional_kwargs={"extra_body": {"seed": seed}}
        )
        said = calling.chat_with_tools([TOOL], user_msg=QUESTION, **options)
        calls = calling.get_tool_calls_from_response(said)
        if len(calls) > 1:
            break
    *_, last = calling.stream_chat_with_tools([TOOL], user_msg=QUESTION, **options)
    results = [
        ChatMessage(role="tool", content=weather(**call.tool_kwargs), additional_kwargs={"tool_call_id": call.tool_id})
        for call in calls
    ]
    answering = model("hermes", is_function_calling_model=True, temperature=0)
    told = [ChatMessage(role="user", content=QUESTION), said.message, *results]
    return {
        "calls": [call.tool_kwargs for call in calls],
        "streamed_calls": [call.tool_kwargs for call in calling.get_tool_calls_from_response(last)],
        "said": str(answering.chat_with_tools([TOOL], chat_history=told).message.content),
    }


async def agent() -> str:
    """What an agent with a tool says."""
    made = FunctionAgent(tools=[TOOL], llm=model("hermes", is_function_calling_model=True, temperature=0))
    return str(await made.run(QUESTION))


def use() -> dict[str, Any]:
    """All of it over chat completions."""
    plain = model("athanor-mini", should_use_structured_outputs=True)
    asked = [ChatMessage(role="user", content="What is a tenant?")]
    return {
        "chat": str(plain.chat(asked).message.content),
        "stream": [chunk.delta for chunk in plain.stream_chat(asked)],
        "structured": plain.as_structured_llm(Verdict).chat(asked).raw.model_dump(),
        **turn(),
        "agent_said": asyncio.run(agent()),
    }


print(json.dumps({"chat completions": use()}))
