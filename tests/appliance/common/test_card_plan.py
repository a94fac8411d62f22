"""The plan of an engine on a GPU: it adds up, and the engine's own code comes to the same numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from appliance.common import card_plan
from appliance.common.card_plan import CardPlan, buckets_of, card_share, plan_card
from appliance.common.config import ModelConfig
from appliance.common.model_shape import MAX_BYTES, ModelShape, parse_shape, read_shape
from engine.backends.common.loading import layout_for, limits_for
from engine.backends.cuda.load import without_spares
from engine.backends.cuda.runtime import budget, launches
from engine.backends.cuda.runtime.storage import spare_bytes
from engine.config import EngineConfig
from engine.core.kv import layout as kv_layout
from engine.errors import ConfigurationError
from engine.model.checkpoint.registry import build_model, describe_model, load_model_config
from engine.model.checkpoint.weights import weight_bytes
from engine.model.layers.blocks import GatedMlp
from tests.appliance.common.cards import CARD_80, LLAMA_8B, WEIGHTS_8B, model

SHAPE = parse_shape(LLAMA_8B)
assert SHAPE is not None
GIB = 1 << 30
CASES: tuple[tuple[int, dict[str, int]], ...] = (
    (CARD_80, {}),
    (24 * GIB, {}),
    (141 * GIB, {"max_num_seqs": 64}),
    (CARD_80, {"gpu_share": 45}),
)
"""Cards, and keys that an entry gives beside ``gpu: auto``."""


def plan(total: int = CARD_80, free: int | None = None, **given: object) -> CardPlan:
    """Plan of the 8B model with an entry that gives these keys beside ``gpu: auto``."""
    assert SHAPE is not None
    return plan_card(model(**given), SHAPE, WEIGHTS_8B, total, total if free is None else free)


def test_weights_in_8_bits_are_planned_as_the_engine_holds_them(tmp_path: Path) -> None:
    """A byte a number of the layers' maps, and their scales: the bytes of the engine's own list of an 8B model, whose
    files are in bfloat16; a head that is the embedding is counted once. The rest of the card is KV."""
    for tied in (False, True):
        (tmp_path / "config.json").write_text(json.dumps({**LLAMA_8B, "tie_word_embeddings": tied}))
        shape, about = read_shape(tmp_path), load_model_config(str(tmp_path))
        assert shape is not None
        wanted = weight_bytes(describe_model(about, scaled=True), torch.bfloat16)
        assert card_plan.card_weights(model(weights="fp8"), shape, WEIGHTS_8B) == wanted
    held, plain = plan(weights="fp8"), plan()
    assert sum(part for _, part in held.parts) == held.allowed
    assert 8 * GIB < held.weights < 9 * GIB and held.kv - plain.kv > 6 * GIB
    assert card_plan.card_weights(model(), shape, WEIGHTS_8B) == WEIGHTS_8B


def told(found: CardPlan, entry: ModelConfig, **more: object) -> EngineConfig:
    """What an engine is told by a plan."""
    return EngineConfig(
        model_dir="", model_digest="", kv_bytes=entry.kv_bytes, block_size=entry.block_size, **found.settings(), **more
    )


def test_palettes_are_planned_as_the_engine_lays_them(tmp_path: Path) -> None:
    """Planes and lists of every matrix that the engine lays a palette beside, in an 8B model, escapes apart: KV is less
    by so much. None of experts, of float32, or where inputs fill no group."""
    for intermediate in (14_336, 14_304):
        (tmp_path / "config.json").write_text(json.dumps({**LLAMA_8B, "intermediate_size": intermediate}))
        shape = read_shape(tmp_path)
        assert shape is not None
        decoder, _ = build_model(load_model_config(str(tmp_path)), torch.bfloat16, torch.device("meta"))
        blocks = [part.block for layer in decoder.layers for part in layer.sublayers]
        maps = [(one.gate_up, one.down.linear) for one in blocks if isinstance(one, GatedMlp)]
        matrices = [one.loaded for pair in maps for one in pair if one.loaded.shape[1] % card_plan.PALETTE_GROUP == 0]
        assert len(matrices) == (64 if intermediate == 14_336 else 32)
        wanted = sum(one.nbytes * 3 // 4 + 4 * (len(one) + 1) + 2 for one in matrices)
        assert card_plan.card_weights(model(gpu_palette=True), shape, WEIGHTS_8B) == WEIGHTS_8B + wanted
        assert card_plan.palette_bytes(model(dtype="float32"), shape) == 0
        assert card_plan.palette_bytes(model(), replace(shape, experts=2)) == 0
    laid, plain = plan(gpu_palette=True), plan()
    assert sum(part for _, part in laid.parts) == laid.allowed == plain.allowed
    assert 7 * GIB < plain.kv - laid.kv < 9 * GIB


def test_an_8b_model_on_80_gb_is_planned_and_adds_up() -> None:
    """From name, path and ``gpu: auto`` alone: 90 % of the card, KV from what is left, 256 rows with their graphs; the
    parts are the sum, and the line for people has all of them."""
    found = plan()
    assert sum(part for _, part in found.parts) == found.allowed == CARD_80 * 90 // 100
    assert (found.share, found.rows, found.batched_tokens, found.max_context) == (90, 256, 2_048, 131_072)
    assert found.kv == found.tokens * 131_072 and found.tokens > 400_000
    assert found.spare == 258 * found.block == 258 * 2 * (1 << 20)
    assert found.buckets == (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
    assert found.words() == (
        "73,403 MiB (90 % of 81,559 MiB) = weights 15,316 + context 512 + reserve 1,949 + spare blocks 516 + "
        "KV 55,108 + unused 2; 440,864 tokens of KV, 256 rows, 2,048 tokens in a step, context 131,072; "
        "14 graphs (rows: 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)"
    )


def test_a_plan_that_others_limit_says_so() -> None:
    """A card of which other programs leave 30 GiB is not called 90 % of it; the parts still add up, and rows stay those
    for which kernels are compiled."""
    found = plan(free=30 * GIB)
    assert found.limited and not plan().limited and not plan(gpu_share=0, kv_bytes=GIB).limited
    assert (sum(part for _, part in found.parts), found.rows) == (30 * GIB, 256)
    assert found.words().startswith(
        "30,720 MiB (all that is free of 81,559 MiB; gpu_share 90 % are 73,403 MiB) = weights "
    )


def test_the_engine_comes_to_the_same_numbers(tmp_path: Path) -> None:
    """The engine's own budget, layout, limits and buckets, on the simulated card with the weights in it, give the
    plan's blocks, rows and context to the byte."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    description = load_model_config(str(tmp_path))
    decoder, _ = build_model(description, torch.bfloat16, torch.device("meta"))
    for total, keys in CASES:
        found = plan(total, **keys)
        held = WEIGHTS_8B + budget.CONTEXT_BYTES
        config = told(found, model(**keys))
        reserve = budget.reserve_bytes(budget.step_shape(config, decoder))
        assert reserve == found.reserve
        kv = budget.kv_bytes_of(budget.CardMemory(total, total - held, held), found.share, reserve)
        config = replace(config, kv_bytes=kv)
        layout = layout_for(config, description, "bfloat16")
        rows = min(config.max_num_seqs, config.max_num_batched_tokens)
        left = without_spares(layout, rows)
        limits = limits_for(config, description, left)
        assert left.num_blocks * left.block_bytes == found.kv
        assert spare_bytes(layout, rows) + layout.block_bytes == found.spare
        assert (limits.max_num_seqs, limits.max_num_batched_tokens) == (found.rows, found.batched_tokens)
        assert limits.max_context <= min(found.max_context, found.tokens) < limits.max_context + 64
        assert launches.buckets(limits.max_num_seqs) == found.buckets


