"""``quantization_config`` as models publish it, and as they should not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ModelLoadError
from engine.model.quantised.awq import Awq
from engine.model.quantised.codec import Present, Stored
from engine.model.quantised.fp8 import ScaledBlocks
from engine.model.quantised.gptq import Gptq, Layout
from engine.model.quantised.grouped import GroupedNumbers, ScaleGrouping
from engine.model.quantised.mxfp4 import mxfp4
from engine.model.quantised.scheme import METHODS, read_scheme

DEEPSEEK_V3 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
QWEN_AWQ = {
    "bits": 4,
    "group_size": 128,
    "modules_to_not_convert": None,
    "quant_method": "awq",
    "version": "gemm",
    "zero_point": True,
}
QWEN_GPTQ = {
    "bits": 4,
    "group_size": 128,
    "damp_percent": 0.01,
    "desc_act": False,
    "static_groups": False,
    "sym": True,
    "true_sequential": True,
    "model_name_or_path": None,
    "quant_method": "gptq",
}
GPT_OSS = {"modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"], "quant_method": "mxfp4"}


def compressed(form: str, **weights: object) -> dict[str, Any]:
    """compressed-tensors' configuration as llm-compressor writes it."""
    values = {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "group_size": None,
        "strategy": "channel",
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "observer": "minmax",
        "observer_kwargs": {},
        **weights,
    }
    group = {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": values}
    return {
        "config_groups": {"group_0": group},
        "format": form,
        "ignore": ["lm_head", "re:.*self_attn.*"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


KIMI_K2 = compressed("pack-quantized", num_bits=4, group_size=32, strategy="group")
LLAMA_FP8 = compressed("float-quantized", type="float")
LLAMA_W8A8 = compressed("int-quantized")

SHAPE = (256, 512)
PARTS = {
    "deepseek": {"weight": Stored("F8_E4M3", SHAPE), "weight_scale_inv": Stored("F32", (2, 4))},
    "awq": {"qweight": Stored("I32", (512, 32)), "qzeros": Stored("I32", (4, 32)), "scales": Stored("F16", (4, 256))},
    "gptq": {"qweight": Stored("I32", (64, 256)), "qzeros": Stored("I32", (4, 32)), "scales": Stored("F16", (4, 256))},
    "kimi": {
        "weight_packed": Stored("I32", (256, 64)),
        "weight_shape": Stored("I32", (2,)),
        "weight_scale": Stored("BF16", (256, 16)),
    },
    "fp8": {"weight": Stored("F8_E4M3", SHAPE), "weight_scale": Stored("BF16", (256, 1))},
    "int8": {"weight": Stored("I8", SHAPE), "weight_scale": Stored("BF16", (256, 1))},
}


@pytest.mark.parametrize(
    ("config", "parts", "codec"),
    [
        (DEEPSEEK_V3, "deepseek", ScaledBlocks("weight_scale_inv", (128, 128))),
        (QWEN_AWQ, "awq", Awq(SHAPE, 128)),
        (QWEN_GPTQ, "gptq", Gptq(SHAPE, Layout(4, 128, True), 4, False)),
        ({**QWEN_GPTQ, "checkpoint_format": "gptq_v2"}, "gptq", Gptq(SHAPE, Layout(4, 128, False), 4, False)),
        (KIMI_K2, "kimi", GroupedNumbers(SHAPE, ScaleGrouping(4, 32, True), packed=True, whole=False, reordered=False)),
        (LLAMA_FP8, "fp8", ScaledBlocks("weight_scale", (1, 0))),
        (
            LLAMA_W8A8,
            "int8",
            GroupedNumbers(SHAPE, ScaleGrouping(8, 0, True), packed=False, whole=False, reordered=False),
        ),
    ],
)
def test_published_configurations(config: dict[str, Any], parts: str, codec: object) -> None:
    """The configurations of well-known checkpoints give the codec of their format."""
    scheme = read_scheme({"quantization_config": config})
    assert scheme is not None
    assert scheme.matrix is not None
    assert scheme.matrix(Present("m", PARTS[parts]), SHAPE) == codec


def test_experts_in_mxfp4_and_no_configuration() -> None:
    """Only gpt-oss' stacked experts are packed; without a configuration nothing is."""
    scheme = read_scheme({"quantization_config": GPT_OSS})
    assert scheme is not None
    assert scheme.matrix is None
    assert scheme.stacked is mxfp4
    assert read_scheme({"hidden_size": 3}) is None
    assert read_scheme({"quantization_config": None}) is None


def changed(config: dict[str, Any], **weights: object) -> dict[str, Any]:
    """The same with other weights."""
    group = config["config_groups"]["group_0"]
    return {**config, "config_groups": {"g": {**group, "weights": {**group["weights"], **weights}}}}


REFUSED = {
    "not an object": [1],
    "no method": {},
    "unknown method": {"quant_method": "bitsandbytes"},
    "method of another type": {"quant_method": ["fp8"]},
    "fp8 of another kind": {**DEEPSEEK_V3, "fmt": "e3m4"},
    "half a block": {**DEEPSEEK_V3, "weight_block_size": [128]},
    "block of nothing": {**DEEPSEEK_V3, "weight_block_size": [0, 128]},
    "block of true": {**DEEPSEEK_V3, "weight_block_size": [True, 128]},
    "awq of 3 bits": {**QWEN_AWQ, "bits": 3},
    "awq gemv": {**QWEN_AWQ, "version": "gemv"},
    "awq without zeros": {**QWEN_AWQ, "zero_point": False},
    "group of nothing": {**QWEN_AWQ, "group_size": 0},
    "group beyond all": {**QWEN_GPTQ, "group_size": 1 << 40},
    "group of text": {**QWEN_GPTQ, "group_size": "128"},
    "gptq of 3 bits": {**QWEN_GPTQ, "bits": 3},
    "gptq of true": {**QWEN_GPTQ, "bits": True},
    "gptq for marlin": {**QWEN_GPTQ, "checkpoint_format": "marlin"},
    "unknown format": compressed("nvfp4-pack-quantized"),
    "no groups": {**KIMI_K2, "config_groups": {}},
    "groups as a list": {**KIMI_K2, "config_groups": [1]},
    "a group of text": {**KIMI_K2, "config_groups": {"g": "x"}},
    "weights missing": {**KIMI_K2, "config_groups": {"g": {"weights": None}}},
    "3 bits": changed(KIMI_K2, num_bits=3),
    "group without a size": changed(KIMI_K2, group_size=None),
    "channel with a size": changed(KIMI_K2, strategy="channel"),
    "unknown strategy": changed(KIMI_K2, strategy="tensor_group"),
    "block without one": changed(LLAMA_FP8, strategy="block"),
    "floats that are packed": changed(KIMI_K2, type="float"),
    "two ways at once": {
        **KIMI_K2,
        "config_groups": {**changed(KIMI_K2)["config_groups"], "h": changed(KIMI_K2, num_bits=8)["config_groups"]["g"]},
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_says_what_is(name: str) -> None:
    """An unknown method or option is an error that names its place in config.json."""
    with pytest.raises(ModelLoadError, match=r"config\.json: quantization_config") as caught:
        read_scheme({"quantization_config": REFUSED[name]})
    if name.startswith("unknown method"):
        assert all(method in str(caught.value) for method in METHODS)


scalars = st.none() | st.booleans() | st.integers(-2, 1 << 70) | st.sampled_from([*METHODS, "group", "int", "x"])
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["weights", "config_groups", "g", "type", "num_bits", "strategy"]), inner, max_size=4
        )
    ),
    max_leaves=8,
)


@settings(deadline=None, derandomize=True, max_examples=400)
@given(
    st.sampled_from([DEEPSEEK_V3, QWEN_AWQ, QWEN_GPTQ, KIMI_K2, LLAMA_FP8, LLAMA_W8A8]),
    st.dictionaries(st.sampled_from(sorted({*DEEPSEEK_V3, *QWEN_AWQ, *QWEN_GPTQ, *KIMI_K2})), values, max_size=3),
)
def test_no_configuration_raises_anything_else(config: dict[str, Any], changes: dict[str, object]) -> None:
    """Whatever JSON stands there gives a scheme or a load error."""
    try:
        scheme = read_scheme({"quantization_config": {**config, **changes}})
        assert scheme is not None
        if scheme.matrix is not None:
            scheme.matrix(Present("m", PARTS["gptq"]), SHAPE)
    except ModelLoadError:
        pass
