"""Whose fault a broken wire is.

``ProtocolError`` is abstract: ``LocalProtocolError`` is our own bug (we tried to send what the
protocol forbids), ``RemoteProtocolError`` is the peer's. Only the second one is a reason to kill
a sandbox. ``PeerGoneError`` and ``AttachError`` are no breach of the protocol: a process ended, or the two
never met. ``RingFull`` is flow control and no error: the caller waits or keeps the frame.
"""

from __future__ import annotations


class ProtocolError(Exception):
    """Base of the five below; never raised itself."""


class LocalProtocolError(ProtocolError):
    """We tried to send something the protocol does not allow."""


class RemoteProtocolError(ProtocolError):
    """The peer sent bytes, cursors or an order of messages that the protocol does not allow."""


class PeerGoneError(ProtocolError):
    """The peer closed its end: its process ended or was killed."""


class AttachError(ProtocolError):
    """Host and guest did not meet: nobody came in time, or the descriptors did not arrive."""


class UnsupportedMachineError(ProtocolError):
    """The processor's memory order does not carry this wire; no setting helps."""


class RingFull(Exception):
    """The frame does not fit now; it will once the peer has read."""


class SweepError(Exception):
    """Freed memory of this process cannot be overwritten; the message says why. No matter of the wire."""
