"""Products of few rows with what surrounds them, against float64; a row's bits beside any others."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from engine.backends.cuda.kernels import gemv
from engine.backends.cuda.kernels.activation import Gate
from engine.backends.cuda.kernels.gemv import FewRows, Scratch
from engine.backends.cuda.kernels.lines import Map
from tests.engine.backends.cuda.kernels.support import COUNTS, PLACE, assert_close, for_each, noise, poisoned

pytestmark = pytest.mark.usefixtures("place")

BF16 = torch.bfloat16
EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Case:
    """One product."""

    rows: int
    outputs: int
    size: int
    gate: str
    normed: bool
    offset: bool
    biased: bool
    adds: bool
    programs: int
    seed: int

    @property
    def shape(self) -> FewRows:
        """How it is cut: tiles as small as tensor cores take them."""
        return FewRows(outputs=16, depth=16, gated_depth=16, programs=self.programs)

    @property
    def kind(self) -> Gate | None:
        """Its gate."""
        return Gate(self.gate) if self.gate else None  # type: ignore[arg-type]

    def drawn(self) -> tuple[Tensor, Map, Tensor]:
        """Rows that are apart from each other, the matrix, and what is added to."""
        generator = torch.Generator().manual_seed(self.seed)
        lines = self.outputs * (2 if self.gate else 1)
        x = noise(generator, self.rows, self.size + 16, dtype=BF16)[:, : self.size]
        weight = noise(generator, lines, self.size, dtype=BF16)
        bias = noise(generator, lines, dtype=BF16) if self.biased else None
        gain = noise(generator, self.size, dtype=BF16) if self.normed else None
        return x, Map(weight, bias, gain, EPS), noise(generator, self.rows, self.outputs, dtype=BF16)

    def scratch(self) -> Scratch:
        """Sums that were never written are no numbers."""
        needed = gemv.numbers_needed(self.shape, self.outputs, self.size, gate=bool(self.gate))
        scratch = Scratch.empty(needed, PLACE)
        scratch.sums.fill_(torch.nan)
        return scratch


def wanted(case: Case, x: Tensor, given: Map, before: Tensor) -> tuple[Tensor, float]:
    """The result in float64, and how large the numbers are that it is made of."""
    wide = x.double()
    if given.gain is not None:
        gain = given.gain.double() + float(case.offset)
        wide = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + EPS) * gain
    y = wide @ given.weight.double().T
    if given.bias is not None:
        y = y + given.bias.double()
    magnitude = y.abs().max().item()
    if case.gate:
        gate, up = y.chunk(2, 1)
        y = (F.silu(gate) if case.gate == "silu" else F.gelu(gate, approximate="tanh")) * up
        magnitude = magnitude**2
    return (y + before.double() if case.adds else y), magnitude


def run(case: Case, x: Tensor, given: Map, before: Tensor, scratch: Scratch) -> Tensor:
    """The kernel's, of the dtype of ``before``."""
    out = before.clone() if case.adds else poisoned(len(x), case.outputs, dtype=before.dtype)
    offset = case.offset and case.normed
    gemv.few_rows(x, given, out, scratch, case.shape, gate=case.kind, offset=offset, adds=case.adds)
    return out


CASES = st.builds(
    Case,
    rows=st.integers(1, gemv.MOST_ROWS),
    outputs=st.integers(1, 50),
    size=st.sampled_from((16, 48, 128, 208)),
    gate=st.sampled_from(("", "", "silu", "gelu")),
    normed=st.booleans(),
    offset=st.booleans(),
    biased=st.booleans(),
    adds=st.booleans(),
    programs=st.sampled_from((1, 4, 16)),
    seed=st.integers(0, 999),
)


@pytest.mark.parametrize("count", COUNTS)
def test_products_are_those_of_float64(count: int) -> None:
    """Any rows, outputs that fill no tile, inputs in one part and in several, norms, biases, gates and sums; counters
    are zero again behind a launch, so that the next one begins as this one did."""

    def check(case: Case) -> None:
        x, given, before = case.drawn()
        scratch = case.scratch()
        target, magnitude = wanted(case, x, given, before)
        # Inputs are rounded behind their gains: where few outputs all happen to be small, sums are of larger numbers.
        usual = float(case.size) if case.gate else case.size**0.5
        for _ in range(2):
            found = run(case, x, given, before, scratch)
            assert_close(found, target, BF16, max(magnitude, usual))
            assert not scratch.counters.any()

    for_each(count, CASES, check)


def test_parts_are_made_of_long_matrices_only() -> None:
    """The shapes of Llama 3.1 8B: as many programs as run at once, and no part shorter than a few tiles."""
    shape = FewRows()
    assert gemv.cut(shape, 6_144, 4_096, gate=False) == (128, 2)
    assert gemv.cut(shape, 4_096, 4_096, gate=False) == (128, 4)
    assert gemv.cut(shape, 14_336, 4_096, gate=True) == (64, 1)
    assert gemv.cut(shape, 4_096, 14_336, gate=False) == (128, 4)
    assert gemv.cut(shape, 128_256, 4_096, gate=False) == (128, 1)
    assert gemv.cut(shape, 64, 128, gate=False) == (128, 1)


@pytest.mark.parametrize("count", [2, pytest.param(60, marks=[pytest.mark.full, pytest.mark.timeout(1_200)])])
def test_a_row_has_the_same_bits_beside_any_others(count: int) -> None:
    """Alone and among up to fifteen others. Not rounded to bfloat16, which would hide last bits. Control:
    with other parts they differ."""

    def check(case: Case) -> None:
        x, given, before = case.drawn()
        before = before.float()
        together = run(case, x, given, before, case.scratch())
        for row in {0, case.rows - 1}:
            one = slice(row, row + 1)
            alone = run(case, x[one], given, before[one], case.scratch())
            assert torch.equal(alone, together[one])

    for_each(count, CASES, check)
    whole, cut = (Case(2, 40, 208, "", False, False, False, False, programs, 1) for programs in (1, 16))
    x, given, before = whole.drawn()
    before = before.float()
    assert not torch.equal(run(whole, x, given, before, whole.scratch()), run(cut, x, given, before, cut.scratch()))
