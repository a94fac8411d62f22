"""curl: chat, a stream, tools and a typed answer over chat completions; prints what came, as JSON."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Oslo and in Bonn?"}]
CITY = {"type": "string", "enum": ["Oslo", "Bonn"]}
PARAMETERS = {"type": "object", "properties": {"city": CITY}, "required": ["city"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "weather", "strict": True, "parameters": PARAMETERS}}]
YES = {"allowed": {"type": "boolean"}, "because": {"enum": ["yes", "no"]}}
VERDICT = {"type": "object", "properties": YES, "required": ["allowed", "because"], "additionalProperties": False}
TYPED = {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": VERDICT}}
SEEDS = 12


def post(**body: Any) -> str:
    """What curl prints for a request; it fails where the status is an error's."""
    argv = ["curl", "--silent", "--show-error", "--no-buffer", "--fail-with-body", "--max-time", "60", "--data", "@-"]
    argv += ["--header", f"authorization: Bearer {os.environ['OPENAI_API_KEY']}"]
    argv += ["--header", "content-type: application/json", f"{os.environ['OPENAI_BASE_URL']}/chat/completions"]
    return subprocess.run(argv, input=json.dumps(body), capture_output=True, text=True, check=True).stdout


def said(**body: Any) -> Any:
    """The answer's message."""
    return json.loads(post(**body))["choices"][0]["message"]


def deltas(**body: Any) -> list[Any]:
    """What each event of a stream adds to the message."""
    *events, last, _ = post(stream=True, **body).split("\n\n")
    assert last == "data: [DONE]", last
    chunks = [json.loads(one.removeprefix("data: ")) for one in events]
    return [choice["delta"] for chunk in chunks for choice in chunk["choices"]]


def turn(model: str) -> dict[str, Any]:
    """Two calls or more of one message, whole and streamed, and the typed answer to what they gave."""
    given: dict[str, Any] = {"model": model, "tools": TOOLS, "temperature": 1.0, "max_tokens": 400}
    for seed in range(SEEDS):
        asked = {**given, "messages": QUESTION, "tool_choice": "required", "seed": seed}
        message = said(**asked)
        if len(message["tool_calls"]) > 1:
            break
    streamed: dict[int, str] = {}
    for piece in (piece for delta in deltas(**asked) for piece in delta.get("tool_calls") or ()):
        streamed[piece["index"]] = streamed.get(piece["index"], "") + piece["function"]["arguments"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "rain"} for call in message["tool_calls"]]
    told = [*QUESTION, message, *results]
    return {
        "calls": [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]],
        "streamed_calls": [json.loads(one) for one in streamed.values()],
        "answer": json.loads(said(**given, messages=told, tool_choice="none", response_format=TYPED)["content"]),
    }


def use() -> dict[str, Any]:
    """All of it over chat completions."""
    asked = {"model": "athanor-mini", "messages": [{"role": "user", "content": "What is a tenant?"}]}
    return {
        "chat": said(**asked)["content"],
        "stream": [delta.get("content") or "" for delta in deltas(**asked)],
        "structured": json.loads(said(**asked, response_format=TYPED)["content"]),
        **turn("several"),
    }


print(json.dumps({"chat completions": use()}))
