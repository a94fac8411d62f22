"""Rotary position embedding: frequencies of every published Llama scaling, and their application.

A head's numbers are rotated in pairs ``(i, i + head_dim / 2)`` by ``position * frequency_i`` (Su et al., RoFormer,
arXiv 2104.09864). Scalings, as ``transformers`` defines them for Llama:

* ``default``: ``theta ** (-2 i / head_dim)``;
* ``linear``: all frequencies divided by ``factor``;
* ``llama3``: long wavelengths divided by ``factor``, short ones kept, a ramp between (Llama 3.1);
* ``yarn``: interpolated and extrapolated frequencies mixed by a ramp, and an attention factor (arXiv 2309.00071);
* ``dynamic``: equals ``default`` up to ``max_position_embeddings``. Beyond it the frequencies would depend on the
  length of the sequence, so that keys of one position differ from step to step; such keys cannot be cached or shared.
  The context of a ``dynamic`` model therefore ends at ``max_position_embeddings``, as the context of every model does;
* ``longrope``: ``engine.model.layers.longrope``.

Some families rotate only the first numbers of a head (``partial``); the others stay.

Angles and tables are computed in float32 whatever the dtype of the model is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import ModelLoadError

SUPPORTED_ROPE = ("default", "linear", "dynamic", "llama3", "yarn")
"""Values of ``rope_type`` that this build can run."""

MAX_NUMBER = 1e12
"""Largest rotary parameter that is believed; published bases reach 1e9."""

DEFAULT_THETA = 10_000.0
"""Base of the wavelengths where the model names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Checked rotary parameters; those that a kind does not use keep their defaults."""

    kind: str = "default"
    theta: float = DEFAULT_THETA
    factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    partial: float = 1.0
    """Share of a head's numbers that are rotated: the first ones."""
    context: int = 0
    """Longest served context, which chooses between the lists of ``longrope``."""
    short: tuple[float, ...] = ()
    """Divisors of the frequencies of ``longrope`` where no context is longer than ``original_positions``."""
    long: tuple[float, ...] = ()
    """Divisors of the frequencies of ``longrope`` where a context may be longer."""

    @property
    def divisors(self) -> tuple[float, ...]:
        """Return the list of ``longrope`` that the longest context chooses."""
        return self.long if self.context > self.original_positions else self.short

    def width(self, head_dim: int) -> int:
        """Numbers of a head that are rotated."""
        return int(head_dim * self.partial)


def read_rope(values: dict[str, object], max_positions: int, default_theta: float = DEFAULT_THETA) -> RopeScaling:
    """Read the rotary parameters of a ``config.json``, old layout (``rope_theta``, ``rope_scaling``) or new
    (``rope_parameters``).

    Raises:
        ModelLoadError: an unknown kind, or a number out of range.
    """
    raw = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if not isinstance(raw, dict):
        raise ModelLoadError("config.json: rope_scaling is not a JSON object")
    kind = raw.get("rope_type", raw.get("type", "default"))
    if kind not in SUPPORTED_ROPE:
        raise ModelLoadError(f"config.json: rope_type must be one of: {', '.join(SUPPORTED_ROPE)}")
    if _number(raw, "partial_rotary_factor", 1.0) != 1.0 or _number(values, "partial_rotary_factor", 1.0) != 1.0:
        raise ModelLoadError("config.json: partial_rotary_factor other than 1 is not supported")
    theta = _number(raw, "rope_theta", _number(values, "rope_theta", default_theta))
    if kind in ("default", "dynamic"):
        return RopeScaling(kind=kind, theta=theta)
    factor = _number(raw, "factor", None)
    if kind == "linear":
        return RopeScaling(kind=kind, theta=theta, factor=factor)
    original = _number(values, "original_max_position_embeddings", 0.0, zero=True)
    original = original or _number(raw, "original_max_position_embeddings", float(max_positions))
    if kind == "llama3":
        low, high = _number(raw, "low_freq_factor", None), _number(raw, "high_freq_factor", None)
        if high < low:
            raise ModelLoadError("config.json: high_freq_factor must not be below low_freq_factor")
        return RopeScaling(
            kind=kind,
            theta=theta,
            factor=factor,
            original_positions=int(original),
            low_freq_factor=low,
            high_freq_factor=high,
        )
    return RopeScaling(
        kind=kind,
        theta=theta,
        factor=factor,
        original_positions=int(original),
        beta_fast=_number(raw, "beta_fast", 32.0),
        beta_slow=_number(raw, "beta_slow", 1.0),
        attention_factor=_yarn_attention_factor(raw, factor),
        truncate=raw.get("truncate", True) is not False,
    )


