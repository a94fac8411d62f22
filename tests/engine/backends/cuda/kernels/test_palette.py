"""Matrices in a palette: every bit of every weight, and products with what surrounds them against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from engine.backends.cuda.kernels import gemv, palette, palette_products
from engine.backends.cuda.kernels.gemv import FewRows, Scratch
from engine.backends.cuda.kernels.lines import Map
from engine.backends.cuda.kernels.palette import GROUP, PATCHED, Palette, packed
from engine.backends.cuda.kernels.palette_products import PaletteCut, PaletteMap, palette_rows
from tests.engine.backends.cuda.kernels.support import COUNTS, PLACE, assert_within, for_each, noise, poisoned
from tests.engine.backends.cuda.kernels.test_few_rows import BF16, CASES, Case, wanted
from tests.native import ON_CARD

pytestmark = pytest.mark.usefixtures("place")

ODD_WORDS = (0x0000, 0x8000, 0x0001, 0x807F, 0x0080, 0x7F80, 0xFF80, 0x7F81, 0xFFC1, 0x7F7F, 0x0200)
"""Zeros, denormals, the least and the largest number, infinities, no numbers with what they carry."""

CUT = PaletteCut(outputs=16, programs=1, lines=2, warps=1)


def words(weight: Tensor) -> Tensor:
    """The bits."""
    return weight.view(torch.int16)


def taken(weight: Tensor) -> Palette:
    """The palette of a matrix that has one."""
    found = packed(weight)
    assert found is not None
    return found


def product(case: Case, x: Tensor, given: PaletteMap, before: Tensor, cut: PaletteCut) -> Tensor:
    """The kernel's result."""
    out = before.clone() if case.adds else poisoned(len(x), case.outputs, dtype=before.dtype)
    needed = gemv.numbers_needed(cut.parts_of, case.outputs, case.size, gate=bool(case.gate))
    scratch = Scratch.empty(needed, PLACE)
    scratch.sums.fill_(torch.nan)
    offset = case.offset and case.normed
    palette_rows(x, given, out, scratch, cut, gate=case.kind, offset=offset, adds=case.adds)
    assert not scratch.counters.any()
    return out


