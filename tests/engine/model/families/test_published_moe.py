"""Published descriptions of models with experts: parameters to the last one, bytes of KV to the last one."""

from __future__ import annotations

import math
from typing import Any

import pytest

from engine.core.kv.layout import KvLayout, Reach
from engine.errors import ModelLoadError
from engine.model.checkpoint.config import ModelConfig
from engine.model.checkpoint.fields import Fields
from engine.model.checkpoint.registry import FAMILIES, describe_model
from tests.engine.model.families.published_moe import (
    DEEPSEEK_V3,
    GPT_OSS_20B,
    GPT_OSS_120B,
    KIMI_K2,
    LLAMA4_SCOUT,
    MIXTRAL_8X7B,
    QWEN3_30B_A3B,
    QWEN3_235B_A22B,
    QWEN15_MOE_A27B,
    Description,
)

GIB = 1 << 30


def read(description: Description) -> ModelConfig:
    """The description, checked."""
    fields = Fields("config.json", description)
    return FAMILIES[fields.architecture(tuple(FAMILIES))].read(fields)


def layout(config: ModelConfig) -> KvLayout:
    """Its KV in bfloat16."""
    return KvLayout(layers=config.kv_layers, block_size=16, dtype="bfloat16", num_blocks=1)


@pytest.mark.parametrize(
    ("description", "parameters"),
    [
        (MIXTRAL_8X7B, 46_702_792_704),
        (QWEN3_30B_A3B, 30_532_122_624),
        (QWEN15_MOE_A27B, 14_315_784_192),
        (GPT_OSS_20B, 20_914_757_184),
        (LLAMA4_SCOUT, 107_769_861_120),
        pytest.param(GPT_OSS_120B, 116_829_156_672, marks=pytest.mark.full),
        pytest.param(QWEN3_235B_A22B, 235_093_634_560, marks=pytest.mark.full),
        pytest.param(DEEPSEEK_V3, 671_026_419_200, marks=pytest.mark.full),
        pytest.param(KIMI_K2, 1_026_408_232_448, marks=pytest.mark.full),
    ],
    ids=lambda one: str(one) if isinstance(one, int) else "",
)
def test_parameters_are_those_that_were_published(description: Description, parameters: int) -> None:
    """What a model wants from its checkpoint has as many numbers as its publisher counts."""
    pieces = describe_model(read(description)).pieces.values()
    assert sum(math.prod(piece.shape) for piece in pieces) == parameters


@pytest.mark.parametrize(
    ("description", "token_bytes"),
    [
        (MIXTRAL_8X7B, 32 * 2 * 8 * 128 * 2),
        (QWEN3_30B_A3B, 48 * 2 * 4 * 128 * 2),
        (QWEN3_235B_A22B, 94 * 2 * 4 * 128 * 2),
        (QWEN15_MOE_A27B, 24 * 2 * 16 * 128 * 2),
        (GPT_OSS_20B, 24 * 2 * 8 * 64 * 2),
        (GPT_OSS_120B, 36 * 2 * 8 * 64 * 2),
        (DEEPSEEK_V3, 61 * (512 + 64) * 2),
        (KIMI_K2, 70_272),
        (LLAMA4_SCOUT, 196_608),
    ],
)
def test_bytes_of_a_token_are_exact(description: Description, token_bytes: int) -> None:
    """Every layer of every family counted; latent attention stores 576 numbers a layer and no value beside them."""
    assert layout(read(description)).token_bytes == token_bytes


def test_only_layers_that_see_everything_grow_with_the_context() -> None:
    """Scout: 12 of 48 layers see the whole context, so 56 GiB hold 1.22 million tokens; 24 of 24 windows of gpt-oss
    alternate with layers that do."""
    scout = read(LLAMA4_SCOUT)
    whole = tuple(layer for layer in scout.kv_layers if layer.reach.kind == "full")
    assert len(whole) == 12
    assert {layer.reach for layer in scout.kv_layers} == {Reach("full"), Reach("chunk", 8_192)}
    assert [index for index, layer in enumerate(scout.kv_layers) if layer.reach.kind == "full"][:2] == [3, 7]
    growing = KvLayout(layers=whole, block_size=16, dtype="bfloat16", num_blocks=1).token_bytes
    assert growing == 49_152
    assert 56 * GIB // growing == 1_223_338
    reaches = [layer.reach for layer in read(GPT_OSS_20B).kv_layers]
    assert reaches[::2] == [Reach("window", 128)] * 12
    assert {reach.kind for reach in reaches[1::2]} == {"full"}


def test_a_description_with_vision_gives_its_stop_ids() -> None:
    """They stand in the part about text."""
    assert read(LLAMA4_SCOUT).stop_ids == {200_001, 200_007, 200_008}


@pytest.mark.parametrize(
    ("description", "changes", "message"),
    [
        (MIXTRAL_8X7B, {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        (MIXTRAL_8X7B, {"num_local_experts": 0}, "num_local_experts"),
        (MIXTRAL_8X7B, {"num_local_experts": 1 << 40}, "num_local_experts"),
        (QWEN3_30B_A3B, {"num_experts": 1_024, "num_hidden_layers": 500}, "more than 65536 experts"),
        (QWEN3_30B_A3B, {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        (QWEN3_30B_A3B, {"mlp_only_layers": [48]}, "mlp_only_layers"),
        (QWEN3_30B_A3B, {"mlp_only_layers": "all"}, "mlp_only_layers"),
        (QWEN3_30B_A3B, {"moe_intermediate_size": 10**9}, "moe_intermediate_size"),
        (QWEN15_MOE_A27B, {"shared_expert_intermediate_size": -1}, "shared_expert_intermediate_size"),
        (GPT_OSS_20B, {"swiglu_limit": float("nan")}, "swiglu_limit"),
        (GPT_OSS_20B, {"hidden_act": "gelu"}, "hidden_act"),
        (DEEPSEEK_V3, {"n_group": 7}, "groups of at least 2"),
        (DEEPSEEK_V3, {"n_group": 256, "topk_group": 4}, "groups of at least 2"),
        (DEEPSEEK_V3, {"topk_group": 9}, "topk_group"),
        (DEEPSEEK_V3, {"topk_group": 1, "num_experts_per_tok": 33}, "fewer experts"),
        (DEEPSEEK_V3, {"scoring_func": "softmax"}, "scoring_func"),
        (DEEPSEEK_V3, {"topk_method": "greedy"}, "topk_method"),
        (DEEPSEEK_V3, {"moe_layer_freq": 2}, "moe_layer_freq"),
        (DEEPSEEK_V3, {"qk_rope_head_dim": 63}, "odd"),
        (DEEPSEEK_V3, {"kv_lora_rank": 1 << 20}, "kv_lora_rank"),
        (DEEPSEEK_V3, {"rope_scaling": "yarn"}, "rope_scaling"),
        (LLAMA4_SCOUT, {"text_config": None}, "text_config"),
        (LLAMA4_SCOUT, {"text_config": {"hidden_size": "wide"}}, "hidden_size"),
    ],
)
def test_numbers_out_of_range_are_refused(description: Description, changes: dict[str, Any], message: str) -> None:
    """A typed error that names the key; control: without the change it reads."""
    assert read(description).num_layers > 0
    with pytest.raises(ModelLoadError, match=message):
        read({**description, **changes})
