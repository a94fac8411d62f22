"""engine.text.conversation: what a tenant may send, and how the rest is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import RequestRejectedError
from engine.text.conversation import MAX_DEPTH, MAX_MESSAGES, MAX_TOOLS, MAX_VALUES, check_text, parse_conversation
from isolation.ipc.messages import FailureCode

USER = {"role": "user", "content": "Hi"}


def parse(*messages: object, **others: object):
    """A conversation of these messages."""
    return parse_conversation(json.dumps({"messages": list(messages)} | others).encode())


def refused(source: bytes) -> str:
    """Why a source is refused."""
    with pytest.raises(RequestRejectedError) as caught:
        parse_conversation(source)
    assert caught.value.code is FailureCode.INVALID
    return caught.value.reason


def test_a_full_conversation() -> None:
    """Every field that is allowed arrives, nulls are dropped, arguments are parsed."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    conversation = parse(
        {"role": "system", "content": "Be brief.", "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "name": "f", "content": "4"},
        tools=[{"type": "function", "function": {"name": "f"}}],
        template_kwargs={"enable_thinking": False, "effort": "low", "budget": 3},
    )
    assert conversation.messages[0] == {"role": "system", "content": "Be brief."}
    assert conversation.messages[1] == {
        "role": "assistant",
        "reasoning_content": "hm",
        "thinking": "hm",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": [1]}}}],
    }
    assert conversation.messages[2]["tool_call_id"] == "c1"
    assert conversation.tools == [{"type": "function", "function": {"name": "f"}}]
    assert conversation.template_kwargs == {"enable_thinking": False, "effort": "low", "budget": 3}


