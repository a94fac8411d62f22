"""The variants of each family that are compared with the reference: changes to a tiny configuration, by name."""

from __future__ import annotations

Changes = dict[str, object]

VOCAB = 131

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
    "gqa 3, yarn": {"sliding_window": 32, "num_attention_heads": 6, "hidden_size": 36, "rope_parameters": YARN},
}

QWEN2_CASES: dict[str, Changes] = {
    "gqa 2": {},
    "tied": {"tie_word_embeddings": True},
    "mqa": {"num_key_value_heads": 1},
    "gqa 7": {"num_attention_heads": 14, "num_key_value_heads": 2, "hidden_size": 56},
    "mha, yarn": {"num_key_value_heads": 4, "rope_parameters": YARN},
    "windows from layer 1": {
        "use_sliding_window": True,
        "sliding_window": 10,
        "max_window_layers": 1,
        "num_hidden_layers": 3,
    },
    "windows by layer type": {
        "use_sliding_window": True,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}

MIXTRAL_CASES: dict[str, Changes] = {
    "gqa 2": {},
    "mqa, one expert a token": {"num_key_value_heads": 1, "num_experts_per_tok": 1},
    "mha, all experts, tied": {
        "num_key_value_heads": 4,
        "num_experts_per_tok": 3,
        "num_local_experts": 3,
        "tie_word_embeddings": True,
    },
    "window 9, wide heads": {"sliding_window": 9, "head_dim": 12},
    "thirteen experts": {"num_local_experts": 13, "num_experts_per_tok": 5, "intermediate_size": 11},
    "one expert": {"num_local_experts": 1, "num_experts_per_tok": 1, "num_hidden_layers": 1},
}

QWEN3_MOE_CASES: dict[str, Changes] = {
    "gqa 2, renormalised": {"norm_topk_prob": True},
    "mqa, not renormalised, tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "every second layer": {"decoder_sparse_step": 2, "num_hidden_layers": 4, "norm_topk_prob": True},
    "a dense layer by name": {"mlp_only_layers": [0], "num_hidden_layers": 3, "head_dim": 12},
    "odd experts, biases": {
        "num_experts": 11,
        "num_experts_per_tok": 5,
        "moe_intermediate_size": 7,
        "attention_bias": True,
    },
    "windows, yarn": {
        "use_sliding_window": True,
        "sliding_window": 10,
        "rope_parameters": YARN,
        "norm_topk_prob": True,
    },
}

QWEN2_MOE_CASES: dict[str, Changes] = {
    "gqa 2": {},
    "mqa, renormalised, tied": {"num_key_value_heads": 1, "norm_topk_prob": True, "tie_word_embeddings": True},
    "no biases, every second layer": {"qkv_bias": False, "decoder_sparse_step": 2, "num_hidden_layers": 3},
    "windows": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 3, "num_hidden_layers": 4},
    "odd experts, a dense layer": {
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 9,
        "shared_expert_intermediate_size": 15,
        "mlp_only_layers": [1],
    },
}

GPT_OSS_ROPE = {**YARN, "rope_theta": 150_000.0, "truncate": False}

GPT_OSS_CASES: dict[str, Changes] = {
    "gqa 2, a window": {},
    "gqa 4, window 5": {"num_attention_heads": 8, "sliding_window": 5, "num_hidden_layers": 3},
    "mqa, yarn": {"num_key_value_heads": 1, "rope_parameters": GPT_OSS_ROPE},
    "one expert a token, tied": {"num_experts_per_tok": 1, "tie_word_embeddings": True, "head_dim": 12},
    "odd experts, tight clamps": {
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
        "intermediate_size": 13,
        "swiglu_limit": 0.7,
        "swiglu_alpha": 1.1,
    },
    "no biases, types by name": {
        "attention_bias": False,
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 1,
    },
}

DEEPSEEK_YARN = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}

DEEPSEEK_CASES: dict[str, Changes] = {
    "groups": {},
    "kimi: one group": {
        "n_group": 1,
        "topk_group": 1,
        "n_routed_experts": 9,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 2.827,
        "first_k_dense_replace": 1,
        "rope_parameters": DEEPSEEK_YARN,
    },
    "no query rank, tied": {"q_lora_rank": None, "tie_word_embeddings": True},
    "yarn, mscale": {"rope_parameters": {**DEEPSEEK_YARN, "mscale": 0.7, "mscale_all_dim": 1.3}},
    "halves, not renormalised": {
        "rope_interleave": False,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "v_head_dim": 14,
    },
    "all dense, biases": {"first_k_dense_replace": 2, "attention_bias": True},
    "odd widths, two shared": {
        "n_shared_experts": 2,
        "moe_intermediate_size": 7,
        "kv_lora_rank": 13,
        "q_lora_rank": 11,
        "qk_nope_head_dim": 5,
        "v_head_dim": 3,
        "qk_rope_head_dim": 6,
    },
}

