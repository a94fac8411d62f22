"""JSON Schemas by seed, in the spirit of published collections: objects of objects, lists, choices, formats, patterns.

Every schema can be satisfied, and every output of it comes to an end soon.
"""

from __future__ import annotations

import random
from typing import Any

WORDS = ("id", "name", "kind", "size", "unit", "owner", "tags", "state", "score", "from", "to", "created", "parent")
PATTERNS = ("^[a-z]{2,6}$", "^[A-Z]{3}-[0-9]{2}$", "^(on|off|auto)$", "^v[0-9]{1,2}(\\.[0-9]{1,2})?$", "^[0-9a-f]{8}$")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4")
DEEPEST = 3


def make_schema(seed: int) -> dict[str, Any]:
    """The schema of this seed."""
    rng = random.Random(seed)
    schema = _object(rng, 0)
    if rng.random() < 0.3:
        # A part of it by reference.
        name = next(iter(schema["properties"]))
        schema["$defs"] = {"part": schema["properties"][name]}
        schema["properties"][name] = {"$ref": "#/$defs/part"}
    return schema


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    leaf = (_string, _integer, _number, _choice, _nullable, _leafless)
    inner = (_object, _array, _any_of)
    makers = leaf if depth >= DEEPEST else leaf + inner
    return rng.choice(makers)(rng, depth)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randrange(1, 5))
    properties = {name: _value(rng, depth + 1) for name in names}
    required = [name for name in names if rng.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randrange(3)
    return {
        "type": "array",
        "items": _value(rng, depth + 1),
        "minItems": least,
        "maxItems": least + rng.randrange(1, 3),
    }


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_value(rng, depth + 1) for _ in range(rng.randrange(2, 4))]}


def _string(rng: random.Random, _depth: int) -> dict[str, Any]:
    kind = rng.randrange(3)
    if kind == 0:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    if kind == 1:
        return {"type": "string", "format": rng.choice(FORMATS)}
    least = rng.randrange(3)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randrange(1, 12)}


def _integer(rng: random.Random, _depth: int) -> dict[str, Any]:
    low = rng.randrange(-1_000, 1_000)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(1, 5_000)}


def _number(rng: random.Random, _depth: int) -> dict[str, Any]:
    low = rng.randrange(-100, 100)
    return {"type": "number", "minimum": low, "maximum": low + rng.randrange(1, 50)}


def _choice(rng: random.Random, _depth: int) -> dict[str, Any]:
    if rng.random() < 0.3:
        return {"const": rng.choice(["fixed", 7, None, [1, "two"]])}
    return {"enum": rng.sample(["low", "high", 1, 2.5, None, True, "caf\u00e9", 'a"b'], 3)}


def _nullable(rng: random.Random, _depth: int) -> dict[str, Any]:
    return {"type": rng.choice([["boolean", "null"], ["null"], ["boolean"]])}


def _leafless(_rng: random.Random, _depth: int) -> dict[str, Any]:
    return {"type": "object", "properties": {}, "additionalProperties": False}
