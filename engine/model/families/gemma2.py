"""Gemma 2: sandwich norms, capped scores and logits, alternating local and global layers (arXiv 2408.00118).

Gains of norms are published minus one; embeddings are scaled by the root of the hidden size; the scale of scores is a
separate field (``query_pre_attn_scalar``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.core.kv.layout import FULL
from engine.model.checkpoint.checklist import Checklist
from engine.model.checkpoint.config import ModelConfig, grouped_layers, read_common, read_reaches, read_window
from engine.model.checkpoint.fields import Fields
from engine.model.layers.blocks import AttentionForm, GatedMlp, GroupedAttention, Layer, Sublayer
from engine.model.layers.decoder import Decoder, DecoderForm, Family
from engine.model.layers.layers import RmsNorm, gelu_mul
from engine.model.layers.rotary import Rotary
from engine.model.layers.sharded import offset_norm

MAX_SCALAR = 65_536
"""Largest ``query_pre_attn_scalar``; published values are widths of heads."""

LEAST_CAP, LARGEST_CAP = 0.1, 1e6
"""Accepted range of a soft-cap; published values are 30 and 50."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaConfig:
    """Fields specific to the Gemma families."""

    scale: float
    """Scale of attention scores."""
    score_cap: float
    logit_cap: float


def read(fields: Fields) -> ModelConfig:
    """Validate a ``config.json``."""
    common = read_common(
        fields.defaults(tie_word_embeddings=True),
        ("Gemma2ForCausalLM",),
        default_kv_heads=4,
        default_head_dim=256,
        default_positions=8_192,
    )
    caps = read_cap(fields, "attn_logit_softcapping", 50.0), read_cap(fields, "final_logit_softcapping", 30.0)
    return with_windows(fields, replace(common, extra=read_scores(fields, caps)), local_of=2)


def read_cap(fields: Fields, key: str, default: float) -> float:
    """Read a soft-cap; 0 for null, which means none."""
    if key in fields.values and fields.absent(key):
        return 0.0
    return fields.number(key, LEAST_CAP, LARGEST_CAP, default=default) if default or not fields.absent(key) else 0.0


def read_scores(fields: Fields, caps: tuple[float, float]) -> GemmaConfig:
    """Read the fields specific to Gemma; refuses a model that is no decoder."""
    for key in ("hidden_activation", "hidden_act"):
        fields.only(key, ("gelu_pytorch_tanh",), default="gelu_pytorch_tanh")
    if fields.boolean("use_bidirectional_attention"):
        raise fields.error("use_bidirectional_attention is not supported")
    scalar = fields.number("query_pre_attn_scalar", 1.0, MAX_SCALAR, default=256.0)
    return GemmaConfig(scale=scalar**-0.5, score_cap=caps[0], logit_cap=caps[1])


def with_windows(fields: Fields, config: ModelConfig, *, local_of: int) -> ModelConfig:
    """Add the attention range of each layer: the last of every ``local_of`` layers is global, unless a list overrides
    it."""
    if "sliding_window" in fields.values and fields.absent("sliding_window"):
        raise fields.error("sliding_window must be an integer; local layers have one")
    window = read_window(fields, default=4_096)
    default = tuple(window if (index + 1) % local_of else FULL for index in range(config.num_layers))
    reaches = read_reaches(fields, config.num_layers, window, default)
    return replace(config, layers=grouped_layers(config, reaches), attention_bias=fields.boolean("attention_bias"))


def sandwich(config: ModelConfig, checklist: Checklist, place: int, form: AttentionForm) -> Layer:
    """Build a layer of any Gemma."""

    def norm(name: str) -> RmsNorm:
        return offset_norm(checklist, name, config.hidden_size, config.rms_norm_eps)

    attention = GroupedAttention(config, checklist.under("self_attn"), place=place, form=form)
    inner = config.intermediate_size
    mlp = GatedMlp(checklist.under("mlp"), hidden=config.hidden_size, inner=inner, activation=gelu_mul)
    first = Sublayer(norm("input_layernorm"), attention, norm("post_attention_layernorm"))
    return Layer((first, Sublayer(norm("pre_feedforward_layernorm"), mlp, norm("post_feedforward_layernorm"))))


def layer(config: ModelConfig, checklist: Checklist, _index: int, place: int) -> Layer:
    """Build one layer."""
    extra, bias = config.extra_of(GemmaConfig), config.attention_bias
    form = AttentionForm(bias=bias, out_bias=bias, scale=extra.scale, cap=extra.score_cap)
    return sandwich(config, checklist, place, form)


def decoder_form(config: ModelConfig, logit_cap: float) -> DecoderForm:
    """Return the decoder form of any Gemma."""
    return DecoderForm(embedding_scale=config.hidden_size**0.5, logit_cap=logit_cap, norm=offset_norm)


def build(config: ModelConfig, checklist: Checklist) -> Decoder:
    """Build the model."""
    extra = config.extra_of(GemmaConfig)
    rotary = Rotary(config.rope, config.head_dim, checklist.memory.device)
    return Decoder(config, checklist, layer, (rotary,), decoder_form(config, extra.logit_cap))


GEMMA2 = Family(read, build)
