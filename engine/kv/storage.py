"""The memory of the KV cache: one tensor a layer, and room to gather blocks into.

Layer tensor: ``(2, num_blocks + 1, block_size, num_kv_heads, head_dim)``, keys then values. Its flat views:
``(slots, num_kv_heads * head_dim)`` to write tokens, ``(blocks, block_size * num_kv_heads * head_dim)`` to read whole
blocks. All memory is taken and touched at the start and never given back: page faults are dear in a sandbox.
"""

from __future__ import annotations

import torch

from engine.kv.layout import KvLayout

GATHER_TOKENS = 4_096
"""Tokens that are gathered in one piece at the most, unless one sequence alone is longer: bounds the gather buffers
while a decode batch still goes through in few products (measured: larger buffers are not faster)."""


class KvStorage:
    """Keys and values of all blocks on one device."""

    def __init__(self, layout: KvLayout, *, max_context: int, dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        self.dtype = dtype
        self.device = device
        shape = (2, layout.num_blocks + 1, layout.block_size, layout.num_kv_heads, layout.head_dim)
        self.layers = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layout.num_layers)]
        width = layout.num_kv_heads * layout.head_dim
        self.key_slots = [layer[0].view(-1, width) for layer in self.layers]
        self.value_slots = [layer[1].view(-1, width) for layer in self.layers]
        self.key_blocks = [layer[0].view(-1, layout.block_size * width) for layer in self.layers]
        self.value_blocks = [layer[1].view(-1, layout.block_size * width) for layer in self.layers]
        self.gather_blocks = -(-max(max_context, GATHER_TOKENS) // layout.block_size)
        room = (self.gather_blocks, layout.block_size * width)
        self.gathered_keys = torch.zeros(room, dtype=dtype, device=device)
        self.gathered_values = torch.zeros(room, dtype=dtype, device=device)

    def zero(self, blocks: list[int]) -> None:
        """Make the bytes of these blocks zero, in all layers."""
        index = torch.tensor(blocks, dtype=torch.int64, device=self.device)
        for layer in self.layers:
            layer.index_fill_(1, index, 0)

    def touch(self) -> None:
        """Write every page once more. Under gVisor a page costs a fault on its first and on its second pass."""
        for tensor in (*self.layers, self.gathered_keys, self.gathered_values):
            tensor.zero_()
