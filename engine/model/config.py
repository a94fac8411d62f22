"""The model's own description, read from untrusted JSON and checked before anything is allocated by it.

Files: ``config.json`` (required) and ``generation_config.json`` (stop ids, when present), in the layout that Hugging
Face publishes. Every number has a range; an unknown architecture or option is an error that says what is supported,
never a guess.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from engine.errors import ModelLoadError
from engine.model.rotary import RopeScaling, read_rope

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM",)
"""Names in ``architectures`` that this build can run."""

MAX_JSON_BYTES = 1 << 20
"""Bytes of a configuration file; published ones have a few KiB."""

MAX_HIDDEN = 65_536
"""Width of the residual stream; the largest published Llama has 16,384."""

MAX_INTERMEDIATE = 1 << 18
"""Width of the MLP; the largest published Llama has 53,248."""

MAX_LAYERS = 512
"""Layers; the largest published Llama has 126."""

MAX_HEADS = 1_024
"""Attention heads; the largest published Llama has 128."""

MAX_HEAD_DIM = 1_024
"""Numbers of a head; 128 is usual."""

MAX_VOCAB = 1 << 20
"""Ids in the vocabulary; the largest published has 262,144."""

MAX_POSITIONS = 1 << 24
"""Positions; the longest published context is ten million."""

MAX_STOP_IDS = 256
"""Ids that end an output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A checked description of a Llama-like decoder."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    rms_norm_eps: float
    rope: RopeScaling
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    stop_ids: frozenset[int] = field(default_factory=frozenset)


def load_model_config(model_dir: str) -> ModelConfig:
    """Read and check the description in a model directory.

    Raises:
        ModelLoadError: a file is missing, malformed or out of range, or the architecture is not supported.
    """
    directory = Path(model_dir)
    fields = _Fields("config.json", read_json_object(directory / "config.json", MAX_JSON_BYTES))
    stop_ids = set(fields.stop_ids())
    generation = directory / "generation_config.json"
    if generation.exists():
        stop_ids |= _Fields(generation.name, read_json_object(generation, MAX_JSON_BYTES)).stop_ids()
    return parse_model_config(fields, frozenset(stop_ids))


def read_json_object(path: Path, max_bytes: int) -> dict[str, object]:
    """Read one small, untrusted JSON object.

    Raises:
        ModelLoadError: missing, too large, or no JSON object.
    """
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise ModelLoadError(f"{path.name} cannot be read: {error.strerror}") from error
    if len(data) > max_bytes:
        raise ModelLoadError(f"{path.name} is larger than {max_bytes} bytes")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path.name} is not JSON") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path.name} is not a JSON object")
    return value


def parse_model_config(fields: _Fields, stop_ids: frozenset[int]) -> ModelConfig:
    """Check the fields of a ``config.json``."""
    architecture = fields.architecture()
    hidden = fields.integer("hidden_size", 1, MAX_HIDDEN)
    heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    kv_heads = fields.integer("num_key_value_heads", 1, MAX_HEADS, default=heads)
    if heads % kv_heads:
        raise ModelLoadError(f"config.json: {heads} attention heads do not divide among {kv_heads} key-value heads")
    if hidden % heads and fields.absent("head_dim"):
        raise ModelLoadError(f"config.json: hidden_size {hidden} does not divide among {heads} heads")
    head_dim = fields.integer("head_dim", 2, MAX_HEAD_DIM, default=hidden // heads)
    if head_dim % 2:
        raise ModelLoadError(f"config.json: head_dim {head_dim} is odd; rotary embedding needs pairs")
    fields.only("hidden_act", ("silu",), default="silu")
    vocab_size = fields.integer("vocab_size", 1, MAX_VOCAB)
    max_positions = fields.integer("max_position_embeddings", 1, MAX_POSITIONS, default=2_048)
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size", 1, MAX_INTERMEDIATE),
        num_layers=fields.integer("num_hidden_layers", 1, MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_positions=max_positions,
        rms_norm_eps=fields.number("rms_norm_eps", 0.0, 1.0, default=1e-6),
        rope=read_rope(fields.values, max_positions),
        tie_word_embeddings=fields.boolean("tie_word_embeddings"),
        attention_bias=fields.boolean("attention_bias"),
        mlp_bias=fields.boolean("mlp_bias"),
        stop_ids=frozenset(stop for stop in stop_ids if stop < vocab_size),
    )


class _Fields:
    """Typed, ranged access to an untrusted JSON object; null counts as absent."""

    def __init__(self, name: str, values: dict[str, object]) -> None:
        self.name = name
        self.values = values

    def absent(self, key: str) -> bool:
        return self.values.get(key) is None

    def integer(self, key: str, low: int, high: int, *, default: int | None = None) -> int:
        value = self.values.get(key)
        if value is None:
            value = default
        if type(value) is not int or not low <= value <= high:
            raise ModelLoadError(f"{self.name}: {key} must be an integer from {low} to {high}")
        return value

    def number(self, key: str, low: float, high: float, *, default: float) -> float:
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise ModelLoadError(f"{self.name}: {key} must be a number from {low} to {high}")
        return float(value)

    def boolean(self, key: str) -> bool:
        value = self.values.get(key)
        if value is None:
            return False
        if type(value) is not bool:
            raise ModelLoadError(f"{self.name}: {key} must be true or false")
        return value

    def only(self, key: str, allowed: tuple[str, ...], *, default: str) -> None:
        value = self.values.get(key)
        if value is None:
            value = default
        if value not in allowed:
            raise ModelLoadError(f"{self.name}: {key} must be one of {', '.join(allowed)}")

    def architecture(self) -> str:
        names = self.values.get("architectures")
        supported = ", ".join(SUPPORTED_ARCHITECTURES)
        if not isinstance(names, list) or len(names) != 1 or names[0] not in SUPPORTED_ARCHITECTURES:
            raise ModelLoadError(f"{self.name}: architectures must name one of: {supported}")
        return str(names[0])

    def stop_ids(self) -> set[int]:
        value = self.values.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if len(ids) > MAX_STOP_IDS or any(type(one) is not int or not 0 <= one < MAX_VOCAB for one in ids):
            raise ModelLoadError(f"{self.name}: eos_token_id must be an id or a list of ids")
        return set(ids)
