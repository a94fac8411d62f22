"""A policy file as it is written: its content, and the position of each part. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from policy.errors import Problem
from policy.positions import Locator, Path, dotted
from policy.schema import PolicySchema


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """One file of a policy."""

    name: str
    locator: Locator
    content: PolicySchema
    files: Mapping[str, str]
    """Texts of the folder ``public`` beside it, by name."""

    def problem(self, path: Path, message: str, *, at_key: bool = False) -> Problem:
        """Return a problem of the value at ``path``, or of its key."""
        place = self.locator.key(path) if at_key else self.locator(path)
        return Problem(self.name, *place, dotted(path), message)
