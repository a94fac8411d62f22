"""Values of a GGUF file from a model folder's descriptions: what ``engine.convert.architecture`` and
``engine.convert.tokenizer`` read, the other way round. Byte-level vocabularies only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from engine.convert.architecture import FAMILIES
from engine.convert.gguf import Value
from engine.convert.pretokenizers import PRETOKENIZERS
from engine.convert.quantise import MAX_JSON_BYTES, json_object, read_bytes
from engine.convert.rope import llama3_divisors
from engine.convert.tokenizer import CONTROL, NORMAL, UNUSED, USER_DEFINED
from engine.errors import ModelLoadError
from engine.model.checkpoint.fields import Fields
from engine.model.checkpoint.safetensors import show_name

TOKENIZER, TOKENIZER_CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"

_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_PARTS = {
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

TokenShape = Callable[[str], tuple[int, ...]]
"""Gives the shape of a tensor of the folder."""


def their_name(name: str) -> str:
    """Return a tensor's name in GGUF files.

    Raises:
        ModelLoadError: it has none.
    """
    if name in _NAMES:
        return _NAMES[name]
    parts = name.split(".")
    inner = ".".join(parts[3:-1])
    if parts[:2] != ["model", "layers"] or not parts[2].isdecimal() or inner not in _PARTS:
        raise ModelLoadError(f"tensor {show_name(name)} has no place in a GGUF file of these architectures")
    return f"blk.{parts[2]}.{_PARTS[inner]}.{parts[-1]}"


def description_of(config: dict[str, object]) -> tuple[str, dict[str, Value]]:
    """Return the architecture's name in the format, and the values that describe the model.

    Raises:
        ModelLoadError: the architecture or its rotation cannot be written.
    """
    fields = Fields("config.json", config)
    published = fields.architecture(tuple(one.name for one in FAMILIES.values()))
    prefix = next(name for name, one in FAMILIES.items() if one.name == published)
    if config.get("quantization_config") is not None:
        raise ModelLoadError("config.json: the model is packed; convert the one that it was made from")
    hidden, heads = fields.integer("hidden_size", 1, 1 << 18), fields.integer("num_attention_heads", 1, 1_024)
    head_dim = fields.integer("head_dim", 2, 1_024, default=max(hidden // heads, 2))
    scaling = _scaling(config)
    base = scaling.get("rope_theta", config.get("rope_theta", 10_000.0))
    found: dict[str, Value] = {
        "context_length": fields.integer("max_position_embeddings", 1, 1 << 24),
        "embedding_length": hidden,
        "block_count": fields.integer("num_hidden_layers", 1, 512),
        "feed_forward_length": fields.integer("intermediate_size", 1, 1 << 18),
        "attention.head_count": heads,
        "attention.head_count_kv": fields.integer("num_key_value_heads", 1, 1_024, default=heads),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": fields.number("rms_norm_eps", 0.0, 1.0, default=1e-6),
        "rope.dimension_count": head_dim,
        "rope.freq_base": float(base) if type(base) in (int, float) else 0.0,
        "vocab_size": fields.integer("vocab_size", 1, 1 << 20),
        **_rope(scaling),
    }
    return prefix, {f"{prefix}.{key}": value for key, value in found.items()}


def divisors_of(config: dict[str, object], description: Mapping[str, Value]) -> list[float] | None:
    """Return the divisors of Llama 3's scaled rotation, which the format holds as a tensor; None for another one."""
    scaling = _scaling(config)
    if scaling.get("rope_type", scaling.get("type")) != "llama3":
        return None
    base, width = (next(v for k, v in description.items() if k.endswith(one)) for one in ("freq_base", "key_length"))
    factor = scaling.get("factor")
    if type(factor) not in (int, float) or not isinstance(base, float) or not isinstance(width, int):
        raise ModelLoadError("config.json: rope_scaling of type llama3 has no factor")
    exact = np.array(llama3_divisors(base, width, float(factor)), np.float32)  # type: ignore[arg-type]  # just asked
    return [float(one) for one in exact]


def _scaling(config: dict[str, object]) -> dict[str, Any]:
    """Return the entry that describes the rotation, in either published place."""
    for key in ("rope_scaling", "rope_parameters"):
        found = config.get(key)
        if isinstance(found, dict):
            return found
    return {}


def _rope(scaling: dict[str, Any]) -> dict[str, Value]:
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind in ("default", "llama3", None):
        return {}
    if kind not in ("linear", "yarn"):
        raise ModelLoadError("config.json: this kind of rope_scaling cannot be written as GGUF")
    fields = Fields("config.json: rope_scaling", scaling)
    found: dict[str, Value] = {"type": str(kind), "factor": fields.number("factor", 1.0, 1e6, default=1.0)}
    if kind == "yarn":
        found["original_context_length"] = fields.integer("original_max_position_embeddings", 1, 1 << 24)
        found |= {f"yarn_{one}": fields.number(one, 0.0, 1e6, default=32.0 if one[5] == "f" else 1.0) for one in _BETAS}
    return {f"rope.scaling.{key}": value for key, value in found.items()}


_BETAS = ("beta_fast", "beta_slow")


