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
from tests.engine.backends.cuda.kernels.support import COUNTS, PLACE, ROUNDING, assert_within, for_each, noise, poisoned

pytestmark = pytest.mark.usefixtures("place")

BF16 = torch.bfloat16
EPS = 1e-5

ROUNDED = 2.0**-23
"""Error of an addition in float32, relative to its result: tensor cores cut where others round, which is half of it."""

STEEPEST = 1.13
"""Most by which SiLU and GELU enlarge a difference."""

CURVED = 2.0**-19
"""Error of SiLU and GELU in float32, relative to their argument: of an exponential, a sum and a quotient."""


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

    @property
    def additions(self) -> int:
        """Additions that a product passes: in its tile, from tile to tile, and from part to part."""
        return self.shape.depth + -(-self.size // self.shape.depth) + self.programs

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


def wanted(case: Case, x: Tensor, given: Map, before: Tensor, additions: int = 0) -> tuple[Tensor, Tensor]:
    """The result in float64, and by how much each number of a bfloat16 result may differ from it.

    Inputs are rounded behind their gains as a kernel rounds them: the gain with its offset, the product with it and the
    rounding to bfloat16 are single operations, which are repeated exactly. What is left is the error of sums: a number
    that passes ``n`` additions takes ``n`` roundings, so a sum of products differs by at most ``n`` times ``ROUNDED``
    of the sum of their absolute values (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2).

    Args:
        case: what is computed.
        x: the rows.
        given: the matrix.
        before: what is added to.
        additions: that a product passes at most; 0: as many as there are inputs, which holds for any order.
    """
    wide, values, scale = x.double(), x, torch.ones(len(x), 1, dtype=torch.float64, device=x.device)
    if given.gain is not None:
        values = (x.float() * (given.gain.float() + float(case.offset))).to(x.dtype)
        scale = torch.rsqrt(wide.square().mean(1, keepdim=True) + EPS)
    weight = given.weight.double()
    y = values.double() @ weight.T * scale
    total = values.double().abs() @ weight.abs().T * scale
    if given.bias is not None:
        y, total = y + given.bias.double(), total + given.bias.double().abs()
    # Squares of a norm are added up in the same order; a few roundings more are what stands around the sums.
    error = (2 * (additions or case.size) + 16) * ROUNDED * total
    if case.gate:
        (gate, up), (gate_error, up_error) = y.chunk(2, 1), error.chunk(2, 1)
        bent = F.silu(gate) if case.gate == "silu" else F.gelu(gate, approximate="tanh")
        bent_error = STEEPEST * gate_error + CURVED * gate.abs()
        y = bent * up
        error = bent_error * up.abs() + bent.abs() * up_error + bent_error * up_error + 4 * ROUNDED * y.abs()
    if case.adds:
        y = y + before.double()
        error = error + ROUNDED * y.abs()
    return y, error + ROUNDING[BF16] * (y.abs() + error)


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
        target, bound = wanted(case, x, given, before, case.additions)
        for _ in range(2):
            found = run(case, x, given, before, scratch)
            assert_within(found, target, bound)
            assert not scratch.counters.any()

    for_each(count, CASES, check)


def test_an_input_that_is_left_out_is_seen() -> None:
    """Control of the bound: a product without the last of its inputs differs by more, with and without a norm."""
    for normed in (False, True):
        case = Case(3, 40, 208, "", normed, False, True, False, 4, 1)
        x, given, before = case.drawn()
        target, bound = wanted(case, x, given, before, case.additions)
        assert_within(run(case, x, given, before, case.scratch()), target, bound)
        given.weight[:, -1] = 0.0
        with pytest.raises(AssertionError, match="over the bound"):
            assert_within(run(case, x, given, before, case.scratch()), target, bound)


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
