"""The engine behind its channel: receive, step, send one frame, sleep when idle.

No thread, no asyncio, no spin, and no collector: nothing that a step makes is part of a cycle, so the interpreter's
cyclic collector is switched off by the program and run here when nobody waits for a step. A step's output is one
frame. When the host has left no room for it the frame is kept and no further step is run until it went out; a host
that reads nothing for ``SEND_TIMEOUT_S`` ends the process.
"""

from __future__ import annotations

import gc
import time
from typing import Protocol

from engine.core.engine import Engine
from engine.core.kv.spill import LOOK_S
from engine.errors import EngineError
from isolation.ipc.codec import Message
from isolation.ipc.embed import Embed, Embedding
from isolation.ipc.engine import Abort, Drain, StepOutput, Submit
from isolation.ipc.errors import PeerGoneError, RingFull
from isolation.ipc.grammar import Masks
from isolation.ipc.kv import KvQuotas, KvUsage
from isolation.ipc.memory_order import LOOK_AGAIN_S
from isolation.ipc.messages import FailureCode
from isolation.ipc.ping import Ping, Pong
from isolation.ipc.prefetch import Prefetch
from isolation.ipc.public import PublicPrefixes, PublicUsage
from isolation.ipc.wiping import wipe

RECEIVE_LIMIT = 256
"""Messages taken before each step, so that a flood of submissions cannot hold up the running requests."""

IDLE_WAIT_S = 60.0
"""Longest sleep without work, which wakes the sandbox; the channel wakes the loop when a message comes."""

BACKLOG_WAIT_S = 0.002
"""Pause while the ring to the host is full and enough messages from it are in hand; sleeps under a millisecond are
rounded up in a sandbox."""

SEND_TIMEOUT_S = 30.0
"""How long a full ring is waited for: longer than any pause of a live host."""


COLLECT_STEPS = 65_536
"""Steps without a pause after which cycles are collected all the same: some minutes of work, for some milliseconds."""


class Collector:
    """Runs the cyclic collector between two steps, and only where it does not run by itself."""

    def __init__(self) -> None:
        self._steps = 0

    def stepped(self) -> None:
        """A step is over."""
        self._steps += 1
        if self._steps >= COLLECT_STEPS:
            self.idle()

    def idle(self) -> None:
        """Nothing is left to do."""
        if self._steps and not gc.isenabled():
            gc.collect()
        self._steps = 0


class Channel(Protocol):
    """What the loop needs of ``isolation.ipc.channel.Channel``."""

    def send(self, message: Message, *, urgent: bool) -> None:
        """Put one frame into the ring, or raise ``RingFull``; one that is not urgent may wait for the host's next
        look."""

    def receive(self, limit: int) -> list[Message]:
        """Take up to ``limit`` messages that are there, without waiting."""

    def wait(self, timeout_s: float, also: int | None = None) -> bool:
        """Sleep until something may be there or, after ``RingFull``, room has come, or the descriptor ``also`` became
        readable; False when the time is over."""


