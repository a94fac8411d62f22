"""Gate of a boot: what takes little memory is made at once, the program waits until the memory that it needs is there.

A model that wakes in the place of another has its sandboxes created while those of the other end. Its files are
checked before, and once more when the wait is over.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from appliance.common.catalog import ModelFiles, check_files
from appliance.common.errors import ConfigError
from isolation.errors import SandboxStartError

SLICE_S = 0.25
"""Seconds between two looks whether a boot that waits is still wanted."""


@dataclass(slots=True)
class Latch:
    """Open unless it was shut. ``shut`` and ``open`` are called in the event loop, ``wait`` in the thread of a boot."""

    waited_s: float = 0.0
    """Seconds that boots have waited at it."""
    _opened: threading.Event | None = field(default=None, repr=False)

    def shut(self) -> None:
        """Hold back the next boot until ``open``."""
        self._opened = threading.Event()

    def open(self) -> None:
        """Let boots go on. Idempotent."""
        if self._opened is not None:
            self._opened.set()

    def wait(self, name: str, stop: threading.Event) -> bool:
        """Wait until it is open; returns whether it was shut.

        Args:
            name: of the sandbox that boots.
            stop: asks to give the boot up, which is noticed within ``SLICE_S``.

        Raises:
            SandboxStartError: the boot was given up.
        """
        opened, began = self._opened, time.monotonic()
        if opened is None or opened.is_set():
            return False
        while not opened.wait(SLICE_S):
            if stop.is_set():
                raise SandboxStartError(f"sandbox {name} was not wanted any more while it waited for memory")
        self.waited_s += time.monotonic() - began
        return True


def check_model(files: ModelFiles | None, pinned: str) -> None:
    """Check that a model's files are those that were pinned, signed or there at the start, before they are used.

    Args:
        files: of the model; None: it has none.
        pinned: digest that they must have; empty: any.

    Raises:
        SandboxStartError: they are others.
    """
    if files is None:
        return
    try:
        check_files(files, pinned)
    except ConfigError as error:
        raise SandboxStartError(error.message) from error
