"""Mapping of a GGUF model to the published layout: its ``config.json`` and the target of each tensor.

``FAMILIES`` has one row for each architecture: its published class, the optional tensors of its layers, and whether its
query and key rows use ggml's order. Names are those of llama.cpp's ``gguf-py/gguf/constants.py``.

llama.cpp rotates neighbouring values of a head where the published form rotates halves, so its converter reorders the
rows of query and key of the "llama" architecture: row ``2 i + half`` of a head is row ``half * dim / 2 + i`` of the
published one. ``Target.heads`` says that this must be undone; other architectures are stored as published.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.convert.gguf import GgufTensor
from engine.convert.rope import ROPE_FACTORS, rope_of
from engine.convert.values import Values
from engine.errors import ModelLoadError
from engine.model.checkpoint.safetensors import show_name, show_names

MAX_LAYERS = 512
MAX_WIDTH = 1 << 18
MAX_HEADS = 1_024
MAX_HEAD_DIM = 1_024
MAX_POSITIONS = 1 << 24
"""Largest context length; the limit in ``engine.model.checkpoint.config``."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """Conversion rules of one architecture."""

    name: str
    """Class name written to ``config.json``."""
    model_type: str
    swapped: bool = False
    """Whether query and key rows use ggml's order."""
    head_norms: bool = False
    """Whether query and key have their own norms."""
    qkv_bias: bool = False
    """Whether query, key and value always have biases, which ``config.json`` does not mention."""


FAMILIES = {
    "llama": Architecture("LlamaForCausalLM", "llama", swapped=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", qkv_bias=True),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", head_norms=True),
}
"""Every supported architecture, by its name in the file."""


@dataclass(frozen=True, slots=True)
class Target:
    """One tensor of the result."""

    name: str
    source: str
    shape: tuple[int, ...]
    heads: int = 0
    """Number of heads whose rows must be reordered; 0 for none."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model in the published layout."""

    config: Mapping[str, object]
    targets: tuple[Target, ...]


@dataclass(frozen=True, slots=True)
class _Shape:
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int


def read_model(values: Values, tensors: Mapping[str, GgufTensor], divisors: Sequence[float] | None) -> Model:
    """Build description and tensor list of a file's model.

    Args:
        values: values of the header.
        tensors: tensors of the header.
        divisors: content of the tensor ``ROPE_FACTORS``, if present.

    Raises:
        ModelLoadError: the architecture or an option is not supported, or tensors are missing, extra or misshaped.
    """
    architecture = values.text("general.architecture")
    if architecture not in FAMILIES:
        raise ModelLoadError(
            f"{values.name}: architecture {show_name(architecture)} is not supported; "
            f"supported are: {', '.join(FAMILIES)}"
        )
    if values.integer("split.count", 0, 1 << 16, default=0) > 1:
        raise ModelLoadError(f"{values.name} is one part of several: join them first, with llama-gguf-split --merge")
    values.refuse(f"{architecture}.expert_count", "mixtures of experts are not converted")
    family = FAMILIES[architecture]
    shape = _read_shape(values, architecture, tensors)
    targets = _targets(family, shape, tensors)
    _check(values.name, targets, tensors)
    rope = rope_of(values, architecture, shape.head_dim, divisors)
    return Model({**_config(values, architecture, shape, tensors), **rope}, tuple(targets))