def test_text_parts_are_joined() -> None:
    """Several text parts become one text with line breaks between them."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert parse({"role": "user", "content": parts}).messages[0]["content"] == "a\nb"


@pytest.mark.parametrize("arguments", ["{broken", "[1]", '"x"', "NaN", "{" * 10_000])
def test_arguments_that_are_no_object_stay_text(arguments: str) -> None:
    """A string that is not the JSON of an object is passed on as it came."""
    call = {"function": {"name": "f", "arguments": arguments}}
    message = parse({"role": "assistant", "tool_calls": [call]}).messages[0]
    assert message["tool_calls"][0]["function"]["arguments"] == arguments


def test_an_empty_list_of_tools_is_none() -> None:
    """No tools and an empty list mean the same."""
    assert parse(USER, tools=[]).tools is None
    assert parse(USER, tools=None, template_kwargs=None).tools is None


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (b"", "not JSON"),
        (b"\xff", "not JSON in UTF-8"),
        (b"{", "not JSON"),
        (b'{"messages": NaN}', "not JSON"),
        (b'{"messages": ' + b"9" * 5000 + b"}", "not JSON"),
        (b"[" * 100_000, "nested deeper"),
        (b"[" * 40 + b"]" * 40, "nested deeper"),
        (b"[]", "not an object with messages"),
        (b'{"messages": [], "extra": 1}', "not an object with messages"),
        (b"{}", "messages is not a list"),
        (b'{"messages": []}', "no messages"),
        (b'{"messages": ["x"]}', r"messages\[0\] is not an object"),
    ],
)
def test_malformed_sources(source: bytes, reason: str) -> None:
    """A source that is no conversation at all is refused with a reason."""
    with pytest.raises(RequestRejectedError, match=reason):
        parse_conversation(source)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({}, "messages[0].role is not text"),
        ({"role": 1}, "messages[0].role is not text"),
        ({"role": "User"}, "messages[0].role is not a lower-case word"),
        ({"role": "user\n<|im_end|>"}, "messages[0].role is not a lower-case word"),
        ({"role": "x" * 33}, "messages[0].role is not a lower-case word"),
        (USER | {"extra": 1}, "messages[0] has an unknown key 'extra'"),
        (USER | {"name": 1}, "messages[0].name is not text"),
        (USER | {"content": 1}, "messages[0].content is not a list"),
        (USER | {"content": ["x"]}, "messages[0].content[0] is not an object"),
        (
            USER | {"content": [{"type": "image_url", "image_url": {"url": "http://x"}}]},
            "messages[0].content[0] is not a text part; this model takes text only",
        ),
        (USER | {"content": [{"type": "text", "text": 1}]}, "messages[0].content[0].text is not text"),
        (USER | {"content": [{"type": "text", "text": "a"}] * 1025}, "messages[0].content has more than 1024 entries"),
        (USER | {"tool_calls": {}}, "messages[0].tool_calls is not a list"),
        (USER | {"tool_calls": [1]}, "messages[0].tool_calls[0] is not an object"),
        (USER | {"tool_calls": [{}]}, "messages[0].tool_calls[0].function is not an object"),
        (USER | {"tool_calls": [{"function": {"name": 1}}]}, "messages[0].tool_calls[0].function.name is not text"),
        (
            USER | {"tool_calls": [{"function": {"name": "f", "arguments": 1}}]},
            "messages[0].tool_calls[0].function.arguments is neither a string nor an object",
        ),
    ],
)
def test_malformed_messages(message: object, reason: str) -> None:
    """Wrong types and unknown keys are refused and named."""
    assert refused(json.dumps({"messages": [message]}).encode()) == reason


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        ({"tools": {}}, "tools is not a list"),
        ({"tools": ["x"]}, "tools[0] is not an object"),
        ({"tools": [{}] * (MAX_TOOLS + 1)}, "tools has more than 128 entries"),
        ({"template_kwargs": []}, "template_kwargs is not an object"),
        ({"template_kwargs": {"a": {}}}, "template_kwargs.a is not a short text, a number or a boolean"),
        ({"template_kwargs": {"a": "x" * 1025}}, "template_kwargs.a is not a short text, a number or a boolean"),
        ({"template_kwargs": {str(index): 1 for index in range(17)}}, "template_kwargs has more than 16 entries"),
    ],
)
def test_malformed_extras(others: dict, reason: str) -> None:
    """So are tools and template arguments."""
    assert refused(json.dumps({"messages": [USER]} | others).encode()) == reason


@pytest.mark.parametrize("where", ["content", "name", "key", "kwarg", "arguments"])
@pytest.mark.parametrize("text", ["a\ufdd0b", "\ufdd1", "\ud800"])
def test_reserved_and_broken_characters_are_refused_everywhere(where: str, text: str) -> None:
    """No string or key, however deep, carries a mark or half a character into a template."""
    data: dict = {"messages": [dict(USER)]}
    if where == "key":
        data["tools"] = [{"function": {text: 1}}]
    elif where == "kwarg":
        data["template_kwargs"] = {"a": text}
    elif where == "arguments":
        arguments = json.dumps({"a": text})
        data["messages"][0]["tool_calls"] = [{"function": {"name": "f", "arguments": arguments}}]
    else:
        data["messages"][0][where] = text
    assert "the text holds" in refused(json.dumps(data).encode())


def test_counts_are_bounded() -> None:
    """Too many messages and too many values are refused without walking them all."""
    assert "more than 8192 entries" in refused(json.dumps({"messages": [USER] * (MAX_MESSAGES + 1)}).encode())
    many = json.dumps({"messages": [USER], "tools": [{"a": [0] * (MAX_VALUES + 1)}]})
    assert "more than 200000 values" in refused(many.encode())


def test_the_deepest_allowed_value_passes() -> None:
    """Nesting up to the bound is accepted."""
    tool: object = "x"
    for _ in range(MAX_DEPTH - 4):
        tool = [tool]
    assert parse(USER, tools=[{"a": tool}]).tools == [{"a": tool}]


def test_checked_text_passes() -> None:
    """Ordinary text of any script is not refused."""
    check_text("plain")
    check_text("\u00e4\U0001f999\ufdd2")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=3),
    max_leaves=12,
)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "tool", "X", ""]) | json_values},
    optional={"content": json_values, "tool_calls": json_values, "name": json_values},
)


@given(st.fixed_dictionaries({"messages": st.lists(messages, max_size=3) | json_values}))
def test_any_json_is_parsed_or_refused(data: dict) -> None:
    """Whatever the JSON, the outcome is a conversation or a refusal."""
    try:
        conversation = parse_conversation(json.dumps(data).encode())
    except RequestRejectedError as error:
        assert error.code is FailureCode.INVALID
    else:
        assert all(isinstance(message["role"], str) for message in conversation.messages)
