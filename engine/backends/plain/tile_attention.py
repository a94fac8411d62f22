"""Attention whose numbers depend on nothing but the row itself: the same bits alone, in any batch and in any chunks.

A *tile* is ``TILE`` tokens that go through the model together, whatever there is to compute: matrix products see one
shape only, and a product of one shape computes all its rows alike (``engine.backends.plain.tiles`` has that checked on
the machine). Here every token of a tile is attended by itself, against its keys in stretches of ``STRETCH`` positions
from the start of its sequence, with the scores of what it does not see at minus infinity: such stretches add exact
zeros. torch's fused attention works through keys in stretches of that width, so padding to it fixes the order of all
roundings; what it cannot compute (soft-caps, sinks, values of another width than keys) goes through the same stretches
here.

Rows of queries, keys and values are padded to whole cache lines: on some processors a product rounds in another order
where its operands begin elsewhere within a line (MKL on AMD, widths that are no multiple of 4), and a row's place in a
tile, or its block's, would then show in its numbers.

Shape suffixes as in ``engine.backends.attention``; N is ``TILE``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.backends.attention import AttentionRule
from engine.backends.common.storage import KvStorage

TILE = 16
"""Tokens of a tile: a width at which products are near their full speed and a lone decoding row wastes little."""

STRETCH = 512
"""Positions that torch's fused attention takes at a time on a CPU (``kvSplitSize``)."""


LINE_BYTES = 64
"""Bytes of a cache line, and of the widest register."""

GROUP = 8
"""Queries of a key-value head are padded to a multiple of this in torch's fused attention."""


@dataclass(frozen=True, slots=True)
class TileReach:
    """Where the tokens of one tile are written and what they attend to, in layers of one reach."""

    slots: Tensor
    """int64 of shape ``(count,)``."""
    blocks: Tensor
    """int64 of shape ``(R, W)``: a table for each token, or one for all of them; ``W`` blocks hold the tile's
    ``length``. The null block where no token sees anything: what was there may be somebody else's by now."""
    mask: Tensor
    """0 or -inf of shape ``(N, 1, 1, length)``."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One tile's metadata. Places behind ``count`` are padding: token 0 at position 0, written nowhere."""

    count: int
    length: int
    """Positions attended, padded to whole stretches."""
    reaches: tuple[TileReach, ...]
    """For each of the layout's ``reaches``."""


@dataclass(frozen=True, slots=True)
class TileAttention:
    """Attention of one tile: writes keys and values, then attends to each token by itself."""

    storage: KvStorage
    tile: Tile
    fixed_shapes: ClassVar[bool] = True

    def __call__(self, place: int, qkv: tuple[Tensor, Tensor, Tensor | None], rule: AttentionRule, /) -> Tensor:
        """Attend in one layer; see ``Attention``."""
        q_nhd, k_nkd, v_nkv = qkv
        storage, tile = self.storage, self.tile
        count, reach = tile.count, tile.reaches[storage.reach_of[place]]
        storage.write(place, reach.slots, k_nkd[:count], None if v_nkv is None else v_nkv[:count])
        q_nkgd = q_nhd.reshape(TILE, k_nkd.shape[1], -1, q_nhd.shape[2])
        blocks, mask = reach.blocks, reach.mask
        if len(blocks) == 1:
            return _attend(q_nkgd, *self._gather(place, blocks, tile.length), mask, rule)
        # As many tokens at a time as the gather buffers hold: each is computed by itself in any case.
        room = storage.gather_blocks * storage.layout.block_size
        step = max(1, room // (blocks.shape[1] * storage.keys[place].shape[1]))
        parts = []
        for start in range(0, TILE, step):
            part = slice(start, min(start + step, TILE))
            keys, values = self._gather(place, blocks[part], tile.length)
            parts.append(_attend(q_nkgd[part], keys, values, mask[part], rule))
        return torch.cat(parts)

    def _gather(self, place: int, tables: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of some tables as ``(B, K, length, D)``."""
        keys, values = self.storage.gather(place, tables.flatten(), len(tables))
        return keys[:, :, :length], values[:, :, :length]


def _attend(q_bkgd: Tensor, k_bksd: Tensor, v_bksv: Tensor, mask: Tensor, rule: AttentionRule) -> Tensor:
    """Attention of each token by itself, to keys and values of its own or of all; gives ``(B, H * V)``."""
    rows, width = len(q_bkgd), v_bksv.shape[3]
    attend = _fused if rule.plain and k_bksd.shape[3] == width else _weigh
    result = attend(_lined(q_bkgd), k_bksd, v_bksv, mask, rule)
    return result[..., :width].reshape(rows, -1)


def _lined(rows: Tensor) -> Tensor:
    """Rows padded with zeros to whole cache lines, where they are not."""
    missing = -rows.shape[-1] % (LINE_BYTES // rows.itemsize)
    return F.pad(rows, (0, missing)) if missing else rows


def _fused(q_bkgd: Tensor, k_bksd: Tensor, v_bksv: Tensor, mask: Tensor, rule: AttentionRule) -> Tensor:
    """Attention by torch's own kernel.

    Its threads have their buffers one behind the other, each as long as the number of queries says: eight make every
    thread's begin at a cache line, and so a row's numbers do not tell which thread has computed it.
    """
    group = q_bkgd.shape[2]
    padded = F.pad(q_bkgd, (0, 0, 0, -group % GROUP))
    keys, values = (_lined(one).expand(len(q_bkgd), -1, -1, -1) for one in (k_bksd, v_bksv))
    return F.scaled_dot_product_attention(padded, keys, values, attn_mask=mask, scale=rule.scale)[:, :, :group]


def _weigh(q_bkgd: Tensor, k_bksd: Tensor, v_bksv: Tensor, mask: Tensor, rule: AttentionRule) -> Tensor:
    """Compute attention piece by piece with a running maximum (Milakov and Gimelshein, arXiv 1805.02867), in
    float32."""
    (rows, heads, group, _), line = q_bkgd.shape, LINE_BYTES // q_bkgd.itemsize
    most = torch.full((rows, heads, group, 1), torch.finfo(torch.float32).min)
    if rule.sinks is not None:
        most = rule.sinks.float().view(1, heads, group, 1).expand(rows, -1, -1, -1)
    # A sink takes part in the sum and brings no value.
    whole = torch.zeros_like(most) if rule.sinks is None else torch.ones_like(most)
    result = torch.zeros(rows, heads, group, -(-v_bksv.shape[3] // line) * line)
    for start in range(0, k_bksd.shape[2], STRETCH):
        part = slice(start, start + STRETCH)
        # Contiguous in any case: a product transposes what is expanded in another way than what is not.
        keys, values = (_lined(one[:, :, part]).expand(rows, -1, -1, -1).contiguous() for one in (k_bksd, v_bksv))
        scores = torch.matmul(q_bkgd, keys.transpose(2, 3)).float().mul_(rule.scale)
        if rule.cap:
            scores.div_(rule.cap).tanh_().mul_(rule.cap)
        scores += mask[..., part].float()
        larger = torch.maximum(most, scores.amax(-1, keepdim=True))
        weights = torch.exp(scores - larger)
        fade = torch.exp(most - larger)
        whole = whole * fade + weights.sum(-1, keepdim=True)
        result = result * fade + torch.matmul(weights.to(values.dtype), values).float()
        most = larger
    return (result / whole).to(q_bkgd.dtype)
