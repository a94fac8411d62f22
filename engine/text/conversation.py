"""A tenant's conversation: untrusted JSON to validated, plain values for the chat template.

The template is a program that would fail in unexpected ways on odd values, and validation is cheap here: types, names,
counts, depth. Roles are words, so that no role can carry text into a header. Strings are Unicode without lone
surrogates and without the marks that represent control tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from engine.errors import RequestRejectedError
from engine.text.marks import holds_mark
from isolation.ipc.messages import FailureCode

MAX_DEPTH = 32
"""Largest nesting depth; JSON schemas in tools rarely exceed ten."""

MAX_VALUES = 200_000
"""Largest number of values in one conversation, keys not counted: a bound on the walk, far above real use."""

MAX_MESSAGES = 8_192
MAX_PARTS = 1_024
"""Largest number of text parts in one message."""
MAX_TOOLS = 128
"""Largest number of tools; the limit of OpenAI's API."""
MAX_TOOL_CALLS = 128
MAX_TEMPLATE_KWARGS = 16
MAX_KWARG_CHARACTERS = 1_024

_ROLE = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_MESSAGE_TEXTS = ("name", "tool_call_id", "reasoning_content")
_MESSAGE_KEYS = frozenset((*_MESSAGE_TEXTS, "role", "content", "tool_calls"))
_TOP_KEYS = frozenset(("messages", "tools", "template_kwargs", "hints"))


@dataclass(frozen=True, slots=True)
class Conversation:
    """Variables with which a chat template is rendered."""

    messages: Sequence[Mapping[str, Any]]
    """Messages with ``role``; ``content`` is one text or absent; ``tool_calls`` have parsed arguments."""
    tools: Sequence[Mapping[str, Any]] | None = None
    template_kwargs: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    hints: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    """As ``template_kwargs``; those that the template does not read have no effect."""


def parse_conversation(source: bytes) -> Conversation:
    """Parse ``{"messages": [...], "tools": [...]?, "template_kwargs": {...}?, "hints": {...}?}``.

    A message's content is a text or a list of ``{"type": "text", "text": ...}``, whose texts are joined with a line
    break. Tool call arguments that are a JSON object in a string are parsed, because templates expect the object. A
    null value counts as an absent key.

    Raises:
        RequestRejectedError: ``INVALID``, with the problem and its position.
    """
    try:
        data = json.loads(source.decode("utf-8"), parse_constant=_no_constant)
    except RecursionError:
        _refuse(f"the conversation is nested deeper than {MAX_DEPTH}")
    except ValueError as error:
        raise RequestRejectedError(FailureCode.INVALID, "the conversation is not JSON in UTF-8") from error
    _check_values(data)
    if not isinstance(data, dict) or not data.keys() <= _TOP_KEYS:
        _refuse("the conversation is not an object with messages, tools, template_kwargs and hints")
    messages = _list("messages", data.get("messages"), MAX_MESSAGES)
    if not messages:
        _refuse("the conversation has no messages")
    return Conversation(
        [_message(f"messages[{index}]", message) for index, message in enumerate(messages)],
        _tools(data.get("tools")),
        _arguments("template_kwargs", data.get("template_kwargs")),
        _arguments("hints", data.get("hints")),
    )


def check_text(text: str) -> None:
    """Refuse text that no tokenizer accepts or that could be mistaken for a mark.

    Raises:
        RequestRejectedError: ``INVALID``.
    """
    if text.isascii():
        return
    if holds_mark(text):
        _refuse("the text holds U+FDD0 or U+FDD1, which are reserved")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestRejectedError(FailureCode.INVALID, "the text holds half of a surrogate pair") from error


