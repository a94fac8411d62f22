"""Causal attention over the paged cache, for a mixed batch of decoding rows and prompt chunks.

Shape suffixes as in ``engine.backends.attention``.

The step's metadata (``AttentionBatch``, made by ``engine.backends.plain.grouping``) is computed once for each reach
that the model's layers have, and all layers of that reach use it. Decoding rows are put into groups of similar length,
each gathered into one padded rectangle; grouped heads are folded into the query length, so keys are read once for all G
heads. Padding reads the null block, or slots that were zeroed when the row got the block; the mask hides both. A prompt
chunk is attended alone: against its own keys when it is the start of its sequence, else against the gathered blocks
that it can see.

torch's fused attention computes where it can. Soft-caps (Gemma 2, arXiv 2408.00118, section 2) and sinks (a learnt
logit for each head that takes part in the softmax and adds no value: arXiv 2309.17453, gpt-oss) are computed with
scores and softmax in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.backends.attention import AttentionRule, weigh
from engine.backends.common.storage import KvStorage


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decoding rows ``start .. stop`` of the step, padded to the same number of blocks."""

    start: int
    stop: int
    blocks: Tensor
    """int64, the rows' blocks row after row."""
    length: int
    """Positions of the rectangle that are attended: up to the end of the longest row."""
    mask: Tensor | None
    """0 or -inf of shape ``(B, 1, 1, S)``; None where nothing is hidden."""


@dataclass(frozen=True, slots=True)
class ChunkContext:
    """A prompt chunk: tokens ``start .. stop`` of the step."""

    start: int
    stop: int
    blocks: Tensor | None
    """int64, blocks of all positions that the chunk can see; None for the start of a sequence."""
    length: int
    """Positions of those blocks, up to the chunk's end."""
    mask: Tensor | None
    """0 or -inf of shape ``(T, S)``; None for plain causal attention of the chunk to itself."""


@dataclass(frozen=True, slots=True)
class ReachBatch:
    """Slots and contexts of one step's tokens in the layers of one reach."""

    slots: Tensor
    """int64 of shape ``(N,)``."""
    groups: tuple[DecodeGroup, ...]
    chunks: tuple[ChunkContext, ...]


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Attention metadata of one step."""

    reaches: tuple[ReachBatch, ...]
    """One for each of the layout's ``reaches``."""


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """Attention of one step: writes keys and values, then attends. All layers share it."""

    storage: KvStorage
    batch: AttentionBatch
    fixed_shapes: ClassVar[bool] = False

    def __call__(self, place: int, qkv: tuple[Tensor, Tensor, Tensor | None], rule: AttentionRule, /) -> Tensor:
        """Attend in one layer; see ``Attention``."""
        q_nhd, k_nkd, v_nkv = qkv
        seen = self.batch.reaches[self.storage.reach_of[place]]
        self.storage.write(place, seen.slots, k_nkd, v_nkv)
        value_dim = self.storage.layout.layers[place].value_dim
        out_nhv = q_nhd.new_empty(q_nhd.shape[0], q_nhd.shape[1], value_dim)
        own = k_nkd, k_nkd[..., :value_dim] if v_nkv is None else v_nkv
        for group in seen.groups:
            self._decode(place, q_nhd, group, rule, out_nhv)
        for chunk in seen.chunks:
            self._prefill(place, q_nhd, own, chunk, rule, out_nhv)
        return out_nhv.flatten(1)

    def _decode(self, place: int, q_nhd: Tensor, group: DecodeGroup, rule: AttentionRule, out_nhv: Tensor) -> None:
        rows = group.stop - group.start
        keys, values = self.storage.gather(place, group.blocks, rows)
        k_bksd, v_bksv = keys[:, :, : group.length], values[:, :, : group.length]
        q_bkgd = q_nhd[group.start : group.stop].reshape(rows, k_bksd.shape[1], -1, q_nhd.shape[2])
        if rule.plain:
            result = F.scaled_dot_product_attention(q_bkgd, k_bksd, v_bksv, attn_mask=group.mask, scale=rule.scale)
        else:
            mask = None if group.mask is None else group.mask.unsqueeze(2)
            result = weigh(q_bkgd.unsqueeze(3), k_bksd, v_bksv, mask, rule).squeeze(3)
        out = out_nhv[group.start : group.stop]
        out.view(*q_bkgd.shape[:3], -1).copy_(result)

    def _prefill(
        self,
        place: int,
        q_nhd: Tensor,
        own: tuple[Tensor, Tensor],
        chunk: ChunkContext,
        rule: AttentionRule,
        out_nhv: Tensor,
    ) -> None:
        q_htd = q_nhd[chunk.start : chunk.stop].transpose(0, 1)
        if chunk.blocks is None:
            k_ksd, v_ksv = (part[chunk.start : chunk.stop].transpose(0, 1).unsqueeze(0) for part in own)
        else:
            keys, values = self.storage.gather(place, chunk.blocks, 1)
            k_ksd, v_ksv = keys[:, :, : chunk.length], values[:, :, : chunk.length]
        if rule.plain:
            result = F.scaled_dot_product_attention(
                q_htd.unsqueeze(0),
                k_ksd,
                v_ksv,
                attn_mask=chunk.mask,
                is_causal=chunk.mask is None,
                scale=rule.scale,
                enable_gqa=q_htd.shape[0] != k_ksd.shape[1],
            )[0]
        else:
            mask = _causal(q_htd) if chunk.mask is None else chunk.mask
            q_kgtd = q_htd.reshape(1, k_ksd.shape[1], -1, *q_htd.shape[1:])
            result = weigh(q_kgtd, k_ksd, v_ksv, mask, rule)[0].flatten(0, 1)
        out_nhv[chunk.start : chunk.stop].copy_(result.transpose(0, 1))


def _causal(q_htd: Tensor) -> Tensor:
    tokens = q_htd.shape[1]
    return torch.full((tokens, tokens), -torch.inf, device=q_htd.device).triu_(1)
