"""Frozen dataclasses to JSON objects and back: the shapes that the admin listener gives and the
command line reads.

``encode`` gives plain dicts, lists, strings, numbers, booleans and None. ``decode`` is its inverse
and checks types on the way, because the two ends may be of different versions: keys it does not
know are passed over, missing ones take the field's default, anything else that does not fit is a
``SnapshotError`` that names the path.
"""

from __future__ import annotations

import types
from dataclasses import MISSING, asdict, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

Json = dict[str, Any]
"""A JSON object."""


class SnapshotError(ValueError):
    """The JSON has another shape than expected; the message names the path and the type wanted."""


def encode(value: object) -> Json:
    """The dataclass instance as a JSON object; tuples stay tuples, which JSON writes as lists."""
    if not is_dataclass(value) or isinstance(value, type):
        raise TypeError(f"not a dataclass instance: {type(value).__name__}")
    return asdict(value)


def decode(kind: type[T], data: object, path: str = "") -> T:
    """Build ``kind``, a dataclass of dataclasses, tuples, dicts and scalars, from parsed JSON.

    Raises:
        SnapshotError: a value is missing or of the wrong type.
    """
    if not isinstance(data, dict):
        raise SnapshotError(f"{path or 'document'}: expected an object, found {_word(data)}")
    plain: Any = kind
    hints = _hints(plain)
    values: dict[str, object] = {}
    for field in fields(plain):
        where = f"{path}.{field.name}" if path else field.name
        if field.name in data:
            values[field.name] = _value(hints[field.name], data[field.name], where)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise SnapshotError(f"{where}: missing")
    return kind(**values)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _value(hint: Any, data: object, path: str) -> object:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _union(get_args(hint), data, path)
    if origin is tuple:
        if not isinstance(data, list):
            raise SnapshotError(f"{path}: expected a list, found {_word(data)}")
        item = get_args(hint)[0]
        return tuple(_value(item, one, f"{path}[{index}]") for index, one in enumerate(data))
    if origin is dict:
        if not isinstance(data, dict):
            raise SnapshotError(f"{path}: expected an object, found {_word(data)}")
        item = get_args(hint)[1]
        return {str(key): _value(item, one, f"{path}.{key}") for key, one in data.items()}
    if is_dataclass(hint):
        shape: Any = hint
        return decode(shape, data, path)
    return _scalar(hint, data, path)


def _union(options: tuple[Any, ...], data: object, path: str) -> object:
    if data is None and type(None) in options:
        return None
    exact = [option for option in options if type(data) is option]
    for option in exact or [option for option in options if option is not type(None)]:
        try:
            return _value(option, data, path)
        except SnapshotError as error:
            problem = error
    raise problem


def _scalar(kind: type, data: object, path: str) -> object:
    if kind is float and type(data) is int:
        return float(data)
    if type(data) is not kind:
        raise SnapshotError(f"{path}: expected {kind.__name__}, found {_word(data)}")
    return data


def _word(data: object) -> str:
    return "null" if data is None else type(data).__name__
