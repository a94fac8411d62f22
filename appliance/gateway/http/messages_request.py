"""Anthropic's JSON of a message -> ``GenerateRequest``: pure; what is not served is refused by name.

Source of names and shapes: Anthropic's API reference of the Messages API, version 2023-06-01 as of 2026-10.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from appliance.common.errors import InvalidRequestError
from appliance.gateway.front import request_builder, sampling_builder
from appliance.gateway.front.end_user import end_user
from appliance.gateway.front.request_builder import Stamp, Turn, TurnCall, check_most
from appliance.gateway.front.tool_builder import (
    MAX_TOOLS,
    ToolChoice,
    ToolSpec,
    build_tools,
    checked_call_id,
    checked_tools,
    shown_tools,
)
from appliance.gateway.generate_request import ChatPrompt, GenerateRequest, Grammar, Operation, TokenizerRequest, Tools
from appliance.gateway.http.dialect import Parsed
from appliance.gateway.http.fields import an_object, needed, number, one_of, typed, without_effect
from appliance.gateway.http.messages_objects import MessageWriter
from appliance.gateway.http.openai import PART_SEPARATOR, document_of, model_of
from appliance.gateway.http.tokenizer_routes import count_request
from appliance.gateway.http.unsupported import Unsupported, refuse_unsupported
from isolation.ipc.grammar import GrammarKind
from isolation.ipc.messages import Priority
from isolation.ipc.output import MAX_CALLS

PROMPT_FIELDS = frozenset({"model", "messages", "system", "tools", "tool_choice", "thinking", "output_config"})
"""Fields that say what the model reads, which are all that a count of tokens takes."""
_SERVED = PROMPT_FIELDS | {
    "max_tokens",
    "stop_sequences",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "service_tier",
    "metadata",
}
UNSUPPORTED: Mapping[str, Unsupported] = {
    "mcp_servers": Unsupported("call the servers in your application, and offer what they do as tools"),
    "container": Unsupported("run code in your application, and offer it as a tool"),
    "output_format": Unsupported("send it as the format of output_config"),
    "context_management": Unsupported("leave out of messages what the model shall not see"),
}
"""Fields that are refused with advice."""

_NAMES = {"stop": "stop_sequences", "reasoning_effort": "thinking"}
_TIERS = {"auto": None, "standard_only": Priority.NORMAL}
_ROLES = ("user", "assistant", "system")
_THINKING = ("enabled", "disabled", "adaptive")
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
_CHOICES = ("auto", "any", "tool", "none")


def parse_message(body: bytes, stamp: Stamp) -> Parsed:
    """The request in the body of ``/v1/messages``.

    Raises:
        InvalidRequestError: anything is wrong with it; ``param`` names the field.
    """
    document = document_of(body)
    refuse_unsupported(document, UNSUPPORTED)
    prompt, tools = _prompt(document)
    tier = typed(document, "service_tier", str)
    given = {name: number(document, name) for name in ("temperature", "top_p")} | {
        "top_k": typed(document, "top_k", int)
    }
    request = GenerateRequest(
        request_id=stamp.request_id,
        operation=Operation.CHAT,
        model=model_of(document),
        prompt=prompt,
        sampling=sampling_builder.sampling_of(given, stamp),
        sent=sampling_builder.sent(given),
        max_tokens=needed(document, "max_tokens", int),
        stop=_stops(document),
        deadline=stamp.deadline,
        stream=typed(document, "stream", bool) or False,
        priority=_TIERS[one_of(tier, tuple(_TIERS), "service_tier")] if tier is not None else None,
        grammar=_grammar(document),
        tools=tools,
        end_user=_end_user(document),
    )
    request = request_builder.checked(request, _NAMES)
    return Parsed(request, MessageWriter, without_effect(document, _SERVED, UNSUPPORTED))


def _end_user(document: Mapping[str, Any]) -> str:
    metadata = typed(document, "metadata", dict) or {}
    return end_user(typed(metadata, "user_id", str, "metadata."), "metadata.user_id")


def parse_count(body: bytes, stamp: Stamp) -> tuple[TokenizerRequest, tuple[str, ...]]:
    """The request in the body of ``/v1/messages/count_tokens``, and the names of fields without effect.

    Raises:
        InvalidRequestError: anything is wrong with it; ``param`` names the field.
    """
    document = document_of(body)
    refuse_unsupported(document, UNSUPPORTED)
    request = count_request(document, _prompt(document)[0], stamp)
    _grammar(document)  # The count is the same, but what a message refuses is refused here too.
    return request, without_effect(document, PROMPT_FIELDS, UNSUPPORTED)


def _prompt(document: Mapping[str, Any]) -> tuple[ChatPrompt, Tools | None]:
    """The conversation, and what the model may call."""
    messages = needed(document, "messages", list)
    check_most(len(messages), request_builder.MAX_MESSAGES, "messages", "entries")
    turns = [turn for index, message in enumerate(messages) for turn in _turns(message, f"messages[{index}]")]
    if system := _text(document.get("system"), "system"):
        turns.insert(0, Turn("system", system))
    entries = typed(document, "tools", list) or []
    check_most(len(entries), MAX_TOOLS, "tools", "entries")
    specs = checked_tools([_tool(entry, f"tools[{index}]") for index, entry in enumerate(entries)], "tools")
    choice = _choice(document.get("tool_choice"))
    tools = build_tools(specs, choice, "tools")
    shown = shown_tools(specs) if choice.calls else ()
    return request_builder.chat_prompt(turns, "messages", tools=shown, hints=_hints(document)), tools


def _hints(document: Mapping[str, Any]) -> dict[str, object]:
    """What chat templates are told of the reasoning that is asked for, as far as they have a word for it."""
    thinking, effort = typed(document, "thinking", dict), _config(document).get("effort")
    hints: dict[str, object] = {}
    if thinking is not None:
        hints |= request_builder.thinking_hints(
            thinks=one_of(thinking.get("type"), _THINKING, "thinking.type") != "disabled"
        )
    if effort is not None:
        hints["reasoning_effort"] = one_of(effort, _EFFORTS, "output_config.effort")
    return hints


def _config(document: Mapping[str, Any]) -> Mapping[str, Any]:
    return typed(document, "output_config", dict) or {}


def _grammar(document: Mapping[str, Any]) -> Grammar | None:
    """The schema that the answer has to satisfy. A keyword that no grammar can hold it to is refused, as with
    Anthropic."""
    form = typed(_config(document), "format", dict, "output_config.")
    if form is None:
        return None
    one_of(form.get("type"), ("json_schema",), "output_config.format.type")
    schema = needed(form, "schema", dict, "output_config.format.")
    return request_builder.grammar(
        GrammarKind.JSON_SCHEMA, request_builder.compact_json(schema), "output_config.format.schema"
    )


def _turns(message: object, at: str) -> Iterator[Turn]:
    """The turns of one message: results of tools are turns of their own, before the rest."""
    fields = an_object(message, at)
    role = one_of(fields.get("role"), _ROLES, f"{at}.role")
    content = fields.get("content")
    if isinstance(content, str):
        yield Turn(role, content)
        return
    if not isinstance(content, list):
        raise InvalidRequestError(f"{at}.content must be a string or an array of blocks", param=f"{at}.content")
    check_most(len(content), request_builder.MAX_PARTS, f"{at}.content", "blocks")
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[TurnCall] = []
    results = False
    for index, block in enumerate(content):
        where = f"{at}.content[{index}]"
        entry = an_object(block, where)
        kind = entry.get("type")
        if kind == "text":
            texts.append(needed(entry, "text", str, f"{where}."))
        elif kind == "tool_result" and role == "user":
            results = True
            call_id = checked_call_id(needed(entry, "tool_use_id", str, f"{where}."), f"{where}.tool_use_id")
            yield Turn("tool", _text(entry.get("content"), f"{where}.content"), call_id=call_id)
        elif kind == "tool_use" and role == "assistant":
            calls.append(_call(entry, where))
        elif kind == "thinking" and role == "assistant":
            thoughts.append(needed(entry, "thinking", str, f"{where}."))
        elif kind != "redacted_thinking":
            raise InvalidRequestError(f"{where}.type is none that is served in a message of the {role}", param=where)
    check_most(len(calls), MAX_CALLS, f"{at}.content", "calls")
    if texts or calls or not results:
        reasoning = PART_SEPARATOR.join(thoughts) or None
        yield Turn(role, PART_SEPARATOR.join(texts), calls=tuple(calls), reasoning=reasoning)


def _call(entry: Mapping[str, Any], at: str) -> TurnCall:
    call_id = checked_call_id(needed(entry, "id", str, f"{at}."), f"{at}.id")
    arguments = request_builder.compact_json(typed(entry, "input", dict, f"{at}.") or {})
    return TurnCall(call_id, needed(entry, "name", str, f"{at}."), arguments)


def _text(value: object, at: str) -> str:
    """The text of a string or of blocks of text."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidRequestError(f"{at} must be a string or an array of text blocks", param=at)
    check_most(len(value), request_builder.MAX_PARTS, at, "blocks")
    texts = []
    for index, block in enumerate(value):
        where = f"{at}[{index}]"
        entry = an_object(block, where)
        if entry.get("type") != "text":
            raise InvalidRequestError(f"{where} must be a text block, since models read text here", param=where)
        texts.append(needed(entry, "text", str, f"{where}."))
    return PART_SEPARATOR.join(texts)


