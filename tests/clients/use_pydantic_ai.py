"""Pydantic AI: chat, a stream, an agent with tools and typed answers over both APIs; prints what came, as JSON."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, RunContext, Tool
from pydantic_ai.messages import ModelResponse, ToolCallPart
from pydantic_ai.models import Model
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.tools import ToolDefinition

SEEDS = 60


class Verdict(BaseModel):
    """A typed answer."""

    allowed: bool
    because: Literal["yes", "no"]


def weather(city: Literal["Oslo", "Bonn"]) -> str:
    """The weather of a city."""
    return f"{city}: rain"


async def at_first(context: RunContext[None], tool: ToolDefinition) -> ToolDefinition | None:
    """Offer the tool in the first step alone: a model that says anything would call it for ever."""
    return tool if context.run_step < 2 else None


def turn(model: Model) -> dict[str, Any]:
    """Two calls or more of one message, and the typed answer to what they gave."""
    agent: Agent[None, Verdict] = Agent(model, output_type=Verdict, tools=[Tool(weather, prepare=at_first)], retries=3)
    for seed in range(SEEDS):
        ended = agent.run_sync(
            "What is the weather in Oslo and in Bonn?",
            model_settings={"temperature": 1.0, "extra_body": {"seed": seed}},
        )
        first = next(one for one in ended.all_messages() if isinstance(one, ModelResponse))
        calls = [one for one in first.parts if isinstance(one, ToolCallPart) and one.tool_name == "weather"]
        if len(calls) > 1:
            break
    return {"calls": [call.args_as_dict() for call in calls], "answer": ended.output.model_dump()}


async def stream(model: Model) -> list[str]:
    """The pieces of a stream."""
    async with Agent(model).run_stream("What is a tenant?") as streamed:
        return [piece async for piece in streamed.stream_text(delta=True, debounce_by=None)]


def use(make: Callable[[str], Model]) -> dict[str, Any]:
    """All of it over one API."""
    typed: Agent[None, Verdict] = Agent(make("athanor-mini"), output_type=NativeOutput(Verdict))
    both: Agent[None, Verdict] = Agent(make("hermes"), output_type=NativeOutput(Verdict), tools=[weather])
    return {
        "chat": Agent(make("athanor-mini")).run_sync("What is a tenant?").output,
        "stream": asyncio.run(stream(make("athanor-mini"))),
        "structured": typed.run_sync("May beta use this model?").output.model_dump(),
        "agent": both.run_sync("May beta use this model?", model_settings={"temperature": 0}).output.model_dump(),
        **turn(make("several")),
    }


print(json.dumps({"chat completions": use(OpenAIChatModel), "responses": use(OpenAIResponsesModel)}))
