"""KV blocks made zero, and their stamps compared before a step: in one launch each, however many blocks.

A block has a stamp that changes with its holder (``engine.core.kv.tags``). A step brings, for each row, the blocks that
it is going to read and the stamps that it expects; a row of which one is different must not be computed: its tokens
would be somebody else's.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.backends.cuda.kernels.triton_common import ceil_div

NUMBERS_AT_ONCE = 4_096
"""Numbers of a block that one program zeroes."""

PAIRS_AT_ONCE = 128
"""Compared together."""


@triton.jit
def _zero(blocks: tl.tensor, memory: tl.tensor, stride: tl.tensor, size: tl.tensor, WIDTH: tl.constexpr) -> None:
    block = tl.load(blocks + tl.program_id(0)).to(tl.int64)
    number = tl.program_id(1).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    zeros = tl.zeros([WIDTH], memory.dtype.element_ty)
    tl.store(memory + block * stride + number, zeros, mask=(number < size) & (block >= 0))


@triton.jit(do_not_specialize=("width", "num_blocks"))
def _compare(
    tables: tl.tensor,
    expected: tl.tensor,
    begins: tl.tensor,
    ends: tl.tensor,
    stamps: tl.tensor,
    faults: tl.tensor,
    width: tl.tensor,
    num_blocks: tl.tensor,
    AT_ONCE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(begins + row), tl.load(ends + row)
    wrong = tl.zeros([AT_ONCE], tl.int32)
    for start in range(begin, end, AT_ONCE):
        place = start + tl.arange(0, AT_ONCE)
        live = place < end
        block = tl.load(tables + row * width + place, mask=live, other=0).to(tl.int64)
        exists = (block >= 0) & (block < num_blocks)
        stamp = tl.load(stamps + block, mask=live & exists, other=0)
        wanted = tl.load(expected + row * width + place, mask=live, other=0)
        wrong += (live & ((stamp != wanted) | (exists == 0))).to(tl.int32)
    tl.store(faults + row, tl.sum(wrong, 0))


def zero_blocks(memory: Tensor, blocks: Tensor) -> None:
    """Make whole blocks zero.

    Args:
        memory: the first axis counts blocks; what a block holds lies together.
        blocks: int32 or int64, negative for none.
    """
    size = memory[0].numel()
    if len(blocks):
        grid = (len(blocks), ceil_div(size, NUMBERS_AT_ONCE))
        _zero[grid](blocks, memory, memory.stride(0), size, WIDTH=NUMBERS_AT_ONCE)


def compare_stamps(
    tables: Tensor, expected: Tensor, seen: tuple[Tensor, Tensor], stamps: Tensor, faults: Tensor
) -> None:
    """Count, for each row, the blocks whose stamp is not what the row expects, and those that do not exist.

    Args:
        tables: int32 ``(rows, width)``, contiguous.
        expected: int64, the same shape: the stamp of each entry.
        seen: int32 ``(rows,)`` each: first entry that the step reads, and the one behind the last.
        stamps: int64 ``(blocks,)``.
        faults: int32 ``(rows,)``, written for every row.
    """
    rows, width = tables.shape
    if rows:
        _compare[(rows,)](tables, expected, *seen, stamps, faults, width, len(stamps), AT_ONCE=PAIRS_AT_ONCE)
