"""Products of up to 16 rows with a matrix in a palette: three quarters of the bytes, the same numbers.

Two forms, as ``gemv`` and ``lines`` are two for a plain matrix: tensor cores for several rows, with the same cut into
tiles and parts and the same order of sums as ``gemv``, so that a line without an escape has the same bits; and sums of
threads for one row.

Escapes are a further tile of inputs, gathered: ``ESCAPES`` of them at once, each of which is a weight in its own line
and zero in the others. A line's first part adds them up, behind its planes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from engine.backends.cuda.kernels.activation import KINDS, Gate
from engine.backends.cuda.kernels.gemv import NO_GATE, ROWS, FewRows, Scratch, close_tile, join_parts
from engine.backends.cuda.kernels.lines import store_row
from engine.backends.cuda.kernels.palette import GROUP, HALF, Palette, PaletteMap, escape_parts, expanded, expanded_wide
from engine.backends.cuda.kernels.triton_common import Threads, ceil_div, dot, narrow

ESCAPES = tl.constexpr(64)
"""Escapes that are multiplied at once."""

AT_ONCE = tl.constexpr(32)
"""Escapes of one row that are added up at once."""

RUN = tl.constexpr(8)
"""Inputs of a thread in the product of one row: as many as sixteen bytes of a row have."""

WARP = 32
"""Threads."""


@dataclass(frozen=True, slots=True)
class PaletteCut:
    """How a matrix is cut. The same parts as in ``FewRows`` give the same sums."""

    outputs: int = 64
    """Outputs of a tile of several rows, a power of two."""
    programs: int = 256
    """Programs that inputs are divided for, where there are fewer tiles of outputs."""
    launch: Threads = Threads(4, 4)  # noqa: RUF009 - a named tuple does not change
    lines: int = 4
    """Lines of a program for one row, a power of two; of a gate as many of both halves together."""
    warps: int = 4
    """Warps of a program for one row."""

    @property
    def parts_of(self) -> FewRows:
        """How many parts."""
        return FewRows(outputs=self.outputs, depth=GROUP, programs=self.programs, gated_depth=GROUP)


@dataclass(frozen=True, slots=True)
class _Form:
    """Facts that are fixed when a kernel is compiled; names as in ``gemv``."""

    size: int
    outputs: int
    depth: int
    parts: int
    share: int
    whole: bool
    offset: float
    gate: int
    adds: bool


class _Planes(NamedTuple):
    """Addresses of a tile's lines."""

    rest: Tensor
    codes: Tensor


