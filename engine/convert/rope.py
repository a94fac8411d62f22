"""Rotary parameters of a GGUF file in the published form.

Files name the base and the kinds "linear" and "yarn". They do not name Llama 3's kind: they hold the resulting divisors
as a tensor (``rope_freqs.weight``). The parameters are inferred from these divisors and verified by recomputing them;
divisors that match no published parameters are refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from engine.convert.values import Values
from engine.errors import ModelLoadError

ROPE_FACTORS = "rope_freqs.weight"
"""Name of the tensor of divisors."""

LOW, HIGH, ORIGINAL = 1.0, 4.0, 8_192
"""Bounds of Llama 3's ramp and its training context: equal in every published model (3.1, 3.2, 3.3)."""

TOLERANCE = 1e-5
"""Largest relative difference between two computations of a divisor in float32."""

MAX_NUMBER = 1e12


def rope_of(values: Values, prefix: str, head_dim: int, divisors: Sequence[float] | None) -> dict[str, object]:
    """Build the rotary entries of ``config.json``.

    Args:
        values: values of the header.
        prefix: name of the architecture.
        head_dim: width of a head.
        divisors: the tensor of divisors, if the file has one.

    Raises:
        ModelLoadError: the kind or its parameters are not supported.
    """
    base = values.number(f"{prefix}.rope.freq_base", 1.0, MAX_NUMBER, default=10_000.0)
    kind = values.text(f"{prefix}.rope.scaling.type", "none")
    scaling: dict[str, object] | None = None
    if kind not in ("none", "linear", "yarn"):
        raise ModelLoadError(f"{values.name}: {prefix}.rope.scaling.type must be none, linear or yarn")
    if divisors is not None and any(one != 1.0 for one in divisors):
        if kind != "none":
            raise ModelLoadError(f"{values.name}: {ROPE_FACTORS} beside {prefix}.rope.scaling.type is not supported")
        scaling = _llama3(values.name, base, head_dim, divisors)
    elif kind != "none":
        scaling = {"rope_type": kind, "factor": values.number(f"{prefix}.rope.scaling.factor", 1.0, 1e6)}
    if kind == "yarn":
        assert scaling is not None, "made above"
        scaling |= _yarn(values, prefix)
    return {"rope_theta": base, "rope_scaling": scaling}


def _yarn(values: Values, prefix: str) -> dict[str, object]:
    for key in ("attn_factor", "yarn_log_multiplier", "yarn_ext_factor", "yarn_attn_factor"):
        values.refuse(f"{prefix}.rope.scaling.{key}", "yarn is converted with its usual attention factor")
    return {
        "original_max_position_embeddings": values.integer(
            f"{prefix}.rope.scaling.original_context_length", 1, 1 << 24
        ),
        "beta_fast": values.number(f"{prefix}.rope.scaling.yarn_beta_fast", 0.0, 1e6, default=32.0),
        "beta_slow": values.number(f"{prefix}.rope.scaling.yarn_beta_slow", 0.0, 1e6, default=1.0),
    }


def _llama3(file: str, base: float, head_dim: int, divisors: Sequence[float]) -> dict[str, object]:
    factor = float(round(max(divisors), 4))
    expected = llama3_divisors(base, head_dim, factor)
    same = len(divisors) == len(expected) and all(
        math.isclose(one, other, rel_tol=TOLERANCE) for one, other in zip(divisors, expected, strict=True)
    )
    if not same:
        raise ModelLoadError(f"{file}: {ROPE_FACTORS} holds divisors that no published model has")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LOW,
        "high_freq_factor": HIGH,
        "original_max_position_embeddings": ORIGINAL,
    }


def llama3_divisors(base: float, head_dim: int, factor: float) -> list[float]:
    """Return the divisor of each frequency under Llama 3's scaling."""
    divisors = []
    for step in range(0, head_dim, 2):
        turns = ORIGINAL / (2 * math.pi * base ** (step / head_dim))
        if turns > HIGH:
            divisors.append(1.0)
        elif turns < LOW:
            divisors.append(factor)
        else:
            ramp = (turns - LOW) / (HIGH - LOW)
            divisors.append(1 / ((1 - ramp) / factor + ramp))
    return divisors
