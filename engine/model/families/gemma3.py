"""Gemma 3, text only: Gemma 2's layer with normalised heads and no capped scores (arXiv 2503.19786).

Five local layers precede each global one; local layers have their own rotary base, and the scaling for long contexts
applies to global layers only. Multimodal models are published as ``Gemma3ForConditionalGeneration``: they run
text-only, their vision tensors are not read, and image input is not supported.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.core.kv.layout import FULL
from engine.model.checkpoint.checklist import Checklist
from engine.model.checkpoint.config import MAX_LAYERS, ModelConfig, read_common
from engine.model.checkpoint.fields import Fields
from engine.model.families.gemma2 import decoder_form, read_cap, read_scores, sandwich, with_windows
from engine.model.layers.blocks import AttentionForm, Layer
from engine.model.layers.decoder import Decoder, Family
from engine.model.layers.rotary import RopeScaling, Rotary, read_rope
from engine.model.layers.sharded import offset_norm

GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0
"""Rotary bases of global and local layers when the description has none."""

DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2_304,
    "intermediate_size": 9_216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
}
"""Defaults that published descriptions of multimodal models omit from their text part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Config:
    """Family-specific part of the description."""

    scale: float
    """Scale of attention scores."""
    logit_cap: float
    local_rope: RopeScaling
    """Rotary parameters of layers with a window; all other layers use the model's own."""


def read(fields: Fields) -> ModelConfig:
    """Validate a ``config.json``."""
    fields = fields.defaults(tie_word_embeddings=True)
    ropes = fields.but(rope_parameters=None, rope_scaling=None)
    common = read_common(
        ropes, ("Gemma3ForCausalLM",), default_kv_heads=4, default_head_dim=256, default_positions=131_072
    )
    if not fields.absent("attn_logit_softcapping"):
        raise fields.error("attn_logit_softcapping is not supported; Gemma 3 has none")
    scores = read_scores(fields, (0.0, read_cap(fields, "final_logit_softcapping", 0.0)))
    full, local = _ropes(fields, common.max_positions)
    extra = Gemma3Config(scale=scores.scale, logit_cap=scores.logit_cap, local_rope=local)
    every = fields.integer("_sliding_window_pattern", 1, MAX_LAYERS, default=6)
    every = fields.integer("sliding_window_pattern", 1, MAX_LAYERS, default=every)
    return with_windows(fields, replace(common, rope=full, extra=extra), local_of=every)


def _ropes(fields: Fields, max_positions: int) -> tuple[RopeScaling, RopeScaling]:
    """Read rotary parameters of global and of local layers, in either layout of the description."""
    both = fields.section("rope_parameters") if not fields.absent("rope_parameters") else Fields(fields.name, {})
    full = both.but(rope_parameters=both.values.get("full_attention"))
    if not fields.absent("rope_scaling"):
        full = full.but(rope_parameters=fields.values["rope_scaling"])
    full = full.but(rope_theta=fields.number("rope_theta", 1.0, 1e12, default=GLOBAL_THETA))
    local = both.but(
        rope_parameters=both.values.get("sliding_attention"),
        rope_theta=fields.number("rope_local_base_freq", 1.0, 1e12, default=LOCAL_THETA),
    )
    return read_rope(full.values, max_positions), read_rope(local.values, max_positions)


def read_text_part(fields: Fields) -> ModelConfig:
    """Validate the ``config.json`` of a multimodal model."""
    text = fields.section("text_config")
    tied = fields.boolean("tie_word_embeddings", default=True)
    if not text.absent("final_logit_softcapping"):
        raise text.error("final_logit_softcapping is not supported; Gemma 3 has none")
    config = read(text.defaults(**DEFAULTS).but(architectures=["Gemma3ForCausalLM"], tie_word_embeddings=tied))
    return replace(config, architecture="Gemma3ForConditionalGeneration", stop_ids=frozenset(text.stop_ids()))


def layer(config: ModelConfig, checklist: Checklist, index: int, place: int) -> Layer:
    """Build one layer."""
    extra = config.extra_of(Gemma3Config)
    table = 0 if config.kv_layers[index].reach == FULL else 1
    bias = config.attention_bias
    form = AttentionForm(bias=bias, out_bias=bias, scale=extra.scale, head_norm=True, norm=offset_norm, table=table)
    return sandwich(config, checklist, place, form)


def build(config: ModelConfig, checklist: Checklist) -> Decoder:
    """Build the model."""
    extra = config.extra_of(Gemma3Config)
    device = checklist.memory.device
    rotaries = tuple(Rotary(rope, config.head_dim, device) for rope in (config.rope, extra.local_rope))
    return Decoder(config, checklist, layer, rotaries, decoder_form(config, extra.logit_cap))


def build_text_part(config: ModelConfig, checklist: Checklist) -> Decoder:
    """Build the text part of a multimodal model."""
    checklist.ignore_prefixes("vision_tower.", "multi_modal_projector.")
    return build(config, checklist.under("language_model"))


GEMMA3 = Family(read, build)
GEMMA3_TEXT_PART = Family(read_text_part, build_text_part)