@pytest.mark.parametrize(("lines", "size"), [(1, GROUP), (5, 3 * GROUP), (67, 2 * GROUP)])
def test_every_bit_of_every_weight_comes_back(lines: int, size: int) -> None:
    """Normal numbers with odd ones among them, escapes too where there is more than a line.
    Control: one bit changed is seen."""
    weight = noise(torch.Generator().manual_seed(lines), lines, size, dtype=BF16) * 0.02
    some = torch.tensor(ODD_WORDS).to(torch.int16)[: max(1, lines * size // PATCHED // 2)]
    words(weight).view(-1)[7 : 7 + 9 * len(some) : 9] = some
    found, out = taken(weight), poisoned(lines, size, dtype=BF16)
    palette.expand(found, out)
    assert torch.equal(words(out), words(weight))
    assert bool(len(found.escapes)) == (lines > 1)
    found.rest[0, 0] ^= 1
    palette.expand(found, out)
    assert not torch.equal(words(out), words(weight))


def test_all_exponents_of_a_palette_have_a_code() -> None:
    """Fifteen of them and zero, both signs, all mantissas, in both halves of a group, at both ends."""
    for base in (0, 100, palette.MOST_BASE):
        exponents = torch.arange(1, 16) + base
        every = (torch.arange(256) & 0x80) << 8 | (torch.arange(256) & 0x7F)
        bits = (exponents[:, None] << 7 | every[None, :]).flatten()
        bits = torch.cat((bits, bits.roll(GROUP // 2), torch.zeros(GROUP)))[: 60 * GROUP].to(torch.int16)
        weight = bits.view(-1, GROUP).view(BF16)
        found, out = taken(weight), poisoned(*weight.shape, dtype=BF16)
        assert not len(found.escapes)
        palette.expand(found, out)
        assert torch.equal(words(out), words(weight))


def test_a_matrix_that_does_not_fit_has_no_palette() -> None:
    """Exponents all over, another dtype, a size that is no multiple of a group; control: one that fits."""
    generator = torch.Generator().manual_seed(1)
    weight = noise(generator, 8, GROUP, dtype=BF16)
    assert packed(weight) is not None
    spread = torch.randint(1, 255, (8, GROUP), generator=generator).to(torch.int16) << 7
    assert packed(spread.view(BF16)) is None
    assert packed(weight.float()) is None
    assert packed(weight[:, : GROUP // 2]) is None
    assert packed(weight * 2.0**126) is None


@pytest.mark.parametrize("count", COUNTS)
def test_products_are_those_of_float64(count: int) -> None:
    """Any rows, one of them by sums of threads, outputs that fill no tile, inputs in one part and in several, norms,
    biases, gates and sums, escapes in many lines."""

    def check(drawn: tuple[Case, int]) -> None:
        case = replace(drawn[0], size=drawn[1] * GROUP)
        x, given, before = case.drawn()
        small = torch.rand(given.weight.shape, generator=torch.Generator().manual_seed(case.seed)) < 0.5 / PATCHED
        given.weight[small] *= 2.0**-30
        found = packed(given.weight)
        assert found is not None
        # Half a group at once, then from one to the next; escapes at the end, some at once.
        escapes = palette_products.ESCAPES.value + len(found.escapes) // palette_products.AT_ONCE.value
        target, bound = wanted(case, x, given, before, GROUP + 2 * drawn[1] + case.programs + escapes)
        cut = replace(CUT, programs=case.programs)
        result = product(case, x, PaletteMap(found, *given[1:]), before, cut)
        assert_within(result, target, bound)

    for_each(count, st.tuples(CASES, st.integers(1, 20)), check)


def test_escapes_are_multiplied() -> None:
    """All of a line's result is one escape, in any line and beside more of them than are taken at once; rows beside it
    differ. Control: without the list it is zero."""
    case = Case(3, 40, 5 * GROUP, "", False, False, False, False, 4, 1)
    for rows in (1, 3):
        x, given, before = replace(case, rows=rows).drawn()
        given.weight.zero_()
        given.weight[:20] = 1.0
        given.weight[20:, 0] = 2.0**-40
        given.weight[30, ::7] = 2.0**40
        found = taken(given.weight)
        assert len(found.escapes) == 19 + (5 * GROUP + 6) // 7
        target, _ = wanted(replace(case, rows=rows), x, given, before)
        result = product(replace(case, rows=rows), x, PaletteMap(found, *given[1:]), before, CUT).double()
        assert torch.allclose(result, target, rtol=2.0**-8, atol=0.0)
        empty = found._replace(starts=torch.zeros_like(found.starts))
        assert not product(replace(case, rows=rows), x, PaletteMap(empty, *given[1:]), before, CUT)[:, 20:].any()


@pytest.mark.parametrize("count", [2, pytest.param(60, marks=[pytest.mark.full, pytest.mark.timeout(1_200)])])
def test_lines_without_escapes_have_the_bits_of_the_plain_product(count: int) -> None:
    """Several rows, inputs in one part, not rounded to bfloat16; on a card to some roundings of float32 where a norm, a
    bias or a gate is behind. Control: with other parts they differ."""

    def check(drawn: tuple[Case, int]) -> None:
        case = replace(drawn[0], rows=max(2, drawn[0].rows), size=drawn[1] * GROUP)
        x, given, before = case.drawn()
        before = before.float()
        # Exponents of normal numbers that are not very small: fifteen cover all of them.
        given = given._replace(weight=torch.where(given.weight.abs() < 2.0**-10, 0.5, given.weight))
        found = taken(given.weight)
        assert not len(found.escapes)
        plain = FewRows(outputs=16, depth=GROUP // 2, gated_depth=GROUP // 2, programs=1)
        out = before.clone() if case.adds else poisoned(case.rows, case.outputs, dtype=torch.float32)
        scratch = Scratch.empty(gemv.numbers_needed(plain, *given.weight.shape, gate=bool(case.gate)), PLACE)
        offset = case.offset and case.normed
        gemv.few_rows(x, given, out, scratch, plain, gate=case.kind, offset=offset, adds=case.adds)
        result = product(case, x, PaletteMap(found, *given[1:]), before, CUT)
        if ON_CARD and (case.gate or case.normed or case.biased):
            # A compiler decides in each kernel which products and sums behind the lines' are rounded once.
            assert torch.allclose(result, out, rtol=2.0**-20, atol=2.0**-20 * out[out.isfinite()].abs().max())
        else:
            assert torch.equal(result, out)
        if case.size >= 8 * GROUP and case.outputs > 20 and not case.gate:
            other = product(case, x, PaletteMap(found, *given[1:]), before, replace(CUT, programs=64))
            assert not torch.equal(other, out)

    for_each(count, st.tuples(CASES, st.integers(1, 20)), check)


def test_a_palette_takes_three_quarters() -> None:
    """Normal numbers: planes and lists together, of the bytes of the plain matrix."""
    weight = noise(torch.Generator().manual_seed(1), 256, 32 * GROUP, dtype=BF16)
    assert 0.75 < taken(weight).nbytes / weight.nbytes < 0.752
    assert palette_products.ESCAPES.value >= 16
    assert isinstance(Map(weight, None, None, 0.0), tuple)
