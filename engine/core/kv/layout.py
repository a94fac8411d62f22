"""Shape of the paged KV cache, layer by layer: bytes of a block, blocks that fit, and the root of every block hash.

A *block* holds keys and values of consecutive tokens in all layers that share a block table. Block 0 is the null
block: never given out, always zero, read by padding. So ``num_blocks`` usable blocks take the room of
``num_blocks + 1``.

Layers may differ: in heads, in the widths of keys and of values, and in how far back they look (``Reach``). A layer
that stores one latent vector a token (multi-head latent attention) has its values inside its keys. Layers of one reach
share a table (``KvGroup``; ``engine.core.kv.groups`` says how a model's layers are dealt to them). Blocks of all tables
are equally large and come from one pool: fewer layers hold more tokens in a block.

Pure arithmetic on ints; no tensor library is imported here.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Literal

from engine.errors import ConfigurationError

NULL_BLOCK = 0
"""Id of the block that padding reads."""

BLOCK_ID_BYTES = 16
"""Width of a block id: 128 bits, so that a collision inside a namespace needs about 2^64 blocks."""

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one number of each dtype that KV may have."""

LAYOUT_VERSION = 2
"""Raised whenever the same tokens would be stored in other bytes."""

ENDLESS = 1 << 40
"""Tokens; longer than any sequence."""

MIN_BLOCKS = 4
"""Fewer usable blocks than this is a configuration mistake, not a small cache."""


@dataclass(frozen=True, slots=True)
class Reach:
    """How far back a token looks, itself included.

    ``full``: to the first token. ``window``: at the last ``size`` tokens. ``chunk``: to the start of its chunk, where
    chunks are ``size`` tokens long and begin at position 0.
    """

    kind: Literal["full", "window", "chunk"]
    size: int = 0
    """Tokens; 0 for ``full``."""

    def covers(self, context: int) -> bool:
        """Whether every token of a context of so many tokens sees all tokens before it."""
        return self.kind == "full" or self.size >= context

    def first_seen(self, position: int) -> int:
        """The first position that the token at ``position`` attends to."""
        if self.kind == "window":
            return max(position - self.size + 1, 0)
        return position // self.size * self.size if self.kind == "chunk" else 0


