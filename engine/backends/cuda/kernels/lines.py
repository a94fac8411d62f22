"""The product of one row with a large matrix, by sums of threads and without tensor cores.

What limits it is how many bytes are under way. A program reads whole lines of the matrix, its next tile while it
multiplies the present one, straight into registers: no tile waits for a barrier, and several programs share a
multiprocessor. A thread has the same sixteen bytes of each line, so its inputs and their gains are read once for all
lines, and a norm in front costs next to nothing.

The matrix does not depend on the launch in front. So an early program (``FewRows.early``) has its first tile under way,
and asks the second-level cache for more of its lines, before it waits for what was written.

A row's sums are taken in another order than by ``gemv``: a row alone has other last bits than beside others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.backends.cuda.kernels.activation import KINDS, Gate, gated
from engine.backends.cuda.kernels.triton_common import EMULATED, ceil_div, narrow

AT_ONCE = 16
"""Bytes that a thread reads at once at the most: eight numbers of bfloat16, sixteen of E4M3."""

WARP = 32
"""Threads."""

ENOUGH_PROGRAMS = 600
"""Programs below which one has half as many lines: some five for each multiprocessor of an H200, where a matrix of
4,096 outputs takes 10.1 us with four lines a program and 10.7 with eight, and one of 6,144 takes 17.1 and 15.3."""

LEAST_FETCHED = 16
"""Bytes that a line is asked for ahead in multiples of."""


class Map(NamedTuple):
    """A matrix with what belongs to it."""

    weight: Tensor
    """``(outputs, size)``; of a gate ``(2 outputs, size)``, all gates first."""
    bias: Tensor | None
    gain: Tensor | None
    """Gains of the norm in front; None: inputs are taken as they are."""
    eps: float
    scale: Tensor | None = None
    """float32, one for each line of a matrix in 8 bits; None: it is in the dtype of the rows."""


@dataclass(frozen=True, slots=True)
class LineCut:
    """How the matrix is cut for one row."""

    outputs: int = 8
    """Lines of a program, a power of two; of a gate as many of both halves together. Half as many where there would be
    fewer programs than ``ENOUGH_PROGRAMS``."""
    warps: int = 4
    """Warps of a program. A tile is as deep as its threads read at once."""
    fetched: int = 0
    """Bytes of each line that an early program asks the second-level cache for while it waits."""
    at_once: int = AT_ONCE
    """Bytes of a line that a thread reads at once."""

    def depth(self, item: int) -> int:
        """Inputs of a tile of a matrix whose numbers have so many bytes."""
        return self.at_once // item * WARP * self.warps


@dataclass(frozen=True, slots=True)
class _LineForm:
    """Facts that are fixed when the kernel is compiled."""

    size: int
    outputs: int
    depth: int
    whole: bool
    """Whether lines end with a tile."""
    offset: float
    gate: int
    adds: bool
    early: bool
    fetched: int
    numbers: int
    """Numbers of the matrix that a thread reads at once."""


@triton.jit
def _read(lines: tl.tensor, place: tl.tensor, FORM: tl.constexpr) -> tl.tensor:
    if FORM.whole:
        tile = tl.load(lines + place[None, :], eviction_policy="evict_first")
    else:
        tile = tl.load(
            lines + place[None, :], mask=(place < FORM.size)[None, :], other=0.0, eviction_policy="evict_first"
        )
    return tile


@triton.jit
def _next(lines: tl.tensor, place: tl.tensor, FORM: tl.constexpr) -> tl.tensor:
    """The tile behind the one that is multiplied; zeros behind the end of the lines."""
    return tl.load(lines + place[None, :], mask=(place < FORM.size)[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def _fetch(weight: tl.tensor, outputs: tl.tensor, FORM: tl.constexpr) -> None:
    """Have the second-level cache fetch what follows the first tile in each line of this program. One thread asks: an
    address of which all threads have a copy would be asked for by each."""
    LINES: tl.constexpr = FORM.outputs
    BYTES: tl.constexpr = FORM.fetched
    for one in tl.static_range(LINES):
        number = tl.minimum(tl.program_id(0) * FORM.outputs + one, outputs - 1).to(tl.int64)
        begin = weight + number * FORM.size + FORM.depth
        tl.inline_asm_elementwise(
            "{ .reg .pred one; .reg .b32 thread; mov.u32 thread, %tid.x; setp.eq.u32 one, thread, 0; "
            "@one cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
            "=r,l,r",
            [begin.to(tl.int64), (outputs * 0 + BYTES).to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _added(total: tl.tensor, tile: tl.tensor, value: tl.tensor, FORM: tl.constexpr) -> tl.tensor:
    """Add a tile's products; those of one thread's sixteen bytes become one number."""
    NUMBERS: tl.constexpr = FORM.numbers
    product = tile.to(tl.float32) * value[None, :]
    return total + tl.sum(tl.reshape(product, [total.shape[0], total.shape[1], NUMBERS]), 2)


@triton.jit
def _one_row(x: tl.tensor, given: Map, out: tl.tensor, outputs: tl.tensor, FORM: tl.constexpr) -> None:
    WIDE: tl.constexpr = FORM.outputs
    DEPTH: tl.constexpr = FORM.depth
    NUMBERS: tl.constexpr = FORM.numbers
    number = tl.program_id(0) * FORM.outputs + tl.arange(0, FORM.outputs)
    depth = tl.arange(0, FORM.depth)
    # What is behind the last line repeats it, and is stored nowhere.
    lines = given.weight + tl.minimum(number, outputs - 1).to(tl.int64)[:, None] * FORM.size
    more = lines
    # No launch writes the matrix: it is read before the wait.
    tile = _read(lines, depth, FORM)
    second_tile = tile
    if FORM.gate >= 0:
        more = lines + outputs.to(tl.int64) * FORM.size
        second_tile = _read(more, depth, FORM)
    if FORM.early:
        gdc_launch_dependents()
        if FORM.fetched > 0:
            _fetch(given.weight, outputs, FORM)
            if FORM.gate >= 0:
                _fetch(given.weight + outputs.to(tl.int64) * FORM.size, outputs, FORM)
        gdc_wait()
    total = tl.zeros([WIDE, DEPTH // NUMBERS], tl.float32)
    second = tl.zeros([WIDE, DEPTH // NUMBERS], tl.float32)
    squared = tl.zeros([DEPTH], tl.float32)
    for start in range(0, FORM.size, FORM.depth):
        place = start + depth
        live = place < FORM.size
        value = tl.load(x + place, mask=live, other=0.0)
        coming = _next(lines, place + FORM.depth, FORM)
        second_coming = coming
        if FORM.gate >= 0:
            second_coming = _next(more, place + FORM.depth, FORM)
        wide = value.to(tl.float32)
        if given.gain is not None:
            squared += wide * wide
            gain = tl.load(given.gain + place, mask=live, other=0.0).to(tl.float32)
            # Rounded as where tensor cores multiply.
            wide = narrow(wide * (gain + FORM.offset), x.dtype.element_ty).to(tl.float32)
        total = _added(total, tile, wide, FORM)
        if FORM.gate >= 0:
            second = _added(second, second_tile, wide, FORM)
        tile = coming
        second_tile = second_coming
    store_row(tl.sum(total, 1), tl.sum(second, 1), tl.sum(squared, 0), given, out, number, outputs, FORM)


@triton.jit
def store_row(
    total: tl.tensor,
    second: tl.tensor,
    squares: tl.tensor,
    given: Map,
    out: tl.tensor,
    number: tl.tensor,
    outputs: tl.tensor,
    FORM: tl.constexpr,
) -> None:
    """Store results of one row, with what stands behind the product."""
    exists = number < outputs
    if given.gain is not None:
        scale = 1.0 / tl.sqrt_rn(squares / FORM.size + given.eps)
        total = total * scale
        second = second * scale
    if given.scale is not None:
        total = total * tl.load(given.scale + number, mask=exists, other=0.0)
        if FORM.gate >= 0:
            second = second * tl.load(given.scale + outputs + number, mask=exists, other=0.0)
    if given.bias is not None:
        total += tl.load(given.bias + number, mask=exists, other=0.0).to(tl.float32)
        if FORM.gate >= 0:
            second += tl.load(given.bias + outputs + number, mask=exists, other=0.0).to(tl.float32)
    if FORM.gate >= 0:
        total = gated(total, second, 0.0, 0.0, FORM.gate)
    if FORM.adds:
        total += tl.load(out + number, mask=exists, other=0.0).to(tl.float32)
    tl.store(out + number, narrow(total, out.dtype.element_ty), mask=exists)


def one_row(
    x: Tensor, given: Map, out: Tensor, shape: LineCut, *, gate: Gate | None, offset: bool, adds: bool, early: bool
) -> None:
    """Multiply one row by a matrix; see ``engine.backends.cuda.kernels.gemv.few_rows``.

    Args:
        x: ``(1, size)``.
        given: the matrix.
        out: ``(1, outputs)``.
        shape: how it is cut.
        gate: as there.
        offset: as there.
        adds: as there.
        early: whether the launch may begin before the one in front of it is over.
    """
    size, outputs = x.shape[1], out.shape[1]
    wide = shape.outputs if gate is None else max(1, shape.outputs // 2)
    if ceil_div(outputs, wide) < ENOUGH_PROGRAMS:
        wide = max(1, wide // 2)
    item = given.weight.element_size()
    depth = shape.depth(item)
    left = max(0, size - depth) * item
    early = early and not EMULATED.value
    form = _LineForm(
        size=size,
        outputs=wide,
        depth=depth,
        whole=size % depth == 0,
        offset=float(offset),
        gate=-1 if gate is None else KINDS[gate.kind],
        adds=adds,
        early=early,
        fetched=min(shape.fetched, left) // LEAST_FETCHED * LEAST_FETCHED if early else 0,
        numbers=shape.at_once // item,
    )
    options: dict[str, object] = {"num_warps": shape.warps, "num_stages": 1}
    if early:
        options["launch_pdl"] = True
    _one_row[(ceil_div(outputs, wide),)](x, given, out, outputs, FORM=form, **options)
