"""The messages of embeddings: a text to be pooled, and its vector.

Payload of Embed: length u32, weight u16, priority u8, deadline_us u64, namespace 32 bytes, ids n x u32.
"""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass
from math import isfinite

from isolation.ipc.engine import MAX_WEIGHT
from isolation.ipc.frame import (
    HEADER_BYTES,
    Frame,
    Kind,
    MessageCodec,
    Record,
    record_codec,
    require,
    require_array,
    require_range,
    take_array,
)
from isolation.ipc.messages import MAX_DEADLINE_US, MAX_EMBEDDING, MAX_TOKENS_PER_REQUEST, NAMESPACE_KEY_BYTES, Priority

_EMBED = struct.Struct(f"<IHBQ{NAMESPACE_KEY_BYTES}s")


@dataclass(frozen=True, slots=True)
class Embed:
    """Pool this text into one vector. Answered by one ``Embedding`` and, behind it, the end of the request in a
    ``StepOutput`` (one token of no meaning), or by a failure; an engine that generates answers ``INVALID``, as one that
    embeds does to a ``Submit``. Nothing of it is kept."""

    request: int
    namespace: bytes
    """As in ``Submit``."""
    token_ids: array[int]
    """Typecode ``I``, at least one id."""
    weight: int = 1
    """As in ``Submit``."""
    priority: int = Priority.NORMAL
    """As in ``Submit``."""
    deadline_us: int = 0
    """As in ``Submit``."""


@dataclass(frozen=True, slots=True)
class Embedding:
    """The vector of an ``Embed``."""

    request: int
    values: array[float]
    """Typecode ``f``, 1 to ``MAX_EMBEDDING`` finite numbers; as many for every request of one engine."""


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
    require_range("values", len(message.values), 1, MAX_EMBEDDING)
    require(all(map(isfinite, message.values)), "a value is not finite")


ARMS = (
    MessageCodec(Kind.EMBED, Embed, _check_embed, _pack_embed, _unpack_embed),
    record_codec(Kind.EMBEDDING, Embedding, Record(), _check_embedding, tail="values", typecode="f"),
)
