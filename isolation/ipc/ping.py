"""The messages of a probe: the host asks for a sign of life, and the guest gives it in its turn.

A guest answers a ``Ping`` when it takes it from the ring, before the message behind it, and does nothing else for it:
no request, no block, no account, no overwriting of memory. So a ``Pong`` says that the guest's loop turns, and a ping
without one that nothing sent after it was taken.
"""

from __future__ import annotations

from dataclasses import dataclass

from isolation.ipc.frame import Kind, Record, record_codec


@dataclass(frozen=True, slots=True)
class Ping:
    """Host, to an engine or a text sandbox: give a sign of life."""

    number: int
    """Unsigned 64-bit, to be repeated in the answer."""


@dataclass(frozen=True, slots=True)
class Pong:
    """Guest: the answer to the ``Ping`` of this number."""

    number: int


ARMS = (
    record_codec(Kind.PING, Ping, Record("number:Q"), names_request=False),
    record_codec(Kind.PONG, Pong, Record("number:Q"), names_request=False),
)
