"""One channel in the event loop: frames out without blocking, frames in by callback, one fault ends it.

A link is fed by two things: the bell of the channel and a slow timer. Python has no memory fence, so a bell can in
theory be missed, by either side; the timer bounds what that costs (``LOOK_AGAIN_S``), and runs only after something was
sent and while something is awaited. Frames that do not fit into the ring wait in a bounded queue and go out when the
guest has read. The answers to probes ring no bell: the timers of all links that were probed in one turn find them in
one wake-up.

The guest is hostile. It may ring without end, write faster than anybody reads, or close its bell and go on writing:
each turn here is short (``TURN_S``), a link has its share of the loop and no more (``LOOP_SHARE``), and after the
guest's end one batch is read and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable

from appliance.common.time_share import TimeShare
from appliance.gateway.sandboxes.probe import LATE_S, Probe
from isolation.ipc.channel import Channel
from isolation.ipc.codec import Message, encode
from isolation.ipc.engine import Submit
from isolation.ipc.errors import PeerGoneError, RemoteProtocolError, RingFull
from isolation.ipc.ping import Ping, Pong

LOOP_SHARE = 0.25
"""Part of the loop's time that one link may spend on what its sandbox sends. An honest engine with 256 sequences needs
two or three hundredths; a link to one that floods frames or rings its bell without end is read less often."""

BURST_S = 0.05
"""Seconds that may be spent at once after a quiet time."""

OVERHEAD_S = 30e-6
"""Seconds that the event loop itself spends on one turn of a link, beside what the link measures: the poll, the
callback, a timer."""

LOOK_AGAIN_S = 0.1
"""Longest delay, in seconds, of a frame by a missed bell while something is awaited."""

RETRY_AFTER_S = 2.0
"""Seconds after which a client may try again when a sandbox is absent or full: about the time of one boot."""

RETRY_S = 0.002
"""Seconds until a full ring is tried again: about one step of a small model."""

MAX_PENDING = 4_096
"""Frames that may wait for space in the ring: four for each of 1,024 requests (submit, abort and slack)."""

READ_BATCH = 16
"""Frames decoded at once; between two batches the clock is looked at."""

TURN_S = 0.005
"""Processor seconds of one turn of the event loop, so that one sandbox cannot hold the others up for longer."""

LAST_BATCH = 256
"""Frames still taken from a guest that is gone; an honest guest leaves one or two."""


class LinkFullError(Exception):
    """The queue of waiting frames is full: the guest does not read."""


class Link:
    """One channel in one event loop. ``on_message`` gets each frame; ``on_end`` is called once, with the reason;
    ``awaited`` says whether an answer is outstanding, ``naps`` whether ``look`` will be called soon, so that only
    what is urgent needs the bell."""

    def __init__(
        self,
        channel: Channel,
        on_message: Callable[[Message], None],
        on_end: Callable[[str, bool], None],
        awaited: Callable[[], bool],
        naps: Callable[[], bool] = lambda: False,
    ) -> None:
        self._channel = channel
        self._on_message = on_message
        self._on_end = on_end
        self._awaited = awaited
        self._naps = naps
        self._pending: deque[Message] = deque()
        self._retry: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._pause: asyncio.TimerHandle | None = None
        self._loop_share = TimeShare(time.monotonic(), LOOP_SHARE, BURST_S, OVERHEAD_S)
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._naps_for_probe = False
        """Whether the bell is armed for urgent frames alone until the timer's next look, because only an answer to a
        probe is to come."""
        self.frames = 0
        """Frames sent and taken, those of probes left out: unchanged while nothing goes on."""
        self.probe = Probe(time.monotonic())
        self.wake: Callable[[], None] | None = None
        """Thaws the sandbox, where it may be frozen; called before the next frame is sent."""
        self._loop.add_reader(channel.fileno(), self._bell)
        self._loop.call_soon(self.look)

    @property
    def closed(self) -> bool:
        """Whether the link has ended."""
        return self._closed

    def send(self, message: Message) -> None:
        """Send now, or as soon as the ring has space.

        Raises:
            LinkFullError: the bound is reached; the message was not taken.
            LocalProtocolError: the message is outside the protocol's bounds; it was not taken.
        """
        if self._closed:
            return
        self.frames += 1
        if self.wake is not None:
            self.wake()
        self._put(message)
        if self._naps_for_probe and not self._closed:
            self._arm(napping=self._naps())

    def check_alive(self, limit_s: float, *, idle: bool, late_s: float = LATE_S) -> None:
        """Probe a sandbox that is ``idle`` and not frozen, when that is due; end one that has not answered for
        ``limit_s`` seconds. It counts as hung after ``late_s``. To be called every few seconds."""
        if self.probe.outstanding:
            self.look()  # The gateway may have stood still while the answer came.
        self._remind(sure=True)
        if self._closed:
            return
        now = time.monotonic()
        if self.probe.stuck(limit_s, now):
            self._finish(f"answered no probe for {limit_s:g} s", at_fault=True)
        elif idle and self.wake is None and self.probe.due(now):
            # One whose ring is full for good does not answer either.
            with contextlib.suppress(LinkFullError):
                self._put(Ping(self.probe.ask(now, late_s)))
            self._doze()

    def _put(self, message: Message) -> None:
        """Put a message into the ring, or into the queue in front of it; may raise as ``send``."""
        if self._timer is None:
            self._timer = self._loop.call_later(LOOK_AGAIN_S, self._look_again)
        if self._pending:
            if len(self._pending) >= MAX_PENDING:
                raise LinkFullError
            encode(message)  # A message that cannot be sent is an error of its sender, not of a timer.
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

    def withdraw(self, request: int) -> bool:
        """Take back a ``Submit`` that still waits for space; False when it was sent, or never queued."""
        for index, message in enumerate(self._pending):
            if isinstance(message, Submit) and message.request == request:
                del self._pending[index]
                return True
        return False

    def look(self) -> None:
        """Take the frames that are there."""
        if not self._closed and self._pause is None:
            self._pump(time.thread_time())

    def close(self) -> None:
        """End the link without calling ``on_end``."""
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
        began = time.thread_time()
        try:
            self._channel.disarm()
        except PeerGoneError:
            self._drain_last()
            return
        except RemoteProtocolError as error:
            self._finish(f"broke the protocol: {error}", at_fault=True)
            return
        self._pump(began)

    def _doze(self) -> None:
        """Have nothing but urgent frames ring until the timer's next look, where this link is not at rest."""
        if not self._closed and self._pause is None:
            self._arm(napping=True)
            self._naps_for_probe = True

    def _arm(self, *, napping: bool) -> None:
        """Ask for the bell, and look soon where something is there already."""
        self._naps_for_probe = False
        try:
            more = self._channel.arm(napping=napping)
        except RemoteProtocolError as error:
            self._finish(f"broke the protocol: {error}", at_fault=True)
            return
        if more:
            self._loop.call_soon(self.look)

    def _remind(self, *, sure: bool = False) -> None:
        """Ring again where the guest sleeps over something that was sent, ``sure``: where it has not read it."""
        if self._closed:
            return
        try:
            self._channel.remind(sure=sure)
        except PeerGoneError:
            self._drain_last()
        except RemoteProtocolError as error:
            self._finish(f"broke the protocol: {error}", at_fault=True)

    def _look_again(self) -> None:
        self._timer = None
        self.look()
        self._remind()
        if not self._closed and (self._pending or self.probe.outstanding or self._awaited()):
            self._timer = self._loop.call_later(LOOK_AGAIN_S, self._look_again)

    def _pump(self, began: float) -> None:
        """Take the frames that are there, then ask for a bell; when more came meanwhile, or time is up, take another
        turn."""
        try:
            more = True
            while more:
                messages = self._channel.receive(READ_BATCH)
                for message in messages:
                    self._hand(message)
                    if self._closed:
                        return
                more = len(messages) == READ_BATCH
                # The clock of a thread is a system call: it is asked only where a batch was full.
                if more and time.thread_time() - began >= TURN_S:
                    break
            self._naps_for_probe = False
            more = more or self._channel.arm(napping=self._naps())
        except RemoteProtocolError as error:
            self._finish(f"broke the protocol: {error}", at_fault=True)
            return
        pause_s = self._loop_share.spend(time.thread_time() - began, time.monotonic())
        if pause_s > 0:
            self._loop.remove_reader(self._channel.fileno())
            self._pause = self._loop.call_later(pause_s, self._resume)
        elif more:
            self._loop.call_soon(self.look)

    def _hand(self, message: Message) -> None:
        """Hand a message on; an answer to a probe belongs here."""
        if not isinstance(message, Pong):
            self.frames += 1
            self._on_message(message)
        elif not self.probe.answer(message.number, time.monotonic()):
            self._finish("broke the protocol: answered a probe that was not sent", at_fault=True)
        elif self._timer is not None and not self._pending and not self._awaited():
            self._timer.cancel()  # An idle link wakes nobody.
            self._timer = None

    def _resume(self) -> None:
        self._pause = None
        if not self._closed:
            self._loop.add_reader(self._channel.fileno(), self._bell)
            self.look()

    def _drain_last(self) -> None:
        """Take what a guest had sent before it went."""
        try:
            messages = [] if self._closed else self._channel.receive(LAST_BATCH)
        except RemoteProtocolError:
            messages = []
        for message in messages:
            if not self._closed:
                self._hand(message)
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
        for timer in (self._timer, self._retry, self._pause):
            if timer is not None:
                timer.cancel()
        self._pending.clear()
        self._channel.close()


class SandboxLink:
    """Part that the links to engines and to text sandboxes have in common."""

    generation: int
    _link: Link

    @property
    def closed(self) -> bool:
        """Whether the sandbox is lost."""
        return self._link.closed

    @property
    def frames(self) -> int:
        """Number that changes with everything sent and taken, but for probes."""
        return self._link.frames

    @property
    def wake(self) -> Callable[[], None] | None:
        """What thaws the sandbox before the next frame; None where it is not frozen."""
        return self._link.wake

    @wake.setter
    def wake(self, wake: Callable[[], None] | None) -> None:
        self._link.wake = wake

    @property
    def probe(self) -> Probe:
        """Pings that the sandbox was sent while it was idle."""
        return self._link.probe

    @property
    def hang(self) -> str:
        """Why requests sent now would rather wait for the sandbox's end than for answers; empty while it answers."""
        return "answers no probe" if self._link.probe.late(time.monotonic()) else ""
