"""How an answer's structure is asked for over HTTP -> ``Grammar``: pure.

``response_format`` as in OpenAI's API (``text``, ``json_object``, ``json_schema``), and vLLM's ``structured_outputs``
(``json``, ``regex``, ``choice``, ``grammar``, ``json_object``) with its older spelling, ``guided_json`` and so on. A
request uses one of them; ``whitespace``, our own, goes with those that give JSON. Schemas were parsed with the body;
they are written out again and read by nobody else here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from appliance.common.errors import InvalidRequestError
from appliance.gateway.front import request_builder
from appliance.gateway.generate_request import Grammar
from isolation.ipc.grammar import GrammarKind, Whitespace

_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}

FIELDS = frozenset({"response_format", "structured_outputs", "whitespace", *_GUIDED})
"""Names of a request's fields that are read here."""

_FORMS = ("json", "json_object", "regex", "choice", "grammar")
_FORMATS = ("text", "json_object", "json_schema")

_WHITESPACES: Mapping[str, Whitespace] = {"compact": Whitespace.COMPACT, "flexible": Whitespace.FLEXIBLE}


def grammar_of(document: Mapping[str, Any]) -> Grammar | None:
    """What the output shall follow, or None.

    Raises:
        InvalidRequestError: malformed, or asked for twice; ``param`` names the field.
    """
    found: dict[str, Grammar] = {}
    grammar = _response_format(document.get("response_format"))
    if grammar is not None:
        found["response_format"] = grammar
    outputs = document.get("structured_outputs")
    if outputs is not None:
        _require(isinstance(outputs, dict), "structured_outputs", "must be an object")
        for name, value in outputs.items():
            if value is not None and value is not False:
                at = f"structured_outputs.{name}"
                found[at] = _form(name, value, at)
    for field, name in _GUIDED.items():
        if document.get(field) is not None:
            found[field] = _form(name, document[field], field)
    if len(found) > 1:
        raise InvalidRequestError(
            f"structured output is asked for {len(found)} times: {', '.join(found)}; give one", param=list(found)[1]
        )
    asked_for = next(iter(found.values()), None)
    return request_builder.spaced(asked_for, _whitespace(document.get("whitespace")), "whitespace")


def _whitespace(value: object) -> Whitespace | None:
    if value is None:
        return None
    chosen = _WHITESPACES.get(value) if isinstance(value, str) else None
    _require(chosen is not None, "whitespace", f"must be one of: {', '.join(_WHITESPACES)}")
    return chosen


def _response_format(value: object) -> Grammar | None:
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    _require(kind in _FORMATS, "response_format", f"must be an object with a type of: {', '.join(_FORMATS)}")
    assert isinstance(value, dict)
    if kind == "text":
        return None
    if kind == "json_object":
        return request_builder.grammar(GrammarKind.JSON_SCHEMA, request_builder.ANY_OBJECT, "response_format")
    at = "response_format.json_schema"
    described = value.get("json_schema")
    _require(isinstance(described, dict), at, "must be an object")
    assert isinstance(described, dict)
    strict = described.get("strict")
    _require(strict is None or isinstance(strict, bool), f"{at}.strict", "must be true or false")
    schema = described.get("schema")
    _require(isinstance(schema, dict), f"{at}.schema", "must be an object")
    asked = GrammarKind.JSON_SCHEMA if strict else GrammarKind.JSON_SCHEMA_LENIENT
    return request_builder.grammar(asked, request_builder.compact_json(schema), f"{at}.schema")


def _form(name: str, value: object, at: str) -> Grammar:
    if name == "json":
        _require(isinstance(value, str | dict | bool), at, "must be a JSON Schema")
        return request_builder.grammar(
            GrammarKind.JSON_SCHEMA, value if isinstance(value, str) else request_builder.compact_json(value), at
        )
    if name == "json_object":
        _require(value is True, at, "must be true or false")
        return request_builder.grammar(GrammarKind.JSON_SCHEMA, request_builder.ANY_OBJECT, at)
    if name == "choice":
        _require(isinstance(value, list), at, "must be an array of strings")
        assert isinstance(value, list)
        return request_builder.choice_grammar(value, at)
    if name in ("regex", "grammar"):
        _require(isinstance(value, str), at, "must be a string")
        assert isinstance(value, str)
        return request_builder.grammar(GrammarKind.REGEX if name == "regex" else GrammarKind.LARK, value, at)
    raise InvalidRequestError(f"{at} is not supported; use one of: {', '.join(_FORMS)}", param=at)


def _require(holds: bool, param: str, what: str) -> None:
    if not holds:
        raise InvalidRequestError(f"{param} {what}", param=param)
