"""The same weights for every engine: a 0.5B shape made from a seed, and both models in each peer's own format.

``python bench/peer_weights.py shape DIR`` writes a LlamaForCausalLM of Qwen2.5-0.5B's shape with random normal weights
in bf16: of no use as a model, as heavy as one. ``small DIR COUNT`` writes so many models of 300 MB (``SMALL``), each
from a seed of its own, into ``DIR/model-00`` and so on; those that are there stay. ``gguf MODEL FILE`` writes what
llama.cpp reads, in the weights' own dtype; it needs the ``gguf`` package, so it runs in the peers' environment.

Source of the tensor names and of the order of rows in ``attn_q`` and ``attn_k`` (llama.cpp rotates neighbouring pairs,
Hugging Face halves): llama.cpp, docs/development/HOWTO-add-model.md and gguf-py's constants.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 896,
    "intermediate_size": 4_864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 151_936,
    "max_position_embeddings": 4_096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
SMALL = SHAPE | {"num_hidden_layers": 8, "vocab_size": 32_000}
"""The same matrices in fewer layers, 296 MB."""

SEED = 0
STANDARD_DEVIATION = 0.02
"""Of the published initialisation of such models; normal, so that the bits are as varied as real weights' are."""


def write_small(folder: Path, count: int) -> None:
    """Write the models of 300 MB that are missing; one is there whole or not at all."""
    for number in range(count):
        place = folder / f"model-{number:02}"
        if not place.exists():
            draft = folder / f".{place.name}"
            write_shape(draft, SMALL, SEED + 1 + number)
            draft.rename(place)


def write_shape(folder: Path, form: dict[str, Any] = SHAPE, seed: int = SEED) -> None:
    """Configuration, weights, and a byte tokenizer for engines that will not start without one."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(form).items():
        if "norm" in name:
            tensors[name] = torch.ones(shape, dtype=torch.bfloat16)
        else:
            drawn = torch.empty(shape).normal_(0.0, STANDARD_DEVIATION, generator=generator)
            tensors[name] = drawn.to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(form, indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    words = {"<unk>": 0, "<s>": 1, "</s>": 2}
    words |= {char: 3 + index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": "</s>",
                "unk_token": "<unk>",
            }
        )
    )


def tensor_shapes(form: dict[str, Any] = SHAPE) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the shape; the head is the embedding."""
    hidden, ffn, head = form["hidden_size"], form["intermediate_size"], form["head_dim"]
    query, key = form["num_attention_heads"] * head, form["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (form["vocab_size"], hidden)}
    for layer in range(form["num_hidden_layers"]):
        place = f"model.layers.{layer}."
        shapes |= {
            place + "input_layernorm.weight": (hidden,),
            place + "self_attn.q_proj.weight": (query, hidden),
            place + "self_attn.k_proj.weight": (key, hidden),
            place + "self_attn.v_proj.weight": (key, hidden),
            place + "self_attn.o_proj.weight": (hidden, query),
            place + "post_attention_layernorm.weight": (hidden,),
            place + "mlp.gate_proj.weight": (ffn, hidden),
            place + "mlp.up_proj.weight": (ffn, hidden),
            place + "mlp.down_proj.weight": (hidden, ffn),
        }
    return shapes | {"model.norm.weight": (hidden,)}


_GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(model: Path, target: Path) -> None:
    """The model as GGUF, matrices in their own dtype, norms in float32."""
    import gguf
    import torch
    from safetensors import safe_open

    config = json.loads((model / "config.json").read_text())
    writer = gguf.GGUFWriter(target, "llama")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    _add_vocabulary(writer, model, config)
    with safe_open(model / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            tensor = file.get_tensor(name)
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                count = heads if "q_proj" in name else kv_heads
                rows, columns = tensor.shape
                tensor = tensor.view(count, 2, rows // count // 2, columns).transpose(1, 2).reshape(rows, columns)
            kind = None
            if tensor.dim() == 1:
                data = tensor.float().numpy()
            elif tensor.dtype is torch.bfloat16:
                data, kind = tensor.contiguous().view(torch.uint8).numpy(), gguf.GGMLQuantizationType.BF16
            else:
                data = tensor.float().contiguous().numpy()
            writer.add_tensor(_gguf_name(name), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_vocabulary(writer: Any, model: Path, config: dict[str, Any]) -> None:
    """The texts of the tokens, for a server's answers; prompts are ids, so how text becomes tokens does not matter.
    A tokenizer that does not name every id of the model is left out, and only llama.cpp's benchmark runs then."""
    import gguf

    found = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    if len(found) != config["vocab_size"]:
        writer.add_tokenizer_model("no_vocab")
        return
    tokens = sorted(found, key=found.__getitem__)
    byte, normal = gguf.TokenType.BYTE, gguf.TokenType.NORMAL
    kinds = [byte if len(one) == len("<0x00>") and one.startswith("<0x") else normal for one in tokens]
    kinds[0] = gguf.TokenType.UNKNOWN
    kinds[config["bos_token_id"]] = kinds[config["eos_token_id"]] = gguf.TokenType.CONTROL
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(place) for place in range(len(tokens))])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(value=False)


def _gguf_name(name: str) -> str:
    if name.startswith("model.layers."):
        _, _, layer, rest = name.split(".", 3)
        return f"blk.{layer}.{_GGUF_NAMES[rest.removesuffix('.weight')]}.weight"
    return {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }[name]


def main(arguments: list[str]) -> int:
    """``shape DIR``, ``small DIR COUNT`` or ``gguf MODEL FILE``."""
    if arguments[:1] == ["shape"] and len(arguments) == 2:
        write_shape(Path(arguments[1]))
    elif arguments[:1] == ["small"] and len(arguments) == 3:
        write_small(Path(arguments[1]), int(arguments[2]))
    elif arguments[:1] == ["gguf"] and len(arguments) == 3:
        write_gguf(Path(arguments[1]), Path(arguments[2]))
    else:
        sys.stderr.write("usage: peer_weights.py shape DIR | small DIR COUNT | gguf MODEL FILE\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
