"""Arms of the codec for the spill channel: Keep, Fetch, Fetched, Forget.

Payloads:

* Keep: namespace 32 bytes, name length u8, name, content to the end of the frame;
* Fetch: namespace 32 bytes, name length u8, names n x that length;
* Fetched: index u32, content to the end of the frame;
* Forget: namespace 32 bytes.
"""

from __future__ import annotations

import struct

from isolation.ipc.frame import HEADER_BYTES, MAX_U32, Arm, Frame, Kind, require, require_range, take_bytes
from isolation.ipc.messages import MAX_FRAME_BYTES, NAMESPACE_KEY_BYTES
from isolation.ipc.spill_messages import MAX_BLOCK_NAME_BYTES, MAX_FETCH_BLOCKS, Fetch, Fetched, Forget, Keep

_NAMED = struct.Struct(f"<{NAMESPACE_KEY_BYTES}sB")
_INDEX = struct.Struct("<I")


def _check_namespace(message: Keep | Fetch | Forget) -> None:
    require(len(message.namespace) == NAMESPACE_KEY_BYTES, "the namespace key has another length")


def _check_keep(message: Keep) -> None:
    _check_namespace(message)
    require_range("name", len(message.block), 1, MAX_BLOCK_NAME_BYTES)
    require_range("content", len(message.content), 1, MAX_FRAME_BYTES)


def _pack_keep(message: Keep) -> bytes:
    return b"".join((_NAMED.pack(message.namespace, len(message.block)), message.block, message.content))


def _unpack_keep(_request: int, frame: Frame) -> Keep:
    namespace, length = _NAMED.unpack_from(frame, HEADER_BYTES)
    name = HEADER_BYTES + _NAMED.size
    content = name + length
    require(content < len(frame), "the frame holds no content")
    return Keep(namespace, take_bytes(frame, name, content), take_bytes(frame, content))


def _check_fetch(message: Fetch) -> None:
    _check_namespace(message)
    require_range("blocks", len(message.blocks), 1, MAX_FETCH_BLOCKS)
    width = len(message.blocks[0])
    require_range("name", width, 1, MAX_BLOCK_NAME_BYTES)
    require(all(len(block) == width for block in message.blocks), "names differ in length")


def _pack_fetch(message: Fetch) -> bytes:
    return b"".join((_NAMED.pack(message.namespace, len(message.blocks[0])), *message.blocks))


def _unpack_fetch(request: int, frame: Frame) -> Fetch:
    namespace, width = _NAMED.unpack_from(frame, HEADER_BYTES)
    names = take_bytes(frame, HEADER_BYTES + _NAMED.size)
    require(width > 0 and len(names) % width == 0, "the frame holds no whole names")
    require_range("blocks", len(names) // width, 1, MAX_FETCH_BLOCKS)
    return Fetch(request, namespace, tuple(names[at : at + width] for at in range(0, len(names), width)))


def _check_fetched(message: Fetched) -> None:
    require_range("index", message.index, 0, MAX_U32)
    require_range("content", len(message.content), 0, MAX_FRAME_BYTES)


def _pack_fetched(message: Fetched) -> bytes:
    return _INDEX.pack(message.index) + message.content


def _unpack_fetched(request: int, frame: Frame) -> Fetched:
    (index,) = _INDEX.unpack_from(frame, HEADER_BYTES)
    return Fetched(request, index, take_bytes(frame, HEADER_BYTES + _INDEX.size))


def _pack_forget(message: Forget) -> bytes:
    return message.namespace


def _unpack_forget(_request: int, frame: Frame) -> Forget:
    return Forget(take_bytes(frame, HEADER_BYTES))


ARMS = (
    Arm(Kind.KEEP, Keep, _check_keep, _pack_keep, _unpack_keep, names_request=False),
    Arm(Kind.FETCH, Fetch, _check_fetch, _pack_fetch, _unpack_fetch),
    Arm(Kind.FETCHED, Fetched, _check_fetched, _pack_fetched, _unpack_fetched),
    Arm(Kind.FORGET, Forget, _check_namespace, _pack_forget, _unpack_forget, names_request=False),
)
