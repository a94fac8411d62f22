"""Messages to frames and back; every byte from a peer passes through ``decode``.

``encode`` and ``decode`` are inverse to each other in both directions: a message has one frame, and
a frame that decodes is the one ``encode`` would give. Both check the message against the bounds of
``messages``. What fails is ``LocalProtocolError`` in ``encode`` and ``RemoteProtocolError`` in
``decode``; nothing else leaves either, whatever bytes come.

No arm allocates by a count it has read: it first compares the length that all counts together
give with the length of the frame, which is already here.
"""

from __future__ import annotations

import struct

from isolation.ipc import embed, engine, grammar, kv, output, ping, prefetch, public, spill, text
from isolation.ipc.embed import Embed, Embedding
from isolation.ipc.engine import Abort, Drain, StepOutput, Submit
from isolation.ipc.errors import LocalProtocolError, RemoteProtocolError
from isolation.ipc.frame import HEADER, HEADER_BYTES, Frame
from isolation.ipc.grammar import Advance, CloseGrammar, Masks, OpenGrammar
from isolation.ipc.kv import KvQuotas, KvUsage
from isolation.ipc.messages import MAX_FRAME_BYTES, PROTOCOL_VERSION, Configure, EngineReady, Failed, Hello, TextReady
from isolation.ipc.output import CloseOutput, OutputRead, ReadOutput
from isolation.ipc.ping import Ping, Pong
from isolation.ipc.prefetch import Prefetch
from isolation.ipc.public import PublicPrefixes, PublicUsage
from isolation.ipc.spill import Fetch, Fetched, Forget, Keep, Lost, Share, Unwanted, Withdraw
from isolation.ipc.text import Decode, Decoded, Encode, Encoded, ReadVocabulary, Vocabulary

EngineRequest = Submit | Embed | Prefetch | Abort | Masks | KvQuotas | PublicPrefixes
TextRequest = Encode | Decode | ReadVocabulary | ReadOutput | CloseOutput | OpenGrammar | Advance | CloseGrammar
HostMessage = Configure | Drain | Ping | EngineRequest | TextRequest | Fetched | Forget | Share | Lost
TextAnswer = Encoded | Decoded | Vocabulary | OutputRead | Failed
EngineAnswer = StepOutput | Embedding | KvUsage | PublicUsage
GuestSpill = Keep | Withdraw | Fetch | Unwanted
GuestMessage = Hello | EngineReady | TextReady | Pong | EngineAnswer | TextAnswer | Masks | GuestSpill
Message = HostMessage | GuestMessage

_ARMS = (
    *(engine.ARMS + embed.ARMS + prefetch.ARMS + text.ARMS + output.ARMS + grammar.ARMS),
    *(kv.ARMS + public.ARMS + spill.ARMS + ping.ARMS),
)
_BY_MESSAGE = {arm.message: arm for arm in _ARMS}
_BY_KIND = {int(arm.kind): arm for arm in _ARMS}

# What a value of a wrong type or width raises on its way into a struct or an array.
_UNENCODABLE = (ValueError, struct.error, OverflowError, TypeError, AttributeError)


def encode(message: Message) -> bytes:
    """One whole frame for a message.

    Raises:
        LocalProtocolError: a field is outside the protocol's bounds, or the frame would be.
    """
    arm = _BY_MESSAGE.get(type(message))
    if arm is None:
        raise LocalProtocolError(f"{type(message).__name__} is no message of this protocol")
    try:
        arm.check(message)
        payload = arm.pack(message)
        request = message.request if arm.names_request else 0  # type: ignore[union-attr]
        length = HEADER_BYTES + len(payload)
        header = HEADER.pack(length, arm.kind, PROTOCOL_VERSION, request)
    except _UNENCODABLE as error:
        name = arm.message.__name__
        raise LocalProtocolError(f"this {name} cannot be sent: {error}") from error
    if length > MAX_FRAME_BYTES:
        raise LocalProtocolError(
            f"a {arm.message.__name__} of {length} bytes is above the frame limit of {MAX_FRAME_BYTES}; split it"
        )
    return header + payload


def decode(frame: Frame) -> Message:
    """The message of one whole frame.

    The bytes must be the caller's own copy: they are read more than once. The message holds no part of them, so they
    can be overwritten afterwards.

    Raises:
        RemoteProtocolError: the bytes are not exactly one frame of this protocol version.
    """
    size = len(frame)
    if not HEADER_BYTES <= size <= MAX_FRAME_BYTES:
        raise RemoteProtocolError(f"a frame of {size} bytes is outside the protocol's bounds")
    length, kind, version, request = HEADER.unpack_from(frame)
    if version != PROTOCOL_VERSION:
        raise RemoteProtocolError(
            f"the peer speaks protocol version {version} and this side {PROTOCOL_VERSION}; "
            "host and sandbox image must come from one release"
        )
    if length != size:
        raise RemoteProtocolError(f"a frame of {size} bytes claims a length of {length}")
    arm = _BY_KIND.get(kind)
    if arm is None:
        raise RemoteProtocolError(f"unknown kind of message: {kind}")
    if request and not arm.names_request:
        raise RemoteProtocolError(f"a {arm.message.__name__} names a request")
    try:
        message: Message = arm.unpack(request, frame)
        arm.check(message)
    except (ValueError, struct.error) as error:
        raise RemoteProtocolError(f"malformed {arm.message.__name__}: {error}") from error
    return message
