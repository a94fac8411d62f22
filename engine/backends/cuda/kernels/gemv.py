"""Products of few rows with a large matrix: the matrix is read once, at the speed of memory.

A decoding step of few rows does nothing but read weights, so what stands around a product is computed on the way: the
norm in front of it, and behind it bias, gate, or the addition to the residual stream. The mean of squares that a norm
divides by is known when the last input has been read, and multiplies what the product gave; gains multiply inputs.

A matrix in 8 bits (``engine.model.layers.scaled``) is widened in registers; scales of its outputs multiply the sums.

Rows are padded to ``ROWS`` for tensor cores, in the narrow operand: the matrix is the wide one. So a row's numbers are
the same bits beside any other rows, and for any number of them up to ``ROWS``. Where a matrix has too few outputs to
occupy a GPU, several programs share the inputs of a tile; the one that arrives last adds up all parts in their order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.backends.cuda.kernels.activation import KINDS, Gate, gated
from engine.backends.cuda.kernels.lines import LineCut, Map, one_row
from engine.backends.cuda.kernels.triton_common import EMULATED, Threads, ceil_div, dot, narrow, power_of_two

MOST_ROWS = 16
"""Rows of a product at the most: the least width of a tensor core's operand in Triton."""

ROWS = tl.constexpr(MOST_ROWS)

ALIGNED = 16
"""Inputs are a multiple of so many: a line of the matrix begins where sixteen bytes can be read at once."""

MOST_COUNTERS = 4_096
"""Tiles of one launch whose parts are counted."""

LEAST_STEPS = 4
"""Tiles of inputs that a part has at least: below that it would be over before its first tile has arrived."""

NO_GATE = -1

CACHE_LINE = tl.constexpr(128)
"""Bytes."""

WIDE_LAUNCH = Threads(4, 4)


@dataclass(frozen=True, slots=True)
class FewRows:
    """How a matrix is cut. One row's bits follow from it, so it depends on the architecture and on no card."""

    outputs: int = 64
    """Outputs of a tile, a power of two."""
    depth: int = 128
    """Inputs of a tile, a power of two."""
    programs: int = 256
    """Programs that inputs are divided for, where there are fewer tiles of outputs: all run at once."""
    launch: Threads = WIDE_LAUNCH
    gated_depth: int = 64
    """Inputs of a tile where a gate's two matrices are read together."""
    most: int = MOST_ROWS
    """Rows up to which these products are used; 0: never."""
    early: bool = False
    """Whether a program may begin before the launch in front of it is over (programmatic dependent launch, sm_90): it
    waits for that before it reads anything that was written."""
    ahead: int = 1_024
    """Bytes of each line of the matrix that an early program asks for while it waits, a power of two: memory has
    something to do while one launch ends and the next begins."""

    alone: LineCut | None = None
    """How a matrix is cut where there is one row; None: as for several rows. A row alone has other last bits then than
    the same row beside others."""

    def parts(self, outputs: int, size: int, depth: int) -> int:
        """Programs that share a tile of this matrix's outputs, a power of two."""
        found, tiles, steps = 1, ceil_div(outputs, self.outputs), ceil_div(size, depth)
        while tiles * found * 2 <= self.programs and steps >= 2 * found * LEAST_STEPS:
            found *= 2
        return found


class Scratch(NamedTuple):
    """Memory that launches one behind the other share."""

    sums: Tensor
    """float32: what parts have added up."""
    counters: Tensor
    """int32, zeros before and after each launch: parts of a tile that have arrived."""

    @classmethod
    def empty(cls, numbers: int, device: torch.device) -> Scratch:
        """Room for so many sums."""
        return cls(torch.empty(numbers, device=device), torch.zeros(MOST_COUNTERS, dtype=torch.int32, device=device))


@dataclass(frozen=True, slots=True)
class _Form:
    """Facts that are fixed when the kernel is compiled."""

    size: int
    outputs: int
    depth: int
    parts: int
    share: int
    """Inputs of a part, a multiple of ``depth``."""
    whole: bool
    """Whether all parts have as many inputs."""
    offset: float
    """Added to gains: 1 where they are published less one."""
    gate: int
    adds: bool
    early: bool
    ahead: int
    """128-byte pieces of a line that are asked for early."""
    item: int
    """Bytes of a number of the matrix."""


@triton.jit
def _lines(weight: tl.tensor, number: tl.tensor, outputs: tl.tensor, FORM: tl.constexpr) -> tl.tensor:
    # What is behind the last line repeats it, and is stored nowhere.
    return weight + tl.minimum(number, outputs - 1).to(tl.int64)[:, None] * FORM.size


