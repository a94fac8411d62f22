"""Pin file of the operator, beside the configuration: which image runs, and which ran before it.

    {"pinned": "9f86...", "before": ["1b4f..."]}

Only root writes it, and the supervisor reads it when it starts. What runs is never changed by what lies in the store.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from appliance.common.errors import ConfigError, os_errors_as, reason_of
from isolation.host.atomic_file import write_whole
from isolation.image.manifest import DIGEST

MAX_BYTES = 8 << 10
MAX_BEFORE = 8
"""How far back a rollback can go."""

MODE = 0o640


@dataclass(frozen=True, slots=True)
class Pin:
    """The digest in force, and those before it, the last one first."""

    pinned: str
    before: tuple[str, ...] = ()

    def moved_to(self, digest: str) -> Pin:
        """With another digest in force; the same one changes nothing."""
        if digest == self.pinned:
            return self
        return Pin(digest, (self.pinned, *(one for one in self.before if one != digest))[:MAX_BEFORE])

    def moved_back(self) -> Pin | None:
        """With the one before in force; None where there is none."""
        return Pin(self.before[0], self.before[1:]) if self.before else None


def read_pin(path: Path) -> Pin | None:
    """The pin, or None where nothing is pinned yet.

    Raises:
        ConfigError: unreadable or malformed.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {reason_of(error)}") from error
    try:
        values = json.loads(data) if len(data) <= MAX_BYTES else {}
        digests: list[object] = [values["pinned"], *values["before"]]
        if not all(isinstance(one, str) and DIGEST.fullmatch(one) for one in digests):
            raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} does not say which image is pinned; `athanor image use DIGEST` does") from error
    first, *before = map(str, digests)
    return Pin(first, tuple(before))


def write_pin(path: Path, pin: Pin) -> None:
    """Put a pin in force from the next start on; the file is its folder's group's to read, as the configuration is.

    Raises:
        ConfigError: it cannot be written.
    """
    text = json.dumps({"pinned": pin.pinned, "before": list(pin.before)}) + "\n"
    with os_errors_as(f"cannot write {path}"):
        write_whole(path, text.encode(), MODE)
        os.chown(path, -1, path.parent.stat().st_gid)
