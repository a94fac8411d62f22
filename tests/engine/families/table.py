"""One row a family: the reference's classes, a tiny base, and the variants of it that are compared."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers

Changes = dict[str, object]

VOCAB = 131

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
    """Of the reference's ``...Config`` and ``...ForCausalLM``."""
    cases: dict[str, Changes]
    """Variants by name: changes to the base."""
    base: Changes = field(default_factory=dict)
    """Changes to ``BASE``."""
    compiled: tuple[str, ...] = ()
    """Variants that the compiled kernels take; all others must be refused with a reason."""
    ranks: tuple[str, ...] = ()
    """Variants that are run on two ranks."""


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10_000.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10_000.0}

LLAMA_CASES: dict[str, Changes] = {
    "gqa 2": {},
    "gqa 4": {"num_attention_heads": 8},
    "mqa": {"num_key_value_heads": 1},
    "mha": {"num_key_value_heads": 4},
    "one layer, one head": {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "wide heads": {"head_dim": 16},
    "narrow heads": {"head_dim": 4},
    "attention bias": {"attention_bias": True},
    "mlp bias": {"mlp_bias": True},
    "both biases, tied": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "large eps": {"rms_norm_eps": 0.1},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}},
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}},
    "llama3": {"rope_parameters": LLAMA3},
    "yarn": {"rope_parameters": YARN},
    "yarn, attention factor": {"rope_parameters": {**YARN, "attention_factor": 1.7}},
    "yarn, mscale": {
        "rope_parameters": {**YARN, "rope_theta": 1_000.0, "mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 8.0}
    },
    "yarn, not truncated": {"rope_parameters": {**YARN, "truncate": False}},
}

MISTRAL_CASES: dict[str, Changes] = {
    "no window": {"sliding_window": None},
    "window 8": {"sliding_window": 8},
    "window 21, mqa": {"sliding_window": 21, "num_key_value_heads": 1},
    "window 1": {"sliding_window": 1},
    "window of the context": {"sliding_window": 128},
    "wide heads, tied": {"sliding_window": None, "head_dim": 24, "tie_word_embeddings": True},
    "window 13, mha": {"sliding_window": 13, "num_key_value_heads": 4},
    "gqa 3, yarn": {
        "sliding_window": 32, "num_attention_heads": 6, "hidden_size": 36, "rope_parameters": YARN,
    },
}  # fmt: skip

QWEN2_CASES: dict[str, Changes] = {
    "gqa 2": {},
    "tied": {"tie_word_embeddings": True},
    "mqa": {"num_key_value_heads": 1},
    "gqa 7": {"num_attention_heads": 14, "num_key_value_heads": 2, "hidden_size": 56},
    "mha, yarn": {"num_key_value_heads": 4, "rope_parameters": YARN},
    "windows from layer 1": {
        "use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1, "num_hidden_layers": 3,
    },
    "windows by layer type": {
        "use_sliding_window": True, "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}  # fmt: skip

QWEN3_CASES: dict[str, Changes] = {
    "gqa 2": {"head_dim": 8},
    "wide heads": {"head_dim": 24},
    "tied, theta": {
        "head_dim": 16, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    },
    "biases": {"head_dim": 8, "attention_bias": True},
    "mqa, yarn": {"head_dim": 10, "num_key_value_heads": 1, "rope_parameters": YARN},
    "default head width": {"num_hidden_layers": 1},
    "gqa 4, windows": {
        "head_dim": 8, "num_attention_heads": 8, "use_sliding_window": True, "sliding_window": 9,
        "max_window_layers": 1, "num_hidden_layers": 3,
    },
}  # fmt: skip

FAMILIES: dict[str, Row] = {
    "llama": Row(
        "Llama", LLAMA_CASES, compiled=tuple(LLAMA_CASES),
        ranks=("gqa 4", "mqa", "mha", "both biases, tied"),
    ),
    "mistral": Row(
        "Mistral", MISTRAL_CASES, compiled=("no window", "window of the context", "wide heads, tied"),
        ranks=("window 8", "window 21, mqa", "wide heads, tied"),
    ),
    "qwen2": Row(
        "Qwen2", QWEN2_CASES, compiled=("gqa 2", "tied", "mqa", "gqa 7", "mha, yarn"),
        ranks=("gqa 7", "mqa", "windows from layer 1"),
    ),
    "qwen3": Row(
        "Qwen3", QWEN3_CASES, compiled=tuple(case for case in QWEN3_CASES if "window" not in case),
        ranks=("wide heads", "biases", "mqa, yarn"),
    ),
}  # fmt: skip

EVERY_CASE = [(family, case) for family, row in FAMILIES.items() for case in row.cases]
RANK_CASES = [(family, case) for family, row in FAMILIES.items() for case in row.ranks]


def save_reference(folder: Path, family: str = "llama", seed: int = 0, **changes: object) -> torch.nn.Module:
    """A model that is random in every detail, norms and biases included, written to a folder."""
    torch.manual_seed(seed)
    row = FAMILIES[family]
    config = getattr(transformers, f"{row.prefix}Config")(**{**BASE, **row.base, **changes})
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{row.prefix}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name or "sinks" in name:
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    model.save_pretrained(folder)
    return model
