"""Instructor: typed answers in its modes, whole and as they grow; prints what came, as JSON."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from typing import Any, Literal

import instructor
from instructor.core.exceptions import IncompleteOutputException
from openai import OpenAI
from pydantic import BaseModel, ConfigDict

ASKED: list[Any] = [{"role": "user", "content": "May beta use this model?"}]
SEEDS = 12


class Verdict(BaseModel):
    """A typed answer; without further members, which a model that says anything would write for ever."""

    model_config = ConfigDict(extra="forbid")
    allowed: bool
    because: Literal["yes", "no"]


class Weather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Oslo", "Bonn"]


def typed(mode: instructor.Mode, model: str) -> dict[str, Any]:
    """A typed answer in one mode."""
    client = instructor.from_openai(OpenAI(), mode=mode)
    asked: dict[str, Any] = {"messages": ASKED, "response_model": Verdict, "max_retries": 2}
    return dict(client.chat.completions.create(model=model, **asked).model_dump())


def calls() -> list[dict[str, Any]]:
    """Two calls or more of one message."""
    client = instructor.from_openai(OpenAI(), mode=instructor.Mode.PARALLEL_TOOLS)
    listed: list[dict[str, Any]] = []
    for seed in range(SEEDS):
        with contextlib.suppress(IncompleteOutputException):
            found = client.chat.completions.create(
                model="several",
                messages=ASKED,
                response_model=Iterable[Weather],
                temperature=1.0,
                max_tokens=300,
                # In this mode the client asks for no call; the embedded model's weights make none of their own.
                extra_body={"seed": seed, "tool_choice": "required"},
            )
            listed = [one.model_dump() for one in found]
        if len(listed) > 1:
            break
    return listed


def use() -> dict[str, Any]:
    """All of it."""
    plain = instructor.from_openai(OpenAI(), mode=instructor.Mode.JSON_SCHEMA)
    partial = plain.chat.completions.create_partial(model="athanor-mini", messages=ASKED, response_model=Verdict)
    said = plain.chat.completions.create(model="athanor-mini", messages=ASKED, response_model=None)
    return {
        "chat": said.choices[0].message.content,
        "grown": [one.model_dump() for one in partial],
        "structured": typed(instructor.Mode.JSON_SCHEMA, "athanor-mini"),
        "calls": calls(),
        "answer": typed(instructor.Mode.TOOLS_STRICT, "hermes"),
    }


responses = {"structured": typed(instructor.Mode.RESPONSES_TOOLS, "hermes")}
print(json.dumps({"chat completions": use(), "responses": responses}))
