"""What a boot needs of a checkpoint that it may begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class Saved(Protocol):
    """A checkpoint that a boot may begin with."""

    @property
    def folder(self) -> Path:
        """Its files."""
        ...

    @property
    def patience_s(self) -> float:
        """Seconds after which a start with it is given up."""
        ...

    def verified(self) -> None:
        """Return once it is known to be undamaged; the sandbox is told nothing before.

        Raises:
            IsolationError: it is damaged.
        """
        ...
