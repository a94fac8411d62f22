"""Arms of the codec for the handshake and for the text sandbox's messages.

Payloads (``rest`` runs to the frame's end):

* Hello: version u16, role u8. Configure: rest JSON.
* EngineReady: vocab_size, max_context, block_size, num_blocks (u32 each), two flags u8.
* TextReady: vocab_size u32, three flags u8.
* Encode: kind u8, max_tokens u32, rest source. Encoded, Decode: rest n x u32.
* Decoded: rest UTF-8. ReadVocabulary: start u32.
* Vocabulary: start u32, n u32, lengths n x u16, then all entries' bytes.
* Failed: code u8, rest UTF-8.
"""

from __future__ import annotations

import struct
from array import array

from isolation.ipc.frame import (
    HEADER_BYTES,
    MAX_U32,
    Arm,
    Frame,
    Kind,
    flag,
    require,
    require_array,
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
    Configure,
    EngineReady,
    Failed,
    FailureCode,
    Hello,
    Role,
    TextReady,
)
from isolation.ipc.text_messages import Decode, Decoded, Encode, Encoded, ReadVocabulary, SourceKind, Vocabulary

_HELLO = struct.Struct("<HB")
_ENGINE_READY = struct.Struct("<4IBB")
_TEXT_READY = struct.Struct("<IBBB")
_ENCODE = struct.Struct("<BI")
_U32 = struct.Struct("<I")
_VOCABULARY = struct.Struct("<II")
_ID_BYTES = 4
_LENGTH_BYTES = 2


def _fixed(layout: struct.Struct, frame: Frame) -> tuple[int, ...]:
    """The fields of a payload that is exactly this struct."""
    require(len(frame) == HEADER_BYTES + layout.size, "the payload has another length")
    return layout.unpack_from(frame, HEADER_BYTES)


def _check_hello(message: Hello) -> None:
    Role(message.role)


def _pack_hello(message: Hello) -> bytes:
    return _HELLO.pack(message.version, message.role)


def _unpack_hello(_request: int, frame: Frame) -> Hello:
    version, role = _fixed(_HELLO, frame)
    return Hello(version, Role(role))


def _check_configure(message: Configure) -> None:
    require_length("config", len(message.config), MAX_CONFIG_BYTES)
    require_utf8("config", message.config)


def _pack_configure(message: Configure) -> bytes:
    return message.config


def _unpack_configure(_request: int, frame: Frame) -> Configure:
    return Configure(take_bytes(frame, HEADER_BYTES))


def _check_engine_ready(message: EngineReady) -> None:
    require_range("vocab_size", message.vocab_size, 1, MAX_U32)
    require_range("max_context", message.max_context, 1, MAX_U32)
    require_range("block_size", message.block_size, 1, MAX_U32)
    require_range("num_blocks", message.num_blocks, 1, MAX_U32)


def _pack_engine_ready(message: EngineReady) -> bytes:
    return _ENGINE_READY.pack(
        message.vocab_size, message.max_context, message.block_size, message.num_blocks, message.deterministic,
        message.publishes,
    )


def _unpack_engine_ready(_request: int, frame: Frame) -> EngineReady:
    vocab_size, max_context, block_size, num_blocks, deterministic, publishes = _fixed(_ENGINE_READY, frame)
    return EngineReady(vocab_size, max_context, block_size, num_blocks, flag(deterministic), flag(publishes))


def _check_text_ready(message: TextReady) -> None:
    require_range("vocab_size", message.vocab_size, 1, MAX_U32)


def _pack_text_ready(message: TextReady) -> bytes:
    return _TEXT_READY.pack(
        message.vocab_size,
        message.has_chat_template,
        message.exact_vocabulary,
        message.strip_leading_space,
    )


def _unpack_text_ready(_request: int, frame: Frame) -> TextReady:
    vocab_size, template, exact, strip = _fixed(_TEXT_READY, frame)
    return TextReady(vocab_size, flag(template), flag(exact), flag(strip))


