"""Blocks made zero, and stamps compared."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

from engine.backends.cuda.kernels.blocks import compare_stamps, zero_blocks
from tests.engine.backends.cuda.kernels import references
from tests.engine.backends.cuda.kernels.support import COUNTS, DTYPES, for_each, poisoned

pytestmark = pytest.mark.usefixtures("place")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", COUNTS)
def test_blocks_become_zero_and_nothing_else_does(count: int, dtype: torch.dtype) -> None:
    """Any number of blocks of any size, in any order, with places for none; their neighbours stay as they were."""

    def check(case: tuple[list[int], int, int]) -> None:
        blocks, size, heads = case
        memory = poisoned(12, size, heads, 3, dtype=dtype)
        zero_blocks(memory, torch.tensor(blocks, dtype=torch.int32))
        for block in range(12):
            assert (memory[block] == 0).all() if block in blocks else memory[block].isnan().all()

    for_each(count, st.tuples(st.lists(st.integers(-1, 11), max_size=6), st.integers(1, 500), st.integers(1, 4)), check)


@pytest.mark.parametrize("count", COUNTS)
def test_foreign_blocks_are_counted(count: int) -> None:
    """Every wrong stamp among the entries that a row reads is counted, and none that it does not read; rows without a
    wrong one are the controls."""

    def check(case: tuple[int, int, int, float]) -> None:
        rows, width, seed, wrong = case
        generator = torch.Generator().manual_seed(seed)
        stamps = torch.randint(-(1 << 62), 1 << 62, (50,), generator=generator)
        tables = torch.randint(0, 50, (rows, width), generator=generator, dtype=torch.int32)
        expected = stamps[tables.long()]
        # One bit anywhere makes another owner.
        flips = torch.ones_like(expected) << torch.randint(0, 63, expected.shape, generator=generator)
        foreign = torch.rand(expected.shape, generator=generator) < wrong
        expected = torch.where(foreign, expected ^ flips, expected)
        # Now and then a table names a block that does not exist.
        nowhere = torch.rand(expected.shape, generator=generator) < wrong / 4
        tables = torch.where(nowhere, torch.where(foreign, -1, 50), tables).int()
        foreign |= nowhere
        begins = torch.randint(0, width + 1, (rows,), generator=generator, dtype=torch.int32)
        ends = torch.maximum(begins, torch.randint(0, width + 1, (rows,), generator=generator, dtype=torch.int32))
        faults = torch.full((rows,), -1, dtype=torch.int32)
        compare_stamps(tables, expected, (begins, ends), stamps, faults)
        assert faults.tolist() == references.faults(tables, expected, (begins, ends), stamps).tolist()
        read = (torch.arange(width) >= begins.unsqueeze(1)) & (torch.arange(width) < ends.unsqueeze(1))
        assert ((faults > 0) == (foreign & read).any(1)).all()

    cases = st.tuples(st.integers(0, 4), st.integers(1, 300), st.integers(0, 9_999), st.sampled_from((0.0, 0.02, 0.5)))
    for_each(count, cases, check)
