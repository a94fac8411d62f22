"""The messages between an engine and the supervisor about KV blocks that leave the engine and come back.

They travel over a channel of their own (``Role.SPILL``), which the gateway never holds. Content is plain KV: the
supervisor seals it, for no key enters a sandbox. A block is named by its id, a keyed hash of the tokens before it; the
namespace key beside it is the one the host gave the engine with requests, and tells the supervisor the tenant.

Order: guest ``Hello``; then guest ``Keep | Fetch``, host ``Fetched | Forget``, each at any time.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_BLOCK_NAME_BYTES = 32
"""Bytes of a block's id; ids have 16, and those of models with several block tables one more."""

MAX_FETCH_BLOCKS = 8_192
"""Blocks of one fetch: a context of 128 Ki tokens in blocks of 16."""

SPILL_HEADER_BYTES = 128
"""Bytes that every frame with content has room for beside it."""


@dataclass(frozen=True, slots=True)
class Keep:
    """Guest: this block's content may be taken up again later, if you keep it. Not answered."""

    namespace: bytes
    block: bytes
    content: bytes
    """At least one byte."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """Guest: these blocks, in this order. Answered by one ``Fetched`` each, up to the first that is not there."""

    request: int
    """Number of the fetch, drawn by the guest."""
    namespace: bytes
    blocks: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Fetched:
    """Host: the block at this place of a fetch; without content it is not there, and nothing more comes."""

    request: int
    index: int
    content: bytes


@dataclass(frozen=True, slots=True)
class Forget:
    """Host: make everything of this namespace unfindable and overwrite it."""

    namespace: bytes
