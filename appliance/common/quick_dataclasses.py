"""Dataclasses whose methods are made without a compiler, for a program that is about to import many.

``dataclasses`` writes the source of six methods of each frozen class and compiles it, which takes 1.2 ms a class: a
quarter of all that a gateway does before it serves. Here only ``__init__``, which is called often, is made so; all
others are closures over the names of the fields, with the same results. What every class is declared with, and what it
can do, stays as it is.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from operator import attrgetter
from typing import Any

KNOWN = ((3, 11), (3, 12))
"""Versions of Python whose ``dataclasses`` makes methods by the four functions that are replaced here. In any other the
library stays as it is, which costs time and nothing else."""

_REPLACED = ("_repr_fn", "_hash_fn", "_cmp_fn", "_frozen_get_del_attr", "_recursive_repr")
"""What is private there and used here; a library without one of them stays as it is too."""

_library: Any = dataclasses
"""The library with what is private in it."""

Fields = list["dataclasses.Field[Any]"]
Values = Callable[[Any], tuple[Any, ...]]


def quicken_dataclasses() -> bool:
    """Let dataclasses that are made from now on in this process have methods that nothing compiles.

    Returns:
        Whether this Python's library is one that is known; False: nothing was changed.
    """
    if sys.version_info[:2] not in KNOWN or not all(hasattr(_library, name) for name in _REPLACED):
        return False
    if _library._repr_fn is not _repr_method:
        _library._repr_fn, _library._hash_fn = _repr_method, _hash_method
        _library._cmp_fn, _library._frozen_get_del_attr = _comparing(_library._cmp_fn), _frozen_methods
    return True


def _values(names: list[str]) -> Values:
    """Function that gives an object's values under these names, always a tuple: tuples compare the same object as equal
    to itself, which not every value does by itself."""
    if not names:
        return lambda _one: ()
    get = attrgetter(*names)
    return get if len(names) > 1 else lambda one: (get(one),)


def _repr_method(fields: Fields, _globals: dict[str, Any]) -> Callable[[Any], str]:
    names = [field.name for field in fields]

    def __repr__(self: Any) -> str:
        shown = ", ".join([f"{name}={getattr(self, name)!r}" for name in names])
        return f"{self.__class__.__qualname__}({shown})"

    method: Callable[[Any], str] = _library._recursive_repr(__repr__)
    return method


def _hash_method(fields: Fields, _globals: dict[str, Any]) -> Callable[[Any], int]:
    values = _values([field.name for field in fields])

    def __hash__(self: Any) -> int:
        return hash(values(self))

    return __hash__


def _comparing(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Function in place of the library's, which gets source of the tuple ``(self.first,self.second,)``. Classes with an
    order are few, so their other comparisons are still ``compiled``."""

    def compare_method(name: str, operator: str, ours: str, theirs: str, globals: dict[str, Any]) -> Any:  # noqa: A002 - the library names it so
        if name != "__eq__":
            return compiled(name, operator, ours, theirs, globals=globals)
        values = _values([one.removeprefix("self.") for one in ours.strip("()").split(",") if one])

        def __eq__(self: Any, other: object) -> bool:
            if other.__class__ is self.__class__:
                return values(self) == values(other)
            return NotImplemented

        return __eq__

    return compare_method


def _frozen_methods(cls: type[Any], fields: Fields, _globals: dict[str, Any]) -> tuple[Callable[..., None], ...]:
    names = frozenset(field.name for field in fields)

    def __setattr__(self: Any, name: str, value: Any) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    def __delattr__(self: Any, name: str) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    return __setattr__, __delattr__
