"""What came over one HTTP/2 connection and is not read yet: it is read in pieces, and the socket waits for them.

A few kilobytes of frames can cost milliseconds, so the event loop turns between two pieces.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from appliance.gateway.front.starts import Begin

TURN_BYTES = 16 << 10
"""Bytes of one connection that are read before the event loop turns: a few milliseconds of the smallest frames."""

STRANGER_TURN_BYTES = 256
"""Bytes that are read before the event loop turns while no credential came: a few calls, which are charged before more
are read."""


class Inbox:
    """Bytes of one connection on their way to ``read``."""

    __slots__ = ("_ask", "_paused", "_read", "_transport", "_unread", "turn_bytes")

    def __init__(
        self, transport: asyncio.Transport, ask: Callable[[Begin], None], read: Callable[[bytes], None], turn_bytes: int
    ) -> None:
        """``ask`` calls what it is given when it is the connection's turn; ``read`` takes a piece."""
        self._transport = transport
        self._ask = ask
        self._read = read
        self._unread = b""
        self._paused = False
        self.turn_bytes = turn_bytes
        """Bytes of a piece."""

    def take(self, data: bytes) -> None:
        """Take what came; the rest of a piece waits, and so does the socket."""
        first = not self._unread
        self._unread += data
        if first:
            self._ask(self._next)
            self._hold()

    def clear(self) -> None:
        """Forget what is not read, and let the socket go on."""
        self._unread = b""
        self._hold()

    def close(self) -> None:
        """Forget the connection, to which this refers: kept, both would wait for the collector."""
        self._unread = b""
        self._transport = cast(asyncio.Transport, None)
        self._ask = self._read = _nothing

    def _next(self) -> bool:
        """Read a piece; False when there is none any more."""
        if not self._unread:
            return False
        piece, self._unread = self._unread[: self.turn_bytes], self._unread[self.turn_bytes :]
        try:
            self._read(piece)
        except BaseException:
            self._transport.abort()  # a defect, which the loop's handler logs, must not leave a silent connection
            raise
        if self._unread:
            asyncio.get_running_loop().call_soon(self._ask, self._next)
        self._hold()
        return True

    def _hold(self) -> None:
        if self._paused != bool(self._unread) and not self._transport.is_closing():
            self._paused = not self._paused
            if self._paused:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()


def _nothing(_what: object) -> None:
    """What is done for a connection that has ended."""
