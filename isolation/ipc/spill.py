"""The messages between an engine and the supervisor about KV blocks that leave the engine and come back.

They travel over a channel of their own (``Role.SPILL``), which the gateway never holds. Content is plain KV: the
supervisor seals it, for no key enters a sandbox. A block is named by its id, a keyed hash of the tokens before it; the
namespace key beside it is the one the host gave the engine with requests, and tells the supervisor the tenant. The
supervisor tells no key: its words about namespaces have marks (``mark_of``).

Order: guest ``Hello``; then guest ``Keep | Withdraw | Fetch | Unwanted``, host ``Fetched | Forget | Share | Lost``,
each at any time.

Payloads that are no record (``frame``):

* Keep: namespace 32 bytes, number left out u32, name length u8, name, content to the end of the frame;
* Withdraw: namespace 32 bytes, name to the end of the frame;
* Fetch: namespace 32 bytes, size u32, name length u8, coming u8, names n x that length.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from enum import IntEnum

from isolation.ipc.frame import (
    HEADER_BYTES,
    Frame,
    Kind,
    MessageCodec,
    Record,
    record_codec,
    require,
    require_range,
    take_bytes,
)
from isolation.ipc.messages import MAX_FRAME_BYTES, NAMESPACE_KEY_BYTES

MAX_BLOCK_NAME_BYTES = 32
"""Bytes of a block's id; ids have 16, and those of models with several block tables one more."""

MARK_BYTES = 32

MAX_LEFT_OUT = 1 << 20
"""Blocks that one ``Keep`` says were left out."""

MAX_FETCH_BLOCKS = 8_192
"""Blocks of one fetch: a context of 128 Ki tokens in blocks of 16."""

SPILL_HEADER_BYTES = 128
"""Bytes that every frame with content has room for beside it."""


class KvTier(IntEnum):
    """Where the supervisor kept a block."""

    MEMORY = 0
    DISK = 1
    STORE = 2
    """Outside of the machine."""


class Miss(IntEnum):
    """What is known of a block that did not come, where other hosts may have it."""

    UNKNOWN = 0
    """Nothing: the store was not asked, or does not serve."""
    LOST = 1
    """The store has not got it, and did not serve a moment ago: it may have been begun anew."""
    LACKED = 2
    """The store has not got it, and served each time that it was asked."""


