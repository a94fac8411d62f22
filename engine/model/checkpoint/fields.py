"""Typed, ranged access to an untrusted JSON object; null counts as absent.

A value of another type or out of range is a ``ModelLoadError`` that names the file and the key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.errors import ModelLoadError

MAX_STOP_IDS = 256
"""Largest number of ids that end an output."""

MAX_STOP_ID = 1 << 20
"""Largest accepted id that ends an output: the limit of a vocabulary."""


class Fields:
    """One JSON object of a file."""

    def __init__(self, name: str, values: dict[str, object]) -> None:
        self.name = name
        self.values = values

    def but(self, **changes: object) -> Fields:
        """Copy the object with other values for some keys; None removes a key."""
        return Fields(self.name, {**self.values, **changes})

    def defaults(self, **values: object) -> Fields:
        """Copy the object with values for absent keys."""
        return self.but(**{key: value for key, value in values.items() if self.absent(key)})

    def absent(self, key: str) -> bool:
        """Return whether the key has no value."""
        return self.values.get(key) is None

    def error(self, text: str) -> ModelLoadError:
        """Build an error that names the file."""
        return ModelLoadError(f"{self.name}: {text}")

    def integer(self, key: str, low: int, high: int, *, default: int | None = None) -> int:
        """Return an integer within a closed range; required when there is no default."""
        value = self.values.get(key)
        if value is None:
            value = default
        if type(value) is not int or not low <= value <= high:
            raise self.error(f"{key} must be an integer from {low} to {high}")
        return value

    def number(self, key: str, low: float, high: float, *, default: float) -> float:
        """Return a number within a closed range."""
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self.error(f"{key} must be a number from {low} to {high}")
        return float(value)

    def boolean(self, key: str, *, default: bool = False) -> bool:
        """Return a boolean."""
        value = self.values.get(key)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.error(f"{key} must be true or false")
        return value

    def only(self, key: str, allowed: tuple[str, ...], *, default: str) -> str:
        """Return one of the permitted words."""
        value = self.values.get(key)
        if value is None:
            value = default
        if not isinstance(value, str) or value not in allowed:
            raise self.error(f"{key} must be one of {', '.join(allowed)}")
        return value

    def words(self, key: str, count: int, allowed: tuple[str, ...]) -> tuple[str, ...] | None:
        """Return a list of exactly ``count`` permitted words; None when absent."""
        what = f"a list of {count} words, each one of {', '.join(allowed)}"
        found = self._items(key, what, lambda items: len(items) == count and all(one in allowed for one in items))
        return None if found is None else tuple(map(str, found))

    def integers(self, key: str, count: int, low: int, high: int) -> tuple[int, ...] | None:
        """Return a list of exactly ``count`` integers within a closed range; None when absent."""
        what = f"a list of {count} integers from {low} to {high}"
        found = self._items(key, what, lambda items: len(items) == count and _within(items, low, high))
        return None if found is None else tuple(found)

    def indices(self, key: str, count: int) -> frozenset[int] | None:
        """Return a list of indices into a list of the given length; None when absent."""
        what = f"a list of at most {count} integers from 0 to {count - 1}"
        found = self._items(key, what, lambda items: len(items) <= count and _within(items, 0, count - 1))
        return None if found is None else frozenset(found)

    def _items(self, key: str, what: str, valid: Callable[[list[Any]], bool]) -> list[Any] | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not valid(value):
            raise self.error(f"{key} must be {what}")
        return value

    def section(self, key: str) -> Fields:
        """Return a nested object."""
        value = self.values.get(key)
        if not isinstance(value, dict):
            raise self.error(f"{key} must be a JSON object")
        return Fields(f"{self.name}: {key}", value)

    def architecture(self, supported: tuple[str, ...]) -> str:
        """Return the single architecture named by the object."""
        names = self.values.get("architectures")
        if not isinstance(names, list) or len(names) != 1 or names[0] not in supported:
            raise self.error(f"architectures must name one of: {', '.join(supported)}")
        return str(names[0])

    def stop_ids(self) -> set[int]:
        """Return the ids that end an output: one, several or none."""
        value = self.values.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if len(ids) > MAX_STOP_IDS or any(type(one) is not int or not 0 <= one < MAX_STOP_ID for one in ids):
            raise self.error("eos_token_id must be an id or a list of ids")
        return set(ids)


def _within(items: list[Any], low: int, high: int) -> bool:
    return all(type(one) is int and low <= one <= high for one in items)
