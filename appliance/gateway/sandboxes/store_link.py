"""The gateway's end of the supervisor's socket for files and batches: a call and its answer, by number."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import TypeVar

import structlog

from appliance.common.batches.messages import (
    LENGTHS,
    StoreAnswer,
    StoreCall,
    StoreFrame,
    StoreRefused,
    check_lengths,
    decode_frame,
    encode_frame,
)
from appliance.common.batches.values import PIECE_BYTES
from appliance.common.control import Control, OpenStore, Welcome
from appliance.common.errors import ControlError, UnavailableError
from appliance.gateway.sandboxes.link import RETRY_AFTER_S

log = structlog.get_logger()

AGAIN_S = 1.0
"""Seconds until a socket that was lost, or did not arrive, is asked for again."""

MAX_CALLS = 256
"""Calls without an answer; further ones are refused: the disk does not follow."""

Answer = TypeVar("Answer", bound=StoreAnswer)


class StoreDeniedError(Exception):
    """The supervisor does not carry out a call; ``reason`` is one of ``appliance.common.batches.messages.REFUSALS``."""

    def __init__(self, reason: str, number: int) -> None:
        super().__init__(reason)
        self.reason, self.number = reason, number


class StoreLink:
    """One socket at a time, asked for again whenever it was lost; all methods run in one event loop."""

    def __init__(self, tell: Callable[[Control], None], *, wanted: bool) -> None:
        """``tell`` sends to the supervisor; ``wanted``: whether the configuration has files and batches."""
        self._tell = tell
        self._wanted = wanted
        self._writer: asyncio.StreamWriter | None = None
        self._calls: dict[int, asyncio.Future[StoreFrame]] = {}
        self._number = 0
        self._reading: asyncio.Task[None] | None = None
        self._asking: asyncio.TimerHandle | None = None
        self.on_up: Callable[[], None] = lambda: None
        """Called when the store can be asked, now or again."""

    @property
    def up(self) -> bool:
        """Whether the store can be asked."""
        return self._writer is not None

    def attached(self, _welcome: Welcome) -> None:
        """Ask a supervisor that has come for the socket."""
        if self._wanted:
            self._lose()
            self._ask()

    def take(self, fds: tuple[int, ...]) -> None:
        """Take over the socket. One that did not arrive, because this process may open no more, is asked for again."""
        if len(fds) != 1:
            for stray in fds:
                os.close(stray)
            self._ask_later()
            return
        sock = socket.socket(fileno=fds[0])
        sock.setblocking(False)
        self._reading = asyncio.create_task(self._read(sock), name="answers of the store")

    def close(self) -> None:
        """Close the socket; calls without an answer fail."""
        self._wanted = False
        self._lose()

    async def ask(self, call: StoreCall, kind: type[Answer], payload: bytes | bytearray = b"") -> Answer:
        """Return the answer to a call.

        Raises:
            StoreDeniedError: it is not carried out.
            UnavailableError: there is no supervisor, or it is gone; whether the call was carried out is not known.
        """
        answer, _ = await self.fetch(call, kind, payload)
        return answer

    async def fetch(
        self, call: StoreCall, kind: type[Answer], payload: bytes | bytearray = b""
    ) -> tuple[Answer, bytes]:
        """Return the answer to a call with its payload; see ``ask``."""
        if self._writer is None or len(self._calls) >= MAX_CALLS:
            raise _away()
        self._number += 1
        number = self._number
        answered = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(encode_frame(StoreFrame(number, call, bytes(payload))))
            await self._writer.drain()
            frame = await answered
        except OSError:
            raise _away() from None
        finally:
            self._calls.pop(number, None)
            # An error in it refers to this frame: kept, both would wait for the collector, with the payload.
            del answered
        if isinstance(frame.message, StoreRefused):
            raise StoreDeniedError(frame.message.reason, frame.message.number)
        if not isinstance(frame.message, kind):
            raise _away()
        return frame.message, frame.payload

    def _ask(self) -> None:
        self._asking = None
        if self._wanted and self._writer is None:
            self._tell(OpenStore())

    def _ask_later(self) -> None:
        if self._wanted and self._asking is None:
            self._asking = asyncio.get_running_loop().call_later(AGAIN_S, self._ask)

    def _lose(self) -> None:
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.cancel()
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None
        self._fail()

    def _fail(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        for waiting in self._calls.values():
            if not waiting.done():
                waiting.set_exception(_away())

    async def _read(self, sock: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=sock, limit=PIECE_BYTES)
        self._writer = writer
        self.on_up()
        try:
            while True:
                self._take_answer(await _next_answer(reader))
        except (asyncio.IncompleteReadError, OSError, ControlError) as error:
            log.warning("the socket for files and batches is lost", problem=str(error))
            self._fail()
            self._ask_later()

    def _take_answer(self, frame: StoreFrame) -> None:
        """Give an answer to who waits for it."""
        waiting = self._calls.get(frame.call)
        if waiting is not None and not waiting.done():
            waiting.set_result(frame)


async def _next_answer(reader: asyncio.StreamReader) -> StoreFrame:
    """Read one answer. A function of its own, so that nothing of an answer stays until the next one comes: it may be
    text of a file that is deleted meanwhile.

    Raises:
        IncompleteReadError: the other end is closed.
        ControlError: it is none that a supervisor sends.
    """
    header, payload = LENGTHS.unpack(await reader.readexactly(LENGTHS.size))
    check_lengths(header, payload)
    return decode_frame(await reader.readexactly(header), await reader.readexactly(payload))


def _away() -> UnavailableError:
    return UnavailableError("files and batches cannot be reached at the moment", retry_after_s=RETRY_AFTER_S)
