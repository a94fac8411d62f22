"""Descriptions of published models, dense ones: read, and the numbers that follow from them are the published ones."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from engine.core.kv.layout import FULL, Reach
from engine.errors import ModelLoadError
from engine.model.checkpoint.config import ModelConfig
from engine.model.checkpoint.registry import describe_model, load_model_config
from engine.startup.memory_estimate import parameters

Values = dict[str, object]

SIGLIP = 416_866_032
"""Numbers of the part for pictures in every Gemma 3, its projection aside."""


def described(name: str, sizes: tuple[int, ...], **more: object) -> Values:
    """A description; sizes: hidden, inner, layers, heads, key-value heads, vocabulary."""
    keys = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
    )
    return {"architectures": [f"{name}ForCausalLM"], **dict(zip(keys, sizes, strict=True)), **more}


def with_pictures(**text: object) -> Values:
    """Gemma 3's, whose text part says only what is not its default."""
    linear = {"factor": 8.0, "rope_type": "linear"}
    text = {"rope_scaling": linear, "sliding_window": 1_024, **text}
    return {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "eos_token_id": [1, 106]}


LISTS = {"type": "longrope", "long_factor": [4.0] * 48, "short_factor": [1.0] * 48}
TIED = {"tie_word_embeddings": True}
LONG = {"max_position_embeddings": 131_072, "original_max_position_embeddings": 4_096, "rope_scaling": LISTS}

PUBLISHED: dict[str, tuple[Values, int, int]] = {
    "Llama 3.1 8B": (described("Llama", (4096, 14336, 32, 32, 8, 128_256)), 8_030_261_248, 131_072),
    "Llama 3.1 405B": (described("Llama", (16384, 53248, 126, 128, 8, 128_256)), 405_853_388_800, 516_096),
    "Llama 3.2 1B": (described("Llama", (2048, 8192, 16, 32, 8, 128_256), **TIED), 1_235_814_400, 32_768),
    "Mistral 7B v0.1": (
        described("Mistral", (4096, 14336, 32, 32, 8, 32_000), sliding_window=4_096),
        7_241_732_096,
        131_072,
    ),
    "Mistral Nemo": (
        described("Mistral", (5120, 14336, 40, 32, 8, 131_072), head_dim=128, sliding_window=None),
        12_247_782_400,
        163_840,
    ),
    "Qwen2.5 0.5B": (described("Qwen2", (896, 4864, 24, 14, 2, 151_936), **TIED), 494_032_768, 12_288),
    "Qwen2.5 7B": (described("Qwen2", (3584, 18944, 28, 28, 4, 152_064)), 7_615_616_512, 57_344),
    "Qwen3 0.6B": (described("Qwen3", (1024, 3072, 28, 16, 8, 151_936), head_dim=128, **TIED), 596_049_920, 114_688),
    "Qwen3 8B": (described("Qwen3", (4096, 12288, 36, 32, 8, 151_936), head_dim=128), 8_190_735_360, 147_456),
    "Gemma 2 2B": (described("Gemma2", (2304, 9216, 26, 8, 4, 256_000), head_dim=256), 2_614_341_888, 106_496),
    "Gemma 2 9B": (described("Gemma2", (3584, 14336, 42, 16, 8, 256_000), head_dim=256), 9_241_705_984, 344_064),
    "Gemma 2 27B": (
        described("Gemma2", (4608, 36864, 46, 32, 16, 256_000), head_dim=128, query_pre_attn_scalar=144),
        27_227_128_320,
        376_832,
    ),
    "Gemma 3 270M": (
        described("Gemma3", (640, 2048, 18, 4, 1, 262_144), head_dim=256, sliding_window=512),
        268_098_176,
        18_432,
    ),
    "Gemma 3 1B": (
        described(
            "Gemma3",
            (1152, 6912, 26, 4, 1, 262_144),
            head_dim=256,
            sliding_window=512,
            sliding_window_pattern=6,
            rope_local_base_freq=10_000,
            rope_theta=1_000_000,
        ),
        999_885_952,
        26_624,
    ),
    "Gemma 3 4B": (
        with_pictures(hidden_size=2560, intermediate_size=10_240, num_hidden_layers=34),
        4_300_079_472 - SIGLIP - 1_152 * 2560 - 1_152,
        139_264,
    ),
    "Gemma 3 27B": (
        with_pictures(
            hidden_size=5376,
            intermediate_size=21_504,
            num_hidden_layers=62,
            num_attention_heads=32,
            num_key_value_heads=16,
            head_dim=128,
            query_pre_attn_scalar=168,
        ),
        27_432_406_640 - SIGLIP - 1_152 * 5376 - 1_152,
        507_904,
    ),
    "Phi-3 mini 4k": (
        described("Phi3", (3072, 8192, 32, 32, 32, 32_064), sliding_window=2_047),
        3_821_079_552,
        393_216,
    ),
    "Phi-3 mini 128k": (described("Phi3", (3072, 8192, 32, 32, 32, 32_064), **LONG), 3_821_079_552, 393_216),
    "Phi-4": (
        described(
            "Phi3",
            (5120, 17920, 40, 40, 10, 100_352),
            rope_theta=250_000,
            max_position_embeddings=16_384,
            sliding_window=None,
            rope_scaling=None,
        ),
        14_659_507_200,
        204_800,
    ),
    "Phi-4 mini": (
        described(
            "Phi3", (3072, 8192, 32, 24, 8, 200_064), partial_rotary_factor=0.75, sliding_window=262_144, **LONG, **TIED
        ),
        3_836_021_760,
        131_072,
    ),
    "OLMo 2 7B": (described("Olmo2", (4096, 11008, 32, 32, 32, 100_352)), 7_298_617_344, 524_288),
    "OLMo 2 13B": (described("Olmo2", (5120, 13824, 40, 40, 40, 100_352)), 13_716_198_400, 819_200),
    "Granite 3.1 2B": (described("Granite", (2048, 8192, 40, 32, 8, 49_155), **TIED), 2_533_531_648, 81_920),
    "Granite 3.1 8B": (described("Granite", (4096, 12800, 40, 32, 8, 49_155), **TIED), 8_170_848_256, 163_840),
}
"""By name: what decides in the description, parameters as published, and bytes of a token's KV in bfloat16: two times
layers, key-value heads, width of a head, and two bytes."""


