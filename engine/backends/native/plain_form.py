"""Which models have the form that the compiled kernels compute, and their layers as the program reads them.

The form is Llama's: one rotary embedding, pre-norm layers of grouped-query attention and SwiGLU, every layer seeing the
whole context; heads may be normalised (Qwen3), layers may do without positions (SmolLM3). Anything else is refused with
the reason, and plain tensor operations compute it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.backends.native.abi import MAX_DIM, MAX_GROUP
from engine.backends.native.library import UnusableKernelsError
from engine.model.layers.blocks import GatedMlp, GroupedAttention, Layer
from engine.model.layers.decoder import Decoder
from engine.model.layers.layers import Linear, RmsNorm, silu_mul
from engine.model.layers.sharded import rms_norm


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainLayer:
    """One layer of the plain form."""

    place: int
    """In the KV."""
    attention_norm: RmsNorm
    qkv: Linear
    out: Linear
    mlp_norm: RmsNorm
    gate_up: Linear
    down: Linear
    scale: float
    """Scale of the scores."""
    rotated: bool
    head_gains: Tensor | None
    """Gains of query heads, then of key heads; None where heads are not normalised."""


def check_supported(model: Decoder, max_context: int) -> list[PlainLayer]:
    """The layers of a model that can run on the kernels.

    Raises:
        UnusableKernelsError: its dtype, the shape of its heads, or something that the kernels do not compute.
    """
    config = model.config
    if model.dtype not in (torch.float32, torch.bfloat16):
        raise UnusableKernelsError(f"they have no {str(model.dtype).removeprefix('torch.')}")
    if config.head_dim > MAX_DIM or config.num_heads // config.num_kv_heads > MAX_GROUP:
        raise UnusableKernelsError(f"they take heads up to {MAX_DIM} wide and groups up to {MAX_GROUP}")
    if model.parallel.ranks > 1 or len(model.layers) != config.num_layers:
        raise UnusableKernelsError("they run a whole model on one rank")
    if not model.plain:
        raise UnusableKernelsError("they do not scale embeddings, cap logits or know several rotary embeddings")
    if any(layer.latent or layer.key_dim != layer.value_dim for layer in config.kv_layers):
        raise UnusableKernelsError("they take keys and values of one width")
    for layer in config.kv_layers:
        if not layer.reach.covers(max_context):
            raise UnusableKernelsError(
                f"they let every token see its whole context of {max_context}; "
                f"this model has a {layer.reach.kind} of {layer.reach.size}"
            )
    return [_plain_layer(place, layer) for place, layer in enumerate(model.layers)]


def _plain_layer(place: int, layer: Layer) -> PlainLayer:
    parts = [(one.before, one.block) for one in layer.sublayers if one.after is None and one.share == 1.0]
    if len(parts) != 2 or len(layer.sublayers) != 2:
        raise UnusableKernelsError("they compute pre-norm layers")
    (attention_norm, attention), (mlp_norm, mlp) = parts
    if attention_norm is None or mlp_norm is None:
        raise UnusableKernelsError("they compute pre-norm layers")
    if not isinstance(attention, GroupedAttention) or not attention.rule.plain:
        raise UnusableKernelsError("they compute grouped-query attention without caps or sinks")
    if attention.form.flat_norm or attention.form.norm is not rms_norm:
        raise UnusableKernelsError("they compute norms of single heads whose gains are published whole")
    if not isinstance(mlp, GatedMlp) or mlp.activation is not silu_mul:
        raise UnusableKernelsError("they compute the SwiGLU MLP")
    return PlainLayer(
        place=place,
        attention_norm=attention_norm,
        qkv=attention.qkv,
        out=attention.out.linear,
        mlp_norm=mlp_norm,
        gate_up=mlp.gate_up,
        down=mlp.down.linear,
        scale=attention.rule.scale,
        rotated=attention.form.table is not None,
        head_gains=attention.head_gains,
    )
