"""Attention kernels against their specification, over memory in which everything that must not be read is poisoned."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from engine.backends.cuda.kernels import decode_attention, prefill_attention
from engine.backends.cuda.kernels.decode_attention import Partials
from engine.backends.cuda.kernels.prefill_attention import ChunkPlaces, PrefillShape, heads_together
from engine.backends.cuda.kernels.tile_map import ChunkMap, DecodeMap, DecodeShape, map_chunks, map_decode
from engine.backends.cuda.runtime.operations import KvLayer
from engine.core.kv.layout import FULL, Reach
from tests.engine.backends.cuda.kernels import references
from tests.engine.backends.cuda.kernels.support import (
    COUNTS,
    DTYPES,
    PLACE,
    LayerCase,
    assert_close,
    fill,
    for_each,
    layers,
    noise,
    poisoned,
    random_tables,
)

pytestmark = pytest.mark.usefixtures("place")

LENGTHS = st.lists(st.one_of(st.just(0), st.integers(1, 70)), min_size=0, max_size=4)
SHAPES = st.builds(
    DecodeShape, tile=st.sampled_from((16, 32)), span=st.integers(1, 2), splits=st.sampled_from((1, 2, 4))
)
LONGEST = 80
LINES = 32
"""Lines of a tile of queries."""


def decode(
    q: Tensor, layer: KvLayer, rows: tuple[Tensor, Tensor], case: LayerCase, split: tuple[DecodeShape, int]
) -> Tensor:
    """Map and attend; memory for partial results is poisoned. Where splits can be combined in their own launch, that
    gives the same bits."""
    shape, programs = split
    map_ = DecodeMap.empty(len(q), programs, shape, PLACE)
    map_decode(rows[1], case.reach, shape, map_)
    found = []
    for dealt in (map_, None) if decode_attention.joins(len(q), case.group, case.value_dim) else (map_,):
        partials = Partials.empty(len(q), q.shape[1], case.value_dim, shape, PLACE)
        partials.outputs.fill_(torch.nan)
        partials.scales.fill_(torch.nan)
        out = poisoned(len(q), q.shape[1], case.value_dim, dtype=q.dtype)
        decode_attention.decode_attention(q, layer, rows, (dealt, shape, partials), case.rule(), out)
        assert not partials.arrived.any()
        found.append(out)
    assert torch.equal(found[0].nan_to_num(7.0), found[-1].nan_to_num(7.0))
    return found[0]


def decode_case(case: LayerCase, lengths: list[int], dtype: torch.dtype) -> tuple[Tensor, KvLayer, Tensor, Tensor]:
    """Queries, memory, tables and lengths."""
    generator = torch.Generator().manual_seed(case.seed)
    tables = random_tables(generator, len(lengths), -(-LONGEST // case.block_size))
    layer = case.memory(tables.numel() + 1, dtype)
    for table, length in zip(tables.tolist(), lengths, strict=True):
        if length:
            fill(layer, table, range(case.reach.first_seen(length - 1), length), generator)
    q = noise(generator, len(lengths), case.kv_heads * case.group, case.key_dim, dtype=dtype)
    return q, layer, tables, torch.tensor(lengths, dtype=torch.int32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", COUNTS)
def test_decoding_rows_attend_as_specified(count: int, dtype: torch.dtype) -> None:
    """Any layer, lengths, cuts and number of programs; rows of no length become zeros; nothing unseen is read."""

    def check(drawn: tuple[LayerCase, list[int], DecodeShape, int]) -> None:
        case, lengths, shape, programs = drawn
        q, layer, tables, sizes = decode_case(case, lengths, dtype)
        if not lengths:
            return
        out = decode(q, layer, (tables, sizes), case, (shape, programs))
        wanted = references.decoded(q, layer, tables, sizes, case.rule())
        magnitude = layer.values.nan_to_num(0.0).abs().max().item()
        # Weights are rounded before they meet values, and results when they are stored.
        assert_close(out, wanted, dtype, magnitude)
        assert not out[sizes == 0].any()

    for_each(count, st.tuples(layers(), LENGTHS, SHAPES, st.integers(1, 5)), check)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [3, pytest.param(60, marks=[pytest.mark.full, pytest.mark.timeout(1_200)])])
def test_a_row_is_the_same_bits_in_any_batch(count: int, dtype: torch.dtype) -> None:
    """Alone, among others, and for any number of programs. Control: with another cut its last bits do change."""

    def check(drawn: tuple[LayerCase, list[int], DecodeShape, int]) -> None:
        case, lengths, shape, programs = drawn
        q, layer, tables, sizes = decode_case(case, lengths, dtype)
        together = decode(q, layer, (tables, sizes), case, (shape, programs))
        for row in range(len(lengths)):
            one = slice(row, row + 1)
            alone = decode(q[one], layer, (tables[one], sizes[one]), case, (shape, 1))
            assert torch.equal(alone, together[one])

    some = st.lists(st.integers(1, 70), min_size=2, max_size=3)
    for_each(count, st.tuples(layers(), some, SHAPES, st.integers(1, 5)), check)


def test_another_cut_changes_the_last_bits() -> None:
    """Positive control of the test above: sums in another order are seen."""
    case = LayerCase(2, 4, 24, 24, False, 4, 0, FULL, 0.0, False, 3)
    q, layer, tables, sizes = decode_case(case, [70, 65], torch.float32)
    first, second = (decode(q, layer, (tables, sizes), case, (DecodeShape(16, 1, splits), 2)) for splits in (1, 4))
    assert not torch.equal(first, second)
    assert_close(first, second, torch.float32, 4.0)


Chunk = tuple[int, int]
"""Start and length."""


def attend_chunks(case: LayerCase, drawn: list[Chunk], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, float]:
    """What the kernel and the specification give for a step of these chunks behind three other tokens, which of the
    step's tokens are in chunks, and the largest value."""
    generator = torch.Generator().manual_seed(case.seed)
    tables = random_tables(generator, len(drawn), -(-2 * LONGEST // case.block_size))
    layer = case.memory(tables.numel() + 1, dtype)
    begins, place = [], 3
    for table, (start, length) in zip(tables.tolist(), drawn, strict=True):
        begins.append(place)
        place += length
        if length:
            fill(layer, table, range(case.reach.first_seen(start), start + length), generator)
    whole = [torch.tensor(part, dtype=torch.int32) for part in (begins, [c[1] for c in drawn], [c[0] for c in drawn])]
    chunks = ChunkPlaces(whole[0], whole[1], whole[2], tables)
    heads = case.kv_heads * case.group
    q = noise(generator, place, heads, case.key_dim, dtype=dtype)
    _, _, queries = heads_together(heads, case.kv_heads, LINES)
    map_ = ChunkMap.empty(place, len(drawn), queries, PLACE)
    map_chunks(chunks.lengths, queries, map_)
    out = poisoned(place, heads, case.value_dim, dtype=dtype)
    prefill_attention.prefill_attention(q, layer, chunks, (map_, PrefillShape(LINES, 16)), case.rule(), out)
    wanted = torch.full_like(out, torch.nan, dtype=torch.float64)
    references.prefilled(q, layer, chunks, case.rule(), wanted)
    inside = torch.arange(place) >= 3
    return out, wanted, inside, layer.values.nan_to_num(0.0).abs().max().item()


CHUNKS = st.lists(st.tuples(st.integers(0, 60), st.one_of(st.just(0), st.integers(1, 40))), min_size=1, max_size=3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", COUNTS)
def test_prompt_chunks_attend_as_specified(count: int, dtype: torch.dtype) -> None:
    """Chunks of any start and length in one launch; tokens of no chunk are left as they were."""

    def check(drawn: tuple[LayerCase, list[Chunk]]) -> None:
        out, wanted, inside, magnitude = attend_chunks(*drawn, dtype)
        assert_close(out[inside], wanted[inside], dtype, magnitude)
        assert out[~inside].isnan().all()

    for_each(count, st.tuples(layers(), CHUNKS), check)


@pytest.mark.parametrize(
    ("dtype", "reach"),
    [
        pytest.param(dtype, reach, id=f"{dtype}-{reach.kind}", marks=marks)
        for dtype, reach, marks in (
            (torch.float32, FULL, ()),
            (torch.bfloat16, Reach("window", 30), pytest.mark.full),
            (torch.float32, Reach("window", 30), pytest.mark.full),
            (torch.bfloat16, FULL, pytest.mark.full),
        )
    ],
)
def test_a_token_is_the_same_bits_however_its_prompt_is_cut(dtype: torch.dtype, reach: Reach) -> None:
    """Tokens of one prompt attend in one chunk, and in chunks of other sizes, so that each has other queries beside it
    in its tile and goes through the loop with conditions or without. Control: so does the specification, not bit by
    bit the same."""
    case = LayerCase(2, 4, 32, 32, False, 16, 0, reach, 0.0, False, 3)
    length, generator = 100, torch.Generator().manual_seed(3)
    some = 5, 31, 32, 64, 99
    tables = random_tables(generator, 1, 7)
    layer = case.memory(8, dtype)
    fill(layer, tables[0].tolist(), range(length), generator)
    q = noise(generator, length, 8, 32, dtype=dtype)
    shape = PrefillShape(LINES, 32)
    found = []
    for size in (length, 64, 37, 1):
        out = poisoned(length, 8, 32, dtype=dtype)
        for start in range(0, length, size) if size > 1 else some:
            count = min(size, length - start)
            chunks = ChunkPlaces(*(torch.tensor([number], dtype=torch.int32) for number in (0, count, start)), tables)
            _, _, queries = heads_together(8, 2, LINES)
            map_ = ChunkMap.empty(count, 1, queries, PLACE)
            map_chunks(chunks.lengths, queries, map_)
            given = q[start : start + count], layer, chunks, (map_, shape), case.rule(), out[start : start + count]
            prefill_attention.prefill_attention(*given)
        found.append(out)
    alone = torch.tensor(some)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert torch.equal(found[0][alone], found[3][alone])
    wanted = references.decoded(q[alone], layer, tables.repeat(5, 1), (alone + 1).int(), case.rule())
    assert_close(found[0][alone], wanted, dtype, 4.0)
    assert not torch.equal(found[0][alone].double(), wanted)


def test_what_is_unseen_would_be_noticed() -> None:
    """Positive control of the poison: with a wider window over the same memory the result is no number."""
    case = LayerCase(1, 2, 16, 16, False, 4, 0, Reach("window", 6), 0.0, False, 1)
    q, layer, tables, sizes = decode_case(case, [30], torch.float32)
    split = DecodeShape(16, 1, 1), 1
    assert decode(q, layer, (tables, sizes), case, split).isfinite().all()
    wider = replace(case, reach=Reach("window", 7))
    assert not decode(q, replace(layer, reach=wider.reach), (tables, sizes), wider, split).isfinite().all()
