"""Gemma 2: sandwich norms, capped scores and logits, local and global layers by turns (arXiv 2408.00118).

Gains of norms are published less one; embeddings are scaled by the root of the hidden size; the scale of scores is
stated on its own (``query_pre_attn_scalar``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.kv.layout import FULL
from engine.model.blocks import AttentionForm, GatedMlp, GroupedAttention, SandwichLayer
from engine.model.checklist import Checklist
from engine.model.config import ModelConfig, grouped_layers, read_common, read_reaches, read_window
from engine.model.decoder import Decoder, DecoderForm, Family
from engine.model.fields import Fields
from engine.model.layers import RmsNorm, gelu_mul
from engine.model.rotary import Rotary
from engine.model.sharded import offset_norm

MAX_SCALAR = 65_536
"""Of ``query_pre_attn_scalar``; published ones are widths of heads."""

LEAST_CAP, LARGEST_CAP = 0.1, 1e6
"""Range of a cap that is believed; published ones are 30 and 50."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaConfig:
    """What Gemmas have besides."""

    scale: float
    """Of scores."""
    score_cap: float
    logit_cap: float


def read(fields: Fields) -> ModelConfig:
    """Check a ``config.json``."""
    common = read_common(
        fields.defaults(tie_word_embeddings=True), ("Gemma2ForCausalLM",),
        default_kv_heads=4, default_head_dim=256, default_positions=8_192,
    )  # fmt: skip
    caps = read_cap(fields, "attn_logit_softcapping", 50.0), read_cap(fields, "final_logit_softcapping", 30.0)
    return with_windows(fields, replace(common, extra=read_scores(fields, caps)), local_of=2)


def read_cap(fields: Fields, key: str, default: float) -> float:
    """A soft-cap; 0 for null, which stands for none."""
    if key in fields.values and fields.absent(key):
        return 0.0
    return fields.number(key, LEAST_CAP, LARGEST_CAP, default=default) if default or not fields.absent(key) else 0.0


def read_scores(fields: Fields, caps: tuple[float, float]) -> GemmaConfig:
    """What Gemmas have besides; refuses what is no decoder."""
    for key in ("hidden_activation", "hidden_act"):
        fields.only(key, ("gelu_pytorch_tanh",), default="gelu_pytorch_tanh")
    if fields.boolean("use_bidirectional_attention"):
        raise fields.error("use_bidirectional_attention is not supported")
    scalar = fields.number("query_pre_attn_scalar", 1.0, MAX_SCALAR, default=256.0)
    return GemmaConfig(scale=scalar**-0.5, score_cap=caps[0], logit_cap=caps[1])


def with_windows(fields: Fields, config: ModelConfig, *, local_of: int) -> ModelConfig:
    """Add the reach of each layer: of ``local_of`` layers the last sees all, unless a list says otherwise."""
    if "sliding_window" in fields.values and fields.absent("sliding_window"):
        raise fields.error("sliding_window must be an integer; local layers have one")
    window = read_window(fields, default=4_096)
    default = tuple(window if (index + 1) % local_of else FULL for index in range(config.num_layers))
    reaches = read_reaches(fields, config.num_layers, window, default)
    return replace(
        config, layers=grouped_layers(config, reaches), attention_bias=fields.boolean("attention_bias")
    )


def sandwich(config: ModelConfig, checklist: Checklist, place: int, form: AttentionForm) -> SandwichLayer:
    """A layer of any Gemma."""

    def norm(name: str) -> RmsNorm:
        return offset_norm(checklist, name, config.hidden_size, config.rms_norm_eps)

    mlp = checklist.under("mlp")
    return SandwichLayer(
        norm("input_layernorm"),
        GroupedAttention(config, checklist.under("self_attn"), place=place, form=form),
        norm("post_attention_layernorm"),
        norm("pre_feedforward_layernorm"),
        GatedMlp(mlp, hidden=config.hidden_size, inner=config.intermediate_size, activation=gelu_mul),
        norm("post_feedforward_layernorm"),
    )


def layer(config: ModelConfig, checklist: Checklist, _index: int, place: int) -> SandwichLayer:
    """One layer."""
    extra, bias = config.extra, config.attention_bias
    assert isinstance(extra, GemmaConfig), "the description was read by this module"
    form = AttentionForm(bias=bias, out_bias=bias, scale=extra.scale, cap=extra.score_cap)
    return sandwich(config, checklist, place, form)


def decoder_form(config: ModelConfig, logit_cap: float) -> DecoderForm:
    """Of any Gemma."""
    return DecoderForm(embedding_scale=config.hidden_size**0.5, logit_cap=logit_cap, norm=offset_norm)


def build(config: ModelConfig, checklist: Checklist) -> Decoder:
    """The model."""
    assert isinstance(config.extra, GemmaConfig), "the description was read by this module"
    rotary = Rotary(config.rope, config.head_dim, checklist.memory.device)
    return Decoder(config, checklist, layer, (rotary,), decoder_form(config, config.extra.logit_cap))


GEMMA2 = Family(read, build)
