"""Messages of the text sandbox: text to ids, ids to text, and the table of its tokens (``isolation.ipc.messages``).

Codecs of the handshake and of the text sandbox's messages. Payloads that are no record (``frame``):

* Vocabulary: start u32, n u32, lengths n x u16, then all entries' bytes.
* Failed: code u8, UTF-8 to the frame's end.
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
    record_codec,
    require,
    require_length,
    require_range,
    require_utf8,
    take_array,
    take_bytes,
)
from isolation.ipc.messages import (
    MAX_CONFIG_BYTES,
    MAX_ENTRY_BYTES,
    MAX_REASON_BYTES,
    MAX_SOURCE_BYTES,
    MAX_TOKENS_PER_REQUEST,
    MAX_VOCABULARY_ENTRIES,
    NO_TOKEN,
    Configure,
    EngineReady,
    Failed,
    FailureCode,
    Hello,
    Role,
    TextReady,
    WeightForm,
)
from isolation.ipc.output import Thinking


class SourceKind(IntEnum):
    """What ``Encode.source`` holds."""

    TEXT = 1
    """UTF-8 text, tokenised as it is, with the tokenizer's own special tokens added."""
    CHAT = 2
    """UTF-8 JSON for the template: ``{"messages": [], "tools": []?, "template_kwargs": {}?, "hints": {}?}``."""
    BARE = 3
    """UTF-8 text, tokenised as it is, with nothing added."""


@dataclass(frozen=True, slots=True)
class Encode:
    """Turn text or a conversation into token ids."""

    request: int
    kind: SourceKind
    source: bytes
    max_tokens: int
    """More ids than this is ``TOO_LONG``."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """Answer to ``Encode``."""

    request: int
    token_ids: array[int]
    thinking: Thinking = Thinking.NONE
    """Where a conversation leaves the model's reasoning."""


@dataclass(frozen=True, slots=True)
class Decode:
    """Turn ids into text, for tokenizers whose table is not exact."""

    request: int
    token_ids: array[int]


@dataclass(frozen=True, slots=True)
class Decoded:
    """Answer to ``Decode``: UTF-8 without special tokens; an unfinished end shows as U+FFFD."""

    request: int
    text: bytes


