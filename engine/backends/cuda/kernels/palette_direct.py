"""Products of several rows with a matrix in a palette, by tensor cores that get their operands from memory directly.

A thread loads those weights that it has in the product: eight of a line at once, expanded in its registers. So no
weight goes through shared memory, and no warp waits for another: while one multiplies, others have groups on their way.
The order of inputs in a product follows from that: a line's sums are those of ``plain`` weights taken in the same way,
bit by bit, and differ from ``gemv``'s in last bits.

The language is Gluon, which Triton's interpreter does not know: there ``palette_products`` computes the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from engine.backends.cuda.kernels.activation import CUBE, KINDS, SQRT_2_OVER_PI, Gate
from engine.backends.cuda.kernels.gemv import MOST_ROWS, NO_GATE, FewRows, Scratch
from engine.backends.cuda.kernels.lines import Map
from engine.backends.cuda.kernels.palette import EXPAND, GROUP, HALF, PaletteMap
from engine.backends.cuda.kernels.triton_common import ceil_div, power_of_two

RUN = gl.constexpr(8)
"""Inputs of a line that a thread has behind each other."""

ESCAPES = gl.constexpr(64)
"""Escapes that are multiplied at once."""

_all_threads = getattr(gl, "barrier", None) or gl.thread_barrier
"""A barrier of a program's threads, by its name since Triton 3.7 and before."""

LEAST_ROWS = 8
"""Rows of a product, at least: the width of the tensor cores' narrow operand."""


@dataclass(frozen=True, slots=True)
class DirectCut:
    """How a matrix is cut."""

    warps: int = 4
    """Warps of a program, each with lines of its own."""
    lines: int = 16
    """Lines of a warp: 16 or 32."""
    programs: int = 512
    """Programs that inputs are divided for, where there are fewer tiles of outputs."""

    @property
    def outputs(self) -> int:
        """Outputs of a tile."""
        return self.warps * self.lines

    @property
    def parts_of(self) -> FewRows:
        """How many parts."""
        return FewRows(outputs=self.outputs, depth=GROUP, programs=self.programs, gated_depth=GROUP)


@dataclass(frozen=True, slots=True)
class _Form:
    """Facts that are fixed when a kernel is compiled; names as in ``gemv``."""

    size: int
    outputs: int
    rows: int
    parts: int
    share: int
    offset: float
    gate: int
    adds: bool
    plain: bool
    """Whether the matrix is a plain one."""
    warps: int


class _Raw(NamedTuple):
    """A group of a tile's lines as it is in memory: of a plain matrix both halves, and the first of them again."""

    low: Tensor
    high: Tensor
    codes: Tensor


class _Sums(NamedTuple):
    """What a tile has added up."""

    total: Tensor
    second: Tensor
    squares: Tensor


class _Places(NamedTuple):
    """Outputs and rows of a tile's numbers."""

    number: Tensor
    row: Tensor


