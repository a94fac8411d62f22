"""Reading fields of JSON documents: types checked, errors that name the field; pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from appliance.common.errors import InvalidRequestError

T = TypeVar("T")

KIND_NAMES: Mapping[type, str] = {
    str: "a string",
    int: "an integer",
    bool: "true or false",
    list: "an array",
    dict: "an object",
}


def typed(document: Mapping[str, Any], name: str, kind: type[T], at: str = "") -> T | None:
    """Return a field's value; None where there is none, or null. ``at`` stands before its name in errors.

    Raises:
        InvalidRequestError: it is of another type.
    """
    value = document.get(name)
    if value is None:
        return None
    if type(value) is not kind:
        raise InvalidRequestError(f"{at}{name} must be {KIND_NAMES[kind]}", param=f"{at}{name}")
    return value


def needed(document: Mapping[str, Any], name: str, kind: type[T], at: str = "") -> T:
    """Return the value of a field that has to be there.

    Raises:
        InvalidRequestError: it is missing, or of another type.
    """
    value = typed(document, name, kind, at)
    if value is None:
        raise InvalidRequestError(f"{at}{name} is required", param=f"{at}{name}")
    return value


def number(document: Mapping[str, Any], name: str) -> float | None:
    """Return the value of a field that is a number; None where there is none.

    Raises:
        InvalidRequestError: it is something else.
    """
    value = document.get(name)
    if value is not None and type(value) not in (int, float):
        raise InvalidRequestError(f"{name} must be a number", param=name)
    return value


def an_object(value: object, at: str) -> dict[str, Any]:
    """Return a value that is an object.

    Raises:
        InvalidRequestError: it is something else.
    """
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{at} must be an object", param=at)
    return value


def without_effect(document: Mapping[str, Any], *known: Collection[str]) -> tuple[str, ...]:
    """Return the names of fields that have a value and are none of the known ones."""
    return tuple(
        name for name, value in document.items() if value is not None and not any(name in names for names in known)
    )


def one_of(value: object, allowed: tuple[str, ...], at: str) -> str:
    """Return a value that is one of some words.

    Raises:
        InvalidRequestError: it is something else.
    """
    if not isinstance(value, str) or value not in allowed:
        raise InvalidRequestError(f"{at} must be one of: {', '.join(allowed)}", param=at)
    return value
