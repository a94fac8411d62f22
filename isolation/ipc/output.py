"""Messages about a model's output: token ids, read by the text sandbox as content, reasoning and calls of tools.

The host sends the tokens of one output as they come and gets what they say. A reading is a function of its tokens
alone: another sandbox that is given all of them goes on where the last one ended (``ReadOutput.shown``).

Payloads that are no record (``frame``):

* ReadOutput: shown u32, thinking u8, ending u8, begins u8, n u32; token_ids n x u32, source to the end of the frame.
* OutputRead: over u8, reasoning_tokens u32, n u32; n x (kind u8, token u32, length u32), then the parts' texts.
"""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass
from enum import IntEnum

from isolation.ipc.frame import (
    HEADER_BYTES,
    MAX_U32,
    Frame,
    Kind,
    MessageCodec,
    Record,
    flag,
    record_codec,
    require,
    require_array,
    require_length,
    require_range,
    require_utf8,
    take_array,
    take_bytes,
)
from isolation.ipc.messages import MAX_TOKENS_PER_REQUEST, Finish

MAX_TOOLS_BYTES = 256 << 10
"""Bytes of the description of a request's tools: 128 tools with 2 KiB each."""

MAX_CALLS = 128
"""Calls in one output, as many as one message of a conversation may have."""

MAX_OUTPUTS = 4_096
"""Outputs that are read at once, as many as an engine runs."""

MAX_PARTS = 1 << 16
"""Parts in one ``OutputRead``."""


class Thinking(IntEnum):
    """Where a prompt leaves the model's reasoning."""

    NONE = 0
    """It is over, or the model's output has none."""
    POSSIBLE = 1
    """The output may begin with it."""
    BEGUN = 2
    """The output begins inside it."""


class PartKind(IntEnum):
    """What a part of an output is."""

    CONTENT = 1
    REASONING = 2
    CALL = 3
    """A call begins; the text is the tool's name."""
    ARGUMENTS = 4
    """More of the begun call's arguments: JSON text."""
    CALLED = 5
    """The begun call is complete; no text."""
    REFUSED = 6
    """Text that begins like a call and is none: the text is the reason. What was read of it follows as content, and the
    begun call, if one has begun, is not to be made."""


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of an output."""

    kind: PartKind
    token: int
    """Number, within the message, of the token with which it became certain."""
    text: str


@dataclass(frozen=True, slots=True)
class ReadOutput:
    """More tokens of an output. Answered by ``OutputRead`` or ``Failed``."""

    request: int
    shown: int
    """Number of tokens at the beginning of ``token_ids`` whose parts the host has; they are read and not answered."""
    thinking: Thinking
    """Where the prompt leaves the model's reasoning; read with the first message of an output."""
    ending: Finish
    """Whether the output ends here, and how."""
    token_ids: array[int]
    source: bytes
    """JSON of the tools (``engine.text.output.tools``) in the first message of an output, else empty."""
    begins: bool = False
    """Whether this is the output's first message to this sandbox."""


@dataclass(frozen=True, slots=True)
class OutputRead:
    """Answer to ``ReadOutput``."""

    request: int
    over: bool
    """Whether the output is to end here, since it may have one call and has it."""
    reasoning_tokens: int
    """Tokens of the output so far that are reasoning, with their marks."""
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class CloseOutput:
    """The output has ended. Idempotent; an unknown id is ignored."""

    request: int


_READ = struct.Struct("<IBBBI")
_ANSWER = struct.Struct("<BII")
_PART = struct.Struct("<BII")


def _check_read(message: ReadOutput) -> None:
    require_array("token_ids", message.token_ids, "I")
    require_length("token_ids", len(message.token_ids), MAX_TOKENS_PER_REQUEST)
    require_range("shown", message.shown, 0, len(message.token_ids))
    require_length("source", len(message.source), MAX_TOOLS_BYTES)
    require_utf8("source", message.source)
    Thinking(message.thinking)
    Finish(message.ending)


def _pack_read(message: ReadOutput) -> bytes:
    fixed = _READ.pack(message.shown, message.thinking, message.ending, message.begins, len(message.token_ids))
    return b"".join((fixed, message.token_ids.tobytes(), message.source))


def _unpack_read(request: int, frame: Frame) -> ReadOutput:
    shown, thinking, ending, begins, count = _READ.unpack_from(frame, HEADER_BYTES)
    ids = HEADER_BYTES + _READ.size
    source = ids + 4 * count
    require(source <= len(frame), "the frame ends within the token ids")
    return ReadOutput(
        request,
        shown,
        Thinking(thinking),
        Finish(ending),
        take_array("I", frame, ids, source),
        take_bytes(frame, source),
        flag(begins),
    )


def _check_answer(message: OutputRead) -> None:
    require_range("reasoning_tokens", message.reasoning_tokens, 0, MAX_TOKENS_PER_REQUEST)
    require_length("parts", len(message.parts), MAX_PARTS)
    for part in message.parts:
        PartKind(part.kind)
        require_range("token", part.token, 0, MAX_U32)


def _pack_answer(message: OutputRead) -> bytes:
    texts = [part.text.encode() for part in message.parts]
    rows = [_PART.pack(part.kind, part.token, len(text)) for part, text in zip(message.parts, texts, strict=True)]
    return b"".join((_ANSWER.pack(message.over, message.reasoning_tokens, len(texts)), *rows, *texts))


def _unpack_answer(request: int, frame: Frame) -> OutputRead:
    over, reasoning_tokens, count = _ANSWER.unpack_from(frame, HEADER_BYTES)
    rows = HEADER_BYTES + _ANSWER.size
    texts = rows + _PART.size * count
    require(count <= MAX_PARTS and texts <= len(frame), "the frame ends within the parts")
    parts = []
    for kind, token, length in _PART.iter_unpack(take_bytes(frame, rows, texts)):
        require(texts + length <= len(frame), "the frame ends within the texts")
        text = take_bytes(frame, texts, texts + length)
        require_utf8("a part's text", text)
        parts.append(Part(PartKind(kind), token, text.decode()))
        texts += length
    require(texts == len(frame), "the lengths do not give the frame's length")
    return OutputRead(request, flag(over), reasoning_tokens, tuple(parts))


ARMS = (
    MessageCodec(Kind.READ_OUTPUT, ReadOutput, _check_read, _pack_read, _unpack_read),
    MessageCodec(Kind.OUTPUT_READ, OutputRead, _check_answer, _pack_answer, _unpack_answer),
    record_codec(Kind.CLOSE_OUTPUT, CloseOutput, Record()),
)
