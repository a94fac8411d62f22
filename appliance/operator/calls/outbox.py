"""Sends messages that a sandbox's ring has no room for at once."""

from __future__ import annotations

from collections import deque

from isolation.ipc.channel import Channel
from isolation.ipc.codec import Message
from isolation.ipc.errors import RingFull


def send_due(outbox: deque[Message], channel: Channel) -> bool:
    """Send messages in their order, and take each that is sent out of ``outbox``; returns False when the ring is full
    before all of them are in."""
    while outbox:
        try:
            channel.send(outbox[0])
        except RingFull:
            return False
        outbox.popleft()
    return True
