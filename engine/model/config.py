"""The model's own description, read from untrusted JSON and checked before anything is allocated by it.

What nearly all decoders have is read here (``read_common``); a family adds what only it has. Every number has a range;
an unknown option is an error that says what is supported, never a guess. ``engine.model.registry`` has the files.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

from engine.errors import ModelLoadError
from engine.kv.layout import FULL, LayerLayout, Reach, uniform_layers
from engine.model.fields import Fields
from engine.model.rotary import DEFAULT_THETA, RopeScaling, read_rope

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

LAYER_TYPES = ("full_attention", "sliding_attention")
"""Words of ``layer_types``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A checked description of a decoder."""

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
    layers: tuple[LayerLayout, ...] = ()
    """What each layer stores and how far it looks; empty: all alike, as the numbers above say, to the first token."""
    extra: object = None
    """What only this family has, in a type of its own."""

    @property
    def kv_layers(self) -> tuple[LayerLayout, ...]:
        """What each layer stores for a token, of all ranks together."""
        return self.layers or uniform_layers(self.num_layers, self.num_kv_heads, self.head_dim)


    def within(self, max_context: int) -> ModelConfig:
        """The same model with contexts of at most so many tokens."""
        context = min(self.max_positions, max_context)
        return replace(self, max_positions=context, rope=replace(self.rope, context=min(self.rope.context, context)))

    def kv_origin(self, model_digest: str) -> str:
        """Names what decides about a token's KV: the model's files, and the list of divisors where there are two."""
        if self.rope.kind != "longrope":
            return model_digest
        return f"{model_digest}/{'long' if self.rope.context > self.rope.original_positions else 'short'}"


def read_json_object(path: Path, max_bytes: int) -> dict[str, object]:
    """Read one small, untrusted JSON object.

    Raises:
        ModelLoadError: missing, too large, or no JSON object.
    """
    value = read_json(path, max_bytes)
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path.name} is not a JSON object")
    return value


def read_json(path: Path, max_bytes: int) -> object:
    """Read one small, untrusted JSON file.

    Raises:
        ModelLoadError: missing, too large, or no JSON.
    """
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise ModelLoadError(f"{path.name} cannot be read: {error.strerror}") from error
    if len(data) > max_bytes:
        raise ModelLoadError(f"{path.name} is larger than {max_bytes} bytes")
    try:
        value: object = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path.name} is not JSON") from error
    return value


def read_common(
    fields: Fields,
    supported: tuple[str, ...],
    *,
    default_kv_heads: int | None = None,
    default_head_dim: int | None = None,
    default_positions: int = 2_048,
    default_theta: float = DEFAULT_THETA,
    default_eps: float = 1e-6,
) -> ModelConfig:
    """Check the fields that nearly all decoders have.

    Args:
        fields: of a ``config.json``.
        supported: architectures that may be named.
        default_kv_heads: where none are named; None: as many as there are attention heads.
        default_head_dim: where none is named; None: the hidden size divided among the heads.
        default_positions: longest context where none is named.
        default_theta: rotary base where none is named.
        default_eps: of the norms, where none is named.

    Raises:
        ModelLoadError: a value is missing, malformed or out of range.
    """
    architecture = fields.architecture(supported)
    hidden = fields.integer("hidden_size", 1, MAX_HIDDEN)
    heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    kv_heads = fields.integer("num_key_value_heads", 1, MAX_HEADS, default=default_kv_heads or heads)
    if heads % kv_heads:
        raise fields.error(f"{heads} attention heads do not divide among {kv_heads} key-value heads")
    if default_head_dim is None and hidden % heads and fields.absent("head_dim"):
        raise fields.error(f"hidden_size {hidden} does not divide among {heads} heads")
    head_dim = fields.integer("head_dim", 2, MAX_HEAD_DIM, default=default_head_dim or hidden // heads)
    if head_dim % 2:
        raise fields.error(f"head_dim {head_dim} is odd; rotary embedding needs pairs")
    max_positions = fields.integer("max_position_embeddings", 1, MAX_POSITIONS, default=default_positions)
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size", 1, MAX_INTERMEDIATE),
        num_layers=fields.integer("num_hidden_layers", 1, MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=fields.integer("vocab_size", 1, MAX_VOCAB),
        max_positions=max_positions,
        rms_norm_eps=fields.number("rms_norm_eps", 0.0, 1.0, default=default_eps),
        rope=read_rope(fields.values, max_positions, default_theta),
        tie_word_embeddings=fields.boolean("tie_word_embeddings"),
    )


def read_window(fields: Fields, *, default: int | None = None) -> Reach:
    """The reach of layers with a sliding window; ``full`` where none is given."""
    if fields.absent("sliding_window") and default is None:
        return FULL
    return Reach("window", fields.integer("sliding_window", 1, MAX_POSITIONS, default=default))


def read_reaches(fields: Fields, num_layers: int, window: Reach, default: tuple[Reach, ...]) -> tuple[Reach, ...]:
    """How far each layer looks, by ``layer_types``, or as by default where there is no such list."""
    types = fields.words("layer_types", num_layers, LAYER_TYPES)
    if types is None:
        return default
    if window is FULL and "sliding_attention" in types:
        raise fields.error("layer_types has sliding_attention, but there is no sliding_window")
    return tuple(window if one == "sliding_attention" else FULL for one in types)


def grouped_layers(config: ModelConfig, reaches: tuple[Reach, ...]) -> tuple[LayerLayout, ...]:
    """Layers of grouped-query attention that look as far as told."""
    dim = config.head_dim
    return tuple(LayerLayout(heads=config.num_kv_heads, key_dim=dim, value_dim=dim, reach=reach) for reach in reaches)
