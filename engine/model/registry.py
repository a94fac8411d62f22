"""Which family runs which architecture: a table, no import by name. And the way from a directory to a description.

Files: ``config.json`` (required) and ``generation_config.json`` (stop ids, when present), in the layout that Hugging
Face publishes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from engine.model.checklist import Checklist
from engine.model.config import MAX_JSON_BYTES, ModelConfig, read_json_object
from engine.model.decoder import Decoder, Family
from engine.model.deepseek import DEEPSEEK, KIMI_WITH_VISION
from engine.model.fields import Fields
from engine.model.gemma2 import GEMMA2
from engine.model.gemma3 import GEMMA3, GEMMA3_TEXT_PART
from engine.model.gpt_oss import GPT_OSS
from engine.model.granite import GRANITE
from engine.model.headless import describe_headless
from engine.model.layers import Memory
from engine.model.llama import LLAMA
from engine.model.llama4 import LLAMA4, LLAMA4_WITH_VISION
from engine.model.mistral import MISTRAL
from engine.model.mixtral import MIXTRAL
from engine.model.olmo2 import OLMO2
from engine.model.parallel import ALONE, Parallel
from engine.model.phi3 import PHI3
from engine.model.qwen2 import QWEN2
from engine.model.qwen2_moe import QWEN2_MOE
from engine.model.qwen3 import QWEN3
from engine.model.qwen3_moe import QWEN3_MOE

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
"""Names in ``architectures`` that this build can run."""


def load_model_config(model_dir: str, *, headless: bool = False) -> ModelConfig:
    """Read and check the description in a model directory.

    Args:
        model_dir: where the files are.
        headless: the vocabulary projection is not needed (``engine.model.headless``).

    Raises:
        ModelLoadError: a file is missing, malformed or out of range, or the architecture is not supported.
    """
    directory = Path(model_dir)
    values = read_json_object(directory / "config.json", MAX_JSON_BYTES)
    fields = Fields("config.json", describe_headless(values) if headless else values)
    stop_ids = fields.stop_ids()
    generation = directory / "generation_config.json"
    if generation.exists():
        stop_ids |= Fields(generation.name, read_json_object(generation, MAX_JSON_BYTES)).stop_ids()
    config = FAMILIES[fields.architecture(tuple(FAMILIES))].read(fields)
    stop_ids |= config.stop_ids
    return replace(config, stop_ids=frozenset(stop for stop in stop_ids if stop < config.vocab_size))


def build_model(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, parallel: Parallel = ALONE, *, final: bool = False
) -> tuple[Decoder, Checklist]:
    """The model in memory that is still to be filled, and the list by which it is filled. ``final``: see
    ``Memory``.

    Raises:
        ConfigurationError: the model cannot be dealt to so many ranks.
    """
    checklist = Checklist(Memory(dtype, device, final), parallel)
    return FAMILIES[config.architecture].build(config, checklist), checklist


def describe_model(config: ModelConfig, parallel: Parallel = ALONE) -> Checklist:
    """What the model wants from its checkpoint; nothing is allocated."""
    return build_model(config, torch.float32, torch.device("meta"), parallel)[1]
