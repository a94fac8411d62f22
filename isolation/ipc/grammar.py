"""The messages of structured output: which tokens may come next, asked of the text sandbox and told to the engine.

Bounds and integers are as in ``messages``, of which these are a part.

Payloads that are no record (``frame``), with ``n`` items each where marked:

* Advance: n u32; requests n x u64, token_ids n x u32.
* Masks: n u32, words of a row u32; requests n x u64, positions n x u32, states n x u8, words n x width x u32.
"""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass, field
from enum import IntEnum

from isolation.ipc.frame import (
    HEADER_BYTES,
    Frame,
    Kind,
    MessageCodec,
    OutOfBoundsError,
    Record,
    record_codec,
    require,
    require_array,
    require_length,
    require_utf8,
    take_array,
    take_bytes,
)
from isolation.ipc.output import Thinking

MAX_GRAMMAR_BYTES = 256 << 10
"""Bytes of the grammar in one ``OpenGrammar``: twice the largest published JSON schemas that one answers by."""
MAX_MASK_ROWS = 4_096
"""Requests in one ``Advance`` or ``Masks``, as many as an engine runs at once."""
GRAMMAR_TENANT_BYTES = 16
"""Bytes of the name that stands for a tenant where compiled grammars are kept."""
NO_GRAMMAR_USER = bytes(GRAMMAR_TENANT_BYTES)
"""In place of an end user's name: all requests of the tenant find each other's compiled grammars."""


class GrammarKind(IntEnum):
    """What ``OpenGrammar.source`` holds, UTF-8."""

    JSON_SCHEMA = 1
    """A JSON Schema; a keyword that is known and not implemented is refused."""
    JSON_SCHEMA_LENIENT = 2
    """A JSON Schema; a keyword that is known and not implemented is passed over."""
    REGEX = 3
    """A regular expression for the whole output."""
    LARK = 4
    """A grammar in llguidance's dialect of Lark."""
    CHOICE = 5
    """A JSON array of strings, one of which is the output."""
    TOOLS = 6
    """JSON of tools (``engine.text.output.tools``): the output is an answer or calls, in the model's format."""


class Whitespace(IntEnum):
    """Whitespace between the tokens of a JSON text; strings in it are no part of that."""

    COMPACT = 0
    """None."""
    FLEXIBLE = 1
    """In each place none, one space, or a new line with a bounded indent."""


class MaskState(IntEnum):
    """What the output so far is to its grammar."""

    OPEN = 0
    """It must go on."""
    ACCEPTING = 1
    """It may end here."""
    BROKEN = 2
    """The grammar cannot be followed further: it is too complex, or its process ended. The mask is empty."""


@dataclass(frozen=True, slots=True)
class OpenGrammar:
    """Compile a grammar, or find it compiled for this tenant and user, and follow it for this request. Answered by
    ``Masks`` with the request's first row, or by ``Failed``: ``INVALID``, ``TOO_LONG`` (it takes too much to compile),
    ``OVERLOADED``."""

    request: int
    tenant: bytes
    """``GRAMMAR_TENANT_BYTES`` bytes that stand for whose it is, and on whose account."""
    kind: GrammarKind
    source: bytes
    keep: bool = True
    """Whether what was compiled may serve later requests of the tenant and user; if not, it goes with the last that
    follows it."""
    whitespace: Whitespace = Whitespace.COMPACT
    """Without effect for a kind that is not JSON Schema."""
    thinking: Thinking = Thinking.NONE
    """Where the prompt leaves the model's reasoning; without effect for a kind that is not ``TOOLS``."""
    user: bytes = NO_GRAMMAR_USER
    """As many bytes that stand for the tenant's end user whose requests alone may find what was compiled. No part of
    the account: a tenant with many users may have as many grammars as one with none."""


@dataclass(frozen=True, slots=True)
class Advance:
    """The next token of each of these requests, in parallel arrays (typecodes ``Q`` and ``I``); each is answered by
    a row of ``Masks``, a request that is not open by nothing."""

    requests: array[int]
    token_ids: array[int]


@dataclass(frozen=True, slots=True)
class CloseGrammar:
    """The request has ended. Idempotent; an unknown id is ignored."""

    request: int


@dataclass(frozen=True, slots=True)
class Masks:
    """Which tokens may come next, one row a request, from the text sandbox to the host and on to the engine.

    ``requests`` (typecode ``Q``), ``positions`` (``I``) and ``states`` run in parallel; ``words`` holds for each of
    them the same number of 32-bit words, bit ``i % 32`` of word ``i // 32`` for token ``i``. Ids beyond are not
    allowed."""

    requests: array[int] = field(default_factory=lambda: array("Q"))
    positions: array[int] = field(default_factory=lambda: array("I"))
    """Output tokens of the request before the one that the mask is for."""
    states: bytes = b""
    """One ``MaskState`` a request."""
    words: bytes = b""

    @property
    def width(self) -> int:
        """Bytes of one row's mask."""
        return len(self.words) // len(self.requests) if self.requests else 0


_OPEN = Record(
    f"kind:B keep:? whitespace:B thinking:B tenant:{GRAMMAR_TENANT_BYTES}s user:{GRAMMAR_TENANT_BYTES}s",
    kind=GrammarKind,
    whitespace=Whitespace,
    thinking=Thinking,
)
_ADVANCE = struct.Struct("<I")
_MASKS = struct.Struct("<II")
_WORD_BYTES = 4
_STATES = bytes(MaskState)


def _check_open(message: OpenGrammar) -> None:
    require_length("source", len(message.source), MAX_GRAMMAR_BYTES)
    require_utf8("source", message.source)


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
    record_codec(Kind.OPEN_GRAMMAR, OpenGrammar, _OPEN, _check_open, tail="source"),
    MessageCodec(Kind.ADVANCE, Advance, _check_advance, _pack_advance, _unpack_advance, names_request=False),
    record_codec(Kind.CLOSE_GRAMMAR, CloseGrammar, Record()),
    MessageCodec(Kind.MASKS, Masks, _check_masks, _pack_masks, _unpack_masks, names_request=False),
)