def test_the_defaults_of_a_cpu_were_refused(tmp_path: Path) -> None:
    """The control: 256 MiB of KV and 128 rows leave an 8B model no block, which the engine refuses."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    config = EngineConfig(model_dir="", model_digest="")
    layout = layout_for(config, load_model_config(str(tmp_path)), "bfloat16")
    with pytest.raises(ConfigurationError, match="keeps a spare block"):
        without_spares(layout, config.max_num_seqs)


def test_constants_are_those_of_the_engine() -> None:
    """The host knows the engine's code not, so it repeats some of its numbers."""
    assert (card_plan.LEAST_BLOCKS, card_plan.SCORED_ROWS) == (kv_layout.MIN_BLOCKS, budget.SCORED_ROWS)
    for name in ("CONTEXT_BYTES", "RESERVE_BYTES", "LIBRARY_BYTES", "MOST_SHARE", "MARGIN"):
        assert getattr(card_plan, name) == getattr(budget, name)
    for name in ("STREAM_COPIES", "TABLE_COPIES", "SPLITS"):
        assert getattr(card_plan, name) == getattr(budget, name)
    assert all(buckets_of(rows) == launches.buckets(rows) for rows in range(1, 600))


def test_what_the_configuration_gives_holds() -> None:
    """Rows, budgets, context, share and kv_bytes that are given are taken as they are; the rest follows from them."""
    found = plan(max_num_seqs=8, max_num_batched_tokens=512, max_context=4_096, gpu_share=50)
    assert (found.rows, found.batched_tokens, found.max_context, found.share) == (8, 512, 4_096, 50)
    assert found.buckets == (1, 2, 4, 8)
    fixed = plan(kv_bytes=4 * GIB)
    assert (fixed.share, fixed.kv + fixed.spare + fixed.rest) == (0, 4 * GIB)
    assert sum(part for _, part in fixed.parts) == fixed.allowed
    assert plan(gpu_share=0, kv_bytes=4 * GIB) == fixed
    assert plan(max_num_seqs=0, max_context=0) == plan()
    shares = [card_share(model(**keys)) for keys in ({}, {"gpu_share": 40}, {"kv_bytes": GIB}, {"gpu_share": 0})]
    assert shares == [90, 40, 0, 0]
    assert card_share(model(gpu="off")) == 0


