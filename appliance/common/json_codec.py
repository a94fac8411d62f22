"""Frozen dataclasses as JSON objects: what the admin listener gives and the command line reads.

The two ends may be of different versions: keys that ``decode`` does not know are passed over, missing ones take the
field's default, and anything else that does not fit is a ``SnapshotError`` that names the path.
"""

from __future__ import annotations

import json
from dataclasses import asdict, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from pydantic_core import SchemaValidator

T = TypeVar("T")

Json = dict[str, Any]
"""A JSON object."""


class SnapshotError(ValueError):
    """The JSON has another shape than expected; the message names the path and what is wrong there."""


def encode(value: object) -> Json:
    """The dataclass instance as a JSON object; tuples stay tuples, which JSON writes as lists."""
    if not is_dataclass(value) or isinstance(value, type):
        raise TypeError(f"not a dataclass instance: {type(value).__name__}")
    return asdict(value)


def decode(kind: type[T], data: object) -> T:
    """Build ``kind``, a dataclass of dataclasses, tuples, dicts and scalars, from parsed JSON.

    Raises:
        SnapshotError: a value is missing or of the wrong type.
    """
    from pydantic import ValidationError

    try:
        # As JSON: only there may a list become a tuple while numbers and texts stay apart.
        hashable: Any = kind
        return cast(T, _validator(hashable).validate_json(json.dumps(data), strict=True))
    except ValidationError as error:
        from policy.positions import dotted  # messages only

        first = error.errors(include_url=False)[0]
        raise SnapshotError(f"{dotted(first['loc']) or 'document'}: {first['msg'].lower()}") from None


@cache
def _validator(kind: Any) -> SchemaValidator:
    """Return what checks values of a type. It keeps no text: by default pydantic has a cache of the short strings that
    it reads, of the whole process and for its life, and tenants' names of files and metadata would stay in it."""
    from pydantic import TypeAdapter
    from pydantic_core import SchemaValidator

    return SchemaValidator(TypeAdapter(kind).core_schema, {"cache_strings": "none"})
