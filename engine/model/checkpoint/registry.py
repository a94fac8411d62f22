"""Registry of model families by architecture, a table without dynamic imports; loads a description from a directory.

Files: ``config.json`` (required) and ``generation_config.json`` (stop ids, when present), in the layout that Hugging
Face publishes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from engine.model.checkpoint.checklist import Checklist
from engine.model.checkpoint.config import MAX_JSON_BYTES, ModelConfig, read_json_object
from engine.model.checkpoint.fields import Fields
from engine.model.families.deepseek import DEEPSEEK, KIMI_WITH_VISION
from engine.model.families.gemma2 import GEMMA2
from engine.model.families.gemma3 import GEMMA3, GEMMA3_TEXT_PART
from engine.model.families.gpt_oss import GPT_OSS
from engine.model.families.granite import GRANITE
from engine.model.families.headless import describe_headless, describe_labelled
from engine.model.families.llama import LLAMA
from engine.model.families.llama4 import LLAMA4, LLAMA4_WITH_VISION
from engine.model.families.mistral import MISTRAL
from engine.model.families.mixtral import MIXTRAL
from engine.model.families.olmo2 import OLMO2
from engine.model.families.phi3 import PHI3
from engine.model.families.qwen2 import QWEN2
from engine.model.families.qwen2_moe import QWEN2_MOE
from engine.model.families.qwen3 import QWEN3
from engine.model.families.qwen3_moe import QWEN3_MOE
from engine.model.layers.decoder import Decoder, Family
from engine.model.layers.layers import Memory
from engine.model.layers.parallel import ALONE, Parallel

FAMILIES: dict[str, Family] = {
    "DeepseekV3ForCausalLM": DEEPSEEK,
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma3ForConditionalGeneration": GEMMA3_TEXT_PART,
    "GptOssForCausalLM": GPT_OSS,
    "GraniteForCausalLM": GRANITE,
    "KimiK25ForConditionalGeneration": KIMI_WITH_VISION,
    "Llama4ForCausalLM": LLAMA4,
    "Llama4ForConditionalGeneration": LLAMA4_WITH_VISION,
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": MISTRAL,
    "MixtralForCausalLM": MIXTRAL,
    "Olmo2ForCausalLM": OLMO2,
    "Phi3ForCausalLM": PHI3,
    "Qwen2ForCausalLM": QWEN2,
    "Qwen2MoeForCausalLM": QWEN2_MOE,
    "Qwen3ForCausalLM": QWEN3,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
}
"""Supported values of ``architectures``."""


def load_model_config(model_dir: str, *, headless: bool = False, labelled: bool = False) -> ModelConfig:
    """Read and validate the description in a model directory.

    Args:
        model_dir: directory of the model's files.
        headless: the vocabulary projection is not needed (``engine.model.families.headless``).
        labelled: the model is a classifier, whose head is needed instead.

    Raises:
        ModelLoadError: a file is missing, malformed or out of range, or the architecture is not supported.
    """
    directory = Path(model_dir)
    values = read_json_object(directory / "config.json", MAX_JSON_BYTES)
    labels = 0
    if labelled:
        values, labels = describe_labelled(values)
    elif headless:
        values = describe_headless(values)
    fields = Fields("config.json", values)
    stop_ids = fields.stop_ids()
    generation = directory / "generation_config.json"
    if generation.exists():
        stop_ids |= Fields(generation.name, read_json_object(generation, MAX_JSON_BYTES)).stop_ids()
    config = FAMILIES[fields.architecture(tuple(FAMILIES))].read(fields)
    stop_ids |= config.stop_ids
    stop_ids = {stop for stop in stop_ids if stop < config.vocab_size}
    return replace(config, stop_ids=frozenset(stop_ids), labels=labels)


def build_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    parallel: Parallel = ALONE,
    *,
    final: bool = False,
    scaled: bool = False,
) -> tuple[Decoder, Checklist]:
    """Build the model with unfilled memory, and the checklist by which it is filled. ``final`` and ``scaled``: see
    ``Memory``.

    Raises:
        ConfigurationError: the model cannot be divided among so many ranks.
    """
    checklist = Checklist(Memory(dtype, device, final, scaled), parallel)
    return FAMILIES[config.architecture].build(config, checklist), checklist


def describe_model(config: ModelConfig, parallel: Parallel = ALONE, *, scaled: bool = False) -> Checklist:
    """Return the model's checklist without allocating anything; ``scaled``: see ``Memory``."""
    return build_model(config, torch.float32, torch.device("meta"), parallel, scaled=scaled)[1]
