"""Block tables by reach: which layers share one, what a block of each holds, and what fits, for published models."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.backends.common.storage import KvStorage
from engine.core.kv.groups import divide, granule
from engine.core.kv.layout import FULL, KvGroup, KvLayout, LayerLayout, Reach, fit_layout, most_blocks, uniform_layers

GIB = 1 << 30
SCOUT = uniform_layers(12, 8, 128) + uniform_layers(36, 8, 128, Reach("chunk", 8_192))
"""Llama 4 Scout: every fourth layer sees everything (config.json: no_rope_layers, attention_chunk_size)."""
GPT_OSS = uniform_layers(12, 8, 64) + uniform_layers(12, 8, 64, Reach("window", 128))
"""gpt-oss-20b: every other layer has a window of 128."""
GEMMA_27B = uniform_layers(10, 16, 128) + uniform_layers(52, 16, 128, Reach("window", 1_024))
"""Gemma 3 27B: every sixth of 62 layers sees everything."""
GEMMA_12B = uniform_layers(8, 8, 256) + uniform_layers(40, 8, 256, Reach("window", 1_024))
GEMMA_4B = uniform_layers(5, 4, 256) + uniform_layers(29, 4, 256, Reach("window", 1_024))


def fitted(layers: tuple[LayerLayout, ...], kv_bytes: int, context: int = 10_485_760) -> KvLayout:
    """The layout of a model in bfloat16."""
    groups = divide(layers, 16, context)
    return fit_layout(kv_bytes=kv_bytes, layers=layers, block_size=16, dtype="bfloat16", groups=groups)


@pytest.mark.parametrize(
    ("layers", "sizes", "lost"),
    [
        (SCOUT, (48, 16), (0, 0)),
        (GPT_OSS, (16, 16), (0, 0)),
        (GEMMA_27B, (80, 16), (3.8, 0)),
        (GEMMA_12B, (80, 16), (0, 0)),
        (GEMMA_4B, (96, 16), (0, 3.3)),
    ],
)
def test_blocks_of_both_tables_are_equally_large(
    layers: tuple[LayerLayout, ...], sizes: tuple[int, int], lost: tuple[float, float]
) -> None:
    """Fewer layers hold more tokens in a block, so that little of a block of either table is lost."""
    layout = fitted(layers, 8 * GIB, 131_072)
    assert tuple(group.block_size for group in layout.groups) == sizes
    assert granule(layout.groups) == sizes[0]
    for group, part in zip(layout.groups, lost, strict=True):
        rows = sum(layer.reach == group.reach for layer in layers) * group.block_size
        assert round(100 * (1 - rows / layout.block_rows), 1) == part
    assert layout.block_bytes == layout.block_rows * layers[0].numbers * 2


def test_llama_4_scout_holds_more_than_a_million_tokens_in_56_gib() -> None:
    """A token of a long sequence takes 49,152 bytes, a quarter of what all layers take: 56 GiB are 1,223,338 of them,
    1.199 million once the chunk that is being written is counted in the others, 0.306 if everything were kept."""
    layout = fitted(SCOUT, 56 * GIB)
    assert layout.lasting_bytes == 12 * 4_096
    assert 56 * GIB // layout.lasting_bytes == 1_223_338
    assert layout.capacity(1) == 1_198_656
    assert layout.capacity(512) == 1_197_120
    whole = fit_layout(kv_bytes=56 * GIB, layers=SCOUT, block_size=16, dtype="bfloat16")
    assert (whole.lasting_bytes, whole.capacity(8_192)) == (196_608, 305_808)


def test_short_sequences_waste_nothing_of_the_pool() -> None:
    """Where nothing is behind a window yet, as many chats fit as if everything were kept, within half a block each."""
    layout, tokens = fitted(SCOUT, 56 * GIB), 2_000
    chats = layout.num_blocks // most_blocks(layout.groups, tokens, 1)
    whole = 56 * GIB // 196_608 // tokens
    assert (chats, whole) == (152, 152)


@pytest.mark.parametrize(
    ("layers", "groups"),
    [
        (uniform_layers(4, 2, 8), ()),
        (uniform_layers(4, 2, 8, Reach("window", 512)), ()),
        (uniform_layers(4, 2, 8, Reach("window", 511)), (KvGroup(Reach("window", 511), 16),)),
        (uniform_layers(1, 2, 8) + uniform_layers(4, 4, 8, Reach("window", 9)), ()),
        (
            uniform_layers(4, 2, 8, Reach("chunk", 9)) + uniform_layers(2, 2, 8, Reach("window", 600)),
            (KvGroup(FULL, 32), KvGroup(Reach("chunk", 9), 16)),
        ),
        (
            uniform_layers(100, 2, 8, Reach("chunk", 9)) + uniform_layers(1, 2, 8),
            (KvGroup(FULL, 512), KvGroup(Reach("chunk", 9), 16)),
        ),
    ],
    ids=["all", "covers", "one window", "shapes differ", "one covers", "few layers"],
)
def test_layers_are_dealt_by_reach(layers: tuple[LayerLayout, ...], groups: tuple[KvGroup, ...]) -> None:
    """One table for each reach that is shorter than a context of 512; everything is kept where shapes differ."""
    assert divide(layers, 16, 512) == groups


@given(st.sampled_from(["window", "chunk"]), st.integers(1, 40), st.integers(1, 9), st.integers(1, 20))
def test_a_table_holds_what_is_seen_and_no_more(kind: str, reach: int, size: int, chunk: int) -> None:
    """From the first block that a chunk sees to its end there are never more blocks than ``most_blocks``, and the first
    position seen lies in the first block."""
    group = KvGroup(Reach(kind, reach), size)
    for start in range(120):
        first = group.first_block(start)
        assert first * size <= group.reach.first_seen(start) < (first + 1) * size
        assert -(-(start + chunk) // size) - first <= group.most_blocks(start + chunk, chunk)
    assert group.reach.first_seen(119) == (max(0, 120 - reach) if kind == "window" else 119 - 119 % reach)


def test_roots_of_other_tables_differ() -> None:
    """Blocks that hold other tokens never share an id."""
    layouts = [fitted(SCOUT, GIB), fitted(SCOUT, GIB, 4_096), fitted(GPT_OSS, GIB)]
    layouts.append(dataclasses.replace(layouts[0], groups=tuple(reversed(layouts[0].groups))))
    assert len({layout.root("aa") for layout in layouts}) == len(layouts)


def test_layers_of_one_memory_never_meet() -> None:
    """Tokens written through different blocks, tables and layers stay where they are; zeroing a block leaves others."""
    layers = uniform_layers(1, 2, 3) + uniform_layers(3, 2, 3, Reach("window", 8))
    layout = KvLayout(layers=layers, block_size=2, dtype="float32", num_blocks=4, groups=divide(layers, 2, 64))
    storage = KvStorage(layout, max_context=64, dtype=torch.float32, device=torch.device("cpu"))
    assert sum(tensor.nbytes for tensor in storage.tensors) == 5 * layout.block_bytes
    assert [group.block_size for group in layout.groups] == [6, 2]
    expected = {}
    for place, block in ((0, 3), (1, 1), (2, 1), (3, 1), (1, 2), (2, 2), (3, 2), (0, 4)):
        size = layout.tables[layout.table_of(layers[place].reach)].block_size
        values = torch.randn(2, size, 2, 3)
        storage.write(place, block * layout.block_rows + torch.arange(size), values[0], values[1])
        expected[place, block] = values
    storage.zero([2])
    for (place, block), values in expected.items():
        keys, found = storage.gather(place, torch.tensor([block]), 1)
        wanted = torch.zeros_like(values) if block == 2 else values
        assert torch.equal(keys[0].transpose(0, 1), wanted[0])
        assert torch.equal(found[0].transpose(0, 1), wanted[1])
