"""Tools that an output may call, as the host describes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.errors import RequestRejectedError
from isolation.ipc.messages import FailureCode

ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}
"""Schema of a tool that describes no parameters."""

STRING = "string"
"""JSON Schema's name of the type of text."""


@dataclass(frozen=True, slots=True)
class Tool:
    """One function that may be called."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=lambda: ANY_ARGUMENTS)
    """JSON Schema of its arguments, which are an object."""
    strict: bool = False
    """Whether the arguments must satisfy the schema."""

    def type_of(self, name: str) -> object:
        """Return what the schema says of the type of a parameter, or None."""
        schema = self.properties.get(name)
        return schema.get("type") if isinstance(schema, dict) else None

    @property
    def properties(self) -> Mapping[str, Any]:
        """The schemas of the parameters, by name."""
        found = self.parameters.get("properties")
        return found if isinstance(found, dict) else {}

    @property
    def required(self) -> frozenset[str]:
        """The names of the parameters that every call has."""
        found = self.parameters.get("required")
        return frozenset(name for name in found if isinstance(name, str)) if isinstance(found, list) else frozenset()


@dataclass(frozen=True, slots=True)
class AnswerSchema:
    """What an output without calls follows."""

    schema: str
    """JSON Schema, as the request has it."""
    strict: bool = False
    """Whether a keyword that is known and not implemented is refused; else it has no effect."""


@dataclass(frozen=True, slots=True)
class ToolSet:
    """Tools of one request, and how they may be called."""

    tools: Mapping[str, Tool]
    """Those that may be called, by name."""
    required: bool = False
    """Whether the output has to call one."""
    parallel: bool = True
    """Whether one output may have several calls."""
    answer: AnswerSchema | None = None
    """What stands in place of calls; None: any text, which may also stand before them."""


NO_TOOLS = ToolSet({})


def parse_tools(source: bytes) -> ToolSet:
    """Parse ``{"tools": [{"name": ..., "parameters": {}?, "strict": false?}], "required": false?, "parallel": true?,
    "answer": {"schema": TEXT, "strict": false?}?}``; nothing at all is no tools.

    Raises:
        RequestRejectedError: ``INVALID``, it is something else.
    """
    if not source:
        return NO_TOOLS
    try:
        document = json.loads(source)
        tools = [_tool(entry) for entry in document["tools"]]
        required, parallel = document.get("required", False), document.get("parallel", True)
        answer = _answer(document["answer"]) if "answer" in document else None
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise RequestRejectedError(FailureCode.INVALID, "the tools are malformed") from error
    return ToolSet({tool.name: tool for tool in tools}, required is True, parallel is True, answer)


def _tool(entry: Mapping[str, Any]) -> Tool:
    parameters = entry.get("parameters")
    if not isinstance(entry["name"], str) or not isinstance(parameters, dict | None):
        raise TypeError
    return Tool(entry["name"], parameters or ANY_ARGUMENTS, entry.get("strict") is True)


def _answer(entry: Mapping[str, Any]) -> AnswerSchema:
    if not isinstance(entry["schema"], str):
        raise TypeError
    return AnswerSchema(entry["schema"], entry.get("strict") is True)
