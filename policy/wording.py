"""Words of messages: wrong values in a file, and numbers with their nouns. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

SHOWN_CHARACTERS = 40
"""Characters of a wrong value that a message repeats."""

_MESSAGES: Mapping[str, str] = {
    "missing": "this key is required",
    "int_type": "must be a whole number, found {shown}",
    "string_type": "must be text, found {shown}",
    "float_type": "must be a number, found {shown}",
    "bool_type": "must be true or false, found {shown}",
    "list_type": "must be a list, found {shown}",
    "tuple_type": "must be a list, found {shown}",
    "model_type": "must be a mapping, found {shown}",
    "dict_type": "must be a mapping, found {shown}",
    "greater_than_equal": "must be at least {ge}, found {shown}",
    "less_than_equal": "must be at most {le}, found {shown}",
    "literal_error": "must be {expected}, found {shown}",
    "enum": "must be {expected}, found {shown}",
    "too_short": "must have at least {entries}",
    "too_long": "must have at most {entries}",
    "string_pattern_mismatch": "{shown} does not fit the pattern {pattern}",
}
"""Messages for pydantic's error types; pydantic's own text is used for all others."""


def worded(item: Mapping[str, Any], known: Sequence[str]) -> str:
    """Describe one of pydantic's errors; ``known`` lists the valid keys beside an unknown one."""
    if item["type"] == "extra_forbidden":
        return _unknown_key(str(item["loc"][-1]), known)
    template = _MESSAGES.get(item["type"])
    if template is None:
        return str(item["msg"])
    bounds = item.get("ctx", {})
    length = int(bounds.get("min_length" if item["type"] == "too_short" else "max_length", 0))
    words = {"shown": _shown(item["input"]), "entries": counted(length, "entry", "entries", grouped=False)}
    return template.format_map({**bounds, **words})


def _unknown_key(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(known)}"
    return f"unknown key; {hint}"


def _shown(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."


def counted(number: int, noun: str, plural: str = "", *, grouped: bool = True) -> str:
    """A number with its noun: ``1 tenant``, ``2 tenants``, ``1,200 entries``.

    Args:
        number: how many.
        noun: for one.
        plural: for any other number; empty: the noun with an ``s``.
        grouped: whether digits stand in groups of three.
    """
    return f"{number:{',' if grouped else ''}} {noun if number == 1 else plural or f'{noun}s'}"
