"""OpenAI's JSON of tools, of the choice among them and of calls in a conversation: pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from appliance.common.errors import InvalidRequestError
from appliance.gateway.front.request_builder import TurnCall, check_most
from appliance.gateway.front.tool_builder import (
    MAX_TOOLS,
    ToolChoice,
    ToolSpec,
    arguments_object,
    build_tools,
    checked_call_id,
    checked_tools,
)
from appliance.gateway.generate_request import Tools
from isolation.ipc.output import MAX_CALLS

FIELDS = frozenset({"tools", "tool_choice", "parallel_tool_calls"})
"""Names of a request's fields that are read here."""


@dataclass(frozen=True, slots=True)
class Offered:
    """Tools of a request."""

    shown: tuple[ToolSpec, ...] = ()
    """Those that the model is told of."""
    tools: Tools | None = None
    """Those that it may call."""


def offered(document: Mapping[str, Any]) -> Offered:
    """Read ``tools``, ``tool_choice`` and ``parallel_tool_calls``.

    Raises:
        InvalidRequestError: malformed; ``param`` names the field.
    """
    entries = document.get("tools")
    if entries is None:
        entries = []
    _require(isinstance(entries, list), "tools", "must be an array")
    check_most(len(entries), MAX_TOOLS, "tools", "entries")
    specs = checked_tools([_tool(entry, f"tools[{index}]") for index, entry in enumerate(entries)], "tools")
    parallel = document.get("parallel_tool_calls")
    _require(parallel is None or isinstance(parallel, bool), "parallel_tool_calls", "must be true or false")
    choice = _choice(document.get("tool_choice"), parallel=parallel is not False)
    tools = build_tools(specs, choice, "tools")
    return Offered(tuple(specs) if choice.calls else (), tools)


def calls_of(value: object, at: str) -> tuple[TurnCall, ...]:
    """Read the calls of an assistant's message.

    Raises:
        InvalidRequestError: malformed; ``param`` names the field.
    """
    if not isinstance(value, list):
        raise InvalidRequestError(f"{at} must be an array", param=at)
    check_most(len(value), MAX_CALLS, at, "entries")
    return tuple(_call(entry, f"{at}[{index}]") for index, entry in enumerate(value))


def call_id_of(value: object, at: str) -> str:
    """Read the id of the call that a message answers.

    Raises:
        InvalidRequestError: there is none.
    """
    if not isinstance(value, str):
        raise InvalidRequestError(f"{at} must be the id of the call that the message answers", param=at)
    return checked_call_id(value, at)


def _tool(entry: object, at: str) -> ToolSpec:
    kind = entry.get("type") if isinstance(entry, dict) else None
    if kind != "function":
        raise InvalidRequestError(
            f'{at}.type must be "function"; other kinds of tools run elsewhere', param=f"{at}.type"
        )
    assert isinstance(entry, dict)
    function, at = entry.get("function"), f"{at}.function"
    _require(isinstance(function, dict), at, "must be an object")
    assert isinstance(function, dict)
    name, description = function.get("name"), function.get("description")
    parameters, strict = function.get("parameters"), function.get("strict")
    _require(isinstance(name, str), f"{at}.name", "must be a string")
    assert isinstance(name, str)
    _require(isinstance(description, str | None), f"{at}.description", "must be a string")
    _require(isinstance(parameters, dict | None), f"{at}.parameters", "must be a JSON Schema of an object")
    _require(strict is None or isinstance(strict, bool), f"{at}.strict", "must be true or false")
    return ToolSpec(name, description, parameters, strict is True, at)


_CHOICES = {"auto": ToolChoice(), "none": ToolChoice(calls=False), "required": ToolChoice(required=True)}
_MODES = ("auto", "required")


def _choice(value: object, *, parallel: bool) -> ToolChoice:
    if value is None:
        return ToolChoice(parallel=parallel)
    if isinstance(value, str) and value in _CHOICES:
        chosen = _CHOICES[value]
        return ToolChoice(calls=chosen.calls, required=chosen.required, parallel=parallel)
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(value, dict) and kind == "function":
        return ToolChoice(required=True, only=(_named(value, "tool_choice"),), parallel=parallel)
    if isinstance(value, dict) and kind == "allowed_tools":
        return _allowed(value.get("allowed_tools"), parallel=parallel)
    raise InvalidRequestError(
        "tool_choice must be auto, none, required, or an object with a type of: function, allowed_tools",
        param="tool_choice",
    )


def _allowed(value: object, *, parallel: bool) -> ToolChoice:
    at = "tool_choice.allowed_tools"
    _require(isinstance(value, dict), at, "must be an object")
    assert isinstance(value, dict)
    mode, tools = value.get("mode"), value.get("tools")
    _require(mode in _MODES, f"{at}.mode", f"must be one of: {', '.join(_MODES)}")
    _require(isinstance(tools, list), f"{at}.tools", "must be an array")
    assert isinstance(tools, list)
    check_most(len(tools), MAX_TOOLS, f"{at}.tools", "entries")
    only = tuple(_named(entry, f"{at}.tools[{index}]") for index, entry in enumerate(tools))
    return ToolChoice(required=mode == "required", only=only, parallel=parallel)


def _named(value: object, at: str) -> str:
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise InvalidRequestError(f"{at}.function.name must be the name of a tool", param=at)
    return name


def _call(entry: object, at: str) -> TurnCall:
    function = entry.get("function") if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or entry.get("type", "function") != "function" or not isinstance(function, dict):
        raise InvalidRequestError(f'{at} must be a call of the type "function"', param=at)
    name, arguments = function.get("name"), function.get("arguments")
    _require(isinstance(name, str), f"{at}.function.name", "must be a string")
    _require(isinstance(arguments, str), f"{at}.function.arguments", "must be a string of JSON")
    assert isinstance(name, str)
    assert isinstance(arguments, str)
    call_id = call_id_of(entry.get("id"), f"{at}.id")
    return TurnCall(call_id, name, arguments_object(arguments, f"{at}.function.arguments"))


def _require(holds: bool, param: str, what: str) -> None:
    if not holds:
        raise InvalidRequestError(f"{param} {what}", param=param)
