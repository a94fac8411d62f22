"""A padded stream of gRPC messages: what a session says goes in whenever it comes, a message of one size out at each
tick, with or without an event. The rules are those of ``padding``; the end and errors wait for one of its lengths.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from google.protobuf.message import Message

from appliance.common.errors import ApplianceError
from appliance.common.tracebacks import forget_frames
from appliance.gateway.front.padding import Padding, Ticks, cut, merged
from appliance.gateway.generate_request import Delta, Event, Finished
from appliance.gateway.grpc.generated import inference_pb2 as pb

MOST_WAITING = 256
"""Events that may wait for their messages; beyond it the session waits, and its stream's bound holds."""

LENGTH_BYTES = 3
"""Bytes of the padding's length, always: a longer spelling than needed is one too, and so any size can be met."""


def _varint(value: int, size: int) -> bytes:
    """Seven bits a byte, the lowest first, spelt in exactly ``size`` bytes (Protocol Buffers, "Encoding")."""
    found = [value >> 7 * place & 0x7F | 0x80 for place in range(size)]
    found[-1] &= 0x7F
    return bytes(found)


TAG = _varint(pb.GenerateResponse.PADDING_FIELD_NUMBER << 3 | 2, 2)
"""What announces the padding: its field's number and that it has a length."""

OVERHEAD_BYTES = len(TAG) + LENGTH_BYTES
"""What the padding takes before its first byte."""

SEQUENCE_BYTES = 8
"""What a message's number takes at most: its tag and a number of 42 bits."""


def fill_message(message: Message, size: int) -> bytes:
    """The message as bytes, filled up to ``size`` or, where it is longer, to a multiple of it."""
    data: bytes = message.SerializeToString()
    total = -(-(len(data) + OVERHEAD_BYTES) // size) * size
    left = total - len(data) - OVERHEAD_BYTES
    return b"".join((data, TAG, _varint(left, LENGTH_BYTES), bytes(left)))


class PacedMessages:
    """One stream. ``render`` makes the message of an event."""

    def __init__(self, padding: Padding, size: int, render: Callable[[Event], pb.GenerateResponse]) -> None:
        self._padding = padding
        self._size = size
        self._render = render
        self._waiting: deque[Event] = deque()
        self._closing: list[Event] = []
        self._error: ApplianceError | None = None
        self._over = False
        self._hurries = False
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()
        self._number = 0
        """Messages so far."""

    def hurry(self) -> None:
        """End soon after the end of what is to be said."""
        self._hurries = True

    async def records(self, events: AsyncGenerator[Event, None], ticks: Ticks) -> AsyncGenerator[bytes, None]:
        """The messages, each at its tick, from the first event on.

        Raises:
            ApplianceError: the session's, when the messages that hide its moment are out.
        """
        reader = asyncio.ensure_future(self._read(events))
        try:
            await self._arrived.wait()
            sent, last = 0, not self._waiting
            while not last:
                await ticks.next()
                sent += 1
                last = self._may_end(sent)
                yield self._record()
                self._room.set()
            await reader
        finally:
            reader.cancel()
            await asyncio.wait([reader])
        if self._error is not None:
            await ticks.next()
            raise self._error

    async def _read(self, events: AsyncGenerator[Event, None]) -> None:
        try:
            async with aclosing(events):
                async for event in events:
                    if isinstance(event, Finished):
                        self._closing.append(event)
                        continue
                    self._waiting.append(event)
                    self._arrived.set()
                    while len(self._waiting) >= MOST_WAITING:
                        self._room.clear()
                        await self._room.wait()
        except ApplianceError as error:
            forget_frames(error)  # They have this object, which has the error.
            self._error = error
        finally:
            self._over = True
            self._arrived.set()

    def _may_end(self, number: int) -> bool:
        """Whether the message of this number is the last; it then says the end, if there is one to be said."""
        complete = self._over and not self._waiting
        if not complete or not (self._hurries or self._padding.records(number) == number):
            return False
        self._waiting.extend(self._closing)
        return True

    def _record(self) -> bytes:
        """The next message: all deltas that have come, as far as they fit, or one other event, or none."""
        deltas = []
        while self._waiting and isinstance(delta := self._waiting[0], Delta):
            deltas.append(delta)
            self._waiting.popleft()
        if deltas:
            parts = [part for one in merged(deltas) for part in cut(one, self._fits)]
            self._waiting.extendleft(reversed(parts[1:]))
            message = self._render(parts[0])
        else:
            message = self._render(self._waiting.popleft()) if self._waiting else pb.GenerateResponse()
        message.sequence = self._number
        self._number += 1
        return fill_message(message, self._size)

    def _fits(self, delta: Delta) -> bool:
        return self._render(delta).ByteSize() <= self._size - OVERHEAD_BYTES - SEQUENCE_BYTES
