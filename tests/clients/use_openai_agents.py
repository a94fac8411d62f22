"""OpenAI's agents: chat, a stream, an agent with tools and a typed answer over both APIs; prints what came, as JSON."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
QUESTION = "What is the weather in Oslo and in Bonn?"
SEEDS = 12


class Verdict(BaseModel):
    """A typed answer."""

    allowed: bool
    because: Literal["yes", "no"]


@function_tool
def weather(city: Literal["Oslo", "Bonn"]) -> str:
    """The weather of a city."""
    return f"{city}: rain"


def caller(model: Model, seed: int) -> Agent[None]:
    """An agent that has to call at first, and answers with a type in the end: its requests have tools and a schema."""
    settings = ModelSettings(tool_choice="required", temperature=1.0, extra_body={"seed": seed})
    return Agent(name="caller", model=model, tools=[weather], output_type=Verdict, model_settings=settings)


async def turn(model: Model) -> dict[str, Any]:
    """Two calls or more of one message, whole and streamed, and the typed answer to what they gave."""
    for seed in range(SEEDS):
        agent = caller(model, seed)
        ended = await Runner.run(agent, QUESTION, max_turns=20)
        said = ended.raw_responses[0].output
        calls = [json.loads(one.arguments) for one in said if one.type == "function_call"]
        if len(calls) > 1:
            break
    streamed = Runner.run_streamed(agent, QUESTION, max_turns=20)
    async for _ in streamed.stream_events():
        continue
    again = streamed.raw_responses[0].output
    return {
        "calls": calls,
        "streamed_calls": [json.loads(one.arguments) for one in again if one.type == "function_call"],
        "answer": ended.final_output.model_dump(),
        "agent": streamed.final_output.model_dump(),
    }


async def use(kind: type[OpenAIChatCompletionsModel] | type[OpenAIResponsesModel]) -> dict[str, Any]:
    """All of it over one API."""
    client = AsyncOpenAI()
    plain, calling = (kind(name, openai_client=client) for name in ("athanor-mini", "several"))
    chat: Agent[None] = Agent(name="chat", model=plain)
    typed: Agent[None] = Agent(name="typed", model=plain, output_type=Verdict)
    streamed = Runner.run_streamed(chat, "What is a tenant?")
    pieces = [
        event.data.delta
        async for event in streamed.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    return {
        "chat": (await Runner.run(chat, "What is a tenant?")).final_output,
        "stream": pieces,
        "structured": (await Runner.run(typed, "May beta use this model?")).final_output.model_dump(),
        **await turn(calling),
    }


async def main() -> None:
    """Both APIs."""
    found = {"chat completions": await use(OpenAIChatCompletionsModel), "responses": await use(OpenAIResponsesModel)}
    print(json.dumps(found))


asyncio.run(main())
