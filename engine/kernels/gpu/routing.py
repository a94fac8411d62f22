"""Which experts a token goes to, and with what weights: the four ways of ``engine.model.routing`` in one kernel.

Among equal scores the expert of the lower number is chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.gpu.dialect import power_of_two, sigmoid
from engine.model.routing import LEAST_SUM, GroupedSigmoid, Rule, SigmoidOfTop, Softmax, SoftmaxOfTop

SOFTMAX, SOFTMAX_OF_TOP, SIGMOID_OF_TOP, GROUPED_SIGMOID = range(4)

LEAST = tl.constexpr(LEAST_SUM)
NO_EXPERT = tl.constexpr(1 << 30)


@dataclass(frozen=True, slots=True)
class Routed:
    """Experts of a step's tokens, the best first."""

    weights: Tensor
    """float32 ``(N, top)``."""
    experts: Tensor
    """int32, the same shape."""


@triton.jit
def _best_groups(rated: tl.tensor, GROUPS: tl.constexpr, BEST: tl.constexpr, ROWS: tl.constexpr) -> tl.tensor:
    """Scores with minus infinity in all groups but those whose two best scores add up to most."""
    group = tl.arange(0, ROWS)
    expert = tl.arange(0, rated.shape[1])
    first = tl.max(rated, 1)
    place = tl.min(tl.where(rated == first[:, None], expert[None, :], NO_EXPERT), 1)
    second = tl.max(tl.where(expert[None, :] == place[:, None], -float("inf"), rated), 1)
    votes = tl.where(group < GROUPS, first + second, -float("inf"))
    kept = group < 0
    for _ in tl.static_range(BEST):
        peak = tl.max(tl.where(kept, -float("inf"), votes), 0)
        chosen = tl.min(tl.where((votes == peak) & (kept == 0), group, NO_EXPERT), 0)
        kept = kept | (group == chosen)
    return tl.where(kept[:, None], rated, -float("inf"))


@triton.jit
def _route(
    logits: tl.tensor,
    bias: tl.tensor,
    weights: tl.tensor,
    experts: tl.tensor,
    logits_row: tl.tensor,
    factor: tl.tensor,
    KIND: tl.constexpr,
    TOP: tl.constexpr,
    TOPS: tl.constexpr,
    SCALED: tl.constexpr,
    GROUPS: tl.constexpr,
    BEST: tl.constexpr,
    MEMBERS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    expert = group[:, None] * MEMBERS + member[None, :]
    live = (group[:, None] < GROUPS) & (member[None, :] < MEMBERS)
    logit = tl.load(logits + row * logits_row + expert, mask=live, other=-float("inf")).to(tl.float32)
    score = logit
    if KIND == 0:
        score = tl.exp(logit - tl.max(logit))
        score = tl.div_rn(score, tl.sum(score) + score * 0.0)
    if KIND == 3:
        score = sigmoid(logit)
    rated = score
    if KIND == 3:
        rated = tl.where(live, score + tl.load(bias + expert, mask=live, other=0.0), -float("inf"))
        if BEST < GROUPS:
            rated = _best_groups(rated, GROUPS, BEST, ROWS)
    rated = tl.where(live, rated, -float("inf"))
    taken = expert < 0
    line = tl.arange(0, TOPS)
    chosen = tl.zeros([TOPS], tl.float32)
    numbers = tl.zeros([TOPS], tl.int32)
    for place in tl.static_range(TOP):
        peak = tl.max(tl.where(taken, -float("inf"), rated))
        number = tl.min(tl.where((rated == peak) & (taken == 0) & live, expert, NO_EXPERT))
        # Scores that are no numbers equal nothing: the lowest experts left stand in, and their weights are none.
        number = tl.where(number == NO_EXPERT, tl.min(tl.where((taken == 0) & live, expert, NO_EXPERT)), number)
        taken = taken | (expert == number)
        chosen = tl.where(line == place, tl.sum(tl.where(expert == number, score, 0.0)), chosen)
        numbers = tl.where(line == place, number, numbers)
    exists = line < TOP
    if KIND == 1:
        chosen = tl.where(exists, tl.exp(chosen - tl.max(tl.where(exists, chosen, -float("inf")), 0)), 0.0)
    if KIND == 2:
        chosen = sigmoid(chosen)
    if SCALED:
        whole = tl.sum(tl.where(exists, chosen, 0.0), 0)
        if KIND == 3:
            whole += LEAST
        chosen = tl.div_rn(chosen, whole + chosen * 0.0)
    if KIND == 3:
        chosen = chosen * factor
    tl.store(weights + row * TOP + line, chosen, mask=exists)
    tl.store(experts + row * TOP + line, numbers, mask=exists)


def route(logits: Tensor, rule: Rule, out: Routed) -> None:
    """Choose experts.

    Args:
        logits: ``(N, E)``, any float dtype; rows may be further apart than that.
        rule: how.
        out: ``(N, top)`` each, contiguous.
    """
    rows, count = logits.shape
    grouped = isinstance(rule, GroupedSigmoid)
    groups, best = (rule.groups, min(rule.best_groups, rule.groups)) if isinstance(rule, GroupedSigmoid) else (1, 1)
    scaled = rule.renormalised if isinstance(rule, Softmax | GroupedSigmoid) else isinstance(rule, SoftmaxOfTop)
    kinds = {Softmax: SOFTMAX, SoftmaxOfTop: SOFTMAX_OF_TOP, SigmoidOfTop: SIGMOID_OF_TOP}
    if rows:
        _route[(rows,)](
            logits,
            rule.bias if isinstance(rule, GroupedSigmoid) else out.weights,
            out.weights,
            out.experts,
            logits.stride(0),
            rule.factor if isinstance(rule, GroupedSigmoid) else 1.0,
            KIND=GROUPED_SIGMOID if grouped else kinds[type(rule)],
            TOP=rule.top,
            TOPS=power_of_two(rule.top),
            SCALED=scaled,
            GROUPS=groups,
            BEST=best,
            MEMBERS=count // groups,
            ROWS=power_of_two(groups),
            WIDTH=power_of_two(count // groups),
            num_warps=1 if count <= 128 else 4,
        )


def reference(logits: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """The specification: the engine's own plain functions."""
    if not len(logits):
        return logits.new_zeros(0, rule.top), logits.new_zeros(0, rule.top, dtype=torch.int64)
    return rule(logits.float())


def empty(rows: int, top: int, device: torch.device) -> Routed:
    """Room for the tokens of a bucket."""
    return Routed(
        torch.zeros(rows, top, device=device), torch.zeros(rows, top, dtype=torch.int32, device=device)
    )
