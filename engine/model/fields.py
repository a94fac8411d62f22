"""Typed, ranged access to an untrusted JSON object; null counts as absent.

A value of another type or out of range is a ``ModelLoadError`` that names the file and the key.
"""

from __future__ import annotations

from engine.errors import ModelLoadError

MAX_STOP_IDS = 256
"""Ids that end an output."""

MAX_STOP_ID = 1 << 20
"""Ids in the largest vocabulary that is believed."""


class Fields:
    """One object of a file."""

    def __init__(self, name: str, values: dict[str, object]) -> None:
        self.name = name
        self.values = values

    def but(self, **changes: object) -> Fields:
        """The same object with other values for some keys; None takes a key away."""
        return Fields(self.name, {**self.values, **changes})

    def defaults(self, **values: object) -> Fields:
        """The same object with values for keys that are absent."""
        return self.but(**{key: value for key, value in values.items() if self.absent(key)})

    def absent(self, key: str) -> bool:
        """Whether there is no such value."""
        return self.values.get(key) is None

    def error(self, text: str) -> ModelLoadError:
        """An error that names the file."""
        return ModelLoadError(f"{self.name}: {text}")

    def integer(self, key: str, low: int, high: int, *, default: int | None = None) -> int:
        """An integer of a closed range; without a default it must be there."""
        value = self.values.get(key)
        if value is None:
            value = default
        if type(value) is not int or not low <= value <= high:
            raise self.error(f"{key} must be an integer from {low} to {high}")
        return value

    def number(self, key: str, low: float, high: float, *, default: float) -> float:
        """A number of a closed range."""
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self.error(f"{key} must be a number from {low} to {high}")
        return float(value)

    def boolean(self, key: str, *, default: bool = False) -> bool:
        """True or false."""
        value = self.values.get(key)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.error(f"{key} must be true or false")
        return value

    def only(self, key: str, allowed: tuple[str, ...], *, default: str) -> str:
        """One of a few words."""
        value = self.values.get(key)
        if value is None:
            value = default
        if not isinstance(value, str) or value not in allowed:
            raise self.error(f"{key} must be one of {', '.join(allowed)}")
        return value

    def words(self, key: str, count: int, allowed: tuple[str, ...]) -> tuple[str, ...] | None:
        """A list of exactly so many words, each one of a few; None where there is no list."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != count or any(word not in allowed for word in value):
            raise self.error(f"{key} must be a list of {count} words, each one of {', '.join(allowed)}")
        return tuple(map(str, value))

    def integers(self, key: str, count: int, low: int, high: int) -> tuple[int, ...] | None:
        """A list of exactly so many integers of a closed range; None where there is no list."""
        value = self.values.get(key)
        if value is None:
            return None
        if (
            not isinstance(value, list)
            or len(value) != count
            or any(type(one) is not int or not low <= one <= high for one in value)
        ):
            raise self.error(f"{key} must be a list of {count} integers from {low} to {high}")
        return tuple(value)

    def indices(self, key: str, count: int) -> frozenset[int] | None:
        """A list of places in a list of so many; None where there is no list."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) > count or any(
            type(one) is not int or not 0 <= one < count for one in value
        ):
            raise self.error(f"{key} must be a list of at most {count} integers from 0 to {count - 1}")
        return frozenset(value)

    def section(self, key: str) -> Fields:
        """An object inside this one."""
        value = self.values.get(key)
        if not isinstance(value, dict):
            raise self.error(f"{key} must be a JSON object")
        return Fields(f"{self.name}: {key}", value)

    def architecture(self, supported: tuple[str, ...]) -> str:
        """The one architecture that the object names."""
        names = self.values.get("architectures")
        if not isinstance(names, list) or len(names) != 1 or names[0] not in supported:
            raise self.error(f"architectures must name one of: {', '.join(supported)}")
        return str(names[0])

    def stop_ids(self) -> set[int]:
        """Ids that end an output: one, several or none."""
        value = self.values.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if len(ids) > MAX_STOP_IDS or any(type(one) is not int or not 0 <= one < MAX_STOP_ID for one in ids):
            raise self.error("eos_token_id must be an id or a list of ids")
        return set(ids)
