"""bfloat16 weights without loss in three quarters of their bytes, for kernels that undo it while they multiply.

Decoding one stream reads every weight once a token, and memory is what it waits for. The upper byte of a weight (sign
and seven bits of exponent) takes few values in a trained matrix: sixteen of them make the matrix's palette, and four
bits say which. Weights whose upper byte is none of them are patched in behind. ``csrc/compressed.h`` has the layout.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.backends.native.library import Library
from engine.backends.native.packing import Compression, Packed

CHUNK = 1_024
"""Weights of a chunk: 16 groups of inputs of one panel."""

PALETTE = 16
"""Upper bytes that four bits can name."""

PATCHED = 64
"""At most one weight in so many may be patched: a patch takes four bytes where a weight saves half of one."""

MOST_PANEL_BYTES = 2 << 20
"""Bytes of an expanded panel, which a thread's scratch must hold: 32,768 inputs."""


def compress(library: Library, packed: Packed) -> Packed:
    """Compress a weight, or return it unchanged where that does not pay: another dtype, too many different exponents, a
    row too long, or a processor without the instructions that undo it in passing."""
    weight = packed.weight
    if weight.dtype != torch.bfloat16 or weight[0].nbytes > MOST_PANEL_BYTES:
        return packed
    chunks, most = weight.numel() // CHUNK, weight.numel() // PATCHED
    palette = torch.zeros(PALETTE, dtype=torch.uint8)
    numbers = torch.empty(chunks, CHUNK * 3 // 2, dtype=torch.uint8)
    starts, patches = torch.zeros(chunks + 1, dtype=torch.int32), torch.zeros(most, dtype=torch.int32)
    count = library.compress(
        weight.data_ptr(), chunks, [one.data_ptr() for one in (palette, numbers, starts, patches)], most
    )
    if count < 0:
        return packed
    # One patch at least, so that there is an address.
    kept = patches[: max(count, 1)].clone()
    return replace(packed, weight=numbers, compression=Compression(palette, starts, kept, tuple(weight.shape)))
