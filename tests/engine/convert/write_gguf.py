"""Writes GGUF files from models in the published layout, as llama.cpp's converter does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from appliance.common.catalog import embedded_model

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}

Kind = gguf.GGMLQuantizationType


def their_name(name: str) -> str:
    """A tensor's name in GGUF files."""
    if name in NAMES:
        return NAMES[name]
    _model, _layers, index, *rest, last = name.split(".")
    return f"blk.{index}.{PARTS['.'.join(rest)]}.{last}"


def their_rows(name: str, data: np.ndarray, heads: int, kv_heads: int) -> np.ndarray:
    """Query and key rows in ggml's order (``LlamaModel.permute`` of llama.cpp's converter)."""
    count = heads if ".q_proj." in name else kv_heads if ".k_proj." in name else 0
    if not count:
        return data
    return data.reshape(count, 2, data.shape[0] // count // 2, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """A checkpoint in float32."""
    return {name: np.asarray(one, dtype=np.float32) for name, one in load_file(folder / "model.safetensors").items()}


def fits(kind: Kind, data: np.ndarray) -> bool:
    """Whether rows of this length can be of this type."""
    return data.ndim == 2 and data.shape[1] % gguf.GGML_QUANT_SIZES[kind][0] == 0


def add_description(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """What the header says of the model."""
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_theta", 10_000.0))
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(config["vocab_size"])


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path, pre: str) -> None:
    """The vocabulary, as SentencePiece's where bytes are spelt ``<0x00>``, else byte-level."""
    spec = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    vocab = spec["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    added = {one["content"]: one for one in spec["added_tokens"]}
    kinds = [
        gguf.TokenType.UNKNOWN
        if text == spec["model"]["unk_token"]
        else gguf.TokenType.CONTROL
        if text in added and added[text]["special"]
        else gguf.TokenType.USER_DEFINED
        if text in added
        else gguf.TokenType.BYTE
        if text.startswith("<0x")
        else gguf.TokenType.NORMAL
        for text in tokens
    ]
    merges = spec["model"]["merges"]
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    if spec["model"]["byte_fallback"]:
        rank: dict[str, float] = {}
        for place, (left, right) in enumerate(merges):
            rank.setdefault(left + right, -float(place))
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([rank.get(text, -1e4 - place) for place, text in enumerate(tokens)])
        writer.add_add_bos_token(spec["post_processor"] is not None)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges([" ".join(one) for one in merges])
        writer.add_add_bos_token(False)
    for key, add in (("bos_token", writer.add_bos_token_id), ("eos_token", writer.add_eos_token_id)):
        add(vocab[settings[key]])
    if "chat_template" in settings:
        writer.add_chat_template(settings["chat_template"])


def write_gguf(
    target: Path,
    folder: Path,
    *,
    kind: Kind = Kind.F32,
    pre: str = "gpt-2",
    change: Callable[[gguf.GGUFWriter], None] | None = None,
) -> dict[str, np.ndarray]:
    """Write a model of the published layout as one GGUF file.

    Gives the tensors as the file means them, in float32 and in the published order: those that were packed are what
    the format's own library unpacks.
    """
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[config["architectures"][0]]
    writer = gguf.GGUFWriter(target, architecture)
    add_description(writer, config)
    add_tokenizer(writer, folder, pre)
    meant = {}
    for name, data in read_tensors(folder).items():
        used = kind if fits(kind, data) else Kind.F32
        packed = gguf.quants.quantize(data, used)
        meant[name] = gguf.quants.dequantize(packed, used).reshape(data.shape)
        heads = (config["num_attention_heads"], config["num_key_value_heads"])
        rows = their_rows(name, data, *heads) if architecture == "llama" else data
        writer.add_tensor(their_name(name), gguf.quants.quantize(np.ascontiguousarray(rows), used), raw_dtype=used)
    if change is not None:
        change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant


def write_embedded(folder: Path, target: Path, kind: Kind) -> None:
    """The embedded model as a GGUF file; ``folder`` takes its files in float32."""
    from safetensors.torch import load_file as load
    from safetensors.torch import save_file as save

    folder.mkdir(exist_ok=True)
    save(
        {name: one.float() for name, one in load(embedded_model() / "model.safetensors").items()},
        folder / "model.safetensors",
    )
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((embedded_model() / name).read_bytes())
    write_gguf(target, folder, kind=kind)