LLAMA4_CASES: dict[str, Changes] = {
    "chunks of 16": {},
    "chunks of 7, every second layer without positions": {
        "attention_chunk_size": 7,
        "no_rope_layer_interval": 2,
        "num_hidden_layers": 4,
    },
    "maverick: every second layer dense, no norms": {
        "interleave_moe_layer_step": 2,
        "use_qk_norm": False,
        "num_local_experts": 9,
        "tie_word_embeddings": True,
    },
    "nothing tuned, layers by list": {
        "attn_temperature_tuning": False,
        "no_rope_layers": [0, 1],
        "moe_layers": [0],
        "num_hidden_layers": 2,
    },
    "two experts a token, mqa, biases": {
        "num_experts_per_tok": 2,
        "num_key_value_heads": 1,
        "attention_bias": True,
        "num_hidden_layers": 2,
    },
    "gqa 4, llama3": {
        "num_attention_heads": 8,
        "head_dim": 10,
        "attention_chunk_size": 8,
        "num_hidden_layers": 2,
        "rope_parameters": {**LLAMA3, "factor": 16.0, "high_freq_factor": 1.0},
    },
}

QWEN3_CASES: dict[str, Changes] = {
    "gqa 2": {"head_dim": 8},
    "wide heads": {"head_dim": 24},
    "tied, theta": {
        "head_dim": 16,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    },
    "biases": {"head_dim": 8, "attention_bias": True},
    "mqa, yarn": {"head_dim": 10, "num_key_value_heads": 1, "rope_parameters": YARN},
    "default head width": {"num_hidden_layers": 1},
    "gqa 4, windows": {
        "head_dim": 8,
        "num_attention_heads": 8,
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 1,
        "num_hidden_layers": 3,
    },
}

GEMMA2_CASES: dict[str, Changes] = {
    "window 8": {"sliding_window": 8},
    "mqa, other scale": {"sliding_window": 13, "num_key_value_heads": 1, "query_pre_attn_scalar": 7},
    "no caps, untied": {
        "sliding_window": 8,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "tie_word_embeddings": False,
    },
    "low caps, three layers": {
        "sliding_window": 5,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "num_hidden_layers": 3,
    },
    "mha, by layer type": {
        "sliding_window": 21,
        "num_key_value_heads": 4,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "window of the context, biases": {"sliding_window": 128, "head_dim": 12, "attention_bias": True},
}

GEMMA3_CASES: dict[str, Changes] = {
    "window 8": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "linear, mqa": {
        "sliding_window": 13,
        "num_key_value_heads": 1,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    },
    "five to one": {"sliding_window": 6, "num_hidden_layers": 7},
    "mha, untied, other scale": {
        "sliding_window": 9,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "query_pre_attn_scalar": 5,
        "head_dim": 12,
    },
    "capped logits, gqa 4": {
        "sliding_window": 16,
        "num_attention_heads": 8,
        "final_logit_softcapping": 2.0,
        "layer_types": ["full_attention", "sliding_attention"],
    },
}

GEMMA3_TEXT_CASES: dict[str, Changes] = {
    **{name: GEMMA3_CASES[name] for name in ("window 8", "linear, mqa", "five to one")},
    "mha, untied, other scale": GEMMA3_CASES["mha, untied, other scale"],
    "gqa 4": {"sliding_window": 16, "num_attention_heads": 8, "layer_types": ["full_attention", "sliding_attention"]},
}

SMALL_PICTURES: Changes = {
    "vision_config": {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    },
    "mm_tokens_per_image": 4,
    "image_token_index": VOCAB,
    "boi_token_index": VOCAB,
    "eoi_token_index": VOCAB,
}


def longrope(width: int, first: int, **more: object) -> Changes:
    """Lists of divisors for so many numbers of a head."""
    half = width // 2
    lists = {
        "short_factor": [1.0 + place / 8 for place in range(half)],
        "long_factor": [1.0 + place * 1.5 for place in range(half)],
    }
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, **lists, **more}
    return {"rope_parameters": rope, "original_max_position_embeddings": first}


PHI3_CASES: dict[str, Changes] = {
    "gqa 2": {},
    "mha, tied": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "window 11": {"sliding_window": 11},
    "partial": {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}},
    "long lists": longrope(8, 3),
    "short lists": longrope(8, 128),
    "long lists, partial, mqa": {**longrope(6, 3, partial_rotary_factor=0.75), "num_key_value_heads": 1},
    "long lists, attention factor, gqa 3": {
        **longrope(6, 2, attention_factor=1.3, factor=4.0),
        "num_attention_heads": 6,
        "hidden_size": 36,
    },
}

OLMO2_CASES: dict[str, Changes] = {
    "gqa 2": {},
    "mha": {"num_key_value_heads": 4},
    "mqa": {"num_key_value_heads": 1},
    "biases, tied": {"attention_bias": True, "tie_word_embeddings": True},
    "gqa 3, yarn": {"num_attention_heads": 6, "hidden_size": 36, "rope_parameters": YARN},
}

GRANITE_CASES: dict[str, Changes] = {
    "all": {
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
    },
    "none": {"attention_multiplier": 0.35},
    "tied, mqa": {
        "tie_word_embeddings": True,
        "num_key_value_heads": 1,
        "residual_multiplier": 0.5,
        "logits_scaling": 0.5,
    },
    "biases": {"attention_bias": True, "mlp_bias": True, "embedding_multiplier": 3.0},
    "gqa 3": {"num_attention_heads": 6, "hidden_size": 36, "residual_multiplier": 1.5, "attention_multiplier": 0.5},
}
