"""Mistakes of a caller, as each API's caller makes them: the form of a case, and the cases about tools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from appliance.gateway.grpc.generated import inference_pb2 as pb

CHAT, TEXT, EMBED, COUNT, RANK = "chat", "text", "embed", "count", "rank"
"""Which request the fields of a case stand in."""


@dataclass(frozen=True)
class Case:
    """One mistake, as each API's caller makes it; a param is the name that the error must give."""

    name: str
    http: dict[str, Any]
    http_param: str
    grpc: dict[str, Any]
    grpc_param: str
    kind: str = TEXT


def turns(*messages: pb.ChatMessage) -> dict[str, Any]:
    """The field of a conversation."""
    return {"conversation": pb.Conversation(messages=messages)}


USER = pb.ChatMessage(role=pb.ROLE_USER, content="x")
SAID = {"role": "user", "content": "x"}


NOW = {"type": "function", "function": {"name": "now"}}


def tools(*functions: dict[str, Any]) -> list[dict[str, Any]]:
    """OpenAI's tools."""
    return [{"type": "function", "function": one} for one in functions]


def offered(http: dict[str, Any], http_param: str, grpc_param: str, *entries: pb.Tool, **fields: Any) -> Case:
    """A mistake in the tools of a conversation, or in the choice among them."""
    conversation = pb.Conversation(messages=[USER], tools=entries or [pb.Tool(name="now")])
    given = {"messages": [SAID], "tools": [NOW], **http}
    return Case(
        f"{http_param} {len(entries)}", given, http_param, {"conversation": conversation, **fields}, grpc_param, CHAT
    )


def called(http: dict[str, Any], http_param: str, grpc_param: str, **message: Any) -> Case:
    """A mistake in a call of a conversation, or in its result."""
    over_grpc = turns(pb.ChatMessage(**message))
    return Case(http_param, {"messages": [http]}, http_param, over_grpc, grpc_param, CHAT)


def endless() -> pb.Tool:
    """A tool with a number that JSON has not."""
    tool = pb.Tool(name="now")
    tool.parameters.update({"maximum": float("inf")})
    return tool


CALL = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
STRICT = {"type": "function", "function": {"name": "now", "strict": True}}
ASSISTANT = {"role": pb.ROLE_ASSISTANT}
TOOL_CASES = [
    offered({"tools": [NOW] * 129}, "tools", "conversation.tools", *[pb.Tool(name="now")] * 129),
    offered(
        {"tools": tools({"name": "a b"})}, "tools[0].function.name", "conversation.tools[0].name", pb.Tool(name="a b")
    ),
    offered({"tools": [NOW, NOW]}, "tools[1].function.name", "conversation.tools[1].name", *[pb.Tool(name="now")] * 2),
    offered(
        {"tools": tools({"name": "now", "parameters": {"title": "x" * (256 << 10)}})},
        "tools",
        "conversation.tools",
        pb.Tool(name="now", parameters={"title": "x" * (256 << 10)}),
    ),
    offered(
        {"tools": tools({"name": "now", "parameters": []})},
        "tools[0].function.parameters",
        "conversation.tools[0].parameters",
        endless(),
    ),
    offered(
        {"tool_choice": {"type": "function", "function": {"name": "then"}}},
        "tool_choice",
        "tool_choice",
        tool_choice=pb.ToolChoice(only=["then"]),
    ),
    offered({"tool_choice": "any"}, "tool_choice", "tool_choice.mode", tool_choice=pb.ToolChoice(mode=9)),
    Case(
        "a call without tools",
        {"messages": [SAID], "tool_choice": "required"},
        "tool_choice",
        {**turns(USER), "tool_choice": pb.ToolChoice(mode=pb.TOOL_MODE_REQUIRED)},
        "tool_choice",
        CHAT,
    ),
    Case(
        "a choice for a text",
        {"tool_choice": "required"},
        "tool_choice",
        {"tool_choice": pb.ToolChoice()},
        "tool_choice",
    ),
    offered(
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NOW] * 129}}},
        "tool_choice.allowed_tools.tools",
        "tool_choice.only",
        tool_choice=pb.ToolChoice(only=["now"] * 129),
    ),
    offered(
        {"guided_regex": "a"},
        "guided_regex",
        "structured_output.regex",
        structured_output=pb.StructuredOutput(regex="a"),
    ),
    offered(
        {"response_format": {"type": "json_object"}, "whitespace": "flexible"},
        "response_format",
        "structured_output.json_object",
        structured_output=pb.StructuredOutput(json_object=pb.JsonObject(), whitespace=pb.WHITESPACE_FLEXIBLE),
    ),
    offered(
        {"structured_outputs": {"json": "x" * (256 << 10)}},
        "structured_outputs.json",
        "structured_output.json_schema",
        structured_output=pb.StructuredOutput(json_schema="x" * (256 << 10)),
    ),
    offered({"n": 2, "tools": [STRICT]}, "n", "choices", pb.Tool(name="now", strict=True), choices=2),
    offered({"ignore_eos": True}, "ignore_eos", "ignore_eos", ignore_eos=True),
    called(
        {"role": "assistant", "tool_calls": [{**CALL, "id": ""}]},
        "messages[0].tool_calls[0].id",
        "conversation.messages[0].tool_calls[0].id",
        tool_calls=[pb.ToolCall(name="now")],
        **ASSISTANT,
    ),
    called(
        {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "now", "arguments": "[]"}}]},
        "messages[0].tool_calls[0].function.arguments",
        "conversation.messages[0].tool_calls[0].arguments",
        tool_calls=[pb.ToolCall(id="1", name="now", arguments="[]")],
        **ASSISTANT,
    ),
    called(
        {"role": "assistant", "tool_calls": [CALL] * 129},
        "messages[0].tool_calls",
        "conversation.messages[0].tool_calls",
        tool_calls=[pb.ToolCall(id="1", name="now")] * 129,
        **ASSISTANT,
    ),
    called(
        {"role": "tool", "content": "x"},
        "messages[0].tool_call_id",
        "conversation.messages[0].tool_call_id",
        role=pb.ROLE_TOOL,
    ),
    called(
        {"role": "assistant", "tool_calls": {}},
        "messages[0].tool_calls",
        "conversation.messages[0].tool_calls",
        role=pb.ROLE_USER,
        tool_calls=[pb.ToolCall(id="1", name="now")],
    ),
]
