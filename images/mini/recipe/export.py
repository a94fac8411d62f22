"""The artefact on disk: a Hugging Face model directory, and reading it back for measurement.

`MODEL.json` records the sha256 of every other file the engine reads, and how it was trained.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from tokenizers import Tokenizer

from recipe import bpe
from recipe.model import MiniLlama, ModelShape

MODEL_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
RECORD = "MODEL.json"


def write_model(folder: Path, network: MiniLlama, tokenizer: Tokenizer) -> None:
    """Write the five files of the model into `folder`, weights rounded to bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", _config(network.shape))
    _write_json(folder / "generation_config.json", _generation_config())
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(network.shape))
    tokenizer.save(str(folder / "tokenizer.json"))
    weights = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in network.state_dict().items()}
    # Not save_file: it makes a file that only its owner can read.
    (folder / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))


def write_record(folder: Path, facts: dict[str, Any]) -> None:
    """Write MODEL.json: the digests of the model's files, then `facts`."""
    _write_json(folder / RECORD, {"name": "athanor-mini", "sha256": digests(folder)} | facts)


def read_record(folder: Path) -> dict[str, Any]:
    """MODEL.json as a dictionary."""
    record: dict[str, Any] = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    return record


def digests(folder: Path) -> dict[str, str]:
    """File name to sha256, hexadecimal, of the model's files in `folder`."""
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in MODEL_FILES}


def read_model(folder: Path) -> tuple[MiniLlama, Tokenizer]:
    """The network of `folder`, its bfloat16 weights widened to float32, and its tokenizer."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    network = MiniLlama(ModelShape(**{name: config[name] for name in asdict(ModelShape())}))
    weights = load_file(folder / "model.safetensors")
    network.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    return network.eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))


def _config(shape: ModelShape) -> dict[str, Any]:
    """config.json as Hugging Face's Llama has it."""
    sizes = asdict(shape)
    rope_theta = sizes.pop("rope_theta")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **sizes,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "rope_theta": rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "bos_token_id": bpe.END_OF_TEXT_ID,
        "eos_token_id": bpe.TURN_END_ID,
        "pad_token_id": bpe.END_OF_TEXT_ID,
    }


def _generation_config() -> dict[str, Any]:
    """Greedy by default; both the end of a turn and the end of text stop."""
    return {
        "bos_token_id": bpe.END_OF_TEXT_ID,
        "eos_token_id": [bpe.TURN_END_ID, bpe.END_OF_TEXT_ID],
        "pad_token_id": bpe.END_OF_TEXT_ID,
        "do_sample": False,
    }


def _tokenizer_config(shape: ModelShape) -> dict[str, Any]:
    """tokenizer_config.json with the chat template."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": shape.max_position_embeddings,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "bos_token": bpe.END_OF_TEXT,
        "eos_token": bpe.TURN_END,
        "pad_token": bpe.END_OF_TEXT,
        "chat_template": bpe.CHAT_TEMPLATE,
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=True) + "\n", encoding="utf-8")
