"""Causal attention over the paged cache, for a mixed batch of decoding rows and prompt chunks.

Shape suffixes: N tokens of the step, B rows of a group, T tokens of a chunk, S context positions, H query heads,
K key-value heads, G = H / K query heads that share one, D head_dim.

The step's metadata (``AttentionBatch``) is computed once and used by all layers. Decoding rows are put into groups of
similar length, each gathered into one padded rectangle; grouped heads are folded into the query length, so keys are
read once for all G heads. Padding reads the null block, or slots that were zeroed when the row got the block; the
mask hides both. A prompt chunk is attended alone: against its own keys when it is the start of its sequence, else
against the gathered blocks of everything up to its end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kv.storage import KvStorage


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decoding rows ``start .. stop`` of the step, padded to the same number of blocks."""

    start: int
    stop: int
    blocks: Tensor
    """int64, the rows' blocks row after row."""
    length: int
    """Context positions attended: the whole rectangle, or the one row's exact length."""
    mask: Tensor | None
    """0 or -inf of shape ``(B, 1, 1, S)``; None for a single row, which is cut to its length."""


@dataclass(frozen=True, slots=True)
class ChunkContext:
    """A prompt chunk: tokens ``start .. stop`` of the step."""

    start: int
    stop: int
    blocks: Tensor | None
    """int64, blocks of all positions up to the chunk's end; None for the start of a sequence."""
    length: int
    """Context positions up to the chunk's end."""
    mask: Tensor | None
    """0 or -inf of shape ``(T, S)``; None for the start of a sequence."""


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Where the tokens of one step are written and what they attend to."""

    slots: Tensor
    """int64 of shape ``(N,)``."""
    groups: tuple[DecodeGroup, ...]
    chunks: tuple[ChunkContext, ...]


class PagedAttention:
    """Writes the step's keys and values, then attends. One object serves all layers."""

    def __init__(self, storage: KvStorage, num_heads: int) -> None:
        self._storage = storage
        self._heads = num_heads
        self._kv_heads = storage.layout.num_kv_heads
        self._dim = storage.layout.head_dim
        self._block_size = storage.layout.block_size

    def __call__(self, layer: int, q_nhd: Tensor, k_nkd: Tensor, v_nkd: Tensor, batch: AttentionBatch) -> Tensor:
        """Attend in one layer; gives ``(N, H * D)``."""
        storage = self._storage
        storage.key_slots[layer].index_copy_(0, batch.slots, k_nkd.flatten(1))
        storage.value_slots[layer].index_copy_(0, batch.slots, v_nkd.flatten(1))
        out_nhd = torch.empty_like(q_nhd, memory_format=torch.contiguous_format)
        for group in batch.groups:
            self._decode(layer, q_nhd, group, out_nhd)
        for chunk in batch.chunks:
            self._prefill(layer, (q_nhd, k_nkd, v_nkd), chunk, out_nhd)
        return out_nhd.flatten(1)

    def _decode(self, layer: int, q_nhd: Tensor, group: DecodeGroup, out_nhd: Tensor) -> None:
        rows = group.stop - group.start
        k_bksd, v_bksd = self._gather(layer, group.blocks, rows, group.length)
        q_bkgd = q_nhd[group.start : group.stop].reshape(rows, self._kv_heads, -1, self._dim)
        result = F.scaled_dot_product_attention(q_bkgd, k_bksd, v_bksd, attn_mask=group.mask)
        out_nhd[group.start : group.stop].view(q_bkgd.shape).copy_(result)

    def _prefill(self, layer: int, qkv: tuple[Tensor, Tensor, Tensor], chunk: ChunkContext, out_nhd: Tensor) -> None:
        q_htd = qkv[0][chunk.start : chunk.stop].transpose(0, 1).unsqueeze(0)
        if chunk.blocks is None:
            k_ksd = qkv[1][chunk.start : chunk.stop].transpose(0, 1).unsqueeze(0)
            v_ksd = qkv[2][chunk.start : chunk.stop].transpose(0, 1).unsqueeze(0)
        else:
            k_ksd, v_ksd = self._gather(layer, chunk.blocks, 1, chunk.length)
        result = F.scaled_dot_product_attention(
            q_htd,
            k_ksd,
            v_ksd,
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
            enable_gqa=self._heads != self._kv_heads,
        )
        out_nhd[chunk.start : chunk.stop].copy_(result[0].transpose(0, 1))

    def _gather(self, layer: int, blocks: Tensor, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of ``rows`` rectangles of blocks as ``(B, K, S, D)`` views of the gather buffers."""
        storage = self._storage
        gathered = []
        for source, room in (
            (storage.key_blocks[layer], storage.gathered_keys),
            (storage.value_blocks[layer], storage.gathered_values),
        ):
            target = room[: len(blocks)]
            torch.index_select(source, 0, blocks, out=target)
            gathered.append(target.view(rows, -1, self._kv_heads, self._dim)[:, :length].transpose(1, 2))
        return gathered[0], gathered[1]