def load(folder: Path, values: Values) -> ModelConfig:
    """Read a description."""
    (folder / "config.json").write_text(json.dumps(values))
    return load_model_config(str(folder))


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_and_kv_of_published_models(name: str, tmp_path: Path) -> None:
    """The description is read; the checkpoint that it asks for has the published number of parameters, exactly, and a
    token the exact number of bytes."""
    values, count, kv_bytes = PUBLISHED[name]
    config = load(tmp_path, values)
    assert parameters(describe_model(config)) == count
    assert 2 * sum(layer.numbers for layer in config.kv_layers) == kv_bytes


def test_gemma_3_looks_as_far_as_published(tmp_path: Path) -> None:
    """Five layers of six see 1,024 tokens and rotate by a base of their own; stop ids are those of the whole file."""
    config = load(tmp_path, PUBLISHED["Gemma 3 27B"][0])
    local = Reach("window", 1_024)
    assert [layer.reach for layer in config.kv_layers] == ([local] * 5 + [FULL]) * 10 + [local] * 2
    assert (config.rope.kind, config.rope.factor, config.rope.theta) == ("linear", 8.0, 1_000_000.0)
    assert config.extra.local_rope.theta == 10_000.0
    assert math.isclose(config.extra.scale, 168**-0.5)
    assert config.stop_ids == {1, 106}


def test_the_limit_of_contexts_chooses_the_list_of_divisors(tmp_path: Path) -> None:
    """Above the first training's context all sequences take the long list, within it the short one; KV of the one
    cannot be taken for KV of the other. Control: a model without lists has one kind of KV."""
    config = load(tmp_path, PUBLISHED["Phi-4 mini"][0])
    long, short = config.within(4_097), config.within(4_096)
    assert config.rope.divisors == long.rope.divisors == (4.0,) * 48
    assert short.rope.divisors == (1.0,) * 48
    assert config.kv_origin("00") == long.kv_origin("00") != short.kv_origin("00")
    assert long.rope.attention_factor == short.rope.attention_factor == math.sqrt(1 + math.log(32) / math.log(4_096))
    plain = load(tmp_path, PUBLISHED["Phi-4"][0])
    assert plain.kv_origin("00") == plain.within(16).kv_origin("00") == "00"


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("Phi-4 mini", {"rope_scaling": {**LISTS, "short_factor": [1.0] * 47}}, "short_factor must be a list of 48"),
        ("Phi-4 mini", {"rope_scaling": {**LISTS, "long_factor": [0.0] * 48}}, "long_factor must be a number"),
        ("Phi-4 mini", {"rope_scaling": {**LISTS, "long_factor": ["1"] * 48}}, "long_factor must be a number"),
        ("Phi-4 mini", {"rope_scaling": {**LISTS, "type": "dynamic"}}, "type must be one of"),
        ("Phi-4 mini", {"rope_scaling": [1]}, "rope_scaling must be a JSON object"),
        ("Phi-4 mini", {"partial_rotary_factor": 0.01}, "they must be pairs"),
        ("Phi-4 mini", {"original_max_position_embeddings": 1}, "original_max_position_embeddings"),
        ("Gemma 2 2B", {"attn_logit_softcapping": -1}, "attn_logit_softcapping"),
        ("Gemma 2 2B", {"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        ("Gemma 2 2B", {"sliding_window": None}, "sliding_window must be an integer"),
        ("Gemma 3 1B", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is not supported"),
        ("Gemma 3 1B", {"rope_local_base_freq": 0}, "rope_local_base_freq"),
        ("Gemma 3 4B", {"text_config": 3}, "text_config must be a JSON object"),
        ("Granite 3.1 2B", {"residual_multiplier": 0}, "residual_multiplier"),
    ],
)
def test_what_a_family_adds_is_checked(name: str, changes: Values, words: str, tmp_path: Path) -> None:
    """Wrong numbers, lists and options are a load error that names them; control: without the change it is read."""
    values = PUBLISHED[name][0]
    assert load(tmp_path, values).num_layers
    with pytest.raises(ModelLoadError, match=words):
        load(tmp_path, {**values, **changes})
