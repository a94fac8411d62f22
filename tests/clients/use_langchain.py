"""LangChain: chat, a stream, tools and typed answers; prints what came, as JSON."""

from __future__ import annotations

import json
from typing import Any, Literal

from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

QUESTION = "What is the weather in Oslo and in Bonn?"
SEEDS = 12


class Verdict(BaseModel):
    """A typed answer."""

    allowed: bool
    because: Literal["yes", "no"]


@tool
def weather(city: Literal["Oslo", "Bonn"]) -> str:
    """The weather of a city."""
    return f"{city}: rain"


def turn(options: dict[str, Any]) -> dict[str, Any]:
    """Two calls or more of one message, whole and streamed, and the typed answer to what they gave."""
    asked = HumanMessage(QUESTION)
    for seed in range(SEEDS):
        model = ChatOpenAI(model="several", temperature=1.0, extra_body={"seed": seed}, **options)
        calling = model.bind_tools([weather], tool_choice="required", strict=True)
        said = calling.invoke([asked])
        if len(said.tool_calls) > 1:
            break
    streamed = None
    for chunk in calling.stream([asked]):
        streamed = chunk if streamed is None else streamed + chunk
    results = [weather.invoke(call) for call in said.tool_calls]
    answering = model.bind_tools([weather], tool_choice="none", response_format=Verdict, strict=True)
    answer = answering.invoke([asked, said, *results])
    return {
        "calls": [call["args"] for call in said.tool_calls],
        "streamed_calls": [call["args"] for call in streamed.tool_calls] if streamed is not None else [],
        "answer": json.loads(answer.text),
    }


def agent() -> dict[str, Any]:
    """What an agent that may call and has to answer with a type gives."""
    made = create_agent(
        ChatOpenAI(model="hermes", temperature=0), tools=[weather], response_format=ProviderStrategy(Verdict)
    )
    found = made.invoke({"messages": [{"role": "user", "content": QUESTION}]})
    return dict(found["structured_response"].model_dump())


def use(**options: Any) -> dict[str, Any]:
    """All of it over one API."""
    model = ChatOpenAI(model="athanor-mini", **options)
    return {
        "chat": model.invoke("What is a tenant?").text,
        "stream": [chunk.text for chunk in model.stream("What is a tenant?")],
        "structured": model.with_structured_output(Verdict).invoke("May beta use this model?").model_dump(),
        **turn(options),
    }


print(json.dumps({"chat completions": {**use(), "agent": agent()}, "responses": use(use_responses_api=True)}))
