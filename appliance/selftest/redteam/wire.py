"""A guest that completes an engine's handshake and then attacks through the shared memory, in one way for each run.

Arguments: the host's socket, and the way. Runs inside a sandbox or as a plain process; needs what an engine's sandbox
has.
"""

from __future__ import annotations

import os
import random
import sys
import time
from array import array

from engine.sandbox.attach import attach
from isolation.ipc.channel import Channel
from isolation.ipc.codec import Message, encode
from isolation.ipc.engine import Started, StepOutput, Submit
from isolation.ipc.errors import PeerGoneError, RingFull
from isolation.ipc.messages import EngineReady, Finish, Hello, Role, TextReady
from isolation.ipc.segment import GUEST_TO_HOST, HOST_TO_GUEST

READY = EngineReady(vocab_size=512, max_context=256, block_size=16, num_blocks=64)
CONTROL_BYTES = 4096
TAIL, HEAD, ASLEEP = 0, 16, 32
"""Words of the control page, as in ``isolation.ipc.ring``."""

SLOT = 4096
"""Bytes between two frames of ``mutate``, so that a reader can continue after a broken one."""
SLOTS = 8
"""Number of frames of ``mutate``, small so that each is overwritten often."""

STAY_S = 30.0
"""Seconds after which a guest exits unless the host has ended it."""


def _words(channel: Channel, ring: str) -> memoryview:
    return channel._segment.arena(ring)[:CONTROL_BYTES].cast("Q")


def _data(channel: Channel) -> memoryview:
    return channel._segment.arena(GUEST_TO_HOST)[CONTROL_BYTES:]


def _publish(channel: Channel, tail: int) -> None:
    """Move the tail and ring the doorbell, as the ring's writer does."""
    words = _words(channel, GUEST_TO_HOST)
    words[TAIL] = tail
    words[ASLEEP] = 0
    channel._bell_out.ring()


def _raw(channel: Channel, frame: bytes, length: int | None = None) -> None:
    """Write bytes in place of the next frame, with any length field."""
    tail = _words(channel, GUEST_TO_HOST)[TAIL]
    data = _data(channel)
    start = tail % data.nbytes
    data[start : start + len(frame)] = frame
    if length is not None:
        data[start : start + 4] = (length & 0xFFFF_FFFF).to_bytes(4, "little")
    _publish(channel, tail + (max(len(frame), 16) + 7 & -8))


def _send(channel: Channel, message: Message) -> None:
    """Send a well-formed frame that our own side of the protocol would refuse to send."""
    _raw(channel, encode(message))


def _given(channel: Channel) -> Submit:
    """Return the request that the host sends."""
    while True:
        for message in channel.receive(1):
            if isinstance(message, Submit):
                return message
        channel.wait(1.0)


def _tokens(request: int, *ids: int, finish: Finish = Finish.NONE) -> StepOutput:
    finishes = bytes([0] * (len(ids) - 1) + [finish])
    return StepOutput(array("Q", [request] * len(ids)), array("I", ids), finishes, starts=(Started(request, 0, 0),))


def oversized(channel: Channel) -> None:
    """Send a frame that claims four gigabytes."""
    _raw(channel, encode(StepOutput()), 0xFFFF_FFF8)


def empty(channel: Channel) -> None:
    """Send a frame that claims zero bytes."""
    _raw(channel, encode(StepOutput()), 0)


def beyond(channel: Channel) -> None:
    """Set the tail far beyond the end of the memory."""
    _publish(channel, 1 << 61)


def backwards(channel: Channel) -> None:
    """Set the tail before bytes that were already read."""
    _send(channel, StepOutput())
    time.sleep(0.3)
    _publish(channel, 0)


def crooked(channel: Channel) -> None:
    """Set a misaligned tail."""
    _publish(channel, _words(channel, GUEST_TO_HOST)[TAIL] + 3)


def head(channel: Channel) -> None:
    """Set the reader's cursor ahead of the writer's: the host would overwrite unsent data."""
    _words(channel, HOST_TO_GUEST)[HEAD] = 1 << 50


def garbage(channel: Channel) -> None:
    """Send random bytes under a valid length."""
    noise = random.Random(1).randbytes(4096)
    _raw(channel, noise, len(noise))


def forged_id(channel: Channel) -> None:
    """Send tokens for an unknown request."""
    _send(channel, _tokens((1 << 63) + 5, 1, 2, 3))


def over_grant(channel: Channel) -> None:
    """Send more tokens than were granted."""
    asked = _given(channel)
    _send(channel, _tokens(asked.request, *range(1, asked.max_tokens + 3)))


def wide_token(channel: Channel) -> None:
    """Send a token beyond the vocabulary."""
    _send(channel, _tokens(_given(channel).request, 1 << 20))


def out_of_order(channel: Channel) -> None:
    """Send a second greeting."""
    _send(channel, Hello(3, Role.ENGINE))


def other_role(channel: Channel) -> None:
    """Send a message that only a text sandbox may send."""
    _send(channel, TextReady(4, True, True, False))


def flood(channel: Channel) -> None:
    """Send empty steps as fast as the ring accepts them."""
    end = time.monotonic() + STAY_S
    while time.monotonic() < end:
        try:
            channel.send(StepOutput())
        except RingFull:
            channel.wait(0.01)


def bells(channel: Channel) -> None:
    """Ring the doorbell without sending frames."""
    end = time.monotonic() + STAY_S
    while time.monotonic() < end:
        channel._bell_out.ring()


def half(channel: Channel) -> None:
    """Exit in the middle of a frame."""
    _raw(channel, encode(_tokens(1, *range(100)))[:50])
    os._exit(1)


def mutate(channel: Channel) -> None:
    """Change frames while they are read, repeatedly: lengths, kinds and counts, each from another frame."""
    short, long = encode(StepOutput()).ljust(64, b"\0"), encode(_tokens(7, *range(200)))
    data = _data(channel)
    for slot in range(1, SLOTS + 1):
        data[slot * SLOT : slot * SLOT + len(long)] = long
    _publish(channel, (SLOTS + 1) * SLOT)
    draw = random.Random(2)
    end = time.monotonic() + STAY_S
    while time.monotonic() < end:
        for _ in range(256):
            start = draw.randint(1, SLOTS) * SLOT
            data[start : start + 4] = draw.choice((short, long))[:4]
            data[start + 4 : start + 64] = draw.choice((short, long))[4:64]


WAYS = {
    one.__name__: one
    for one in (
        oversized,
        empty,
        beyond,
        backwards,
        crooked,
        head,
        garbage,
        forged_id,
        over_grant,
        wide_token,
        out_of_order,
        other_role,
        flood,
        bells,
        half,
        mutate,
    )
}

if __name__ == "__main__":
    met, _ = attach(sys.argv[1], Role.ENGINE)
    met.send(READY)
    cursors = _words(met, GUEST_TO_HOST)
    while cursors[HEAD] != cursors[TAIL]:  # the rest is for the gateway's link, not for the greeting
        time.sleep(0.002)
    try:
        WAYS[sys.argv[2]](met)
        time.sleep(STAY_S)
    except PeerGoneError:
        pass  # the host has closed the connection
