"""One row a family: the reference's classes, a tiny base, and the variants of it that are compared."""

from __future__ import annotations

import copy
import functools
import json
import tempfile
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import transformers

from tests.engine.model.families.variants import (
    DEEPSEEK_CASES,
    GEMMA2_CASES,
    GEMMA3_CASES,
    GEMMA3_TEXT_CASES,
    GPT_OSS_CASES,
    GRANITE_CASES,
    LLAMA4_CASES,
    LLAMA_CASES,
    MISTRAL_CASES,
    MIXTRAL_CASES,
    OLMO2_CASES,
    PHI3_CASES,
    QWEN2_CASES,
    QWEN2_MOE_CASES,
    QWEN3_CASES,
    QWEN3_MOE_CASES,
    SMALL_PICTURES,
    VOCAB,
    Changes,
)

BASE: Changes = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 57,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Row:
    """A family."""

    prefix: str
    """Of the reference's ``...ForCausalLM``."""
    cases: dict[str, Changes]
    """Variants by name: changes to the base."""
    base: Changes = field(default_factory=dict)
    """Changes to ``BASE``."""
    config: str = "Config"
    """What the name of the reference's configuration ends in."""
    compiled: tuple[str, ...] = ()
    """Variants that the compiled kernels take; all others must be refused with a reason."""
    ranks: tuple[str, ...] = ()
    """Variants that are run on two ranks."""
    full: tuple[str, ...] = ()
    """Variants that only the full counts have."""
    pictures: Changes | None = None
    """Of a model that also takes pictures, whose text part alone is run: the description of the other part."""

    @property
    def architecture(self) -> str:
        """As descriptions name it."""
        return f"{self.prefix}{'ForCausalLM' if self.pictures is None else 'ForConditionalGeneration'}"

    def describe(self, changes: Changes) -> transformers.PreTrainedConfig:
        """The reference's description of a variant."""
        values = {**BASE, **self.base, **changes}
        if self.pictures is not None:
            tied = values.get("tie_word_embeddings", True)
            values = {"text_config": values, "tie_word_embeddings": tied, **self.pictures}
        return getattr(transformers, f"{self.prefix}{self.config}")(**values)