def test_a_small_card_gets_fewer_rows_and_a_full_one_says_so() -> None:
    """Each row has KV enough on 24 GB, and a card without room lacks bytes instead of planning nonsense."""
    small = plan(24 * GIB)
    assert 1 < small.rows < 256 and small.tokens >= small.rows * card_plan.LEAST_ROW_TOKENS
    assert f"context {small.tokens:,};" in small.words() and small.reserve <= 24 * GIB // 16
    assert plan(16 * GIB).lacking and not small.lacking
    assert plan(free=20 * GIB).allowed == 20 * GIB


def test_rows_do_not_follow_what_is_free_at_the_moment() -> None:
    """Kernels are compiled for a number of rows: with less free memory there is less KV, and the rows are the same."""
    shape = parse_shape(LLAMA_8B)
    assert shape is not None
    plans = [plan_card(model(), shape, WEIGHTS_8B, 24 << 30, (24 << 30) - taken) for taken in (0, 3 << 30, 7 << 29)]
    assert len({one.rows for one in plans}) == 1
    assert plans[0].kv > plans[1].kv > plans[2].kv


def test_a_wide_model_has_smaller_steps() -> None:
    """Scores of rows and activations of a step stay within a sixteenth of the card, and what is given is not varied."""
    assert SHAPE is not None
    wide = replace(SHAPE, vocabulary=262_144, intermediate=262_144)
    found = plan_card(model(), wide, WEIGHTS_8B, CARD_80, CARD_80)
    assert (found.rows, found.batched_tokens) == (256, 1_024) and found.reserve <= CARD_80 // 16
    fixed = plan_card(model(max_num_batched_tokens=8_192), wide, WEIGHTS_8B, CARD_80, CARD_80)
    assert fixed.batched_tokens == 8_192 and fixed.rows < 256
    forced = plan_card(model(max_num_seqs=256, max_num_batched_tokens=8_192), wide, WEIGHTS_8B, CARD_80, CARD_80)
    assert (forced.rows, forced.batched_tokens) == (256, 8_192) and forced.reserve > CARD_80 // 16


@given(
    total=st.integers(1 << 30, 200 << 30),
    used=st.floats(0, 1),
    weights=st.integers(1 << 20, 150 << 30),
    block_size=st.sampled_from([1, 16, 64, 512]),
    shape=st.builds(
        ModelShape,
        layers=st.integers(1, 128),
        heads=st.integers(1, 128),
        kv_heads=st.integers(1, 128),
        width=st.integers(16, 512),
        value_width=st.integers(16, 512),
        kv_numbers=st.integers(64, 16_384),
        experts=st.integers(0, 8),
        expert_width=st.integers(0, 8_192),
        hidden=st.integers(64, 16_384),
        intermediate=st.integers(64, 65_536),
        vocabulary=st.integers(256, 1 << 18),
        positions=st.integers(16, 1 << 20),
        dtype=st.sampled_from(["float32", "bfloat16"]),
    ),
)
def test_every_plan_adds_up_or_lacks(total: int, used: float, weights: int, block_size: int, shape: ModelShape) -> None:
    """For any card and model: what fits is a sum of its parts within the bounds of the configuration."""
    found = plan_card(model(block_size=block_size), shape, weights, total, int(total * (1 - used)))
    if found.lacking:
        return
    assert sum(part for _, part in found.parts) == found.allowed <= total * 90 // 100
    assert all(part >= 0 for _, part in found.parts) and found.rest < found.block
    sized = model(block_size=block_size).model_copy(update=found.settings())
    assert ModelConfig.model_validate(sized.model_dump()) == sized


@pytest.mark.parametrize(
    ("changes", "numbers", "experts"),
    [
        ({}, 2_048, (0, 0)),
        ({"head_dim": 256}, 4_096, (0, 0)),
        ({"num_key_value_heads": None}, 8_192, (0, 0)),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, 576, (0, 0)),
        ({"moe_intermediate_size": 2_048, "num_experts_per_tok": 8}, 2_048, (8, 2_048)),
        ({"num_experts_per_tok": 2}, 2_048, (2, 14_336)),
    ],
)
def test_shapes_of_families(changes: dict[str, object], numbers: int, experts: tuple[int, int]) -> None:
    """Heads of a given width, without groups, latent attention, and mixtures; nested descriptions as well."""
    values = {**LLAMA_8B, **changes}
    for found in (parse_shape(values), parse_shape({"model_type": "x", "text_config": values})):
        assert found is not None
        assert (found.kv_numbers, found.experts, found.expert_width) == (numbers, *experts)
        assert (found.dtype, found.reaches) == ("bfloat16", 1)
    windows = parse_shape({**LLAMA_8B, "layer_types": ["sliding_attention", "full_attention"]})
    assert windows is not None and windows.reaches == 2


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "[" * 100_000, json.dumps({**LLAMA_8B, "num_hidden_layers": -1}), " " * (MAX_BYTES + 1)]
)
def test_odd_descriptions_give_no_shape(text: str, tmp_path: Path) -> None:
    """Nothing is raised, and nothing believed."""
    (tmp_path / "config.json").write_text(text)
    assert read_shape(tmp_path) is None
    assert read_shape(tmp_path / "none") is None
    assert parse_shape({**LLAMA_8B, "hidden_size": True}) is None