FULL = Reach("full")


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers that share a block table: those of one reach."""

    reach: Reach
    block_size: int
    """Tokens in one of its blocks."""

    def first_block(self, position: int) -> int:
        """Index of the first block that the token at ``position`` reads."""
        return self.reach.first_seen(position) // self.block_size

    def most_blocks(self, length: int, chunk: int = 1) -> int:
        """Most blocks that a sequence holds on its way to ``length`` tokens, computed ``chunk`` at a time."""
        needed = -(-length // self.block_size)
        if self.reach.kind == "full":
            return needed
        # What the first token of the chunk sees, and the chunk, may begin at any place of a block.
        return min(needed, (self.reach.size - 1 + chunk + self.block_size - 2) // self.block_size + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLayout:
    """What one layer stores for a token."""

    heads: int
    """Key-value heads."""
    key_dim: int
    """Numbers of a head's key."""
    value_dim: int
    """Numbers of a head's value."""
    latent: bool = False
    """Whether the value is the first ``value_dim`` numbers of the key, and not stored again."""
    reach: Reach = FULL

    @property
    def numbers(self) -> int:
        """Numbers stored for a token."""
        return self.heads * (self.key_dim + (0 if self.latent else self.value_dim))


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """How keys (already rotated) and values lie in memory.

    With one table a layer is a tensor of shape ``(num_blocks + 1, block_size, heads, key_dim)`` for keys and one of
    ``(num_blocks + 1, block_size, heads, value_dim)`` for values, which a latent layer has not. With several tables
    all layers are of one shape, and a block is ``block_rows`` *rows*, each a token of one layer: those of the first
    layer of its table, then those of the second, and so on.
    """

    layers: tuple[LayerLayout, ...]
    block_size: int
    dtype: str
    num_blocks: int
    """Usable blocks, the null block not counted."""
    groups: tuple[KvGroup, ...] = ()
    """One for each block table, that of whole contexts first; none: one table, in which everything is kept."""

    @property
    def tables(self) -> tuple[KvGroup, ...]:
        """What each block table is for."""
        return self.groups or (KvGroup(FULL, self.block_size),)

    def table_of(self, reach: Reach) -> int:
        """Which table layers of this reach use: their own or, when they have none, the first."""
        return next((place for place, group in enumerate(self.groups) if group.reach == reach), 0)

    @property
    def block_rows(self) -> int:
        """Rows of a block where there are several tables: what the table with the most needs."""
        rows = [0] * len(self.tables)
        for layer in self.layers:
            table = self.table_of(layer.reach)
            rows[table] += self.tables[table].block_size
        return max(rows)

    @property
    def lasting_bytes(self) -> int:
        """Bytes that one more token of a long sequence takes for good: in layers that keep everything."""
        kept = [layer.numbers for layer in self.layers if self.tables[self.table_of(layer.reach)].reach == FULL]
        return sum(kept) * ITEM_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers."""
        return sum(layer.numbers for layer in self.layers) * ITEM_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, keys and values of all layers that it is for."""
        if len(self.groups) < 2:
            return self.token_bytes * self.block_size
        return self.block_rows * self.layers[0].numbers * ITEM_BYTES[self.dtype]

    def capacity(self, chunk: int) -> int:
        """Tokens of the longest sequence that all usable blocks hold, computed ``chunk`` tokens at a time; ``ENDLESS``
        where only windows are kept and they fit."""
        lengths = range(ENDLESS)
        return bisect_right(lengths, self.num_blocks, key=lambda length: most_blocks(self.tables, length, chunk)) - 1

    @property
    def reaches(self) -> tuple[Reach, ...]:
        """The different reaches of its layers, in the order of their first layers."""
        return tuple(dict.fromkeys(layer.reach for layer in self.layers))

    def root(self, model_digest: str, adapter_digest: str = "") -> bytes:
        """Parent id of every first block: 16 bytes that differ between models, adapters, layouts and dtypes.

        Args:
            model_digest: hex digest of the model's files.
            adapter_digest: hex digest of the adapter's files; empty for none.
        """
        parts = (model_digest, f"{LAYOUT_VERSION}/{len(self.layers)}/{self.block_size}", self.dtype)
        digest = blake2b(digest_size=BLOCK_ID_BYTES, person=b"athanor-kv-root")
        tables = [f"{one.reach.kind}/{one.reach.size}/{one.block_size}" for one in self.groups]
        adapter = (f"adapter/{adapter_digest}",) if adapter_digest else ()
        for part in (*parts, *map(_described, self.layers), *tables, *adapter):
            data = part.encode()
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
        return digest.digest()


def most_blocks(tables: tuple[KvGroup, ...], length: int, chunk: int) -> int:
    """Most blocks that a sequence holds in all tables on its way to ``length`` tokens."""
    return sum(group.most_blocks(length, chunk) for group in tables)


def uniform_layers(num_layers: int, heads: int, head_dim: int, reach: Reach = FULL) -> tuple[LayerLayout, ...]:
    """Layers that are all alike, with values as wide as keys."""
    return (LayerLayout(heads=heads, key_dim=head_dim, value_dim=head_dim, reach=reach),) * num_layers


def fit_layout(
    *, kv_bytes: int, layers: tuple[LayerLayout, ...], block_size: int, dtype: str, groups: tuple[KvGroup, ...] = ()
) -> KvLayout:
    """The layout with as many blocks as ``kv_bytes`` hold.

    Raises:
        ConfigurationError: the block size is not positive, or fewer than ``MIN_BLOCKS`` blocks fit.
    """
    if block_size < 1:
        raise ConfigurationError(f"block_size is {block_size}; it must be at least 1")
    one = KvLayout(layers=layers, block_size=block_size, dtype=dtype, num_blocks=1, groups=groups)
    num_blocks = kv_bytes // one.block_bytes - 1
    if num_blocks < MIN_BLOCKS:
        needed = (MIN_BLOCKS + 1) * one.block_bytes
        raise ConfigurationError(
            f"kv_bytes is {kv_bytes}: too small for {MIN_BLOCKS} blocks of this model; give at least {needed}"
        )
    return replace(one, num_blocks=num_blocks)


def _described(layer: LayerLayout) -> str:
    value = f"{layer.value_dim}{'=' if layer.latent else '+'}"
    return f"{layer.heads}/{layer.key_dim}/{value}/{layer.reach.kind}/{layer.reach.size}"