@triton.jit
def _tile(lines: tl.tensor, place: tl.tensor, FORM: tl.constexpr) -> tl.tensor:
    if FORM.whole:
        tile = tl.load(lines + place[None, :], eviction_policy="evict_first")
    else:
        tile = tl.load(
            lines + place[None, :], mask=(place < FORM.size)[None, :], other=0.0, eviction_policy="evict_first"
        )
    return tile


@triton.jit
def _prefetch(lines: tl.tensor, FORM: tl.constexpr) -> None:
    """Have the second-level cache fetch the first pieces of lines."""
    place = lines[:, None] + tl.arange(0, FORM.ahead)[None, :] * (CACHE_LINE // FORM.item)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [place.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def close_tile(
    total: tl.tensor,
    second: tl.tensor,
    squares: tl.tensor,
    given: Map,
    out: tl.tensor,
    number: tl.tensor,
    rows: tl.tensor,
    outputs: tl.tensor,
    FORM: tl.constexpr,
) -> None:
    """Store a tile's results, with what stands behind the product."""
    row = tl.arange(0, ROWS)
    exists = number < outputs
    if given.gain is not None:
        scale = 1.0 / tl.sqrt_rn(squares / FORM.size + given.eps)
        total = total * scale[None, :]
        second = second * scale[None, :]
    if given.scale is not None:
        total = total * tl.load(given.scale + number, mask=exists, other=0.0)[:, None]
        if FORM.gate >= 0:
            second = second * tl.load(given.scale + outputs + number, mask=exists, other=0.0)[:, None]
    if given.bias is not None:
        total += tl.load(given.bias + number, mask=exists, other=0.0).to(tl.float32)[:, None]
        if FORM.gate >= 0:
            second += tl.load(given.bias + outputs + number, mask=exists, other=0.0).to(tl.float32)[:, None]
    if FORM.gate >= 0:
        total = gated(total, second, 0.0, 0.0, FORM.gate)
    address = out + row[None, :] * outputs + number[:, None]
    live = exists[:, None] & (row < rows)[None, :]
    if FORM.adds:
        total += tl.load(address, mask=live, other=0.0).to(tl.float32)
    tl.store(address, narrow(total, out.dtype.element_ty), mask=live)


@triton.jit
def join_parts(
    total: tl.tensor,
    second: tl.tensor,
    squares: tl.tensor,
    given: Map,
    out: tl.tensor,
    scratch: Scratch,
    rows: tl.tensor,
    outputs: tl.tensor,
    FORM: tl.constexpr,
) -> None:
    """Leave a part's sums; the program that arrives last adds up all of them in their order."""
    PARTS: tl.constexpr = FORM.parts
    tile = tl.program_id(0)
    part = tl.program_id(1)
    number = tile * FORM.outputs + tl.arange(0, FORM.outputs)
    row = tl.arange(0, ROWS)
    kept = (number < outputs)[:, None] & (row < rows)[None, :]
    # By part: sums of the first matrix, of the second one, and squares of each tile.
    apart = ROWS * outputs
    sums = scratch.sums + row[None, :] * outputs + number[:, None]
    others = sums + PARTS * apart
    norms = scratch.sums + 2 * PARTS * apart + tile * (PARTS * ROWS) + row
    tl.store(sums + part * apart, total, mask=kept)
    if FORM.gate >= 0:
        tl.store(others + part * apart, second, mask=kept)
    if given.gain is not None:
        tl.store(norms + part * ROWS, squares)
    # What all threads of this program have stored has to be there for the program that arrives last.
    tl.debug_barrier()
    arrived = tl.atomic_add(scratch.counters + tile, 1, sem="acq_rel", scope="gpu")
    if arrived == PARTS - 1:
        total = tl.zeros_like(total)
        second = tl.zeros_like(second)
        squares = tl.zeros_like(squares)
        for one in tl.static_range(PARTS):
            total += tl.load(sums + one * apart, mask=kept, other=0.0, cache_modifier=".cg")
            if FORM.gate >= 0:
                second += tl.load(others + one * apart, mask=kept, other=0.0, cache_modifier=".cg")
            if given.gain is not None:
                squares += tl.load(norms + one * ROWS, cache_modifier=".cg")
        tl.store(scratch.counters + tile, 0)
        close_tile(total, second, squares, given, out, number, rows, outputs, FORM)