@triton.jit
def _planes(weight: Palette, number: tl.tensor, lines: tl.tensor, FORM: tl.constexpr) -> _Planes:
    # What is behind the last line repeats it, and is stored nowhere.
    line = tl.minimum(number, lines - 1).to(tl.int64)[:, None]
    return _Planes(weight.rest + line * FORM.size, weight.codes + line * (FORM.size // 2))


@triton.jit
def _bytes(address: tl.tensor, place: tl.tensor, live: tl.tensor, WHOLE: tl.constexpr) -> tl.tensor:
    if WHOLE:
        tile = tl.load(address + place[None, :], eviction_policy="evict_first")
    else:
        tile = tl.load(address + place[None, :], mask=live[None, :], other=0, eviction_policy="evict_first")
    return tile


@triton.jit
def _tile(
    planes: _Planes, place: tl.tensor, pair: tl.tensor, scale: tl.tensor, WIDE: tl.constexpr, FORM: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Weights of some groups: their first halves, and their second halves; ``WIDE``: in float32."""
    live = place < FORM.size
    low = _bytes(planes.rest, place, live, FORM.whole)
    high = _bytes(planes.rest, place + HALF, live, FORM.whole)
    codes = _bytes(planes.codes, pair, live, FORM.whole)
    if WIDE:
        first, second = expanded_wide(low, high, codes, scale)
    else:
        first, second = expanded(low, high, codes, scale)
    return first, second


@triton.jit
def _values(
    x: tl.tensor, x_row: tl.tensor, place: tl.tensor, rows: tl.tensor, given: PaletteMap, FORM: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Inputs of all rows, times their gains, and their squares."""
    row = tl.arange(0, ROWS)
    read = (row < rows)[:, None]
    if not FORM.whole:
        read = read & (place < FORM.size)[None, :]
    value = tl.load(x + row[:, None] * x_row + place[None, :], mask=read, other=0.0)
    squares = tl.zeros([ROWS, HALF], tl.float32)
    if given.gain is not None:
        wide = value.to(tl.float32)
        squares = wide * wide
        gains = tl.broadcast_to(given.gain + place[None, :], (ROWS, HALF))
        gain = tl.load(gains, mask=read, other=0.0).to(tl.float32)
        value = narrow(wide * (gain + FORM.offset), tl.bfloat16)
    return value, squares


@triton.jit
def _escaped(
    total: tl.tensor,
    x: tl.tensor,
    x_row: tl.tensor,
    given: PaletteMap,
    first: tl.tensor,
    end: tl.tensor,
    rows: tl.tensor,
    FORM: tl.constexpr,
) -> tl.tensor:
    """Add products of the escapes of lines ``first`` to ``end``, a tile."""
    WIDE: tl.constexpr = FORM.outputs
    weight = given.weight
    row = tl.arange(0, ROWS)
    line = first + tl.arange(0, WIDE)
    last = tl.load(weight.starts + end)
    for at in range(tl.load(weight.starts + first), last, ESCAPES):
        number = at + tl.arange(0, ESCAPES)
        live = number < last
        place, value = escape_parts(tl.load(weight.escapes + number, mask=live, other=0))
        owner = tl.load(weight.owners + number, mask=live, other=-1)
        tile = tl.where(owner[None, :] == line[:, None], value[None, :], tl.zeros([WIDE, ESCAPES], tl.bfloat16))
        read = live[:, None] & (row < rows)[None, :]
        inputs = tl.load(x + row[None, :] * x_row + place[:, None], mask=read, other=0.0)
        if given.gain is not None:
            gain = tl.load(given.gain + place, mask=live, other=0.0).to(tl.float32)
            inputs = narrow(inputs.to(tl.float32) * (gain + FORM.offset)[:, None], tl.bfloat16)
        total = dot(tile, inputs, total)
    return total


@triton.jit(do_not_specialize=("rows",))
def _several_rows(
    x: tl.tensor,
    x_row: tl.tensor,
    given: PaletteMap,
    out: tl.tensor,
    scratch: Scratch,
    rows: tl.tensor,
    outputs: tl.tensor,
    FORM: tl.constexpr,
) -> None:
    WIDE: tl.constexpr = FORM.outputs
    DEPTH: tl.constexpr = FORM.depth
    first = tl.program_id(0) * FORM.outputs
    part = tl.program_id(1)
    number = first + tl.arange(0, FORM.outputs)
    half = tl.arange(0, HALF)
    weight = given.weight
    planes = _planes(weight, number, outputs, FORM)
    more = planes
    if FORM.gate >= 0:
        more = _planes(weight, number + outputs, 2 * outputs, FORM)
    scale = tl.load(weight.scale)
    total = tl.zeros([WIDE, ROWS], tl.float32)
    second = tl.zeros([WIDE, ROWS], tl.float32)
    squared = tl.zeros([ROWS, HALF], tl.float32)
    begin = part * FORM.share
    for start in range(0, FORM.share, DEPTH):
        place = begin + start + half
        pair = (begin + start) // 2 + half
        low, high = _tile(planes, place, pair, scale, False, FORM)
        value, squares = _values(x, x_row, place, rows, given, FORM)
        other, more_squares = _values(x, x_row, place + HALF, rows, given, FORM)
        squared = squared + squares + more_squares
        total = dot(low, tl.trans(value), total)
        total = dot(high, tl.trans(other), total)
        if FORM.gate >= 0:
            low, high = _tile(more, place, pair, scale, False, FORM)
            second = dot(low, tl.trans(value), second)
            second = dot(high, tl.trans(other), second)
    if part == 0:
        end = tl.minimum(first + WIDE, outputs)
        total = _escaped(total, x, x_row, given, first, end, rows, FORM)
        if FORM.gate >= 0:
            second = _escaped(second, x, x_row, given, first + outputs, end + outputs, rows, FORM)
    squares_sum = tl.sum(squared, 1)
    if FORM.parts == 1:
        close_tile(total, second, squares_sum, given, out, number, rows, outputs, FORM)
    else:
        join_parts(total, second, squares_sum, given, out, scratch, rows, outputs, FORM)


@triton.jit
def _added(total: tl.tensor, tile: tl.tensor, value: tl.tensor) -> tl.tensor:
    """Add a tile's products; those of one thread's inputs become one number."""
    product = tile * value[None, :]
    return total + tl.sum(tl.reshape(product, [total.shape[0], total.shape[1], RUN]), 2)


@triton.jit
def _row(
    x: tl.tensor, place: tl.tensor, live: tl.tensor, given: PaletteMap, FORM: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Inputs of one row times their gains, and their squares."""
    wide = tl.load(x + place, mask=live, other=0.0).to(tl.float32)
    squares = wide * wide
    if given.gain is not None:
        gain = tl.load(given.gain + place, mask=live, other=0.0).to(tl.float32)
        # Rounded as where tensor cores multiply.
        wide = narrow(wide * (gain + FORM.offset), tl.bfloat16).to(tl.float32)
    return wide, squares


@triton.jit
def _row_escapes(x: tl.tensor, given: PaletteMap, first: tl.tensor, end: tl.tensor, FORM: tl.constexpr) -> tl.tensor:
    """What the escapes of lines ``first`` to ``end`` add to them."""
    WIDE: tl.constexpr = FORM.outputs
    weight = given.weight
    line = first + tl.arange(0, WIDE)
    total = tl.zeros([WIDE], tl.float32)
    last = tl.load(weight.starts + end)
    for at in range(tl.load(weight.starts + first), last, AT_ONCE):
        number = at + tl.arange(0, AT_ONCE)
        live = number < last
        place, value = escape_parts(tl.load(weight.escapes + number, mask=live, other=0))
        owner = tl.load(weight.owners + number, mask=live, other=-1)
        wide, _ = _row(x, place, live, given, FORM)
        product = value.to(tl.float32) * wide
        total += tl.sum(tl.where(owner[None, :] == line[:, None], product[None, :], 0.0), 1)
    return total


@triton.jit
def _one_row(x: tl.tensor, given: PaletteMap, out: tl.tensor, outputs: tl.tensor, FORM: tl.constexpr) -> None:
    WIDE: tl.constexpr = FORM.outputs
    COLUMNS: tl.constexpr = FORM.depth // 2
    first = tl.program_id(0) * FORM.outputs
    number = first + tl.arange(0, FORM.outputs)
    column = tl.arange(0, COLUMNS)
    weight = given.weight
    planes = _planes(weight, number, outputs, FORM)
    more = planes
    if FORM.gate >= 0:
        more = _planes(weight, number + outputs, 2 * outputs, FORM)
    scale = tl.load(weight.scale)
    total = tl.zeros([WIDE, COLUMNS // RUN], tl.float32)
    second = tl.zeros([WIDE, COLUMNS // RUN], tl.float32)
    squared = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, FORM.size, FORM.depth):
        # A thread has eight bytes of each plane, as it has sixteen of a row: no number changes threads.
        place = start + column // HALF * (2 * HALF) + column % HALF
        place = tl.max_contiguous(tl.multiple_of(place, RUN), RUN)
        pair = tl.max_contiguous(tl.multiple_of(start // 2 + column, RUN), RUN)
        live = place < FORM.size
        low, high = _tile(planes, place, pair, scale, True, FORM)
        value, squares = _row(x, place, live, given, FORM)
        other, more_squares = _row(x, place + HALF, live, given, FORM)
        squared += squares + more_squares
        total = _added(_added(total, low, value), high, other)
        if FORM.gate >= 0:
            low, high = _tile(more, place, pair, scale, True, FORM)
            second = _added(_added(second, low, value), high, other)
    end = tl.minimum(first + WIDE, outputs)
    sums = tl.sum(total, 1) + _row_escapes(x, given, first, end, FORM)
    second_sums = sums
    if FORM.gate >= 0:
        second_sums = tl.sum(second, 1) + _row_escapes(x, given, first + outputs, end + outputs, FORM)
    store_row(sums, second_sums, tl.sum(squared, 0), given, out, number, outputs, FORM)


def palette_rows(
    x: Tensor,
    given: PaletteMap,
    out: Tensor,
    scratch: Scratch,
    shape: PaletteCut,
    *,
    gate: Gate | None = None,
    offset: bool = False,
    adds: bool = False,
) -> None:
    """Multiply up to ``MOST_ROWS`` rows by a matrix; see ``engine.backends.cuda.kernels.gemv.few_rows``.

    Args:
        x: ``(N, size)``; rows may be further apart than that.
        given: the matrix.
        out: ``(N, outputs)``, contiguous.
        scratch: with room for ``gemv.numbers_needed`` of ``shape.parts_of``.
        shape: how the matrix is cut.
        gate: as there.
        offset: as there.
        adds: as there.
    """
    rows, size = x.shape
    outputs = out.shape[1]
    kind = NO_GATE if gate is None else KINDS[gate.kind]
    if rows == 1 and shape.lines:
        depth = 2 * int(RUN.value) * WARP * shape.warps
        wide = shape.lines if gate is None else max(1, shape.lines // 2)
        form = _Form(size, wide, depth, 1, size, size % depth == 0, float(offset), kind, adds)
        _one_row[(ceil_div(outputs, wide),)](x, given, out, outputs, FORM=form, num_warps=shape.warps, num_stages=1)
        return
    parts = shape.parts_of.parts(outputs, size, GROUP)
    share = ceil_div(ceil_div(size, GROUP), parts) * GROUP
    form = _Form(size, shape.outputs, GROUP, parts, share, share * parts == size, float(offset), kind, adds)
    _several_rows[(ceil_div(outputs, shape.outputs), parts)](
        x, x.stride(0), given, out, scratch, rows, outputs, FORM=form, **shape.launch.options
    )
