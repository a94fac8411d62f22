"""Arms of the codec for structured output: OpenGrammar, Advance, CloseGrammar, Masks.

Payloads (``n`` items each where marked, ``rest`` runs to the frame's end):

* OpenGrammar: kind u8, keep u8, tenant 16 bytes, rest source. CloseGrammar: nothing.
* Advance: n u32; requests n x u64, token_ids n x u32.
* Masks: n u32, words of a row u32; requests n x u64, positions n x u32, states n x u8, words n x width x u32.
"""

from __future__ import annotations

import struct

from isolation.ipc.frame import (
    HEADER_BYTES,
    Arm,
    Frame,
    Kind,
    OutOfBoundsError,
    flag,
    require,
    require_array,
    require_length,
    require_utf8,
    take_array,
    take_bytes,
)
from isolation.ipc.grammar_messages import (
    GRAMMAR_TENANT_BYTES,
    MAX_GRAMMAR_BYTES,
    MAX_MASK_ROWS,
    Advance,
    CloseGrammar,
    GrammarKind,
    Masks,
    MaskState,
    OpenGrammar,
)

_OPEN = struct.Struct(f"<BB{GRAMMAR_TENANT_BYTES}s")
_ADVANCE = struct.Struct("<I")
_MASKS = struct.Struct("<II")
_WORD_BYTES = 4
_STATES = bytes(MaskState)


def _check_open(message: OpenGrammar) -> None:
    GrammarKind(message.kind)
    require(len(message.tenant) == GRAMMAR_TENANT_BYTES, "the tenant's name has another length")
    require_length("source", len(message.source), MAX_GRAMMAR_BYTES)
    require_utf8("source", message.source)


def _pack_open(message: OpenGrammar) -> bytes:
    return _OPEN.pack(message.kind, message.keep, message.tenant) + message.source


def _unpack_open(request: int, frame: Frame) -> OpenGrammar:
    kind, keep, tenant = _OPEN.unpack_from(frame, HEADER_BYTES)
    return OpenGrammar(request, tenant, GrammarKind(kind), take_bytes(frame, HEADER_BYTES + _OPEN.size), flag(keep))


def _check_close(_message: CloseGrammar) -> None:
    pass


def _pack_close(_message: CloseGrammar) -> bytes:
    return b""


def _unpack_close(request: int, frame: Frame) -> CloseGrammar:
    require(len(frame) == HEADER_BYTES, "bytes trail the message")
    return CloseGrammar(request)


def _check_advance(message: Advance) -> None:
    require_array("requests", message.requests, "Q")
    require_array("token_ids", message.token_ids, "I")
    require_length("requests", len(message.requests), MAX_MASK_ROWS)
    require(len(message.requests) == len(message.token_ids), "requests and token_ids have different lengths")


def _pack_advance(message: Advance) -> bytes:
    return b"".join((_ADVANCE.pack(len(message.requests)), message.requests.tobytes(), message.token_ids.tobytes()))


def _unpack_advance(_request: int, frame: Frame) -> Advance:
    (count,) = _ADVANCE.unpack_from(frame, HEADER_BYTES)
    requests = HEADER_BYTES + _ADVANCE.size
    ids = requests + 8 * count
    require(ids + 4 * count == len(frame), "the count does not give the frame's length")
    return Advance(take_array("Q", frame, requests, ids), take_array("I", frame, ids, len(frame)))


def _check_masks(message: Masks) -> None:
    require_array("requests", message.requests, "Q")
    require_array("positions", message.positions, "I")
    count = len(message.requests)
    require_length("requests", count, MAX_MASK_ROWS)
    require(count == len(message.positions) == len(message.states), "columns of masks have different lengths")
    if message.states.translate(None, _STATES):
        raise OutOfBoundsError("states holds a byte that is no MaskState")
    require(message.width * count == len(message.words), "the masks have different widths")
    require(message.width % _WORD_BYTES == 0, "a mask is not made of whole words")


def _pack_masks(message: Masks) -> bytes:
    return b"".join(
        (
            _MASKS.pack(len(message.requests), message.width // _WORD_BYTES),
            message.requests.tobytes(),
            message.positions.tobytes(),
            message.states,
            message.words,
        )
    )


def _unpack_masks(_request: int, frame: Frame) -> Masks:
    count, width = _MASKS.unpack_from(frame, HEADER_BYTES)
    # Else a frame without rows could claim any width, and have more than one form.
    require(count > 0 or width == 0, "masks of no request have a width")
    requests = HEADER_BYTES + _MASKS.size
    positions = requests + 8 * count
    states = positions + 4 * count
    words = states + count
    require(words + _WORD_BYTES * width * count == len(frame), "the counts do not give the frame's length")
    return Masks(
        take_array("Q", frame, requests, positions),
        take_array("I", frame, positions, states),
        take_bytes(frame, states, words),
        take_bytes(frame, words),
    )


ARMS = (
    Arm(Kind.OPEN_GRAMMAR, OpenGrammar, _check_open, _pack_open, _unpack_open),
    Arm(Kind.ADVANCE, Advance, _check_advance, _pack_advance, _unpack_advance, names_request=False),
    Arm(Kind.CLOSE_GRAMMAR, CloseGrammar, _check_close, _pack_close, _unpack_close),
    Arm(Kind.MASKS, Masks, _check_masks, _pack_masks, _unpack_masks, names_request=False),
)
