"""Calls of a conversation as chat templates take them: ids, names, one call a message."""

from __future__ import annotations

from typing import Any

from engine.text.output.formats.hermes import HERMES
from engine.text.output.formats.llama3 import LLAMA3
from engine.text.output.formats.mistral import MISTRAL
from engine.text.output.history import fit_calls


def call(call_id: str, name: str) -> dict[str, Any]:
    """A call."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": {}}}


TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "?"},
    {"role": "assistant", "content": "Both.", "tool_calls": [call("call_1", "now"), call("call_2", "get")]},
    {"role": "tool", "tool_call_id": "call_2", "content": "two"},
    {"role": "tool", "tool_call_id": "call_1", "content": "one"},
    {"role": "user", "content": "thanks"},
]


def test_results_get_the_names_of_their_tools() -> None:
    """A name that is given stays; a result of an unknown call has none; a plain conversation is not copied."""
    fitted = fit_calls([*TALK, {"role": "tool", "tool_call_id": "x", "content": ""}], HERMES)
    assert [message.get("name") for message in fitted] == [None, None, "get", "now", None, None]
    named = [*TALK[:2], {**TALK[2], "name": "own"}]
    assert fit_calls(named, HERMES)[2]["name"] == "own"
    plain = TALK[:1]
    assert fit_calls(plain, MISTRAL) is plain


def test_ids_of_any_server_get_the_length_that_templates_insist_on() -> None:
    """Calls and results still belong together, other ids stay apart, and an id that fits stays."""
    fitted = fit_calls(TALK, MISTRAL)
    first, second = (one["id"] for one in fitted[1]["tool_calls"])
    assert first != second and all(len(one) == 9 and one.isalnum() and one.isascii() for one in (first, second))
    assert [fitted[2]["tool_call_id"], fitted[3]["tool_call_id"]] == [second, first]
    assert fit_calls([{"role": "assistant", "tool_calls": [call("abcDEF123", "now")]}], MISTRAL)[0]["tool_calls"][0][
        "id"
    ] == ("abcDEF123")
    assert fit_calls(TALK, HERMES)[1]["tool_calls"][0]["id"] == "call_1"
    assert TALK[1]["tool_calls"][0]["id"] == "call_1", "what was given is not changed"


def test_several_calls_become_one_in_each_message() -> None:
    """Each with its result behind it, in the order of the calls; what was said before them is said once, and a result
    of no call is kept."""
    fitted = fit_calls([*TALK[:4], {"role": "tool", "tool_call_id": "x", "content": "lost"}, TALK[4]], LLAMA3)
    shown = [
        (message["role"], message.get("content"), [one["id"] for one in message.get("tool_calls", ())])
        for message in fitted
    ]
    assert shown == [
        ("user", "?", []),
        ("assistant", "Both.", ["call_1"]),
        ("tool", "one", []),
        ("assistant", "", ["call_2"]),
        ("tool", "two", []),
        ("tool", "lost", []),
        ("user", "thanks", []),
    ]
