"""Typed, ranged access to the values of a GGUF header."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from engine.convert.gguf import Value
from engine.errors import ModelLoadError
from engine.model.safetensors import show_name


class Values:
    """The header's values, asked for by name.

    Args:
        values: as they were read.
        name: the file's name, for messages.
    """

    def __init__(self, values: Mapping[str, Value], name: str) -> None:
        self._values = values
        self.file = name

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def text(self, key: str, default: str | None = None) -> str:
        """A string.

        Raises:
            ModelLoadError: missing without a default, or something else.
        """
        value = self._values.get(key, default)
        if not isinstance(value, str):
            raise ModelLoadError(f"{self.file}: {key} must be a string")
        return value

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """A whole number in a range.

        Raises:
            ModelLoadError: missing without a default, out of range, or something else.
        """
        value = self._values.get(key, default)
        if type(value) is not int or not low <= value <= high:
            raise ModelLoadError(f"{self.file}: {key} must be an integer from {low} to {high}")
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """A number in a range. Files hold them in float32: what is given is the shortest decimal that means the same.

        Raises:
            ModelLoadError: missing without a default, out of range, or something else.
        """
        value = self._values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise ModelLoadError(f"{self.file}: {key} must be a number from {low:g} to {high:g}")
        return float(str(np.float32(value)))

    def boolean(self, key: str, default: bool) -> bool:
        """True or false.

        Raises:
            ModelLoadError: something else.
        """
        value = self._values.get(key, default)
        if type(value) is not bool:
            raise ModelLoadError(f"{self.file}: {key} must be true or false")
        return value

    def texts(self, key: str) -> list[str]:
        """An array of strings.

        Raises:
            ModelLoadError: missing or something else.
        """
        value = self._values.get(key)
        if not isinstance(value, list):
            raise ModelLoadError(f"{self.file}: {key} must be an array of strings")
        return value

    def numbers(self, key: str, count: int) -> list[float]:
        """An array of ``count`` numbers.

        Raises:
            ModelLoadError: missing, of another length, or something else.
        """
        value = self._values.get(key)
        if not isinstance(value, np.ndarray) or len(value) != count:
            raise ModelLoadError(f"{self.file}: {key} must be an array of {count} numbers")
        found: list[float] = value.tolist()
        return found

    def refuse(self, key: str, why: str) -> None:
        """Refuse a file that has a value at all.

        Raises:
            ModelLoadError: it has.
        """
        if key in self._values:
            raise ModelLoadError(f"{self.file}: {show_name(key)} is set: {why}")
