"""bfloat16 matrices without loss in 12 bits a weight, and their expansion in registers.

Fifteen exponents that lie behind each other make a matrix's palette, and four bits say which; code 0 is zero.
Sign and mantissa are a byte. Whatever has another exponent (denormals, infinities and no numbers too) is an *escape*:
zero in the planes, and in a list of its own, which a product adds up behind the rest. So all weights have all of their
bits, a line without an escape has its sums in the order of the plain matrix, and no weight needs a branch.

Inputs are taken in groups of ``GROUP``. A byte of codes has those of two weights, half a group apart, so that a
thread that reads some bytes of it reads two pieces of as many signs and mantissas. The bits of a byte are ordered so
that a weight needs two instructions and a half: a permutation of bytes puts each where the exponent of a bfloat16
begins, and a product with a power of two, which is exact, makes it that of the palette.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.backends.cuda.kernels.triton_common import EMULATED, ceil_div

GROUP = 128
"""Inputs that a matrix's size is a multiple of."""

HALF = tl.constexpr(GROUP // 2)

CODES = 15
"""Exponents of a palette: four bits less the code of zero."""

MOST_BASE = 127
"""Largest number that is added to a code: two to that power is a bfloat16. Above it all weights are over two."""

MOST_INPUTS = 1 << 16
"""An escape has sixteen bits for its place in a line."""

PATCHED = 64
"""At most one weight in so many may be an escape: one takes eight bytes where a weight saves half of one."""

LINES_AT_ONCE = 1 << 22
"""Weights that are packed at once: what packing needs besides is some ten times their bytes."""

EXPANDED = 1_024
"""Weights that a program of ``expand`` computes."""

_JOIN = """
    prmt.b32 byte, {rest}, {rest}, {bytes}; prmt.b32 place, codes, codes, {places};
    lop3.b32 byte, byte, place, 0x807F807F, 0xE4; fma.rn.bf16x2 {out}, byte, {scale}, zero;"""
"""Two weights: sign and mantissa where a bfloat16 has them, the code between them. The sum with minus zero is exact."""


def _assembly(first: int, pair: str) -> str:
    """Four weights of each half of a group, of two of which ``pair`` makes results.

    Args:
        first: number of the first input: signs and mantissas of both halves, codes, the power of two.
        pair: what is done with ``word``, two bfloat16, for results ``{one}`` and following.
    """
    low, high, codes, scale = (f"${first + one}" for one in range(4))
    lines = [".reg .b32 codes, place, byte, word, zero; mov.b32 zero, 0x80008000;", f"mov.b32 codes, {codes};"]
    number = 0
    for rest, orders in ((low, ("0x1100", "0x3322")), (high, ("0x2110", "0x0332"))):
        if rest == high:
            lines.append(f"shf.l.wrap.b32 codes, {codes}, {codes}, 4;")
        lines.append("and.b32 codes, codes, 0x87878787;")
        for order, places in zip(("0x1100", "0x3322"), orders, strict=True):
            lines.append(_JOIN.format(rest=rest, bytes=order, places=places, scale=scale, out="word"))
            lines.append(pair.format(*(f"${number + one}" for one in range(2))))
            number += first // 4
    return "{" + "\n".join(lines) + "}"


EXPAND = tl.constexpr(_assembly(4, "mov.b32 {0}, word;"))
"""Two bfloat16 are one result."""

EXPAND_WIDE = tl.constexpr(_assembly(8, "shl.b32 {0}, word, 16; and.b32 {1}, word, 0xFFFF0000;"))
"""As float32, each a result of its own."""


class Palette(NamedTuple):
    """A matrix of ``(lines, size)`` weights; addresses in kernels."""

    rest: Tensor
    """uint8 ``(lines, size)``: the sign in the highest bit, and the mantissa."""
    codes: Tensor
    """uint8 ``(lines, size / 2)``: of inputs ``i`` and ``i + GROUP / 2`` of a group. The first one's code has its
    lowest bit in bit 7 and the others in bits 0 to 2, the second one's is in bits 3 to 6."""
    scale: Tensor
    """bfloat16 ``(1,)``: what makes a code an exponent."""
    starts: Tensor
    """int32 ``(lines + 1,)``: where each line's escapes begin, and where the last one's end."""
    escapes: Tensor
    """int32: the input in the upper sixteen bits, the weight in the lower ones; by line, and by input in it."""
    owners: Tensor
    """int32: the line of each escape."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return sum(one.nbytes for one in self)

    @classmethod
    def empty(cls, lines: int, size: int, escapes: int, device: torch.device) -> Palette:
        """Room for a matrix."""
        whole = [torch.empty(count, dtype=torch.int32, device=device) for count in (lines + 1, escapes, escapes)]
        return cls(
            torch.empty(lines, size, dtype=torch.uint8, device=device),
            torch.empty(lines, size // 2, dtype=torch.uint8, device=device),
            torch.empty(1, dtype=torch.bfloat16, device=device),
            *whole,
        )


class PaletteMap(NamedTuple):
    """A matrix with what belongs to it; see ``engine.backends.cuda.kernels.lines.Map``."""

    weight: Palette
    """All gates first, where there is a gate."""
    bias: Tensor | None
    gain: Tensor | None
    eps: float
    scale: None = None
    """None, always: numbers of a palette are those of the matrix. Kernels ask it of any map."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a matrix fits a palette."""

    base: int
    """What is added to a code."""
    escapes: int


def fit(weight: Tensor) -> Fit | None:
    """The palette that covers most of a matrix; None where it would not pay, or for a matrix of another form."""
    lines, size = weight.shape
    if weight.dtype != torch.bfloat16 or size % GROUP or size > MOST_INPUTS:
        return None
    counts = torch.zeros(256, dtype=torch.int64, device=weight.device)
    zeros = torch.zeros((), dtype=torch.int64, device=weight.device)
    for part in torch.split(weight, max(1, LINES_AT_ONCE // size)):
        words = part.contiguous().view(torch.int16)
        counts += torch.bincount((words >> 7 & 0xFF).flatten().int(), minlength=256)
        zeros += (words & 0x7FFF == 0).sum()
    covered = counts[1:255].unfold(0, CODES, 1).sum(1)[: MOST_BASE + 1]
    # The largest exponents of those that cover as many.
    base = len(covered) - 1 - int(covered.flip(0).argmax())
    escapes = lines * size - int(covered[base]) - int(zeros)
    return Fit(base, escapes) if escapes <= lines * size // PATCHED else None


def pack(weight: Tensor, found: Fit, out: Palette) -> None:
    """Fill a palette, whose escapes are as many as ``fit`` found, with a matrix."""
    size = weight.shape[1]
    at_once, begin = max(1, LINES_AT_ONCE // size), 0
    out.scale.fill_(2.0**found.base)
    out.starts.zero_()
    for first in range(0, len(weight), at_once):
        words = weight[first : first + at_once].contiguous().view(torch.int16).int() & 0xFFFF
        code = (words >> 7 & 0xFF) - found.base
        escaped = ((code < 1) | (code > CODES)) & (words & 0x7FFF != 0)
        none = escaped | (words & 0x7FFF == 0)
        code = code.masked_fill(none, 0)
        rest = (words >> 8 & 0x80 | words & 0x7F).masked_fill(escaped, 0)
        out.rest[first : first + at_once] = rest.to(torch.uint8)
        low, high = code.view(len(words), -1, 2, GROUP // 2).unbind(2)
        both = (low & 1) << 7 | low >> 1 | high << 3
        out.codes[first : first + at_once] = both.flatten(1).to(torch.uint8)
        out.starts[first + 1 : first + 1 + len(words)] = escaped.sum(1)
        line, place = escaped.nonzero(as_tuple=True)
        end = begin + len(line)
        out.escapes[begin:end] = place.int() << 16 | words[line, place]
        out.owners[begin:end] = line.int() + first
        begin = end
    out.starts.copy_(out.starts.cumsum(0))


def packed(weight: Tensor) -> Palette | None:
    """A matrix as a palette; None where that does not pay."""
    found = fit(weight)
    if found is None:
        return None
    out = Palette.empty(weight.shape[0], weight.shape[1], found.escapes, weight.device)
    pack(weight, found, out)
    return out


@triton.jit
def _number(rest: tl.tensor, code: tl.tensor, scale: tl.tensor) -> tl.tensor:
    # Under the interpreter, where no instruction can be named.
    base = ((scale.to(tl.uint16, bitcast=True).to(tl.int32) >> 7) & 0xFF) - 127
    exponent = tl.where(code == 0, 0, code + base)
    rest = rest.to(tl.int32)
    word = ((rest & 0x80) << 8) | (exponent << 7) | (rest & 0x7F)
    return word.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def expanded(low: tl.tensor, high: tl.tensor, codes: tl.tensor, scale: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Weights of both halves of a group, bfloat16; escapes are zero."""
    if EMULATED:
        both = codes.to(tl.int32)
        first = _number(low, ((both & 7) << 1) | (both >> 7), scale)
        second = _number(high, (both >> 3) & 15, scale)
    else:
        first, second = tl.inline_asm_elementwise(
            EXPAND,
            "=r,=r,=r,=r,r,r,r,r,r",
            [low, high, codes, scale],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    return first, second


@triton.jit
def expanded_wide(low: tl.tensor, high: tl.tensor, codes: tl.tensor, scale: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """What ``expanded`` gives, as float32."""
    if EMULATED:
        one, other = expanded(low, high, codes, scale)
        first, second = one.to(tl.float32), other.to(tl.float32)
    else:
        first, second = tl.inline_asm_elementwise(
            EXPAND_WIDE,
            "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r",
            [low, high, codes, scale],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=4,
        )
    return first, second


@triton.jit
def escape_parts(word: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Inputs and weights of escapes."""
    place = (word >> 16) & 0xFFFF
    weight = (word & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return place, weight


@triton.jit
def _expand(given: Palette, out: tl.tensor, size: tl.tensor, WIDTH: tl.constexpr) -> None:
    line = tl.program_id(0).to(tl.int64)
    pair = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    live = pair < size // 2
    place = pair // HALF * (2 * HALF) + pair % HALF
    low = tl.load(given.rest + line * size + place, mask=live, other=0)
    high = tl.load(given.rest + line * size + place + HALF, mask=live, other=0)
    codes = tl.load(given.codes + line * (size // 2) + pair, mask=live, other=0)
    first, second = expanded(low, high, codes, tl.load(given.scale))
    tl.store(out + line * size + place, first, mask=live)
    tl.store(out + line * size + place + HALF, second, mask=live)


@triton.jit(do_not_specialize=("count",))
def _put_escapes(given: Palette, out: tl.tensor, size: tl.tensor, count: tl.tensor, WIDTH: tl.constexpr) -> None:
    number = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    live = number < count
    word = tl.load(given.escapes + number, mask=live, other=0)
    line = tl.load(given.owners + number, mask=live, other=0).to(tl.int64)
    place, _ = escape_parts(word)
    # As they are: a signalling no number stays one.
    tl.store(out + line * size + place, (word & 0xFFFF).to(tl.int16), mask=live)


def expand(given: Palette, out: Tensor) -> None:
    """The whole matrix, every bit of it, into memory of its plain form."""
    lines, size = out.shape
    _expand[(lines, ceil_div(size // 2, EXPANDED))](given, out, size, WIDTH=EXPANDED)
    count = len(given.escapes)
    if count:
        _put_escapes[(ceil_div(count, EXPANDED),)](given, out.view(torch.int16), size, count, WIDTH=EXPANDED)