def _check_values(data: object) -> None:
    level: list[object] = [data]
    total = 0
    for _ in range(MAX_DEPTH):
        deeper: list[object] = []
        for value in level:
            if isinstance(value, str):
                check_text(value)
            elif isinstance(value, dict):
                for key in value:
                    check_text(key)
                deeper.extend(value.values())
            elif isinstance(value, list):
                deeper.extend(value)
        total += len(deeper)
        if total > MAX_VALUES:
            _refuse(f"the conversation has more than {MAX_VALUES} values")
        if not deeper:
            return
        level = deeper
    _refuse(f"the conversation is nested deeper than {MAX_DEPTH}")


def _message(where: str, value: object) -> dict[str, Any]:
    message = {name: part for name, part in _object(where, value).items() if part is not None}
    if not message.keys() <= _MESSAGE_KEYS:
        unknown = min(message.keys() - _MESSAGE_KEYS)
        _refuse(f"{where} has an unknown key {unknown[:64]!r}")
    role = _text(f"{where}.role", message.get("role"))
    if not _ROLE.fullmatch(role):
        _refuse(f"{where}.role is not a lower-case word")
    for name in _MESSAGE_TEXTS:
        if name in message:
            _text(f"{where}.{name}", message[name])
    if "content" in message:
        message["content"] = _content(f"{where}.content", message["content"])
    if "reasoning_content" in message:
        # Some templates use this older name of the field.
        message["thinking"] = message["reasoning_content"]
    if "tool_calls" in message:
        calls = _list(f"{where}.tool_calls", message["tool_calls"], MAX_TOOL_CALLS)
        message["tool_calls"] = [_tool_call(f"{where}.tool_calls[{index}]", call) for index, call in enumerate(calls)]
    return message


def _content(where: str, value: object) -> str:
    if isinstance(value, str):
        return value
    texts = []
    for index, part in enumerate(_list(where, value, MAX_PARTS)):
        fields = _object(f"{where}[{index}]", part)
        if fields.keys() != {"type", "text"} or fields["type"] != "text":
            _refuse(f"{where}[{index}] is not a text part; this model takes text only")
        texts.append(_text(f"{where}[{index}].text", fields["text"]))
    return "\n".join(texts)


def _tool_call(where: str, value: object) -> dict[str, Any]:
    call = dict(_object(where, value))
    function = dict(_object(f"{where}.function", call.get("function")))
    _text(f"{where}.function.name", function.get("name"))
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        function["arguments"] = _parsed_arguments(arguments)
    elif not isinstance(arguments, dict):
        _refuse(f"{where}.function.arguments is neither a string nor an object")
    call["function"] = function
    return call


def _parsed_arguments(arguments: str) -> object:
    try:
        parsed = json.loads(arguments, parse_constant=_no_constant)
        _check_values(parsed)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _tools(value: object) -> list[dict[str, Any]] | None:
    if value is None:
        return None
    tools = _list("tools", value, MAX_TOOLS)
    return [_object(f"tools[{index}]", tool) for index, tool in enumerate(tools)] or None


def _arguments(where: str, value: object) -> dict[str, str | int | float | bool]:
    kwargs = {} if value is None else _object(where, value)
    if len(kwargs) > MAX_TEMPLATE_KWARGS:
        _refuse(f"{where} has more than {MAX_TEMPLATE_KWARGS} entries")
    for name, part in kwargs.items():
        if not isinstance(part, str | int | float) or len(str(part)) > MAX_KWARG_CHARACTERS:
            _refuse(f"{where}.{name[:64]} is not a short text, a number or a boolean")
    return kwargs


def _object(where: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        _refuse(f"{where} is not an object")
    return value


def _list(where: str, value: object, limit: int) -> list[Any]:
    if not isinstance(value, list):
        _refuse(f"{where} is not a list")
    if len(value) > limit:
        _refuse(f"{where} has more than {limit} entries")
    return value


def _text(where: str, value: object) -> str:
    if not isinstance(value, str):
        _refuse(f"{where} is not text")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _refuse(reason: str) -> NoReturn:
    raise RequestRejectedError(FailureCode.INVALID, reason)