FAMILIES: dict[str, Row] = {
    "gemma2": Row(
        "Gemma2",
        GEMMA2_CASES,
        base={"head_dim": 8},
        ranks=("window 8", "mqa, other scale", "no caps, untied"),
        full=("mha, by layer type", "window of the context, biases", "mqa, other scale"),
    ),
    "gemma3": Row(
        "Gemma3",
        GEMMA3_CASES,
        base={"head_dim": 8},
        config="TextConfig",
        full=("mha, untied, other scale", "capped logits, gqa 4"),
        ranks=("five to one", "linear, mqa"),
    ),
    "gemma3 text part": Row(
        "Gemma3",
        GEMMA3_TEXT_CASES,
        base={"head_dim": 8, "pad_token_id": 0},
        pictures=SMALL_PICTURES,
        ranks=("window 8",),
        full=("linear, mqa", "five to one", "gqa 4"),
    ),
    "granite": Row(
        "Granite", GRANITE_CASES, compiled=("none",), ranks=("all", "tied, mqa"), full=("none", "gqa 3", "tied, mqa")
    ),
    "olmo2": Row("Olmo2", OLMO2_CASES, ranks=("gqa 2", "mha", "mqa"), full=("mha", "gqa 3, yarn")),
    "phi3": Row(
        "Phi3",
        PHI3_CASES,
        base={"pad_token_id": 0},
        compiled=("gqa 2", "mha, tied", "long lists", "short lists", "long lists, attention factor, gqa 3"),
        ranks=("window 11", "long lists, partial, mqa", "mha, tied"),
        full=("gqa 2", "partial", "short lists"),
    ),
    "llama": Row("Llama", LLAMA_CASES, compiled=tuple(LLAMA_CASES), ranks=("gqa 4", "mqa", "mha", "both biases, tied")),
    "mistral": Row(
        "Mistral",
        MISTRAL_CASES,
        compiled=("no window", "window of the context", "wide heads, tied"),
        ranks=("window 8", "window 21, mqa", "wide heads, tied"),
    ),
    "qwen2": Row(
        "Qwen2",
        QWEN2_CASES,
        compiled=("gqa 2", "tied", "mqa", "gqa 7", "mha, yarn"),
        ranks=("gqa 7", "mqa", "windows from layer 1"),
    ),
    "qwen3": Row(
        "Qwen3",
        QWEN3_CASES,
        compiled=tuple(case for case in QWEN3_CASES if "window" not in case),
        ranks=("wide heads", "biases", "mqa, yarn"),
    ),
    "mixtral": Row(
        "Mixtral",
        MIXTRAL_CASES,
        base={"num_local_experts": 4},
        ranks=("window 9, wide heads", "thirteen experts", "one expert"),
        full=("gqa 2", "mqa, one expert a token", "thirteen experts"),
    ),
    "qwen3_moe": Row(
        "Qwen3Moe",
        QWEN3_MOE_CASES,
        base={"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 17, "head_dim": 8},
        ranks=("every second layer", "odd experts, biases"),
        full=("gqa 2, renormalised", "every second layer", "windows, yarn"),
    ),
    "qwen2_moe": Row(
        "Qwen2Moe",
        QWEN2_MOE_CASES,
        base={
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 17,
            "shared_expert_intermediate_size": 21,
        },
        ranks=("windows", "odd experts, a dense layer"),
        full=("gqa 2", "windows", "no biases, every second layer"),
    ),
    "gpt_oss": Row(
        "GptOss",
        GPT_OSS_CASES,
        base={
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 12,
            "head_dim": 8,
            "intermediate_size": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        ranks=("gqa 4, window 5", "odd experts, tight clamps"),
        full=("gqa 2, a window", "gqa 4, window 5", "one expert a token, tied"),
    ),
    "deepseek": Row(
        "DeepseekV3",
        DEEPSEEK_CASES,
        base={
            "num_key_value_heads": 4,
            "n_routed_experts": 12,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 12,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 20,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
        ranks=("kimi: one group", "no query rank, tied", "odd widths, two shared"),
        full=("groups", "no query rank, tied", "all dense, biases", "halves, not renormalised"),
    ),
    "llama4": Row(
        "Llama4",
        LLAMA4_CASES,
        config="TextConfig",
        base={
            "num_local_experts": 4,
            "attention_chunk_size": 16,
            "intermediate_size_mlp": 41,
            "head_dim": 8,
            "num_hidden_layers": 4,
            "floor_scale": 10,
            "attn_scale": 0.3,
        },
        ranks=("chunks of 7, every second layer without positions", "maverick: every second layer dense, no norms"),
        full=("chunks of 16", "chunks of 7, every second layer without positions", "nothing tuned, layers by list"),
    ),
}

WITH_VISION = {"Llama4ForConditionalGeneration": "llama4", "KimiK25ForConditionalGeneration": "deepseek"}
"""Architectures whose text part is that of a family; ``test_with_vision`` has them."""


Case = tuple[str, str]
"""A family and one of its variants."""


def marks(case: Case, later: Collection[Case] = ()) -> tuple[pytest.MarkDecorator, ...]:
    """Marks of a case; those of ``later`` are of the full counts."""
    return (pytest.mark.full,) if case in later or case[1] in FAMILIES[case[0]].full else ()


def as_params(cases: list[Case], later: Collection[Case] = ()) -> list[object]:
    """Parameters of a test that takes a case; some are for the full counts alone, and so are those of ``later``."""
    return [pytest.param(case, marks=marks(case, later), id="-".join(case)) for case in cases]


RANK_CASES = [(family, case) for family, row in FAMILIES.items() for case in row.ranks]
MIXTURES = tuple(family for family, row in FAMILIES.items() if any("experts" in name for name in row.base))
"""Families whose models have experts."""
EVERY_CASE = [(family, case) for family, row in FAMILIES.items() for case in row.cases]
EVERY_PARAM = [pytest.param(*case, marks=marks(case)) for case in EVERY_CASE]
"""Parameters of a test that takes a family and a variant."""


@functools.cache
def _make_reference(family: str, seed: int, changes: str) -> tuple[torch.nn.Module, dict[str, bytes]]:
    """Make one reference model, and the files that describe it; once a process, since making is what takes the time."""
    torch.manual_seed(seed)
    row = FAMILIES[family]
    config = row.describe(json.loads(changes))
    config._attn_implementation = config._experts_implementation = "eager"
    model = getattr(transformers, row.architecture)(config).eval()
    with torch.no_grad():
        buffers = [(name, buffer) for name, buffer in model.named_buffers() if "correction_bias" in name]
        for name, parameter in (*model.named_parameters(), *buffers):
            if "norm" in name or "bias" in name or "sinks" in name:
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return model, {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def save_reference(folder: Path, family: str = "llama", seed: int = 0, **changes: object) -> torch.nn.Module:
    """Write a model that is random in every detail, norms and biases included, to a folder; give the reference's form.

    Model and files are copies: a test may change both.
    """
    model, files = _make_reference(family, seed, json.dumps(changes, sort_keys=True))
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return copy.deepcopy(model)
