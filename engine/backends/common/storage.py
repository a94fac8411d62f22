"""The memory of the KV cache: keys and values of each layer, and room to gather blocks into.

Keys of a layer: ``(num_blocks + 1, block_size, heads, key_dim)``; values likewise, or, in a latent layer, the first
numbers of the keys. Flat views: ``(slots, heads * dim)`` to write tokens, ``(blocks, block_size * heads * dim)`` to
read whole blocks. With several block tables all layers lie in one piece of memory, a block after the other, and each
layer's views are cuts of it: the same block may be keys of 12 layers now, and of 36 others tomorrow.

All memory is taken and touched at the start and never given back: page faults are dear in a sandbox.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.core.kv.groups import granule
from engine.core.kv.layout import KvLayout, LayerLayout

GATHER_TOKENS = 4_096
"""Tokens that are gathered in one piece at the most, unless one sequence alone is longer: bounds the gather buffers
while a decode batch still goes through in few products (measured: larger buffers are not faster)."""

GATHER_STEP = 512
"""Tokens of which the gather buffers hold a multiple: the deterministic class pads contexts to it."""


def gather_tokens(layout: KvLayout, max_context: int) -> int:
    """Tokens that the gather buffers hold: one sequence of the longest context, padded as the deterministic class pads
    it, in whole blocks of any table."""
    padded = -(-max(max_context, GATHER_TOKENS) // GATHER_STEP) * GATHER_STEP
    size = granule(layout.tables)
    return -(-padded // size) * size


class KvStorage:
    """Keys and values of all blocks on one device."""

    def __init__(self, layout: KvLayout, *, max_context: int, dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        self.dtype = dtype
        self.device = device
        self.reach_of = [layout.reaches.index(layer.reach) for layer in layout.layers]
        """By layer: index of its reach in the layout's ``reaches``."""
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.tensors: list[Tensor] = []
        """Every tensor that holds tokens; the first axis counts blocks."""
        self._key_rows: list[Tensor] = []
        self._value_rows: list[Tensor] = []
        if len(layout.tables) == 1:
            for layer in layout.layers:
                self._take_layer(layer, layout.block_size)
        else:
            self._share_blocks(layout.block_rows)
        self.gather_blocks = gather_tokens(layout, max_context) // layout.block_size
        room = self.gather_blocks * layout.block_size
        wide = max((layer.heads * layer.key_dim for layer in layout.layers), default=0)
        narrow = max((layer.heads * layer.value_dim for layer in layout.layers if not layer.latent), default=0)
        self._gathered_keys = torch.zeros(room * wide, dtype=dtype, device=device)
        self._gathered_values = torch.zeros(room * narrow, dtype=dtype, device=device)

    def write(self, place: int, slots: Tensor, k_nkd: Tensor, v_nkd: Tensor | None) -> None:
        """Store tokens of the layer at ``place``: slots int64 ``(N,)``; values None in a latent layer."""
        self._key_rows[place].index_copy_(0, slots, k_nkd.flatten(1))
        if v_nkd is not None:
            self._value_rows[place].index_copy_(0, slots, v_nkd.flatten(1))

    def gather(self, place: int, blocks: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Keys and values of ``rows`` rectangles of blocks, each ``(B, heads, S, dim)``; valid until the next call."""
        layer = self.layout.layers[place]
        keys = _gather(self.keys[place], blocks, rows, self._gathered_keys)
        if layer.latent:
            return keys, keys[..., : layer.value_dim]
        return keys, _gather(self.values[place], blocks, rows, self._gathered_values)

    def _take_layer(self, layer: LayerLayout, block_size: int) -> None:
        """Memory of one layer alone."""
        tokens = (self.layout.num_blocks + 1, block_size, layer.heads)
        keys = torch.zeros(*tokens, layer.key_dim, dtype=self.dtype, device=self.device)
        values = (
            keys[..., : layer.value_dim]
            if layer.latent
            else torch.zeros(*tokens, layer.value_dim, dtype=self.dtype, device=self.device)
        )
        self.keys.append(keys)
        self.values.append(values)
        self.tensors += [keys] if layer.latent else [keys, values]
        self._key_rows.append(keys.view(-1, layer.heads * layer.key_dim))
        self._value_rows.append(keys if layer.latent else values.view(-1, layer.heads * layer.value_dim))

    def _share_blocks(self, block_rows: int) -> None:
        """Memory of all layers together: in a block the rows of the first layer of its table, then of the next."""
        layout, like = self.layout, self.layout.layers[0]
        rows = (layout.num_blocks + 1, block_rows, like.heads)
        keys = torch.zeros(*rows, like.key_dim, dtype=self.dtype, device=self.device)
        values = (
            keys[..., : like.value_dim]
            if like.latent
            else torch.zeros(*rows, like.value_dim, dtype=self.dtype, device=self.device)
        )
        self.tensors = [keys] if like.latent else [keys, values]
        begins = [0] * len(layout.tables)
        for layer in layout.layers:
            table = layout.table_of(layer.reach)
            begin, size = begins[table], layout.tables[table].block_size
            begins[table] += size
            self.keys.append(keys[:, begin : begin + size])
            self.values.append(values[:, begin : begin + size])
            self._key_rows.append(keys.view(-1, like.heads * like.key_dim)[begin:])
            self._value_rows.append(keys if like.latent else values.view(-1, like.heads * like.value_dim)[begin:])

    def zero(self, blocks: list[int]) -> None:
        """Make the bytes of these blocks zero, in all layers."""
        index = torch.tensor(blocks, dtype=torch.int64, device=self.device)
        for tensor in self.tensors:
            tensor.index_fill_(0, index, 0)

    def touch(self) -> None:
        """Write every page once more. Under gVisor a page costs a fault on its first and on its second pass."""
        for tensor in (*self.tensors, self._gathered_keys, self._gathered_values):
            tensor.zero_()


def _gather(source: Tensor, blocks: Tensor, rows: int, room: Tensor) -> Tensor:
    """Blocks of ``source`` copied into ``room``, as ``(B, heads, S, dim)``."""
    num_blocks, block_size, heads, dim = source.shape
    width = block_size * heads * dim
    target = room[: len(blocks) * width].view(-1, width)
    # Of a block only the rows of this layer, which lie together; blocks may be further apart.
    lines = source.as_strided((num_blocks, width), (source.stride(0), 1))
    torch.index_select(lines, 0, blocks, out=target)
    return target.view(rows, -1, heads, dim).transpose(1, 2)
