"""Two rings, two bells and one order of messages: what each side of a sandbox border holds.

One thread uses a channel, and only ``wait`` blocks. While both sides are busy no system call is
made: ``receive`` is a look at one word of memory, ``send`` a copy and a look. The bell is rung only
when the peer has said that it sleeps.

Sleeping in a loop of its own (the guest):

    channel.wait(timeout_s) and handle(channel.receive())

and in an event loop (the gateway), which sets a timer of ``LOOK_AGAIN_S`` beside ``fileno()``:

    readable or timer:  channel.disarm(), handle(channel.receive()) until it is empty
    then:               channel.arm(); when that says True, receive again
    timer:              channel.remind(), since the guest does not look again by itself

An event loop that will look again soon by itself, for it hands tokens on at a cadence, arms with ``napping=True``:
then only what is sent as urgent rings.

``memory_order`` explains why a fence stands between each flag and the look behind it, and why the
host looks again nevertheless.

The supervisor speaks the handshake, then calls ``disarm``, hands ``fds()`` to the gateway and
closes its own copies. All that the rings know lives in shared memory, so the gateway goes on with
``established=True``. In between nobody on the host may use the channel.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import Self

from isolation.ipc.codec import Message, decode, encode
from isolation.ipc.doorbell import BellReader, BellWriter, adopt
from isolation.ipc.errors import PeerGoneError, RemoteProtocolError, RingFull
from isolation.ipc.memory_order import LOOK_AGAIN_S, fence, later_look_s
from isolation.ipc.messages import Role
from isolation.ipc.ring import RingReader, RingWriter
from isolation.ipc.segment import GUEST_TO_HOST, HOST_TO_GUEST, Layout, Segment, map_segment
from isolation.ipc.state import Conversation, Side, State
from isolation.ipc.wiping import wipe

_GONE = "the peer has closed its end of the channel: its process ended or was killed"


class Channel:
    """One side of a connection, made by ``Channel.host`` or ``Channel.guest``.

    It owns the three descriptors once it is made; when making it fails, the caller still does.
    """

    def __init__(self, segment: Segment, fds: tuple[int, int, int], conversation: Conversation) -> None:
        names = (HOST_TO_GUEST, GUEST_TO_HOST)
        outbound, inbound = names if conversation.side is Side.HOST else reversed(names)
        self.missed_bells = 0
        """Times that something lay in the ring and no bell had rung; 0 unless a fence failed."""
        self._segment = segment
        self._fds = fds
        self._conversation = conversation
        self._writer = RingWriter(segment.arena(outbound))
        self._reader = RingReader(segment.arena(inbound))
        self._bell_in = BellReader(fds[1])
        self._bell_out = BellWriter(fds[2])
        self._waiting = False
        self._closed = False

    @classmethod
    def host(
        cls, memfd: int, bell_in: int, bell_out: int, layout: Layout, role: Role, *, established: bool = False
    ) -> Self:
        """The host's side; ``established`` goes on behind the handshake, in the same cursors.

        Raises:
            RemoteProtocolError: the segment is not sealed, or its cursors are not possible.
        """
        state = State.READY if established else State.GREETING
        segment = map_segment(memfd, layout)
        return cls(segment, (memfd, bell_in, bell_out), Conversation(role, Side.HOST, state))

    @classmethod
    def guest(cls, memfd: int, bell_in: int, bell_out: int, layout: Layout, role: Role) -> Self:
        """The guest's side, before its ``Hello``.

        Raises:
            RemoteProtocolError: the segment is smaller than its layout.
        """
        os.set_inheritable(memfd, False)
        adopt(bell_in)
        adopt(bell_out)
        segment = map_segment(memfd, layout, check_seals=False)
        return cls(segment, (memfd, bell_in, bell_out), Conversation(role, Side.GUEST))

    @property
    def state(self) -> State:
        """How far the conversation has come."""
        return self._conversation.state

    def send(self, message: Message, *, urgent: bool = True) -> None:
        """Put one message into the outbound ring and wake the peer when it sleeps; when it only naps, for what is
        urgent or when the ring is half full.

        Raises:
            RingFull: there is no room now. The peer will ring our bell once it has read.
            LocalProtocolError: the message is out of bounds or out of order.
            RemoteProtocolError: the peer's cursor is not possible.
            PeerGoneError: the peer's process has ended; what it sent before can still be received.
        """
        after = self._conversation.sending(message)
        self._push(encode(message))
        if after is not self._conversation.state:
            self._conversation.enter(after)
        fence()
        if self._writer.take_sleeper(urgent=urgent):
            self._bell_out.ring()

    def receive(self, limit: int = 64) -> list[Message]:
        """Up to ``limit`` messages that are there now; never blocks.

        Raises:
            RemoteProtocolError: a frame, a cursor or the order is wrong. Everything received in
                this call is lost, and the channel is of no more use.
        """
        messages: list[Message] = []
        pop, received = self._reader.pop, self._conversation.received
        try:
            while len(messages) < limit and (frame := pop()) is not None:
                try:
                    message = decode(frame)
                finally:
                    wipe(frame)  # It may be a prompt; what the message keeps of it are copies.
                received(message)
                messages.append(message)
        except RemoteProtocolError:
            self._conversation.enter(State.BROKEN)
            raise
        if messages:
            fence()
            if self._reader.take_waiter():
                with suppress(PeerGoneError):  # What it sent is in hand; the next wait will tell.
                    self._bell_out.ring()
        return messages

    def wait(self, timeout_s: float, also: int | None = None) -> bool:
        """Sleep until something may be there, at most this long; False when the time is over. The host looks again
        meanwhile, at both rings; the guest is woken by nothing but its bell.

        True is also the answer when room came into a full outbound ring, and when ``also``, a descriptor of the
        caller's, became readable; the caller reads it.

        Raises:
            PeerGoneError: the peer's process has ended and everything it sent was received.
            RemoteProtocolError: the peer's cursor is not possible.
        """
        if self._reader.pending():
            return True
        deadline = time.monotonic() + timeout_s
        looks = self._conversation.side is Side.HOST
        look = LOOK_AGAIN_S if looks else timeout_s
        try:
            if self.arm():
                return True
            while (left := deadline - time.monotonic()) > 0:
                if self._bell_in.wait(min(left, look), also):
                    self._hear()
                    return True
                if self._reader.pending():
                    self.missed_bells += 1
                    return True
                if looks:
                    look = later_look_s(look)
                    self.remind()
            return False
        finally:
            self._reader.set_asleep(asleep=False)

    def remind(self, *, sure: bool = False) -> None:
        """Ring the peer's bell again where it sleeps over something that it has not read: a bell was lost. For the
        host, a while after it has sent something. ``sure``: also where the peer does not say that it sleeps, for its
        kernel may have lost the ring itself; a peer that computes is rung in vain.

        Raises:
            PeerGoneError: the peer's process has ended; what it sent before can still be received.
            RemoteProtocolError: the peer's cursor is not possible.
        """
        if self._writer.unread() and (self._writer.take_sleeper() or sure):
            self._bell_out.ring()

    @property
    def pending(self) -> bool:
        """Whether something is there to be received.

        Raises:
            RemoteProtocolError: the peer's cursor is not possible.
        """
        return self._reader.pending()

    def fileno(self) -> int:
        """The descriptor that becomes readable when an armed channel's bell rings."""
        return self._bell_in.fd

    def arm(self, *, napping: bool = False) -> bool:
        """Ask for the bell; True when something is there already and the wish was withdrawn.

        ``napping``: only for what is urgent; the caller looks by itself soon.

        Raises:
            RemoteProtocolError: the peer's cursor is not possible.
        """
        self._reader.set_asleep(asleep=True, napping=napping)
        fence()
        if not self._reader.pending():
            return False
        self._reader.set_asleep(asleep=False)
        return True

    def disarm(self) -> None:
        """Withdraw the wish for the bell and take its rings off.

        Raises:
            PeerGoneError: the peer's process has ended and everything it sent was received.
            RemoteProtocolError: the peer's cursor is not possible.
        """
        self._reader.set_asleep(asleep=False)
        self._hear()

    def fds(self) -> tuple[int, int, int]:
        """Segment, inbound bell and outbound bell, for another process of the same side.

        Close this channel after handing them over: the peer sees the end of the new owner only
        when no other copy of the bells is left.
        """
        return self._fds

    def close(self) -> None:
        """Unmap the rings and close the three descriptors; the second call does nothing.

        Shared memory is left as it is: another process may have taken the channel over.
        """
        if self._closed:
            return
        self._closed = True
        self._writer.release()
        self._reader.release()
        self._segment.close()
        for fd in self._fds:
            os.close(fd)

    def _push(self, frame: bytes) -> None:
        try:
            self._writer.push(frame)
        except RingFull:
            self._writer.set_waiting(waiting=True)
            self._waiting = True
            fence()
            self._writer.push(frame)  # Room may have come before the flag was up.
        if self._waiting:
            self._writer.set_waiting(waiting=False)
            self._waiting = False

    def _hear(self) -> None:
        """Take the rings off; the peer's end counts only once the ring is empty."""
        if not self._bell_in.drain() and not self._reader.pending():
            raise PeerGoneError(_GONE)
