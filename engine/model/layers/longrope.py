"""LongRoPE: a divisor for each frequency, one list for short contexts and one for long ones (arXiv 2402.13753).

``transformers`` takes the long list as soon as a sequence is longer than the context that the model was trained with
first, and then for all of its positions: the keys of one token would depend on how long its sequence is by now, and
could be neither kept nor shared. Here the *limit* of contexts decides, once, when the model is loaded, as in vLLM: a
limit above the first training's context takes the long list for every sequence, however short. An operator who serves
short contexts only (``max_context``) gets the short list. Within either a key depends on its position alone.
"""

from __future__ import annotations

import math

from engine.model.checkpoint.fields import Fields
from engine.model.layers.rotary import DEFAULT_THETA, MAX_NUMBER, RopeScaling

NAMES = ("longrope", "su", "yarn")
"""Values of the type in published descriptions of Phi-3; all three mean this."""

MAX_DIVISOR = 1e6
"""Largest divisor that is believed; published ones reach 65."""

DEFAULT_FIRST_CONTEXT = 4_096
"""Tokens of the first training's contexts where a description does not say."""


def read_longrope(fields: Fields, head_dim: int, max_positions: int) -> RopeScaling:
    """Read Phi's rotary parameters: none or LongRoPE, of all of a head or of its first part.

    Args:
        fields: of a ``config.json``.
        head_dim: numbers of a head.
        max_positions: the model's own longest context.

    Raises:
        ModelLoadError: an unknown kind, or numbers out of range.
    """
    key = "rope_parameters" if fields.absent("rope_scaling") else "rope_scaling"
    raw = fields.but(**{key: {}}).section(key) if fields.absent(key) else fields.section(key)
    kind = raw.only("rope_type" if raw.absent("type") else "type", ("default", *NAMES), default="default")
    theta = fields.number("rope_theta", 1.0, MAX_NUMBER, default=DEFAULT_THETA)
    theta = raw.number("rope_theta", 1.0, MAX_NUMBER, default=theta)
    partial = fields.number("partial_rotary_factor", 0.0, 1.0, default=1.0)
    partial = raw.number("partial_rotary_factor", 0.0, 1.0, default=partial)
    width = int(head_dim * partial)
    if width < 2 or width % 2:
        raise fields.error(f"partial_rotary_factor {partial} leaves {width} numbers of a head; they must be pairs")
    if kind == "default":
        return RopeScaling(theta=theta, partial=partial)
    first = raw.integer("original_max_position_embeddings", 2, max_positions, default=DEFAULT_FIRST_CONTEXT)
    first = fields.integer("original_max_position_embeddings", 2, max_positions, default=first)
    factor = raw.number("factor", 1 / MAX_DIVISOR, MAX_DIVISOR, default=max_positions / first)
    usual = math.sqrt(1 + math.log(factor) / math.log(first)) if factor > 1 else 1.0
    return RopeScaling(
        kind="longrope",
        theta=theta,
        factor=factor,
        original_positions=first,
        attention_factor=raw.number("attention_factor", 1 / MAX_DIVISOR, MAX_DIVISOR, default=usual),
        partial=partial,
        context=max_positions,
        short=_divisors(raw, "short_factor", width // 2),
        long=_divisors(raw, "long_factor", width // 2),
    )


def _divisors(raw: Fields, key: str, count: int) -> tuple[float, ...]:
    given = raw.values.get(key)
    if not isinstance(given, list) or len(given) != count:
        raise raw.error(f"{key} must be a list of {count} numbers")
    return tuple(Fields(raw.name, {key: one}).number(key, 1 / MAX_DIVISOR, MAX_DIVISOR, default=0.0) for one in given)
