"""Typed, ranged access to the values of a GGUF header."""

from __future__ import annotations

import numpy as np

from engine.model.checkpoint.fields import Fields
from engine.model.checkpoint.safetensors import show_name


class Values(Fields):
    """Values of a header, accessed by name."""

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string.

        Raises:
            ModelLoadError: it is missing without a default, or is no string.
        """
        value = self.values.get(key, default)
        if not isinstance(value, str):
            raise self.error(f"{key} must be a string")
        return value

    def number(self, key: str, low: float, high: float, *, default: float | None = None) -> float:
        """Return a number within a range. Files hold float32: the result is the shortest decimal with that value.

        Raises:
            ModelLoadError: it is missing without a default, out of range, or no number.
        """
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self.error(f"{key} must be a number from {low:g} to {high:g}")
        return float(str(np.float32(value)))

    def texts(self, key: str) -> list[str]:
        """Return an array of strings.

        Raises:
            ModelLoadError: it is missing or no array of strings.
        """
        value = self.values.get(key)
        if not isinstance(value, list):
            raise self.error(f"{key} must be an array of strings")
        return value

    def numbers(self, key: str, count: int) -> list[float]:
        """Return an array of ``count`` numbers.

        Raises:
            ModelLoadError: it is missing, of another length, or no array of numbers.
        """
        value = self.values.get(key)
        if not isinstance(value, np.ndarray) or len(value) != count:
            raise self.error(f"{key} must be an array of {count} numbers")
        found: list[float] = value.tolist()
        return found

    def refuse(self, key: str, why: str) -> None:
        """Refuse a file that contains this value.

        Raises:
            ModelLoadError: it is present.
        """
        if key in self.values:
            raise self.error(f"{show_name(key)} is set: {why}")
