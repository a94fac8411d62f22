"""The product of one row by sums of threads, with what surrounds it, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from engine.backends.cuda.kernels import gemv
from engine.backends.cuda.kernels.gemv import FewRows, Scratch
from engine.backends.cuda.kernels.lines import LineCut, Map
from tests.engine.backends.cuda.kernels.support import COUNTS, PLACE, assert_within, for_each, poisoned
from tests.engine.backends.cuda.kernels.test_few_rows import CASES, Case, wanted

pytestmark = pytest.mark.usefixtures("place")

CUTS = st.builds(LineCut, outputs=st.sampled_from((2, 8)), warps=st.sampled_from((1, 2)))
NO_SCRATCH = 0


def alone(case: Case, lines: LineCut | None, x: Tensor, given: Map, before: Tensor) -> Tensor:
    """The kernel's result for one row; without ``lines`` that of the kernel for several."""
    out = before.clone() if case.adds else poisoned(1, case.outputs, dtype=before.dtype)
    shape = replace(FewRows(outputs=16, depth=16, gated_depth=16, programs=1), alone=lines)
    scratch = Scratch.empty(NO_SCRATCH, PLACE)
    offset = case.offset and case.normed
    gemv.few_rows(x, given, out, scratch, shape, gate=case.kind, offset=offset, adds=case.adds)
    return out


@pytest.mark.parametrize("count", COUNTS)
def test_the_product_of_one_row_is_that_of_float64(count: int) -> None:
    """Lines that end with a tile and that do not, several tiles, outputs that fill no program, norms, biases, gates
    and sums."""

    def check(drawn: tuple[Case, LineCut, int]) -> None:
        case, lines, tiles = drawn
        case = replace(case, rows=1, size=case.size + tiles * lines.depth(2))
        x, given, before = case.drawn()
        target, bound = wanted(case, x, given, before)
        assert_within(alone(case, lines, x, given, before), target, bound)

    for_each(count, st.tuples(CASES, CUTS, st.integers(0, 2)), check)


def test_whole_tiles_have_no_remainder() -> None:
    """A line of exactly two tiles, and the same sums by the kernel for several rows: they differ in last bits at the
    most. Control: one number of the matrix changed is seen."""
    lines = LineCut(outputs=4, warps=1)
    case = Case(1, 9, 2 * lines.depth(2), "silu", True, False, True, False, 1, 3)
    x, given, before = case.drawn()
    target, bound = wanted(case, x, given, before)
    found = alone(case, lines, x, given, before)
    assert_within(found, target, bound)
    assert_within(alone(case, None, x, given, before), target, bound)
    given.weight[0, -1] += 8.0
    assert not torch.equal(alone(case, lines, x, given, before), found)