def text_of(fds: Mapping[str, int], config: dict[str, object], shape: TokenShape) -> dict[str, Value]:
    """Return the values that describe the tokenizer.

    Raises:
        ModelLoadError: it is not of the supported kind.
    """
    spec = json_object(fds[TOKENIZER], TOKENIZER)
    try:
        vocab, merges, added = spec["model"]["vocab"], spec["model"]["merges"], spec["added_tokens"]  # type: ignore[index]
        entries = {int(one["id"]): (str(one["content"]), bool(one["special"])) for one in added}  # type: ignore[attr-defined]
        if any(one[flag] for one in added for flag in ("lstrip", "rstrip", "single_word")):  # type: ignore[attr-defined]
            raise ModelLoadError(f"{TOKENIZER}: it has added tokens that strip spaces, which GGUF does not know")
        ids = {int(place): str(text) for text, place in vocab.items()} | {k: v[0] for k, v in entries.items()}
        pairs = [one if isinstance(one, str) else " ".join(one) for one in merges]
        pre = _pre_of(spec)
        begin, after = _framing(spec)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ModelLoadError(f"{TOKENIZER} is not of the form that is converted: byte-level BPE") from error
    count = shape("model.embed_tokens.weight")[0]
    if not ids or max(ids) >= count or min(ids) < 0:
        raise ModelLoadError(f"{TOKENIZER} has ids beyond the {count} rows of the embedding")
    kinds = np.full(count, UNUSED, np.int32)
    kinds[list(ids)] = NORMAL
    for place, (_, special) in entries.items():
        kinds[place] = CONTROL if special else USER_DEFINED
    settings = json_object(fds[TOKENIZER_CONFIG], TOKENIZER_CONFIG) if TOKENIZER_CONFIG in fds else {}
    named = {text: place for place, text in ids.items()}
    found: dict[str, Value] = {
        "model": "gpt2",
        "pre": pre,
        "tokens": [ids.get(place, f"[PAD{place}]") for place in range(count)],
        "token_type": kinds,
        "merges": pairs,
        **_marks(settings, config, named),
        "add_bos_token": begin is not None,
        "add_eos_token": after is not None,
    }
    for wanted, key in ((begin, "bos_token_id"), (after, "eos_token_id")):
        if wanted is not None and found.get(key) != named.get(wanted):
            raise ModelLoadError(f"{TOKENIZER} frames texts with a token that {TOKENIZER_CONFIG} does not name so")
    template = _template(fds, settings)
    chat: dict[str, Value] = {} if template is None else {"tokenizer.chat_template": template}
    return {**{f"tokenizer.ggml.{key}": value for key, value in found.items()}, **chat}


def _pre_of(spec: Any) -> str:
    """Return the name of the pre-tokenizer, found by its pattern.

    Raises:
        ModelLoadError: it has none, or the model is no byte-level BPE.
    """
    model, pre = spec["model"], spec["pre_tokenizer"]
    steps = pre["pretokenizers"] if pre["type"] == "Sequence" else [pre]
    last = steps[-1]
    if model["type"] != "BPE" or model.get("byte_fallback") or last["type"] != "ByteLevel" or last["add_prefix_space"]:
        raise ModelLoadError(f"{TOKENIZER} is not of the kind that is converted: byte-level BPE")
    pattern = None
    if len(steps) == 2 and steps[0]["type"] == "Split" and steps[0]["behavior"] == "Isolated":
        pattern = steps[0]["pattern"]["Regex"]
    normaliser = spec.get("normalizer")
    form = (pattern, normaliser is not None, bool(model.get("ignore_merges", False)))
    known = normaliser is None or normaliser == {"type": "NFC"}
    built_in = len(steps) == 1 and last.get("use_regex", True)
    for name, one in PRETOKENIZERS.items():
        if known and (one.pattern, one.nfc, one.whole_words) == form and (pattern is not None or built_in):
            return name
    raise ModelLoadError(f"{TOKENIZER}: its way to split text has no name in GGUF files")


def _framing(spec: Any) -> tuple[str | None, str | None]:
    """Return the tokens that are added before and behind a text."""
    post = spec.get("post_processor")
    if post is None:
        return None, None
    steps = [one for one in post.get("processors", [post]) if one["type"] != "ByteLevel"]
    if not steps:
        return None, None
    if len(steps) != 1 or steps[0]["type"] != "TemplateProcessing":
        raise ModelLoadError(f"{TOKENIZER}: its post_processor cannot be written as GGUF")
    single = [one["SpecialToken"]["id"] if "SpecialToken" in one else None for one in steps[0]["single"]]
    place = single.index(None)
    if place > 1 or len(single) - place > 2:
        raise ModelLoadError(f"{TOKENIZER}: it frames texts with several tokens, which cannot be written as GGUF")
    return (single[0] if place else None), (single[-1] if len(single) > place + 1 else None)


def _marks(settings: dict[str, object], config: dict[str, object], named: Mapping[str, int]) -> dict[str, Value]:
    """Return the ids of begin, end, end of a turn, padding."""
    found: dict[str, Value] = {}
    for key in ("bos", "eos", "unk", "pad"):
        value = settings.get(f"{key}_token")
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str) and text in named:
            found[{"unk": "unknown", "pad": "padding"}.get(key, key) + "_token_id"] = named[text]
    stops = config.get("eos_token_id")
    every = [one for one in (stops if isinstance(stops, list) else [stops]) if type(one) is int]
    if every and "eos_token_id" not in found:
        found["eos_token_id"] = every[0]
    others = [one for one in every if one != found.get("eos_token_id")]
    if others:
        found["eot_token_id"] = others[0]
    return found


def _template(fds: Mapping[str, int], settings: dict[str, object]) -> str | None:
    if TEMPLATE in fds:
        try:
            return read_bytes(fds[TEMPLATE], TEMPLATE, MAX_JSON_BYTES).decode("utf-8")
        except UnicodeDecodeError as error:
            raise ModelLoadError(f"{TEMPLATE} is not UTF-8") from error
    value = settings.get("chat_template")
    if isinstance(value, list):
        value = next(
            (one.get("template") for one in value if isinstance(one, dict) and one.get("name") == "default"), None
        )
    return value if isinstance(value, str) else None
