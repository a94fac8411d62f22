"""What the sections of the configuration have in common: their base, and units of numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict


@dataclass(frozen=True, slots=True)
class Unit:
    """Unit of a key's number, as the reference prints it."""

    name: str


BYTES = Unit("bytes")
TOKENS = Unit("tokens")
SECONDS = Unit("seconds")


class Section(BaseModel):
    """Part of the configuration: frozen, strict, without keys that are not its own.

    What checks a section is made when one is checked by itself: the whole configuration has its own of each.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, defer_build=True)

    def anchored(self, folder: Path) -> Self:
        """Copy with every relative path taken from ``folder``."""
        return self.model_copy(update={name: anchored_value(value, folder) for name, value in self})


def anchored_value(value: Any, folder: Path) -> Any:
    """Return a value of a configuration with every relative path taken from ``folder``."""
    if isinstance(value, Path):
        return folder / value
    if isinstance(value, Section):
        return value.anchored(folder)
    return tuple(anchored_value(one, folder) for one in value) if isinstance(value, tuple) else value
