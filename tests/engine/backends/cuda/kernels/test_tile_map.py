"""The maps of a step: every split and tile is dealt once, in equal shares."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import strategies as st

from engine.backends.cuda.kernels.tile_map import ChunkMap, DecodeMap, DecodeShape, map_chunks, map_decode
from engine.core.kv.layout import FULL, Reach
from tests.engine.backends.cuda.kernels.references import decode_units
from tests.engine.backends.cuda.kernels.support import COUNTS, PLACE, for_each

pytestmark = pytest.mark.usefixtures("place")

LENGTHS = st.lists(st.one_of(st.just(0), st.integers(1, 30), st.integers(1, 900)), min_size=1, max_size=9)
Decode = tuple[list[int], Reach, DecodeShape, int]


@pytest.mark.parametrize("count", COUNTS)
def test_every_split_is_dealt_once_and_in_equal_shares(count: int) -> None:
    """The map holds the splits of the specification in order, and no program has a share that is more than one split
    above the mean. All that a program reads of it was written: before, it holds nothing of use."""

    def check(case: Decode) -> None:
        lengths, reach, shape, programs = case
        out = DecodeMap.empty(len(lengths), programs, shape, PLACE)
        for part in out:
            part.fill_(-7_777)
        map_decode(torch.tensor(lengths, dtype=torch.int32), reach, shape, out)
        units = decode_units(lengths, reach, shape)
        begins = out.begins.tolist()
        assert begins[0] == 0 and begins[-1] == len(units)
        found = zip(out.unit_rows.tolist(), out.unit_splits.tolist(), strict=True)
        assert list(found)[: len(units)] == [unit[:2] for unit in units]
        tiles = [unit[2] for unit in units]
        for begin, end in pairwise(begins):
            assert begin <= end
            assert sum(tiles[begin:end]) <= sum(tiles) / programs + max(tiles, default=0)

    reaches = st.sampled_from((FULL, Reach("window", 33), Reach("chunk", 64)))
    shapes = st.builds(
        DecodeShape, tile=st.sampled_from((4, 16)), span=st.integers(1, 4), splits=st.sampled_from((1, 2, 8))
    )
    for_each(count, st.tuples(LENGTHS, reaches, shapes, st.integers(1, 40)), check)


@pytest.mark.parametrize("count", COUNTS)
def test_every_tile_of_a_chunk_is_dealt_once(count: int) -> None:
    """Tiles follow each other chunk by chunk; entries behind the last tile say that there is none."""

    def check(case: tuple[list[int], int]) -> None:
        lengths, tile = case
        out = ChunkMap.empty(sum(lengths), len(lengths), tile, PLACE)
        map_chunks(torch.tensor(lengths, dtype=torch.int32), tile, out)
        wanted = [(chunk, first) for chunk, length in enumerate(lengths) for first in range(0, length, tile)]
        wanted += [(-1, 0)] * (len(out.tile_chunks) - len(wanted))
        assert list(zip(out.tile_chunks.tolist(), out.tile_firsts.tolist(), strict=True)) == wanted

    for_each(count, st.tuples(LENGTHS, st.sampled_from((1, 8, 64))), check)


def test_a_map_made_for_another_step_is_no_use() -> None:
    """Control: the map of other lengths differs, so the comparisons above can fail."""
    shape = DecodeShape(4, 1, 4)
    maps = []
    for lengths in ([9, 40], [40, 9]):
        out = DecodeMap.empty(2, 3, shape, PLACE)
        map_decode(torch.tensor(lengths, dtype=torch.int32), FULL, shape, out)
        maps.append((out.unit_rows.tolist(), out.begins.tolist()))
    assert maps[0] != maps[1]
