"""Wake-up of a loop that looks at files now and then, when one of their folders changes: inotify(7).

A kernel or a file system without it (some network mounts) leaves the period of the looks, so nothing depends on it but
how soon a change is seen. Folders are watched, not files: files are replaced by renaming another one over them.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Self

import structlog

from appliance.common.aligned_sleep import until_next

SETTLE_S = 0.1
"""Seconds from a change to the end of the sleep: several changes of one command wake the loop once, and a folder that
changes without end wakes it ten times a second."""

READ_BYTES = 1 << 16
"""Bytes of events taken in one read: at least 240 of them. What is left rings again."""

MOVED = 0x800
"""IN_MOVE_SELF of inotify(7): the folder has another name, or lies elsewhere; its watch goes with it."""

CHANGES = 0x008 | 0x040 | 0x080 | 0x200 | MOVED
"""IN_CLOSE_WRITE, IN_MOVED_FROM, IN_MOVED_TO and IN_DELETE of inotify(7): contents, renames and removals."""

ONLY_FOLDERS = 0x01000000
"""IN_ONLYDIR of inotify(7)."""

IGNORED = 0x8000
"""IN_IGNORED of inotify(7): the kernel watches this folder no longer, for it was removed."""

OVERFLOWN = 0x4000
"""IN_Q_OVERFLOW of inotify(7): events were lost, of any folder; the watch of this one is -1."""

EVENT = struct.Struct("=iIII")
"""Head of an event of inotify(7): watch, mask, cookie, and length of the name behind it."""

log = structlog.get_logger()


class FolderBell:
    """Sleep that ends when a watched folder changes. All methods run in one event loop."""

    def __init__(self) -> None:
        """Open the watch, in a running loop; without one (no descriptor or no inotify) ``sleep`` sleeps for its whole
        period."""
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            problem = os.strerror(ctypes.get_errno())
            log.warning("folders of keys cannot be watched: changes are seen by the regular looks", problem=problem)
        else:
            asyncio.get_running_loop().add_reader(self._fd, self._ring)
        self._rung = False
        """Whether a change waits to be taken; meanwhile the loop does not look at the watch."""
        self._timer: asyncio.Future[None] | None = None
        """Ends the current sleep; None between two."""
        self._watches: dict[Path, int] = {}
        """Watches by folder; -1 where the kernel refused one, or it may not be of the folder of this name."""

    def __enter__(self) -> Self:
        """Return the bell; its end closes the watch."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the watch."""
        if self._fd >= 0:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def watch(self, folders: Iterable[Path]) -> None:
        """Watch these folders and no others. A folder that is not there is tried again by the next call."""
        wanted = set(folders)
        if self._fd < 0 or (wanted == self._watches.keys() and -1 not in self._watches.values()):
            return
        for gone in self._watches.keys() - wanted:
            self._libc.inotify_rm_watch(self._fd, self._watches.pop(gone))
        for folder in wanted:
            if self._watches.get(folder, -1) < 0:
                name = ctypes.c_char_p(os.fsencode(folder))
                self._watches[folder] = self._libc.inotify_add_watch(self._fd, name, CHANGES | ONLY_FOLDERS)

    async def sleep(self, period_s: float) -> None:
        """Sleep until the next multiple of ``period_s`` (seconds, as ``aligned_sleep`` does), or until ``SETTLE_S``
        after a change."""
        loop = asyncio.get_running_loop()
        if not self._rung:
            # The reader stays between sleeps: adding and removing it made an idle wake-up cost half as much again.
            self._timer = loop.create_future()
            handle = loop.call_later(until_next(loop.time(), period_s), _end, self._timer)
            try:
                await self._timer
            finally:
                handle.cancel()
                self._timer = None
        if self._rung:
            await asyncio.sleep(SETTLE_S)
            self._drain()
            self._rung = False
            loop.add_reader(self._fd, self._ring)

    def _ring(self) -> None:
        """Note a change, and look at the watch no more until it is taken."""
        asyncio.get_running_loop().remove_reader(self._fd)
        self._rung = True
        if self._timer is not None:
            _end(self._timer)

    def _drain(self) -> None:
        """Take the events; a folder that was removed or moved, and all where events were lost, are watched again under
        their names by the next ``watch``."""
        try:
            events = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return
        at = 0
        while at < len(events):
            watch, mask, _, name_bytes = EVENT.unpack_from(events, at)
            at += EVENT.size + name_bytes
            if mask & MOVED:
                self._libc.inotify_rm_watch(self._fd, watch)
            if mask & (MOVED | IGNORED | OVERFLOWN):
                lost = set(self._watches.values()) if mask & OVERFLOWN else {watch}
                self._watches = {folder: -1 if one in lost else one for folder, one in self._watches.items()}


def _end(timer: asyncio.Future[None]) -> None:
    if not timer.done():
        timer.set_result(None)