@dataclass(frozen=True, slots=True)
class ReadVocabulary:
    """Ask for the id-to-bytes table from ``start`` on."""

    request: int
    start: int


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A slice of the id-to-bytes table; special tokens have no bytes."""

    request: int
    start: int
    entries: tuple[bytes, ...]


_ENGINE_READY = Record(
    "vocab_size:I max_context:I block_size:I num_blocks:I deterministic:? publishes:? form:B adapters:I weights:B"
)
_TEXT_READY = Record(
    "vocab_size:I has_chat_template:? exact_vocabulary:? strip_leading_space:? calls:? thinks:? "
    "think_begins:I think_ends:I"
)
_VOCABULARY = struct.Struct("<II")
_LENGTH_BYTES = 2


def _check_configure(message: Configure) -> None:
    require_length("config", len(message.config), MAX_CONFIG_BYTES)
    require_utf8("config", message.config)


def _check_engine_ready(message: EngineReady) -> None:
    for name in ("vocab_size", "max_context", "block_size", "num_blocks"):
        require_range(name, getattr(message, name), 1, MAX_U32)
    require_range("weights", message.weights, 0, max(WeightForm))


def _check_text_ready(message: TextReady) -> None:
    require_range("vocab_size", message.vocab_size, 1, MAX_U32)
    none = message.think_begins == NO_TOKEN
    require(none == (message.think_ends == NO_TOKEN), "one of the tokens around reasoning is missing")
    if not none:
        require_range("think_begins", message.think_begins, 0, message.vocab_size - 1)
        require_range("think_ends", message.think_ends, 0, message.vocab_size - 1)


def _check_encode(message: Encode) -> None:
    require_length("source", len(message.source), MAX_SOURCE_BYTES)
    require_range("max_tokens", message.max_tokens, 0, MAX_TOKENS_PER_REQUEST)
    require_utf8("source", message.source)


def _check_ids(message: Encoded | Decode) -> None:
    require_length("token_ids", len(message.token_ids), MAX_TOKENS_PER_REQUEST)


def _check_decoded(message: Decoded) -> None:
    # The frame's own limit bounds the length.
    require_utf8("text", message.text)


def _check_vocabulary(message: Vocabulary) -> None:
    count = len(message.entries)
    require_length("entries", count, MAX_VOCABULARY_ENTRIES)
    require_range("start + entries", message.start + count, 0, MAX_U32 + 1)
    require_length("the longest entry", max(map(len, message.entries), default=0), MAX_ENTRY_BYTES)


def _pack_vocabulary(message: Vocabulary) -> bytes:
    lengths = array("H", map(len, message.entries))
    fixed = _VOCABULARY.pack(message.start, len(message.entries))
    return b"".join((fixed, lengths.tobytes(), *message.entries))


def _unpack_vocabulary(request: int, frame: Frame) -> Vocabulary:
    start, count = _VOCABULARY.unpack_from(frame, HEADER_BYTES)
    at_lengths = HEADER_BYTES + _VOCABULARY.size
    at_entries = at_lengths + _LENGTH_BYTES * count
    require(at_entries <= len(frame), "the frame ends within the lengths")
    lengths = take_array("H", frame, at_lengths, at_entries)
    require(at_entries + sum(lengths) == len(frame), "the lengths do not give the frame's length")
    entries = []
    for length in lengths:
        entries.append(take_bytes(frame, at_entries, at_entries + length))
        at_entries += length
    return Vocabulary(request, start, tuple(entries))


def _check_failed(message: Failed) -> None:
    FailureCode(message.code)
    require_length("reason", len(message.reason.encode()), MAX_REASON_BYTES)


def _pack_failed(message: Failed) -> bytes:
    return bytes((message.code,)) + message.reason.encode()


def _unpack_failed(request: int, frame: Frame) -> Failed:
    require(len(frame) > HEADER_BYTES, "the failure code is missing")
    reason = take_bytes(frame, HEADER_BYTES + 1)
    # Before the reason becomes a string, since that is when a wrong byte would raise.
    require_length("reason", len(reason), MAX_REASON_BYTES)
    require_utf8("reason", reason)
    return Failed(request, FailureCode(frame[HEADER_BYTES]), reason.decode())


ARMS = (
    record_codec(Kind.HELLO, Hello, Record("version:H role:B", role=Role), names_request=False),
    record_codec(Kind.CONFIGURE, Configure, Record(), _check_configure, tail="config", names_request=False),
    record_codec(Kind.ENGINE_READY, EngineReady, _ENGINE_READY, _check_engine_ready, names_request=False),
    record_codec(Kind.TEXT_READY, TextReady, _TEXT_READY, _check_text_ready, names_request=False),
    record_codec(Kind.ENCODE, Encode, Record("kind:B max_tokens:I", kind=SourceKind), _check_encode, tail="source"),
    record_codec(
        Kind.ENCODED, Encoded, Record("thinking:B", thinking=Thinking), _check_ids, tail="token_ids", typecode="I"
    ),
    record_codec(Kind.DECODE, Decode, Record(), _check_ids, tail="token_ids", typecode="I"),
    record_codec(Kind.DECODED, Decoded, Record(), _check_decoded, tail="text"),
    record_codec(Kind.READ_VOCABULARY, ReadVocabulary, Record("start:I")),
    MessageCodec(Kind.VOCABULARY, Vocabulary, _check_vocabulary, _pack_vocabulary, _unpack_vocabulary),
    MessageCodec(Kind.FAILED, Failed, _check_failed, _pack_failed, _unpack_failed),
)