@gluon.jit
def _raw(given: PaletteMap, line: gl.tensor, begin: gl.tensor, half: gl.tensor, FORM: gl.constexpr) -> _Raw:
    line = line.to(gl.int64)[:, None]
    if FORM.plain:
        address = given.weight + line * FORM.size + (begin + half)[None, :]
        low = gl.load(address)
        return _Raw(low, gl.load(address + HALF), low)
    else:
        address = given.weight.rest + line * FORM.size + (begin + half)[None, :]
        codes = given.weight.codes + line * (FORM.size // 2) + (begin // 2 + half)[None, :]
        return _Raw(gl.load(address), gl.load(address + HALF), gl.load(codes))


@gluon.jit
def _tiles(raw: _Raw, scale: gl.tensor, FORM: gl.constexpr) -> tuple[gl.tensor, gl.tensor]:
    if FORM.plain:
        return raw.low, raw.high
    else:
        low, high = gl.inline_asm_elementwise(
            EXPAND,
            "=r,=r,=r,=r,r,r,r,r,r",
            [raw.low, raw.high, raw.codes, scale],
            dtype=(gl.bfloat16, gl.bfloat16),
            is_pure=True,
            pack=4,
        )
        return low, high


@gluon.jit
def _values(
    x: gl.tensor, place: gl.tensor, live: gl.tensor, given: PaletteMap, FORM: gl.constexpr
) -> tuple[gl.tensor, gl.tensor]:
    """Inputs of all rows times their gains, ``(inputs, rows)``, and their squares."""
    value = gl.load(x + place[:, None], mask=live, other=0.0)
    squares = gl.zeros_like(value).to(gl.float32)
    if given.gain is not None:
        wide = value.to(gl.float32)
        squares = wide * wide
        gain = gl.load(given.gain + place).to(gl.float32)
        value = (wide * (gain + FORM.offset)[:, None]).to(gl.bfloat16)
    return value, squares


@gluon.jit
def _escaped(
    total: gl.tensor,
    x: gl.tensor,
    given: PaletteMap,
    first: gl.tensor,
    end: gl.tensor,
    rows: gl.tensor,
    A: gl.constexpr,
    B: gl.constexpr,
    FORM: gl.constexpr,
) -> gl.tensor:
    """Add products of the escapes of lines ``first`` to ``end``."""
    WIDE: gl.constexpr = FORM.outputs
    weight = given.weight
    line = first + gl.arange(0, FORM.outputs, layout=gl.SliceLayout(1, A))
    count = gl.arange(0, ESCAPES, layout=gl.SliceLayout(0, A))
    again = gl.arange(0, ESCAPES, layout=gl.SliceLayout(1, B))
    row = gl.arange(0, FORM.rows, layout=gl.SliceLayout(0, B))
    last = gl.load(weight.starts + end)
    for at in range(gl.load(weight.starts + first), last, ESCAPES):
        word = gl.load(weight.escapes + at + count, mask=at + count < last, other=0)
        owner = gl.load(weight.owners + at + count, mask=at + count < last, other=-1)
        value = (word & 0xFFFF).to(gl.int16).to(gl.bfloat16, bitcast=True)
        zero = gl.zeros([WIDE, ESCAPES], gl.bfloat16, layout=A)
        tile = gl.where(owner[None, :] == line[:, None], value[None, :] + zero, zero)
        word = gl.load(weight.escapes + at + again, mask=at + again < last, other=0)
        live = (at + again < last)[:, None] & (row < rows)[None, :]
        inputs, _ = _values(x, (word >> 16) & 0xFFFF, live, given, FORM)
        total = mma_v2(tile, inputs, total)
    return total


@gluon.jit
def _gated(gate: gl.tensor, up: gl.tensor, KIND: gl.constexpr) -> gl.tensor:
    """As ``activation.gated``."""
    if KIND == 0:
        return gate * (1.0 / (1.0 + gl.exp(-gate))) * up
    else:
        curve = (gate + gate * CUBE * gate * gate) * SQRT_2_OVER_PI
        return 0.5 * gate * (1.0 + (1.0 - 2.0 / (gl.exp(2.0 * curve) + 1.0))) * up


@gluon.jit
def _close(
    sums: _Sums,
    given: PaletteMap,
    out: gl.tensor,
    places: _Places,
    rows: gl.tensor,
    outputs: gl.tensor,
    FORM: gl.constexpr,
) -> None:
    number, row = places.number, places.row
    total, second = sums.total, sums.second
    exists = number < outputs
    if given.gain is not None:
        scale = 1.0 / gl.sqrt_rn(sums.squares / FORM.size + given.eps)
        total = total * scale[None, :]
        second = second * scale[None, :]
    if given.bias is not None:
        total += gl.load(given.bias + number, mask=exists, other=0.0).to(gl.float32)[:, None]
        if FORM.gate >= 0:
            second += gl.load(given.bias + outputs + number, mask=exists, other=0.0).to(gl.float32)[:, None]
    if FORM.gate >= 0:
        total = _gated(total, second, FORM.gate)
    address = out + row[None, :] * outputs + number[:, None]
    live = exists[:, None] & (row < rows)[None, :]
    if FORM.adds:
        total += gl.load(address, mask=live, other=0.0).to(gl.float32)
    gl.store(address, total.to(out.dtype.element_ty), mask=live)


@gluon.jit
def _join(
    sums: _Sums,
    given: PaletteMap,
    out: gl.tensor,
    scratch: Scratch,
    places: _Places,
    rows: gl.tensor,
    outputs: gl.tensor,
    FORM: gl.constexpr,
) -> None:
    """As ``gemv.join_parts``."""
    number, row = places.number, places.row
    PARTS: gl.constexpr = FORM.parts
    tile, part = gl.program_id(0), gl.program_id(1)
    kept = (number < outputs)[:, None] & (row < rows)[None, :]
    apart = FORM.rows * outputs
    first = scratch.sums + row[None, :] * outputs + number[:, None]
    others = first + FORM.parts * apart
    norms = scratch.sums + 2 * FORM.parts * apart + tile * (FORM.parts * FORM.rows) + row
    gl.store(first + part * apart, sums.total, mask=kept)
    if FORM.gate >= 0:
        gl.store(others + part * apart, sums.second, mask=kept)
    if given.gain is not None:
        gl.store(norms + part * FORM.rows, sums.squares)
    # What all threads of this program have stored has to be there for the program that arrives last.
    _all_threads()
    arrived = gl.atomic_add(scratch.counters + tile, 1, sem="acq_rel", scope="gpu")
    if arrived == FORM.parts - 1:
        total = gl.zeros_like(sums.total)
        second = gl.zeros_like(sums.second)
        squares = gl.zeros_like(sums.squares)
        for one in gl.static_range(PARTS):
            total += gl.load(first + one * apart, mask=kept, other=0.0, cache_modifier=".cg")
            if FORM.gate >= 0:
                second += gl.load(others + one * apart, mask=kept, other=0.0, cache_modifier=".cg")
            if given.gain is not None:
                squares += gl.load(norms + one * FORM.rows, cache_modifier=".cg")
        gl.store(scratch.counters + tile, 0)
        _close(_Sums(total, second, squares), given, out, places, rows, outputs, FORM)


@gluon.jit(do_not_specialize=("rows",))
def _direct(
    x: gl.tensor,
    x_row: gl.tensor,
    given: PaletteMap,
    out: gl.tensor,
    scratch: Scratch,
    rows: gl.tensor,
    outputs: gl.tensor,
    FORM: gl.constexpr,
) -> None:
    WARPS: gl.constexpr = FORM.warps
    SIZE: gl.constexpr = FORM.size
    WIDE: gl.constexpr = FORM.outputs
    ROWS: gl.constexpr = FORM.rows
    C: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, C, RUN)
    B: gl.constexpr = gl.DotOperandLayout(1, C, RUN)
    first = gl.program_id(0) * FORM.outputs
    # What is behind the last line repeats it, and is stored nowhere.
    line = gl.minimum(first + gl.arange(0, WIDE, layout=gl.SliceLayout(1, A)), outputs - 1)
    half = gl.arange(0, HALF, layout=gl.SliceLayout(0, A))
    depth = gl.arange(0, HALF, layout=gl.SliceLayout(1, B))
    row = gl.arange(0, FORM.rows, layout=gl.SliceLayout(0, B))
    live = (row < rows)[None, :] & (depth >= 0)[:, None]
    inputs = x + row[None, :] * x_row
    scale = 1.0
    if not FORM.plain:
        scale = gl.load(given.weight.scale)
    total = gl.zeros([WIDE, ROWS], gl.float32, layout=C)
    second = gl.zeros([WIDE, ROWS], gl.float32, layout=C)
    squared = gl.zeros([HALF, ROWS], gl.float32, layout=B)
    begin = gl.program_id(1) * FORM.share
    end = gl.minimum(begin + FORM.share, SIZE)
    for start in range(begin, end, 2 * HALF):
        raw = _raw(given, line, start, half, FORM)
        more = raw
        if FORM.gate >= 0:
            more = _raw(given, line + outputs, start, half, FORM)
        value, squares = _values(inputs, start + depth, live, given, FORM)
        other, more_squares = _values(inputs, start + HALF + depth, live, given, FORM)
        squared = squared + squares + more_squares
        low, high = _tiles(raw, scale, FORM)
        total = mma_v2(high, other, mma_v2(low, value, total))
        if FORM.gate >= 0:
            low, high = _tiles(more, scale, FORM)
            second = mma_v2(high, other, mma_v2(low, value, second))
    if not FORM.plain:  # noqa: SIM102 - the first is decided when the kernel is compiled
        if gl.program_id(1) == 0:
            last = gl.minimum(first + FORM.outputs, outputs)
            total = _escaped(total, inputs, given, first, last, rows, A, B, FORM)
            if FORM.gate >= 0:
                second = _escaped(second, inputs, given, first + outputs, last + outputs, rows, A, B, FORM)
    squares_sum = gl.convert_layout(gl.sum(squared, 0), gl.SliceLayout(0, C))
    number = first + gl.arange(0, FORM.outputs, layout=gl.SliceLayout(1, C))
    places = _Places(number, gl.arange(0, FORM.rows, layout=gl.SliceLayout(0, C)))
    sums = _Sums(total, second, squares_sum)
    if FORM.parts == 1:
        _close(sums, given, out, places, rows, outputs, FORM)
    else:
        _join(sums, given, out, scratch, places, rows, outputs, FORM)


def direct_rows(
    x: Tensor,
    given: PaletteMap | Map,
    out: Tensor,
    scratch: Scratch,
    shape: DirectCut,
    *,
    gate: Gate | None = None,
    offset: bool = False,
    adds: bool = False,
) -> None:
    """Multiply up to ``MOST_ROWS`` rows by a matrix, in a palette or plain; see
    ``engine.backends.cuda.kernels.palette_products.palette_rows``.

    Args:
        x: ``(N, size)``, with sizes that are multiples of ``GROUP``; rows may be further apart than that.
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
    parts = shape.parts_of.parts(outputs, size, GROUP)
    share = ceil_div(ceil_div(size, GROUP), parts) * GROUP
    form = _Form(
        size=size,
        outputs=shape.outputs,
        rows=power_of_two(min(rows, MOST_ROWS), LEAST_ROWS),
        parts=parts,
        share=share,
        offset=float(offset),
        gate=NO_GATE if gate is None else KINDS[gate.kind],
        adds=adds,
        plain=isinstance(given, Map),
        warps=shape.warps,
    )
    _direct[(ceil_div(outputs, shape.outputs), parts)](
        x, x.stride(0), given, out, scratch, rows, outputs, FORM=form, num_warps=shape.warps
    )
