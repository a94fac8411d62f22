"""Arms of the codec for embeddings: Embed and Embedding.

Payloads (``n`` items each where marked):

* Embed: length u32, weight u16, priority u8, deadline_us u64, namespace 32 bytes, ids n x u32;
* Embedding: values n x f32, as many as the frame holds.
"""

from __future__ import annotations

import struct
from array import array
from math import isfinite

from isolation.ipc.engine_codec import MAX_WEIGHT
from isolation.ipc.frame import (
    HEADER_BYTES,
    Arm,
    Frame,
    Kind,
    OutOfBoundsError,
    require,
    require_array,
    require_range,
    take_array,
)
from isolation.ipc.messages import (
    MAX_DEADLINE_US,
    MAX_EMBEDDING,
    MAX_TOKENS_PER_REQUEST,
    NAMESPACE_KEY_BYTES,
    Embed,
    Embedding,
    Priority,
)

_EMBED = struct.Struct(f"<IHBQ{NAMESPACE_KEY_BYTES}s")
_VALUE_BYTES = 4


def _check_embed(message: Embed) -> None:
    require_array("the text", message.token_ids, "I")
    require_range("length", len(message.token_ids), 1, MAX_TOKENS_PER_REQUEST)
    require(len(message.namespace) == NAMESPACE_KEY_BYTES, "the namespace key has another length")
    require_range("weight", message.weight, 1, MAX_WEIGHT)
    require_range("priority", message.priority, Priority.HIGH, Priority.LOW)
    require_range("deadline_us", message.deadline_us, 0, MAX_DEADLINE_US)


def _pack_embed(message: Embed) -> bytes:
    fixed = _EMBED.pack(
        len(message.token_ids), message.weight, message.priority, message.deadline_us, message.namespace
    )
    return fixed + message.token_ids.tobytes()


def _unpack_embed(request: int, frame: Frame) -> Embed:
    count, weight, priority, deadline_us, namespace = _EMBED.unpack_from(frame, HEADER_BYTES)
    start = HEADER_BYTES + _EMBED.size
    require(start + 4 * count == len(frame), "the count does not give the frame's length")
    return Embed(request, namespace, take_array("I", frame, start, len(frame)), weight, priority, deadline_us)


def _check_embedding(message: Embedding) -> None:
    values = message.values
    if values.typecode != "f":
        raise OutOfBoundsError("values is not an array of typecode f")
    require_range("values", len(values), 1, MAX_EMBEDDING)
    require(all(map(isfinite, values)), "a value is not finite")


def _pack_embedding(message: Embedding) -> bytes:
    return message.values.tobytes()


def _unpack_embedding(request: int, frame: Frame) -> Embedding:
    size = len(frame) - HEADER_BYTES
    require(size % _VALUE_BYTES == 0 and size <= _VALUE_BYTES * MAX_EMBEDDING, "the frame holds no whole values")
    values = array("f")
    values.frombytes(memoryview(frame)[HEADER_BYTES:])
    return Embedding(request, values)


ARMS = (
    Arm(Kind.EMBED, Embed, _check_embed, _pack_embed, _unpack_embed),
    Arm(Kind.EMBEDDING, Embedding, _check_embedding, _pack_embedding, _unpack_embedding),
)
