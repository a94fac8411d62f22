"""The pipelined form of prefill attention, on a card against its specification; Triton's interpreter does not know its
language. Elsewhere: that it compiles to what it is meant to be (``test_compile``), and which layers it takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from engine.backends.attention import AttentionRule
from engine.backends.cuda.kernels.prefill_attention import ChunkPlaces, heads_together
from engine.backends.cuda.kernels.prefill_pipelined import PipelinedShape, fits, prefill_pipelined
from engine.backends.cuda.kernels.tile_map import ChunkMap, map_chunks
from engine.backends.cuda.runtime.operations import KvLayer
from engine.core.kv.layout import FULL, Reach
from tests.engine.backends.cuda.kernels import references
from tests.engine.backends.cuda.kernels.support import (
    COUNTS,
    PLACE,
    LayerCase,
    assert_close,
    fill,
    for_each,
    noise,
    poisoned,
    random_tables,
)
from tests.native import ON_CARD

pytestmark = pytest.mark.usefixtures("place")
on_card = pytest.mark.skipif(
    not ON_CARD or torch.cuda.get_device_capability()[0] != 9, reason="its instructions are those of sm_90"
)

BF16 = torch.bfloat16
SHAPES = (PipelinedShape(), PipelinedShape(ordered=True), PipelinedShape(stages=3))
LONGEST = 700

Chunk = tuple[int, int]
"""Start and length."""


def attended(q: Tensor, layer: KvLayer, chunks: ChunkPlaces, case: LayerCase, shape: PipelinedShape) -> Tensor:
    """What the kernel gives for a step of these chunks; what it does not write is no number."""
    heads = q.shape[1]
    _, _, queries = heads_together(heads, case.kv_heads, shape.lines)
    map_ = ChunkMap.empty(len(q), len(chunks.lengths), queries, PLACE)
    map_chunks(chunks.lengths, queries, map_)
    out = poisoned(*q.shape, dtype=BF16)
    prefill_pipelined(q, layer, chunks, (map_, shape), case.rule(), out)
    return out


@st.composite
def cases(draw: st.DrawFn) -> LayerCase:
    """Layers that it takes."""
    width = draw(st.sampled_from((64, 128)))
    return LayerCase(
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.sampled_from((1, 3, 4, 8, 17))),
        key_dim=width,
        value_dim=width,
        latent=False,
        block_size=draw(st.sampled_from((16, 32, 64))),
        gap=0,
        reach=FULL,
        cap=0.0,
        sinks=False,
        seed=draw(st.integers(0, 10_000)),
    )


CHUNKS = st.lists(st.tuples(st.integers(0, 300), st.one_of(st.just(0), st.integers(1, 300))), min_size=1, max_size=3)


@on_card
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("count", COUNTS)
def test_chunks_attend_as_specified(count: int, shape: PipelinedShape) -> None:
    """Chunks of any start and length, over memory in which all other slots are no numbers."""

    def check(drawn: tuple[LayerCase, list[Chunk]]) -> None:
        case, spans = drawn
        generator = torch.Generator().manual_seed(case.seed)
        tables = random_tables(generator, len(spans), -(-LONGEST // case.block_size))
        layer = case.memory(tables.numel() + 1, BF16)
        begins, place = [], 3
        for table, (start, length) in zip(tables.tolist(), spans, strict=True):
            begins.append(place)
            place += length
            if length:
                fill(layer, table, range(start + length), generator)
        numbers = (begins, [one[1] for one in spans], [one[0] for one in spans])
        chunks = ChunkPlaces(*(torch.tensor(part, dtype=torch.int32) for part in numbers), tables)
        q = noise(generator, place, case.kv_heads * case.group, case.key_dim, dtype=BF16)
        assert fits(q, layer, case.rule())
        out = attended(q, layer, chunks, case, shape)
        wanted = torch.full_like(out, torch.nan, dtype=torch.float64)
        references.prefilled(q, layer, chunks, case.rule(), wanted)
        assert_close(out[3:], wanted[3:], BF16, layer.values.nan_to_num(0.0).abs().max().item())
        assert out[:3].isnan().all()

    for_each(count, st.tuples(cases(), CHUNKS), check)


@on_card
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_token_is_the_same_bits_however_its_prompt_is_cut(shape: PipelinedShape) -> None:
    """In one chunk and in chunks of other sizes, and again and again: waits between warps leave no race."""
    case = LayerCase(2, 4, 128, 128, False, 16, 0, FULL, 0.0, False, 3)
    length, generator = 690, torch.Generator().manual_seed(3)
    tables = random_tables(generator, 1, 44)
    layer = case.memory(45, BF16)
    fill(layer, tables[0].tolist(), range(length), generator)
    q = noise(generator, length, 8, 128, dtype=BF16)

    def cut(size: int) -> Tensor:
        parts = []
        for start in range(0, length, size):
            tokens = min(size, length - start)
            chunks = ChunkPlaces(*(torch.tensor([one], dtype=torch.int32) for one in (0, tokens, start)), tables)
            parts.append(attended(q[start : start + tokens], layer, chunks, case, shape))
        return torch.cat(parts)

    whole = cut(length)
    assert whole.isfinite().all()
    for size in (length, 300, 128, 37, length):
        assert torch.equal(whole, cut(size))


def test_which_layers_it_takes() -> None:
    """Whole contexts, heads of 64 or 128, blocks of a multiple of 16 tokens, bfloat16, plain scores; nothing else."""
    keys = torch.zeros(3, 16, 2, 128, dtype=BF16)
    layer, rule = KvLayer(keys, keys.clone()), AttentionRule(0.1)
    q = torch.zeros(1, 8, 128, dtype=BF16)
    assert fits(q, layer, rule)
    narrow, odd = (torch.zeros(3, *size, dtype=BF16) for size in ((16, 2, 64), (24, 2, 128)))
    assert fits(q[..., :64], KvLayer(narrow, narrow), rule)
    wide = torch.zeros(3, 16, 2, 256, dtype=BF16)
    for refused in (
        replace(layer, reach=Reach("window", 9)),
        replace(layer, latent=True),
        KvLayer(odd, odd),
        KvLayer(keys.float(), keys.float()),
        KvLayer(keys, narrow),
    ):
        assert not fits(q, refused, rule)
    assert not fits(torch.zeros(1, 8, 256, dtype=BF16), KvLayer(wide, wide), rule)
    assert not fits(q, layer, replace(rule, cap=1.0))
    assert not fits(q, layer, replace(rule, sinks=torch.zeros(8)))