@triton.jit(do_not_specialize=("rows",))
def _few_rows(
    x: tl.tensor,
    x_row: tl.tensor,
    given: Map,
    out: tl.tensor,
    scratch: Scratch,
    rows: tl.tensor,
    outputs: tl.tensor,
    FORM: tl.constexpr,
) -> None:
    WIDE: tl.constexpr = FORM.outputs
    DEPTH: tl.constexpr = FORM.depth
    tile = tl.program_id(0)
    part = tl.program_id(1)
    number = tile * FORM.outputs + tl.arange(0, FORM.outputs)
    row = tl.arange(0, ROWS)
    depth = tl.arange(0, FORM.depth)
    lines = _lines(given.weight, number, outputs, FORM)
    more = lines
    if FORM.gate >= 0:
        more = lines + outputs.to(tl.int64) * FORM.size
    if FORM.early:
        gdc_launch_dependents()
        # No launch writes the matrix: what is needed of it first is fetched before the wait.
        _prefetch(lines + part * FORM.share, FORM)
        if FORM.gate >= 0:
            _prefetch(more + part * FORM.share, FORM)
        gdc_wait()
    inputs = x + row[:, None] * x_row
    total = tl.zeros([WIDE, ROWS], tl.float32)
    second = tl.zeros([WIDE, ROWS], tl.float32)
    squared = tl.zeros([ROWS, DEPTH], tl.float32)
    begin = part * FORM.share
    for start in range(0, FORM.share, FORM.depth):
        place = begin + start + depth
        weight = _tile(lines, place, FORM)
        read = (row < rows)[:, None]
        if not FORM.whole:
            read = read & (place < FORM.size)[None, :]
        value = tl.load(inputs + place[None, :], mask=read, other=0.0)
        if given.gain is not None:
            wide = value.to(tl.float32)
            squared += wide * wide
            # A line for each row, as inputs are: so it is copied ahead as they are, and not waited for in each turn.
            gains = tl.broadcast_to(given.gain + place[None, :], (ROWS, DEPTH))
            gain = tl.load(gains, mask=read, other=0.0).to(tl.float32)
            value = narrow(wide * (gain + FORM.offset), x.dtype.element_ty)
        turned = tl.trans(value)
        # All numbers of E4M3 are numbers of bfloat16.
        total = dot(weight.to(x.dtype.element_ty), turned, total)
        if FORM.gate >= 0:
            second = dot(_tile(more, place, FORM).to(x.dtype.element_ty), turned, second)
    squares = tl.sum(squared, 1)
    if FORM.parts == 1:
        close_tile(total, second, squares, given, out, number, rows, outputs, FORM)
    else:
        join_parts(total, second, squares, given, out, scratch, rows, outputs, FORM)


def cut(shape: FewRows, outputs: int, size: int, *, gate: bool) -> tuple[int, int]:
    """Inputs of a tile of this matrix, and parts."""
    depth = shape.gated_depth if gate else shape.depth
    return depth, shape.parts(outputs, size, depth)


def numbers_needed(shape: FewRows, outputs: int, size: int, *, gate: bool) -> int:
    """Sums that a launch needs room for."""
    _, parts = cut(shape, outputs, size, gate=gate)
    return 0 if parts == 1 else parts * MOST_ROWS * (2 * outputs + ceil_div(outputs, shape.outputs))


def few_rows(
    x: Tensor,
    given: Map,
    out: Tensor,
    scratch: Scratch,
    shape: FewRows,
    *,
    gate: Gate | None = None,
    offset: bool = False,
    adds: bool = False,
) -> None:
    """Multiply rows by a matrix.

    Args:
        x: ``(N, size)``, N of 1 to ``MOST_ROWS``; rows may be further apart than that.
        given: the matrix; its size is a multiple of ``ALIGNED``, its dtype that of ``x``, or E4M3 where it has scales.
        out: ``(N, outputs)``, contiguous.
        scratch: with room for ``numbers_needed``.
        shape: how the matrix is cut.
        gate: of SiLU or GELU: the matrix has twice as many outputs, and what is stored is the gated half.
        offset: the norm's gain is published less one.
        adds: add to what stands in ``out``.
    """
    rows, size = x.shape
    outputs = out.shape[1]
    if rows == 1 and shape.alone is not None:
        one_row(x, given, out, shape.alone, gate=gate, offset=offset, adds=adds, early=shape.early)
        return
    depth, parts = cut(shape, outputs, size, gate=gate is not None)
    share = ceil_div(ceil_div(size, depth), parts) * depth
    form = _Form(
        size=size,
        outputs=shape.outputs,
        depth=depth,
        parts=parts,
        share=share,
        whole=share * parts == size,
        offset=float(offset),
        gate=NO_GATE if gate is None else KINDS[gate.kind],
        adds=adds,
        early=shape.early and not EMULATED.value,
        ahead=power_of_two(max(1, min(shape.ahead, share * given.weight.element_size()) // CACHE_LINE.value) // 2 + 1),
        item=given.weight.element_size(),
    )
    options: dict[str, object] = dict(shape.launch.options)
    if form.early:
        options["launch_pdl"] = True
    _few_rows[(ceil_div(outputs, shape.outputs), parts)](
        x, x.stride(0), given, out, scratch, rows, outputs, FORM=form, **options
    )
