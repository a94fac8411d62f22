"""Philox: the published answers, and uniform numbers that depend on seed and position only."""

from __future__ import annotations

import numpy as np
import pytest

from engine.backends.common.rng import philox, uniforms

KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
"""Known answers of the authors' library Random123 (kat_vectors, philox4x32 10)."""


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    """Counters and keys of the authors' table give the table's words."""

    def words(values: tuple[int, ...]) -> tuple[np.ndarray, ...]:
        return tuple(np.array([value], dtype=np.uint64) for value in values)

    assert tuple(int(word[0]) for word in philox(words(counter), words(key))) == expected


def test_numbers_depend_on_seed_and_position_only() -> None:
    """A pair gives the same number alone and among others, and other pairs give others."""
    seeds = np.array([0, 1, 2, 2**64 - 1, 12345], dtype=np.uint64)
    positions = np.array([0, 1, 7, 511, 2**33], dtype=np.int64)
    grid_seeds, grid_positions = (side.ravel() for side in np.meshgrid(seeds, positions))
    together = uniforms(grid_seeds, grid_positions)
    alone = [uniforms(grid_seeds[i : i + 1], grid_positions[i : i + 1])[0] for i in range(len(grid_seeds))]
    assert together.tolist() == alone
    assert len(set(alone)) == len(alone)


@pytest.mark.parametrize("along", ["positions", "seeds"])
def test_numbers_are_uniform(along: str) -> None:
    """Along positions and along neighbouring seeds, 100 cells fill evenly (chi-square, 99 degrees of freedom)."""
    count = 100_000
    many = np.arange(count)
    seeds = np.full(count, 42, dtype=np.uint64) if along == "positions" else many.astype(np.uint64)
    positions = many if along == "positions" else np.full(count, 42)
    numbers = uniforms(seeds, positions.astype(np.int64))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    cells = np.bincount((numbers * 100).astype(int), minlength=100)
    statistic = ((cells - count / 100) ** 2 / (count / 100)).sum()
    assert 50 < statistic < 170
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.02