def _read_shape(values: Values, prefix: str, tensors: Mapping[str, GgufTensor]) -> _Shape:
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelLoadError(f"{values.name}: the matrix token_embd.weight is missing")
    hidden = values.integer(f"{prefix}.embedding_length", 1, MAX_WIDTH)
    heads = values.integer(f"{prefix}.attention.head_count", 1, MAX_HEADS)
    head_dim = values.integer(f"{prefix}.attention.key_length", 2, MAX_HEAD_DIM, default=hidden // heads)
    if values.integer(f"{prefix}.attention.value_length", 2, MAX_HEAD_DIM, default=head_dim) != head_dim:
        raise ModelLoadError(f"{values.name}: keys and values of different length are not supported")
    if values.integer(f"{prefix}.rope.dimension_count", 2, MAX_HEAD_DIM, default=head_dim) != head_dim:
        raise ModelLoadError(f"{values.name}: {prefix}.rope.dimension_count is not the heads' {head_dim}")
    if head_dim % 2:
        raise ModelLoadError(f"{values.name}: heads of {head_dim} numbers have no halves to rotate")
    return _Shape(
        hidden=hidden,
        inner=values.integer(f"{prefix}.feed_forward_length", 1, MAX_WIDTH),
        layers=values.integer(f"{prefix}.block_count", 1, MAX_LAYERS),
        heads=heads,
        kv_heads=values.integer(f"{prefix}.attention.head_count_kv", 1, MAX_HEADS, default=heads),
        head_dim=head_dim,
        vocabulary=embedding.shape[0],
    )


def _config(values: Values, prefix: str, shape: _Shape, tensors: Mapping[str, GgufTensor]) -> dict[str, object]:
    family = FAMILIES[prefix]
    positions = values.integer(f"{prefix}.context_length", 1, MAX_POSITIONS)
    config: dict[str, object] = {
        "architectures": [family.name],
        "model_type": family.model_type,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": positions,
        "rms_norm_eps": values.number(f"{prefix}.attention.layer_norm_rms_epsilon", 0.0, 1.0),
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    if prefix == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
        config["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
    return config


def _targets(family: Architecture, shape: _Shape, tensors: Mapping[str, GgufTensor]) -> list[Target]:
    targets = [
        Target("model.embed_tokens.weight", "token_embd.weight", (shape.vocabulary, shape.hidden)),
        Target("model.norm.weight", "output_norm.weight", (shape.hidden,)),
    ]
    if "output.weight" in tensors:
        targets.append(Target("lm_head.weight", "output.weight", (shape.vocabulary, shape.hidden)))
    attention_bias = family.qkv_bias or "blk.0.attn_q.bias" in tensors
    mlp_bias = "blk.0.ffn_up.bias" in tensors
    for index in range(shape.layers):
        targets += _layer(family, shape, index, (attention_bias, mlp_bias))
    return targets


def _layer(family: Architecture, shape: _Shape, index: int, biases: tuple[bool, bool]) -> list[Target]:
    ours, theirs = f"model.layers.{index}.", f"blk.{index}."
    wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    swaps = (shape.heads, shape.kv_heads) if family.swapped else (0, 0)
    output_bias = biases[0] and not family.qkv_bias
    matrices = (
        ("self_attn.q_proj", "attn_q", wide, shape.hidden, biases[0], swaps[0]),
        ("self_attn.k_proj", "attn_k", narrow, shape.hidden, biases[0], swaps[1]),
        ("self_attn.v_proj", "attn_v", narrow, shape.hidden, biases[0], 0),
        ("self_attn.o_proj", "attn_output", shape.hidden, wide, output_bias, 0),
        ("mlp.gate_proj", "ffn_gate", shape.inner, shape.hidden, biases[1], 0),
        ("mlp.up_proj", "ffn_up", shape.inner, shape.hidden, biases[1], 0),
        ("mlp.down_proj", "ffn_down", shape.hidden, shape.inner, biases[1], 0),
    )
    targets = []
    for name, source, outputs, inputs, bias, heads in matrices:
        targets.append(Target(f"{ours}{name}.weight", f"{theirs}{source}.weight", (outputs, inputs), heads))
        if bias:
            targets.append(Target(f"{ours}{name}.bias", f"{theirs}{source}.bias", (outputs,), heads))
    norms = [("input_layernorm", "attn_norm", shape.hidden), ("post_attention_layernorm", "ffn_norm", shape.hidden)]
    if family.head_norms:
        norms += [(f"self_attn.{one}_norm", f"attn_{one}_norm", shape.head_dim) for one in "qk"]
    targets += [Target(f"{ours}{name}.weight", f"{theirs}{source}.weight", (size,)) for name, source, size in norms]
    return targets


def _check(file: str, targets: list[Target], tensors: Mapping[str, GgufTensor]) -> None:
    for target in targets:
        if target.source not in tensors:
            raise ModelLoadError(f"{file} lacks tensor {target.source}")
        found = tensors[target.source].shape
        if found != target.shape:
            raise ModelLoadError(
                f"{file}: tensor {target.source} has shape {list(found)}; its header asks for {list(target.shape)}"
            )
    used = {target.source for target in targets} | {ROPE_FACTORS}
    extra = [name for name in tensors if name not in used]
    if extra:
        raise ModelLoadError(f"{file} holds {show_names(extra)}, which its architecture has no use for")
