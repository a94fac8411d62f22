"""What adapters add, against float64; rows without one; slots that are loaded again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.backends.cuda.kernels.adapters import (
    MOST_ROWS,
    NO_SLOT,
    AdapterTile,
    Groups,
    SlotFactors,
    expand,
    group_rows,
    shrink,
    sums_needed,
)
from tests.engine.backends.cuda.kernels.support import PLACE, noise

pytestmark = pytest.mark.usefixtures("place")

TILE = AdapterTile(depth=16, share=64, outputs=16, walkers=2)
PIECES = [(0, 40), (40, 8), (48, 24)]
"""A fused projection."""
INPUTS, OUTPUTS = 80, 72


def grouped(slots: list[int]) -> Groups:
    """The rows of a step, by adapter."""
    found = Groups.empty(len(slots), PLACE)
    for one in found:
        one.fill_(7)
    group_rows(torch.tensor(slots, dtype=torch.int32), found)
    return found


def added(x: Tensor, slots: list[int], given: SlotFactors, out: Tensor) -> Tensor:
    """The kernels' result."""
    groups, sums = grouped(slots), torch.full((sums_needed(given, len(x), TILE),), torch.nan)
    result = out.clone()
    shrink(x, groups, given, sums, TILE)
    expand(groups, given, sums, result, TILE)
    return result


def drawn(
    count: int, dtype: torch.dtype, ranks: tuple[int, ...]
) -> tuple[SlotFactors, dict[int, list[tuple[Tensor, Tensor]]]]:
    """Adapters in slots, and their factors."""
    generator = torch.Generator().manual_seed(count)
    given = SlotFactors.empty(count, INPUTS, PIECES, max(ranks), dtype, PLACE, TILE)
    given.down[0], given.up[0] = torch.nan, torch.nan
    factors: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for slot in range(1, count + 1):
        rank = ranks[slot % len(ranks)]
        for piece, (first, outputs) in enumerate(PIECES):
            down, up = noise(generator, rank, INPUTS, dtype=dtype), noise(generator, outputs, rank, dtype=dtype)
            given.load(slot, piece, first, down, up)
            factors.setdefault(slot, []).append((down, up))
    return given, factors


def wanted(x: Tensor, slots: list[int], factors: dict[int, list[tuple[Tensor, Tensor]]], out: Tensor) -> Tensor:
    """The result in float64."""
    result = out.double()
    for row, slot in enumerate(slots):
        for (first, count), (down, up) in zip(PIECES, factors.get(slot, ()), strict=False):
            result[row, first : first + count] += x[row].double() @ down.double().T @ up.double().T
    return result


@pytest.mark.parametrize("slots", [[0], [3], [0, 0, 0], [1, 2, 1, 0, 3, 1], [2] * 37, [*range(1, 30), 0, 5, 5]])
def test_rows_are_put_together_by_slot(slots: list[int]) -> None:
    """Every row with a slot is in one group of its slot, in order, and groups are full but the last of each slot; rows
    without one are in none."""
    found = grouped(slots)
    count = int(found.number)
    rows = [[row for row in line if row >= 0] for line in found.rows[:count].tolist()]
    by_slot: dict[int, list[int]] = {}
    for slot, line in zip(found.slots[:count].tolist(), rows, strict=True):
        assert line
        assert all(slots[row] == slot for row in line)
        by_slot.setdefault(slot, []).extend(line)
    assert by_slot == {slot: [r for r, one in enumerate(slots) if one == slot] for slot in set(slots) - {NO_SLOT}}
    assert count == sum(-(-slots.count(slot) // 16) for slot in set(slots) - {NO_SLOT})
    assert not (found.rows[count:] >= 0).any()


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-4), (torch.bfloat16, 2**-6)])
def test_adapters_add_what_they_are_made_of(dtype: torch.dtype, error: float) -> None:
    """Several adapters of two ranks, many rows of one and single ones, three pieces, one narrower than a tile;
    rows without an adapter keep their bits, whatever lies in slot 0. Control: another slot gives another result."""
    given, factors = drawn(5, dtype, (3, 20))
    slots = [1, 0, 2, *[3] * 19, 0, 5]
    generator = torch.Generator().manual_seed(1)
    x, out = noise(generator, len(slots), INPUTS, dtype=dtype), noise(generator, len(slots), OUTPUTS, dtype=dtype)
    found, target = added(x, slots, given, out), wanted(x, slots, factors, out)
    assert (found.double() - target).abs().max() <= error * target.abs().max()
    kept = [row for row, slot in enumerate(slots) if slot == NO_SLOT]
    assert torch.equal(found[kept], out[kept])
    other = added(x, [4, *slots[1:]], given, out)
    assert not torch.equal(other[0], found[0])
    assert torch.equal(other[1:], found[1:])


def test_a_row_has_the_same_bits_beside_any_others() -> None:
    """Alone, and in a group with others."""
    given, _ = drawn(2, torch.float32, (4,))
    generator = torch.Generator().manual_seed(2)
    x, out = noise(generator, 20, INPUTS), noise(generator, 20, OUTPUTS)
    together = added(x, [1, 2] * 10, given, out)
    for row in (0, 1, 19):
        one = slice(row, row + 1)
        assert torch.equal(added(x[one], [1 + row % 2], given, out[one]), together[one])


def test_a_slot_is_loaded_again() -> None:
    """An adapter of a lower rank in a slot that had one of a higher: nothing of the old one is left."""
    given, _ = drawn(1, torch.float32, (16,))
    generator = torch.Generator().manual_seed(3)
    x, out = noise(generator, 1, INPUTS), noise(generator, 1, OUTPUTS)
    factors = []
    for piece, (first, outputs) in enumerate(PIECES):
        factors.append((noise(generator, 2, INPUTS), noise(generator, outputs, 2)))
        given.load(1, piece, first, *factors[-1])
    target = wanted(x, [1], {1: factors}, out)
    assert (added(x, [1], given, out).double() - target).abs().max() <= 1e-4 * target.abs().max()


def test_bounds_are_kept() -> None:
    """More rows than one program compares, and slot 0, are defects of the caller."""
    given, _ = drawn(1, torch.float32, (2,))
    with pytest.raises(AssertionError, match="slot 0"):
        given.load(NO_SLOT, 0, 0, torch.zeros(1, INPUTS), torch.zeros(1, 1))
    with pytest.raises(AssertionError, match="pairs of rows"):
        group_rows(torch.zeros(MOST_ROWS + 1, dtype=torch.int32), Groups.empty(MOST_ROWS + 1, PLACE))
