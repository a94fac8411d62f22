"""The supervisor's end of the last uses of API keys: the one writer of their file.

What the gateway tells is merged in memory and written at most every ``WRITE_S``, so a flood of calls costs no more than
a few.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from appliance.common.aligned_sleep import aligned_sleep
from appliance.common.control import KeysUsed
from appliance.common.errors import ConfigError, ControlError
from appliance.common.key_uses import MAX_USES, is_secret_name, read_uses, write_uses

WRITE_S = 5.0
"""Seconds between two writings of the file: so much of a last use is lost with the machine's power."""

MAX_KEYS_TOLD = 1_000
"""Keys of one message; a gateway sends half as many."""

AHEAD_S = 60
"""Seconds by which a use may lie ahead of this process's clock."""

log = structlog.get_logger()


class KeyUseKeeper:
    """Last uses by secret. ``take`` and ``run`` run in one event loop."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        """``folder`` is the audit log's."""
        self._folder = folder
        self._clock = clock
        self._used: dict[str, int] = {}
        self._changed = False
        self._failing = False

    def load(self) -> None:
        """Read what was written before; blocks. A damaged file is begun anew: it decides nothing."""
        try:
            self._used = read_uses(self._folder)
        except ConfigError as error:
            log.warning("the last uses of keys are not known any more", problem=error.message)

    def take(self, message: KeysUsed) -> None:
        """Take uses that the gateway tells.

        Raises:
            ControlError: it is no message that a gateway sends.
        """
        latest = self._clock() + AHEAD_S
        if len(message.used) > MAX_KEYS_TOLD or not all(map(is_secret_name, message.used)):
            raise ControlError("a message about the use of keys is not one that a gateway sends")
        for name, at in message.used.items():
            if self._used.get(name, -1) < at <= latest:
                self._used.pop(name, None)  # to the end: the first are those used the longest ago
                self._used[name] = at
                self._changed = True
        while len(self._used) > MAX_USES:
            del self._used[next(iter(self._used))]

    async def run(self) -> None:
        """Write what has changed every ``WRITE_S`` until cancelled."""
        await asyncio.to_thread(self.load)
        while True:
            await aligned_sleep(WRITE_S)
            if self._changed:
                self._changed = False
                await asyncio.to_thread(self._write, dict(self._used))

    def close(self) -> None:
        """Write what has changed since; blocks."""
        if self._changed:
            self._write(self._used)

    def _write(self, used: dict[str, int]) -> None:
        try:
            write_uses(self._folder, used)
        except ConfigError as error:
            if not self._failing:
                log.error("the last uses of keys are not written", problem=error.message)
            self._failing, self._changed = True, True
        else:
            self._failing = False
