"""JSON from strangers: UTF-8 only, no duplicate keys, no NaN, bounded depth and bounded number of containers.

The standard parser is linear and safe on any input, but it builds what it reads: two bytes (``[]``) become an object of
56. The number of containers is therefore bounded before it runs, and so is the depth right after.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

MAX_JSON_DEPTH = 32
"""Levels of nesting; the deepest legitimate request (a content part of a message) has 5."""

MAX_JSON_CONTAINERS = 65_536
"""Arrays and objects of one document; 1,024 messages with 16 parts each need a quarter of it."""

_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+["\\]?', re.DOTALL)
"""A string, closed or not: an unclosed one must match too, or each escaped quote in it would start a new search."""

_CONTAINERS = frozenset({list, dict})
"""Types that the parser makes of arrays and objects, and no subclass of them."""


class JsonError(ValueError):
    """The document is refused; the message says why and shows nothing of it."""


def parse_json(text: bytes, *, max_containers: int = MAX_JSON_CONTAINERS) -> Any:
    """The value of a JSON document (RFC 8259).

    Raises:
        JsonError: not UTF-8, malformed, a key twice in one object, NaN or Infinity, too deep, too many containers.
    """
    if _has_more_containers(text, max_containers):
        raise JsonError(f"more than {max_containers} arrays and objects")
    try:
        value = json.loads(
            text.decode("utf-8"), parse_float=_finite, parse_constant=_refuse_constant, object_pairs_hook=_unique
        )
    except UnicodeDecodeError:
        raise JsonError("not UTF-8") from None
    except RecursionError:
        raise JsonError(f"nested deeper than {MAX_JSON_DEPTH} levels") from None
    except json.JSONDecodeError as error:
        raise JsonError(f"malformed at line {error.lineno}, column {error.colno}") from None
    except JsonError:
        raise
    except ValueError:
        raise JsonError("a number has too many digits") from None
    _check_depth(value)
    return value


def _has_more_containers(text: bytes, limit: int) -> bool:
    """Whether the text has more arrays and objects; strings are looked at only when their brackets could matter."""
    if text.count(b"[") + text.count(b"{") <= limit:
        return False
    bare = _STRING.sub(b"", text)
    return bare.count(b"[") + bare.count(b"{") > limit


def _refuse_constant(name: str) -> None:
    raise JsonError(f"{name} is not a JSON number")


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise JsonError("a number is too large")
    return number


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Two values under one key are read differently by different parsers on the way; none of them is right.
    found = dict(pairs)
    if len(found) != len(pairs):
        raise JsonError("an object has the same key twice")
    return found


def _check_depth(value: Any) -> None:
    level = [value] if type(value) in _CONTAINERS else []
    for _ in range(MAX_JSON_DEPTH):
        level = [
            item
            for parent in level
            for item in (parent.values() if type(parent) is dict else parent)
            if type(item) in _CONTAINERS
        ]
        if not level:
            return
    raise JsonError(f"nested deeper than {MAX_JSON_DEPTH} levels")