def _check_encode(message: Encode) -> None:
    SourceKind(message.kind)
    require_length("source", len(message.source), MAX_SOURCE_BYTES)
    require_range("max_tokens", message.max_tokens, 0, MAX_TOKENS_PER_REQUEST)
    require_utf8("source", message.source)


def _pack_encode(message: Encode) -> bytes:
    return _ENCODE.pack(message.kind, message.max_tokens) + message.source


def _unpack_encode(request: int, frame: Frame) -> Encode:
    kind, max_tokens = _ENCODE.unpack_from(frame, HEADER_BYTES)
    source = take_bytes(frame, HEADER_BYTES + _ENCODE.size)
    return Encode(request, SourceKind(kind), source, max_tokens)


def _check_ids(message: Encoded | Decode) -> None:
    require_array("token_ids", message.token_ids, "I")
    require_length("token_ids", len(message.token_ids), MAX_TOKENS_PER_REQUEST)


def _pack_ids(message: Encoded | Decode) -> bytes:
    return message.token_ids.tobytes()


def _unpack_ids(frame: Frame) -> array[int]:
    require((len(frame) - HEADER_BYTES) % _ID_BYTES == 0, "the last token id is cut off")
    return take_array("I", frame, HEADER_BYTES, len(frame))


def _unpack_encoded(request: int, frame: Frame) -> Encoded:
    return Encoded(request, _unpack_ids(frame))


def _unpack_decode(request: int, frame: Frame) -> Decode:
    return Decode(request, _unpack_ids(frame))


def _check_decoded(message: Decoded) -> None:
    # The frame's own limit bounds the length.
    require_utf8("text", message.text)


def _pack_decoded(message: Decoded) -> bytes:
    return message.text


def _unpack_decoded(request: int, frame: Frame) -> Decoded:
    return Decoded(request, take_bytes(frame, HEADER_BYTES))


def _check_read_vocabulary(message: ReadVocabulary) -> None:
    require_range("start", message.start, 0, MAX_U32)


def _pack_read_vocabulary(message: ReadVocabulary) -> bytes:
    return _U32.pack(message.start)


def _unpack_read_vocabulary(request: int, frame: Frame) -> ReadVocabulary:
    (start,) = _fixed(_U32, frame)
    return ReadVocabulary(request, start)


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
    Arm(Kind.HELLO, Hello, _check_hello, _pack_hello, _unpack_hello, names_request=False),
    Arm(Kind.CONFIGURE, Configure, _check_configure, _pack_configure, _unpack_configure, names_request=False),
    Arm(
        Kind.ENGINE_READY,
        EngineReady,
        _check_engine_ready,
        _pack_engine_ready,
        _unpack_engine_ready,
        names_request=False,
    ),
    Arm(
        Kind.TEXT_READY,
        TextReady,
        _check_text_ready,
        _pack_text_ready,
        _unpack_text_ready,
        names_request=False,
    ),
    Arm(Kind.ENCODE, Encode, _check_encode, _pack_encode, _unpack_encode),
    Arm(Kind.ENCODED, Encoded, _check_ids, _pack_ids, _unpack_encoded),
    Arm(Kind.DECODE, Decode, _check_ids, _pack_ids, _unpack_decode),
    Arm(Kind.DECODED, Decoded, _check_decoded, _pack_decoded, _unpack_decoded),
    Arm(
        Kind.READ_VOCABULARY,
        ReadVocabulary,
        _check_read_vocabulary,
        _pack_read_vocabulary,
        _unpack_read_vocabulary,
    ),
    Arm(Kind.VOCABULARY, Vocabulary, _check_vocabulary, _pack_vocabulary, _unpack_vocabulary),
    Arm(Kind.FAILED, Failed, _check_failed, _pack_failed, _unpack_failed),
)
