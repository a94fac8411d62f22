"""Model description from untrusted JSON, validated before anything is allocated by it.

``read_common`` reads the fields that nearly all decoders have; a family adds its own. Every number has a range; an
unknown option is an error that names the supported ones, never a guess. ``engine.model.checkpoint.registry`` reads the
files.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from engine.core.kv.layout import FULL, LayerLayout, Reach, uniform_layers
from engine.errors import ModelLoadError
from engine.model.checkpoint.fields import Fields
from engine.model.layers.rotary import DEFAULT_THETA, RopeScaling, read_rope

MAX_JSON_BYTES = 1 << 20
"""Largest configuration file in bytes; published ones have a few KiB."""

MAX_HIDDEN = 65_536
"""Largest width of the residual stream; the largest published Llama has 16,384."""

MAX_INTERMEDIATE = 1 << 18
"""Largest width of the MLP; the largest published Llama has 53,248."""

MAX_LAYERS = 512
"""Largest number of layers; the largest published Llama has 126."""

MAX_HEADS = 1_024
"""Largest number of attention heads; the largest published Llama has 128."""

MAX_HEAD_DIM = 1_024
"""Largest width of a head; 128 is usual."""

MAX_VOCAB = 1 << 20
"""Largest vocabulary; the largest published has 262,144 ids."""

MAX_POSITIONS = 1 << 24
"""Largest number of positions; the longest published context is ten million."""

LAYER_TYPES = ("full_attention", "sliding_attention")
"""Valid values in ``layer_types``."""


Extra = TypeVar("Extra")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Validated description of a decoder."""

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
    """KV layout and attention range of each layer; empty when all layers match the numbers above, without windows."""
    labels: int = 0
    """Outputs of the classification head; 0: there is none."""
    extra: object = None
    """Family-specific part of the description, of a type defined by the family."""

    @property
    def kv_layers(self) -> tuple[LayerLayout, ...]:
        """Return what each layer stores for a token, over all ranks."""
        return self.layers or uniform_layers(self.num_layers, self.num_kv_heads, self.head_dim)

    def extra_of(self, kind: type[Extra]) -> Extra:
        """Return the family-specific part, which has the family's type."""
        assert isinstance(self.extra, kind), "the description was read by the same family"
        return self.extra

    def within(self, max_context: int) -> ModelConfig:
        """Return this model with a context limit of so many tokens."""
        context = min(self.max_positions, max_context)
        return replace(self, max_positions=context, rope=replace(self.rope, context=min(self.rope.context, context)))

    def kv_origin(self, model_digest: str) -> str:
        """Identify everything that determines a token's KV: the model's files, and the divisor list where there are
        two."""
        if self.rope.kind != "longrope":
            return model_digest
        return f"{model_digest}/{'long' if self.rope.context > self.rope.original_positions else 'short'}"


def read_json_object(path: Path, max_bytes: int) -> dict[str, object]:
    """Read one small, untrusted JSON object.

    Raises:
        ModelLoadError: it is missing, too large, or no JSON object.
    """
    value = read_json(path, max_bytes)
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path.name} is not a JSON object")
    return value


def read_json(path: Path, max_bytes: int) -> object:
    """Read one small, untrusted JSON file.

    Raises:
        ModelLoadError: it is missing, too large, or no JSON.
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
    """Validate the fields that nearly all decoders have.

    Args:
        fields: content of a ``config.json``.
        supported: architectures that may be named.
        default_kv_heads: used when absent; None means the number of attention heads.
        default_head_dim: used when absent; None means the hidden size divided by the number of heads.
        default_positions: longest context when absent.
        default_theta: rotary base when absent.
        default_eps: epsilon of the norms when absent.

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
    """Read the window size of sliding-window layers; ``full`` when absent."""
    if fields.absent("sliding_window") and default is None:
        return FULL
    return Reach("window", fields.integer("sliding_window", 1, MAX_POSITIONS, default=default))


def read_reaches(fields: Fields, num_layers: int, window: Reach, default: tuple[Reach, ...]) -> tuple[Reach, ...]:
    """Read the attention range of each layer from ``layer_types``, or use the default without such a list."""
    types = fields.words("layer_types", num_layers, LAYER_TYPES)
    if types is None:
        return default
    if window is FULL and "sliding_attention" in types:
        raise fields.error("layer_types has sliding_attention, but there is no sliding_window")
    return tuple(window if one == "sliding_attention" else FULL for one in types)


def grouped_layers(config: ModelConfig, reaches: tuple[Reach, ...]) -> tuple[LayerLayout, ...]:
    """Build layers of grouped-query attention with the given attention ranges."""
    dim = config.head_dim
    return tuple(LayerLayout(heads=config.num_kv_heads, key_dim=dim, value_dim=dim, reach=reach) for reach in reaches)