def inverse_frequencies(rope: RopeScaling, head_dim: int) -> Tensor:
    """Radians a position, float32, one for each pair that is rotated."""
    width = rope.width(head_dim)
    steps = torch.arange(0, width, 2, dtype=torch.int64).to(torch.float32) / width
    frequencies: Tensor = 1.0 / (rope.theta**steps)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "longrope":
        return 1.0 / (torch.tensor(rope.divisors, dtype=torch.float32) * rope.theta**steps)
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    if rope.kind == "yarn":
        return _yarn(rope.theta**steps, rope, head_dim)
    return frequencies


class Rotary:
    """Turns positions into rotation tables, once a step for all layers."""

    def __init__(self, rope: RopeScaling, head_dim: int, device: torch.device) -> None:
        if device.type == "meta":
            # A model that is only described: its tables are asked for where launches are rehearsed, nowhere else, and
            # tensor operations on that device would load thousands of modules.
            device = torch.device("cpu")
        half = inverse_frequencies(rope, head_dim).to(device)
        self.frequencies = torch.cat((half, half))
        """Radians a position, float32, one for each number that is rotated."""
        self.scale = rope.attention_factor
        self.width = len(self.frequencies)
        self.sign = torch.ones(self.width, device=device)
        self.sign[: self.width // 2] = -1.0

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines for ``positions`` (int64, shape ``(N,)``), each of shape ``(N, 1, width)``."""
        # Of a model that is only described the frequencies lie elsewhere; else nothing is copied.
        angles = positions.to(torch.float32).unsqueeze(1) * self.frequencies.to(positions.device)
        cos, sin = angles.cos(), angles.sin().mul_(self.sign.to(positions.device))
        if self.scale != 1.0:
            cos.mul_(self.scale)
            sin.mul_(self.scale)
        return cos.to(dtype).unsqueeze(1), sin.to(dtype).unsqueeze(1)


def rotate(x_nhd: Tensor, cos_n1d: Tensor, sin_n1d: Tensor) -> Tensor:
    """Rotate the first numbers of heads of shape ``(N, H, D)``, as many as there are cosines.

    The sines carry the sign of the first half.
    """
    width = cos_n1d.shape[-1]
    if width < x_nhd.shape[-1]:
        return torch.cat((rotate(x_nhd[..., :width], cos_n1d, sin_n1d), x_nhd[..., width:]), -1)
    half = x_nhd.shape[-1] // 2
    return torch.addcmul(x_nhd * cos_n1d, x_nhd.roll(half, -1), sin_n1d)


def pairs_apart(x: Tensor) -> Tensor:
    """Numbers of the last axis that are published as neighbouring pairs, in the order of ``rotate``: the first of every
    pair, then the second of every pair. Products of query and key are the same in either order."""
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    return pairs.transpose(-1, -2).flatten(-2)


def _llama3(frequencies: Tensor, rope: RopeScaling) -> Tensor:
    wavelengths = 2 * math.pi / frequencies
    long_wave = rope.original_positions / rope.low_freq_factor
    short_wave = rope.original_positions / rope.high_freq_factor
    # Llama 4 has no ramp: both factors are the same.
    width = rope.high_freq_factor - rope.low_freq_factor or 1.0
    ramp = (rope.original_positions / wavelengths - rope.low_freq_factor) / width
    mixed = (1 - ramp) * frequencies / rope.factor + ramp * frequencies
    scaled = torch.where(wavelengths > long_wave, frequencies / rope.factor, mixed)
    return torch.where(wavelengths < short_wave, frequencies, scaled)


def _yarn(powers: Tensor, rope: RopeScaling, head_dim: int) -> Tensor:
    def dimension(rotations: float) -> float:
        ratio = rope.original_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return (1.0 / (rope.factor * powers)) * (1 - kept) + (1.0 / powers) * kept


def _yarn_attention_factor(raw: dict[str, object], factor: float) -> float:
    if raw.get("attention_factor") is not None:
        return _number(raw, "attention_factor", None)
    mscale, all_dim = _number(raw, "mscale", 0.0, zero=True), _number(raw, "mscale_all_dim", 0.0, zero=True)
    if mscale and all_dim:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
    return yarn_mscale(factor, 1.0)


def yarn_mscale(factor: float, mscale: float) -> float:
    """By how much attention grows with a context stretched by ``factor`` (YaRN, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _number(values: dict[str, object], key: str, default: float | None, *, zero: bool = False) -> float:
    """A positive, finite number; with ``zero`` 0 stands for absent."""
    found = values.get(key)
    value = default if found is None else found
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_NUMBER:
        raise ModelLoadError(f"config.json: rotary parameter {key} must be a finite number")
    if value < 0 or (value == 0 and not zero):
        raise ModelLoadError(f"config.json: rotary parameter {key} must be above 0")
    return float(value)
