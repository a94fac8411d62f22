"""Pieces of JSON Schema (draft 2020-12) of which the schemas of requests and answers are made; pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]

ANY_OBJECT: Schema = {"type": "object"}
ANY_TEXT: Schema = {"type": "string"}
TRUTH: Schema = {"type": "boolean"}
NULL: Schema = {"type": "null"}
NUMBER: Schema = {"type": "number"}
COUNT: Schema = {"type": "integer", "minimum": 0}
TIME: Schema = {"type": "integer", "minimum": 0, "description": "Unix seconds."}


def text(least: int = 0, most: int | None = None, *, pattern: str | None = None) -> Schema:
    """Return the schema of a text with so many characters."""
    found: Schema = {"type": "string"}
    if least:
        found["minLength"] = least
    if most is not None:
        found["maxLength"] = most
    return found if pattern is None else {**found, "pattern": pattern}


def whole(low: int, high: int) -> Schema:
    """Return the schema of a whole number of a range."""
    return {"type": "integer", "minimum": low, "maximum": high}


def number(low: float, high: float, *, above: bool = False) -> Schema:
    """Return the schema of a number of a range; ``above``: without its least value."""
    return {"type": "number", "exclusiveMinimum" if above else "minimum": low, "maximum": high}


def word(*words: str) -> Schema:
    """Return the schema of one of some texts."""
    return {"type": "string", "enum": list(words)}


def items(one: Schema, least: int = 0, most: int | None = None) -> Schema:
    """Return the schema of a list of so many entries."""
    found: Schema = {"type": "array", "items": one}
    if least:
        found["minItems"] = least
    if most is not None:
        found["maxItems"] = most
    return found


def either(*schemas: Schema) -> Schema:
    """Return the schema of what satisfies one of several."""
    return {"anyOf": list(schemas)}


def ref(name: str) -> Schema:
    """Return a reference to a schema of the document."""
    return {"$ref": f"#/components/schemas/{name}"}


def or_null(schema: Schema) -> Schema:
    """Return the schema of a value that may be null."""
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], NULL]}
    if "$ref" in schema or "const" in schema or not isinstance(schema.get("type"), str):
        return {"anyOf": [schema, NULL]}
    found = {**schema, "type": [schema["type"], "null"]}
    return {**found, "enum": [*schema["enum"], None]} if "enum" in schema else found


def taken(properties: Mapping[str, Schema], *needed: str) -> Schema:
    """Return the schema of an object in a request: fields that are not needed may be null, which asks for nothing, but
    for those that say what the object is; other fields are passed over."""
    fixed = {*needed, *(name for name, schema in properties.items() if "const" in schema)}
    made = {name: schema if name in fixed else or_null(schema) for name, schema in properties.items()}
    return {"type": "object", "properties": made, **({"required": list(needed)} if needed else {})}


def given(properties: Mapping[str, Schema], *optional: str) -> Schema:
    """Return the schema of an object in an answer: it has these fields, of which some may be missing, and no others."""
    return {
        "type": "object",
        "properties": dict(properties),
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
    }


def constant(value: str) -> Schema:
    """Return the schema of one text."""
    return {"const": value}