def _tool(entry: object, at: str) -> ToolSpec:
    fields = an_object(entry, at)
    kind = fields.get("type")
    if kind not in (None, "custom"):
        raise InvalidRequestError(f"{at}.type must be custom: other tools run elsewhere", param=f"{at}.type")
    return ToolSpec(
        needed(fields, "name", str, f"{at}."),
        typed(fields, "description", str, f"{at}."),
        typed(fields, "input_schema", dict, f"{at}."),
        typed(fields, "strict", bool, f"{at}.") or False,
        at,
    )


def _choice(value: object) -> ToolChoice:
    if value is None:
        return ToolChoice()
    fields = an_object(value, "tool_choice")
    kind = one_of(fields.get("type"), _CHOICES, "tool_choice.type")
    single = typed(fields, "disable_parallel_tool_use", bool, "tool_choice.") or False
    only = (needed(fields, "name", str, "tool_choice."),) if kind == "tool" else None
    return ToolChoice(calls=kind != "none", required=kind in ("any", "tool"), only=only, parallel=not single)


def _stops(document: Mapping[str, Any]) -> tuple[str, ...]:
    stops = typed(document, "stop_sequences", list) or []
    if not all(isinstance(stop, str) for stop in stops):
        raise InvalidRequestError("stop_sequences must be an array of strings", param="stop_sequences")
    return tuple(stops)