@dataclass(frozen=True, slots=True)
class Keep:
    """Guest: this block's content may be taken up again later, if you keep it. Not answered."""

    namespace: bytes
    block: bytes
    content: bytes
    """At least one byte."""
    left_out: int = 0
    """Blocks, of any namespace, that were to be sent when they were computed and were not, since the last ``Keep``."""


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Guest: the block of this name that I sent, or that you gave me from another host, is wrong; let nobody have it.
    Not answered."""

    namespace: bytes
    block: bytes


@dataclass(frozen=True, slots=True)
class Fetch:
    """Guest: these blocks, in this order. Answered by one ``Fetched`` each, up to the first that is not there."""

    request: int
    """Number of the fetch, drawn by the guest."""
    namespace: bytes
    blocks: tuple[bytes, ...]
    size: int = 0
    """Bytes of a block, where what another host computed will do as well; 0: only what this engine has sent."""
    coming: bool = False
    """Whether another host has just computed them: one that the store does not have yet is asked for again."""
    ahead: bool = False
    """Whether no request waits for them yet, since another host still computes them: they are asked for behind those
    that are waited for, and what is not there is no miss."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """Host: the block at this place of a fetch; without content it is not there, and nothing more comes."""

    request: int
    index: int
    content: bytes
    tier: KvTier = KvTier.MEMORY
    """Where it was; of no meaning without content."""
    miss: Miss = Miss.UNKNOWN
    """Why there is no content; of no meaning where there is some."""


@dataclass(frozen=True, slots=True)
class Unwanted:
    """Guest: nobody waits for this fetch any more; send no more of it. Not answered: what is on its way still comes."""

    request: int
    """Number of the fetch."""


@dataclass(frozen=True, slots=True)
class Forget:
    """Host: make everything of the namespace with this mark unfindable and overwrite it."""

    mark: bytes


@dataclass(frozen=True, slots=True)
class Share:
    """Host: other hosts may have blocks of the namespace with this mark; ask for those that you did not send.
    ``Forget`` ends it."""

    mark: bytes
    computed: bool = False
    """Whether those hosts are to have the blocks of prompts when they are computed, and not only what is evicted."""
    lasts_s: int = 0
    """Seconds for which those hosts find a block that was sent: it is to be sent again after that. 0: for ever."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Host: the store where other hosts look has lost what it had of the namespace with this mark, or did not get all
    of it: nothing that was sent, or found there, counts as there any more."""

    mark: bytes


def mark_of(namespace: bytes) -> bytes:
    """Return the mark of a namespace, 32 bytes: the host names namespaces by it, so that an engine learns the keys of
    those alone of which requests came to it. Who has a key can ask the host for blocks of it, and send some."""
    return hashlib.sha256(b"athanor namespace mark\x00" + namespace).digest()


_NAMED = struct.Struct(f"<{NAMESPACE_KEY_BYTES}sIB")
_FETCH = struct.Struct(f"<{NAMESPACE_KEY_BYTES}sIBB")


def _check_namespace(message: Keep | Withdraw | Fetch) -> None:
    require(len(message.namespace) == NAMESPACE_KEY_BYTES, "the namespace key has another length")


def _check_keep(message: Keep) -> None:
    _check_namespace(message)
    require_range("name", len(message.block), 1, MAX_BLOCK_NAME_BYTES)
    require_range("content", len(message.content), 1, MAX_FRAME_BYTES)
    require_range("left out", message.left_out, 0, MAX_LEFT_OUT)


def _pack_keep(message: Keep) -> bytes:
    head = _NAMED.pack(message.namespace, message.left_out, len(message.block))
    return b"".join((head, message.block, message.content))


def _unpack_keep(_request: int, frame: Frame) -> Keep:
    namespace, left_out, length = _NAMED.unpack_from(frame, HEADER_BYTES)
    name = HEADER_BYTES + _NAMED.size
    content = name + length
    require(content < len(frame), "the frame holds no content")
    return Keep(namespace, take_bytes(frame, name, content), take_bytes(frame, content), left_out)


def _check_withdraw(message: Withdraw) -> None:
    _check_namespace(message)
    require_range("name", len(message.block), 1, MAX_BLOCK_NAME_BYTES)


def _pack_withdraw(message: Withdraw) -> bytes:
    return message.namespace + message.block


def _unpack_withdraw(_request: int, frame: Frame) -> Withdraw:
    name = HEADER_BYTES + NAMESPACE_KEY_BYTES
    require(name < len(frame), "the frame holds no name")
    return Withdraw(take_bytes(frame, HEADER_BYTES, name), take_bytes(frame, name))


def _check_fetch(message: Fetch) -> None:
    _check_namespace(message)
    require_range("blocks", len(message.blocks), 1, MAX_FETCH_BLOCKS)
    require_range("size", message.size, 0, MAX_FRAME_BYTES)
    width = len(message.blocks[0])
    require_range("name", width, 1, MAX_BLOCK_NAME_BYTES)
    require(all(len(block) == width for block in message.blocks), "names differ in length")


def _pack_fetch(message: Fetch) -> bytes:
    head = _FETCH.pack(message.namespace, message.size, len(message.blocks[0]), message.coming | message.ahead << 1)
    return b"".join((head, *message.blocks))


def _unpack_fetch(request: int, frame: Frame) -> Fetch:
    namespace, size, width, flags = _FETCH.unpack_from(frame, HEADER_BYTES)
    names = take_bytes(frame, HEADER_BYTES + _FETCH.size)
    require(flags < 4, "a flag that there is not")
    require(width > 0 and len(names) % width == 0, "the frame holds no whole names")
    require_range("blocks", len(names) // width, 1, MAX_FETCH_BLOCKS)
    blocks = tuple(names[at : at + width] for at in range(0, len(names), width))
    return Fetch(request, namespace, blocks, size, bool(flags & 1), bool(flags & 2))


ARMS = (
    MessageCodec(Kind.KEEP, Keep, _check_keep, _pack_keep, _unpack_keep, names_request=False),
    MessageCodec(Kind.WITHDRAW, Withdraw, _check_withdraw, _pack_withdraw, _unpack_withdraw, names_request=False),
    MessageCodec(Kind.FETCH, Fetch, _check_fetch, _pack_fetch, _unpack_fetch),
    record_codec(Kind.FETCHED, Fetched, Record("index:I tier:B miss:B", tier=KvTier, miss=Miss), tail="content"),
    record_codec(Kind.UNWANTED, Unwanted, Record("")),
    record_codec(Kind.LOST, Lost, Record(f"mark:{MARK_BYTES}s"), names_request=False),
    record_codec(Kind.FORGET, Forget, Record(f"mark:{MARK_BYTES}s"), names_request=False),
    record_codec(Kind.SHARE, Share, Record(f"mark:{MARK_BYTES}s computed:? lasts_s:I"), names_request=False),
)
