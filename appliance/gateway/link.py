"""The event-loop face of one channel: frames out without blocking, frames in by callback, one fault ends it.

A link is fed by two things: the bell of the channel and a slow timer. Python has no memory fence, so a bell can in
theory be missed; the timer bounds what that costs (``LOOK_AGAIN_S``). Frames that do not fit into the ring wait in a
bounded queue and go out when the guest has read.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from isolation.ipc.channel import Channel
from isolation.ipc.errors import LocalProtocolError, PeerGoneError, RemoteProtocolError, RingFull
from isolation.ipc.messages import Message

LOOK_AGAIN_S = 0.1
"""The longest that a missed bell can delay a frame while something is awaited."""

RETRY_S = 0.002
"""How soon a full ring is tried again: about one step of a small model."""

MAX_PENDING = 4_096
"""Frames that may wait for room: four for each of 1,024 requests (submit, abort and slack)."""

READ_BATCH = 256
"""Frames taken in one turn of the event loop, so that one sandbox cannot starve the others."""


class LinkFullError(Exception):
    """``MAX_PENDING`` frames wait already: the guest does not read."""


class Link:
    """One channel in one event loop. ``on_message`` gets each frame; ``on_end`` is called once, with the reason."""

    def __init__(
        self,
        channel: Channel,
        on_message: Callable[[Message], None],
        on_end: Callable[[str, bool], None],
    ) -> None:
        self._channel = channel
        self._on_message = on_message
        self._on_end = on_end
        self._pending: deque[Message] = deque()
        self._retry: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._loop.add_reader(channel.fileno(), self._bell)
        self._timer = self._loop.call_later(LOOK_AGAIN_S, self._look_again)
        self._loop.call_soon(self._again)

    @property
    def closed(self) -> bool:
        """Whether the link has ended."""
        return self._closed

    def send(self, message: Message) -> None:
        """Send now or as soon as there is room.

        Raises:
            LinkFullError: the bound is reached; the message was not taken.
        """
        if self._closed:
            return
        if self._pending:
            if len(self._pending) >= MAX_PENDING:
                raise LinkFullError
            self._pending.append(message)
            return
        try:
            self._channel.send(message)
        except RingFull:
            self._pending.append(message)
            self._retry = self._loop.call_later(RETRY_S, self._flush)
        except PeerGoneError:
            self._loop.call_soon(self._drain_last)
        except RemoteProtocolError as error:
            self._finish(f"broke the protocol: {error}", at_fault=True)

    def close(self) -> None:
        """End the link without a word to ``on_end``."""
        self._release()

    def _flush(self) -> None:
        self._retry = None
        while self._pending and not self._closed:
            try:
                self._channel.send(self._pending[0])
            except RingFull:
                self._retry = self._loop.call_later(RETRY_S, self._flush)
                return
            except PeerGoneError:
                self._drain_last()
                return
            except RemoteProtocolError as error:
                self._finish(f"broke the protocol: {error}", at_fault=True)
                return
            self._pending.popleft()

    def _bell(self) -> None:
        try:
            self._channel.disarm()
        except PeerGoneError:
            self._drain_last()
            return
        except RemoteProtocolError as error:
            self._finish(f"broke the protocol: {error}", at_fault=True)
            return
        self._pump()

    def _look_again(self) -> None:
        if not self._closed:
            self._timer = self._loop.call_later(LOOK_AGAIN_S, self._look_again)
            self._pump()

    def _pump(self) -> None:
        """Take what is there, then ask for a bell; when something came meanwhile, take a further turn."""
        try:
            messages = self._channel.receive(READ_BATCH)
            for message in messages:
                self._on_message(message)
                if self._closed:
                    return
            if self._channel.arm():
                self._loop.call_soon(self._again)
        except RemoteProtocolError as error:
            self._finish(f"broke the protocol: {error}", at_fault=True)
        except PeerGoneError:
            self._drain_last()

    def _again(self) -> None:
        if not self._closed:
            self._pump()

    def _drain_last(self) -> None:
        """The guest is gone; what it had sent before still counts."""
        try:
            while not self._closed:
                messages = self._channel.receive(READ_BATCH)
                if not messages:
                    break
                for message in messages:
                    self._on_message(message)
        except (RemoteProtocolError, LocalProtocolError, PeerGoneError):
            pass
        self._finish("the sandbox is gone", at_fault=False)

    def _finish(self, reason: str, *, at_fault: bool) -> None:
        if not self._closed:
            self._release()
            self._on_end(reason, at_fault)

    def _release(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._channel.fileno())
        self._timer.cancel()
        if self._retry is not None:
            self._retry.cancel()
        self._pending.clear()
        self._channel.close()