class Bell(Protocol):
    """What the loop needs of the channel to the supervisor, which the engine reads."""

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when the bell rings."""

    def arm(self) -> bool:
        """Ask for the bell; True when something is there already."""

    def disarm(self) -> None:
        """Withdraw the wish for the bell, or raise ``PeerGoneError`` where nobody can ring it any more."""


class HostStuckError(EngineError):
    """The host has read nothing for too long."""


class UnexpectedMessageError(EngineError):
    """The host sent a message that an engine does not take."""


class Sleep:
    """Sleep of an engine that has nothing to compute: the gateway wakes it, and the supervisor where there is a channel
    to it."""

    def __init__(self, channel: Channel, bell: Bell | None) -> None:
        self._channel = channel
        self._bell = bell

    def wait(self, timeout_s: float) -> None:
        """Sleep until either has sent something, at most this long.

        Raises:
            PeerGoneError: the gateway closed its end.
        """
        bell = self._bell
        if bell is None:
            self._channel.wait(timeout_s)
        elif bell.arm():
            # It came a moment ago, or there is no room for it yet.
            self._channel.wait(min(timeout_s, LOOK_S))
        else:
            first_s = min(timeout_s, LOOK_AGAIN_S)
            woken = self._channel.wait(first_s, bell.fileno())
            # No sleeper relies on the fences alone (``isolation.ipc.memory_order``): the supervisor's ring too is
            # looked at once more.
            if not woken and not bell.arm():
                self._channel.wait(timeout_s - first_s, bell.fileno())
            try:
                bell.disarm()
            except PeerGoneError:
                self._bell = None


def serve(engine: Engine, channel: Channel, bell: Bell | None = None) -> None:
    """Serve until the host drains the engine. ``bell``: the channel to the supervisor, where the engine uses one.

    Raises:
        PeerGoneError: the host closed its end.
        HostStuckError: the ring to the host stayed full.
        UnexpectedMessageError: the host spoke out of turn.
    """
    draining = False
    collector, sleep = Collector(), Sleep(channel, bell)
    backlog: list[Message] = []
    while True:
        backlog += channel.receive(RECEIVE_LIMIT - len(backlog))
        for message in backlog:
            if isinstance(message, Ping):
                _send(channel, Pong(message.number), backlog, urgent=False)
            else:
                draining |= _take(engine, message, draining=draining)
        backlog.clear()
        if engine.has_work:
            output = engine.step()
            collector.stepped()
            for embedding in engine.take_embeddings():
                _send(channel, embedding, backlog, urgent=False)
            if output is not None:
                _send(channel, output, backlog, urgent=engine.urgent)
            elif engine.rest_s:
                channel.wait(engine.rest_s)
            _tell_usage(engine, channel, backlog)
            _tell_public(engine, channel, backlog)
        elif draining and not engine.has_live_requests:
            return
        else:
            # Nothing is to be computed: there are no requests, or all of them wait for masks, which come in a moment.
            if not engine.has_live_requests:
                collector.idle()
            _tell_public(engine, channel, backlog)
            engine.look()
            _tell_usage(engine, channel, backlog)
            if not engine.has_work:
                sleep.wait(0.0 if backlog else engine.idle_wait_s(IDLE_WAIT_S))


def _tell_usage(engine: Engine, channel: Channel, backlog: list[Message]) -> None:
    """Tell what accounts of KV have, when that is due."""
    usage = engine.take_usage()
    if usage is not None:
        _send(channel, usage, backlog, urgent=False)


def _take(engine: Engine, message: Message, *, draining: bool) -> bool:
    """Hand a message to the engine; says whether it asks for draining."""
    if isinstance(message, Submit | Embed):
        if draining:
            engine.refuse_all(message, FailureCode.OVERLOADED)
        elif engine.embeds != isinstance(message, Embed):
            engine.refuse_all(message, FailureCode.INVALID)
        elif isinstance(message, Embed):
            engine.embed(message)
        else:
            engine.add(message)
        wipe(message.token_ids)  # Who keeps them has copies of its own.
    elif isinstance(message, Prefetch):
        engine.prefetch(message)
        wipe(message.token_ids)
    elif isinstance(message, Abort):
        engine.abort(message.request)
    elif isinstance(message, Masks):
        engine.set_masks(message)
    elif isinstance(message, KvQuotas):
        engine.set_quotas(message)
    elif isinstance(message, PublicPrefixes):
        engine.set_public(message)
    elif isinstance(message, Drain):
        return True
    else:
        raise UnexpectedMessageError(f"an engine takes no {type(message).__name__}")
    return False


def _tell_public(engine: Engine, channel: Channel, backlog: list[Message]) -> None:
    """Tell what became of public prefixes, when there is something to tell: requests wait for none of it, but what is
    resident shall be used."""
    usage = engine.take_public()
    if usage is not None:
        _send(channel, usage, backlog, urgent=True)


def _send(
    channel: Channel,
    output: StepOutput | Embedding | KvUsage | PublicUsage | Pong,
    backlog: list[Message],
    *,
    urgent: bool,
) -> None:
    """Send a frame, waiting for room. What the host sends meanwhile goes into the backlog, up to ``RECEIVE_LIMIT``:
    left in the ring, it would end every wait at once."""
    deadline = time.monotonic() + SEND_TIMEOUT_S
    while True:
        try:
            channel.send(output, urgent=urgent)
        except RingFull:
            left = deadline - time.monotonic()
            if left <= 0:
                raise HostStuckError("the host has not read its ring") from None
            if len(backlog) == RECEIVE_LIMIT:
                time.sleep(BACKLOG_WAIT_S)
            elif channel.wait(left):
                backlog += channel.receive(RECEIVE_LIMIT - len(backlog))
        else:
            return
