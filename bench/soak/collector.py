"""A collector of spans that can be well, away, silent, refusing or mad. Only its manners matter: it reads nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import Literal

Mood = Literal["well", "away", "silent", "refusing", "mad"]


class Collector:
    """Listens at one address for its life; its mood can change at any time."""

    def __init__(self) -> None:
        self.mood: Mood = "well"
        self.taken = 0
        """Exports that were answered with 200."""
        self.met: Counter[str] = Counter()
        """Exports by the mood that they met."""
        self.port = 0
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def open(self) -> None:
        """Begin to listen, at the same port every time."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening and let go of everybody."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in tuple(self._open):
            writer.close()

    async def become(self, mood: Mood) -> None:
        """Change the mood; who is connected is let go."""
        await self.close()
        self.mood = mood
        if mood != "away":
            await self.open()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.lower().split(b"\r\n")
                sizes = [int(line.partition(b":")[2]) for line in lines if line.startswith(b"content-length:")]
                await reader.readexactly(sizes[0] if sizes else 0)
                self.met[self.mood] += 1
                if self.mood == "silent":
                    await asyncio.sleep(3_600)
                elif self.mood == "refusing":
                    writer.write(b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\n\r\n")
                elif self.mood == "mad":
                    writer.write(b"HTTP/9.9 abc\r\n" + bytes(range(256)))
                    return
                else:
                    self.taken += 1
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError, asyncio.CancelledError):
            # Cancelled at the end of the run: streams of Python 3.11 complain of a handler that says so.
            return
        finally:
            self._open.discard(writer)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
