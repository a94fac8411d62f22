"""Shape of the paged KV cache: bytes of a block, blocks that fit, and the root of every block hash.

A *block* holds keys and values of ``block_size`` consecutive tokens in all layers. Block 0 is the null block: never
given out, always zero, read by padding. So ``num_blocks`` usable blocks take the room of ``num_blocks + 1``.

Pure arithmetic on ints; no tensor library is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from engine.errors import ConfigurationError

NULL_BLOCK = 0
"""Id of the block that padding reads."""

BLOCK_ID_BYTES = 16
"""Width of a block id: 128 bits, so that a collision inside a namespace needs about 2^64 blocks."""

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one number of each dtype that KV may have."""

LAYOUT_VERSION = 1
"""Raised whenever the same tokens would be stored in other bytes."""

MIN_BLOCKS = 4
"""Fewer usable blocks than this is a configuration mistake, not a small cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """How keys and values lie in memory, the same for every layer.

    One layer is one tensor of shape ``(2, num_blocks + 1, block_size, num_kv_heads, head_dim)``; index 0 of the first
    axis holds keys (already rotated), index 1 values.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    num_blocks: int
    """Usable blocks, the null block not counted."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers, keys and values."""
        numbers = 2 * self.num_layers * self.block_size * self.num_kv_heads * self.head_dim
        return numbers * ITEM_BYTES[self.dtype]

    @property
    def capacity(self) -> int:
        """Tokens that all usable blocks hold together."""
        return self.num_blocks * self.block_size

    def root(self, model_digest: str) -> bytes:
        """Parent id of every first block: 16 bytes that differ between models, layouts and dtypes.

        Args:
            model_digest: hex digest of the model's files.
        """
        parts = (
            model_digest,
            f"{LAYOUT_VERSION}/{self.num_layers}/{self.num_kv_heads}/{self.head_dim}/{self.block_size}",
            self.dtype,
        )
        digest = blake2b(digest_size=BLOCK_ID_BYTES, person=b"athanor-kv-root")
        for part in parts:
            data = part.encode()
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
        return digest.digest()


def fit_layout(
    *, kv_bytes: int, num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: str
) -> KvLayout:
    """The layout with as many blocks as ``kv_bytes`` hold.

    Raises:
        ConfigurationError: the block size is not positive, or fewer than ``MIN_BLOCKS`` blocks fit.
    """
    if block_size < 1:
        raise ConfigurationError(f"block_size is {block_size}; it must be at least 1")
    one = KvLayout(
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        num_blocks=1,
    )
    num_blocks = kv_bytes // one.block_bytes - 1
    if num_blocks < MIN_BLOCKS:
        needed = (MIN_BLOCKS + 1) * one.block_bytes
        raise ConfigurationError(
            f"kv_bytes is {kv_bytes}: too small for {MIN_BLOCKS} blocks of this model; give at least {needed}"
        )
    return KvLayout(
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        num_blocks=num_blocks,
    )
