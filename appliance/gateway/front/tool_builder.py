"""Limits and checks of the tools of a request, and of their calls in a conversation, for both front ends."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from appliance.common.errors import InvalidRequestError
from appliance.gateway.front.request_builder import check_most, compact_json, utf8
from appliance.gateway.generate_request import Tools
from isolation.ipc.output import MAX_TOOLS_BYTES

MAX_TOOLS = 128
"""Tools of one request, as in OpenAI's API."""

MAX_NAME = 64
"""Characters of a tool's name."""

MAX_CALL_ID_BYTES = 256
"""Bytes of the id of a call, which another server may have made."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    """JSON Schema of the arguments; None: any."""
    strict: bool = False
    """Whether arguments must satisfy the schema."""
    param: str = field(default="tools[0]", compare=False)
    """Name by which the caller knows it, for errors."""


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model calls, and what."""

    calls: bool = True
    """False: it does not, and is told of no tool."""
    required: bool = False
    """Whether it has to."""
    only: tuple[str, ...] | None = None
    """Names of the tools that may be called; None: all."""
    parallel: bool = True
    """Whether one output may have several calls."""
    param: str = "tool_choice"
    """Name by which the caller knows it."""


def checked_tools(specs: Sequence[ToolSpec], param: str) -> Sequence[ToolSpec]:
    """Return the tools once they are checked.

    Raises:
        InvalidRequestError: too many, two of one name, or a name that no tool may have.
    """
    check_most(len(specs), MAX_TOOLS, param, "entries")
    known: set[str] = set()
    for spec in specs:
        if not _NAME.fullmatch(spec.name):
            raise InvalidRequestError(
                f"a tool's name has 1 to {MAX_NAME} letters, digits, underscores and hyphens of ASCII",
                param=f"{spec.param}.name",
            )
        if spec.name in known:
            raise InvalidRequestError(f"two tools have the name {spec.name!r}", param=f"{spec.param}.name")
        known.add(spec.name)
    return specs


def build_tools(specs: Sequence[ToolSpec], choice: ToolChoice, param: str) -> Tools | None:
    """Return the tools that an output may call; None where it may call none.

    Raises:
        InvalidRequestError: the choice names a tool that is not there, or the tools are too long.
    """
    if not choice.calls:
        return None
    known = {spec.name for spec in specs}
    if choice.only is not None and not (choice.only and known.issuperset(choice.only)):
        missing = next((name for name in choice.only if name not in known), None)
        what = "names no tool" if missing is None else f"names {missing[:MAX_NAME]!r}, which is none of the tools"
        raise InvalidRequestError(f"{choice.param} {what}", param=choice.param)
    if not specs:
        if choice.required:
            raise InvalidRequestError(f"{choice.param} asks for a call, and there are no tools", param=choice.param)
        return None
    called = [spec for spec in specs if choice.only is None or spec.name in choice.only]
    document = {
        "tools": [{"name": one.name, "parameters": one.parameters, "strict": one.strict} for one in called],
        "required": choice.required,
        "parallel": choice.parallel,
    }
    source = utf8(compact_json(document), param)
    check_most(len(source), MAX_TOOLS_BYTES, param, "bytes")
    held = choice.required or any(spec.strict for spec in called)
    return Tools(source, frozenset(spec.name for spec in called), held, param)


def shown_tools(specs: Sequence[ToolSpec]) -> list[dict[str, Any]]:
    """Return the tools as chat templates read them: in the shape of OpenAI's API."""
    shown = []
    for spec in specs:
        function: dict[str, Any] = {"name": spec.name}
        if spec.description is not None:
            function["description"] = spec.description
        function["parameters"] = spec.parameters or {"type": "object", "properties": {}}
        shown.append({"type": "function", "function": function})
    return shown


def checked_call_id(value: str, param: str) -> str:
    """Return the id of a call, of whatever server.

    Raises:
        InvalidRequestError: it is empty or too long.
    """
    if not 1 <= len(utf8(value, param)) <= MAX_CALL_ID_BYTES:
        raise InvalidRequestError(f"the id of a call has 1 to {MAX_CALL_ID_BYTES} bytes", param=param)
    return value


def arguments_object(text: str, param: str) -> str:
    """Return the arguments of an earlier call, which are the JSON of an object; nothing stands for an empty one.

    Raises:
        InvalidRequestError: they are something else.
    """
    if not text.strip():
        return "{}"
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise InvalidRequestError(f"{param} must be the JSON of an object", param=param)
    return text
