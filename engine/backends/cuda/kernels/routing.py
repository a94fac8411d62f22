"""Which experts a token goes to, and with what weights: the four ways of ``engine.model.layers.routing`` in one kernel.

Among equal scores the expert of the lower number is chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.backends.cuda.kernels.triton_common import power_of_two, sigmoid
from engine.model.layers.routing import LEAST_SUM, GroupedSigmoid, Rule, SigmoidOfTop, Softmax, SoftmaxOfTop

KINDS = {Softmax: "softmax", SoftmaxOfTop: "softmax of top", SigmoidOfTop: "sigmoid of top", GroupedSigmoid: "grouped"}
"""Words by which the kernel knows a way to route."""

LEAST = tl.constexpr(LEAST_SUM)
NO_EXPERT = tl.constexpr(1 << 30)


class Routed(NamedTuple):
    """Experts of a step's tokens, the best first."""

    weights: Tensor
    """float32 ``(N, top)``."""
    experts: Tensor
    """int32, the same shape."""


@dataclass(frozen=True, slots=True)
class _RouteForm:
    """Facts about a router that are fixed when the kernel is compiled for it."""

    kind: str
    top: int
    scaled: bool
    """Whether the weights of the experts that are chosen add up to 1."""
    groups: int
    best: int
    """Groups that experts are chosen from."""
    members: int
    """Experts of a group."""


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
    out: Routed,
    logits_row: tl.tensor,
    factor: tl.tensor,
    FORM: tl.constexpr,
    TOPS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    expert = group[:, None] * FORM.members + member[None, :]
    live = (group[:, None] < FORM.groups) & (member[None, :] < FORM.members)
    logit = tl.load(logits + row * logits_row + expert, mask=live, other=-float("inf")).to(tl.float32)
    score = logit
    if FORM.kind == "softmax":
        score = tl.exp(logit - tl.max(logit))
        score = tl.div_rn(score, tl.sum(score) + score * 0.0)
    rated = score
    if FORM.kind == "grouped":
        score = sigmoid(logit)
        rated = tl.where(live, score + tl.load(bias + expert, mask=live, other=0.0), -float("inf"))
        if FORM.best < FORM.groups:
            rated = _best_groups(rated, FORM.groups, FORM.best, ROWS)
    rated = tl.where(live, rated, -float("inf"))
    taken = expert < 0
    TOP: tl.constexpr = FORM.top
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
    exists = line < FORM.top
    if FORM.kind == "softmax of top":
        chosen = tl.where(exists, tl.exp(chosen - tl.max(tl.where(exists, chosen, -float("inf")), 0)), 0.0)
    if FORM.kind == "sigmoid of top":
        chosen = sigmoid(chosen)
    if FORM.scaled:
        whole = tl.sum(tl.where(exists, chosen, 0.0), 0)
        if FORM.kind == "grouped":
            whole += LEAST
        chosen = tl.div_rn(chosen, whole + chosen * 0.0)
    if FORM.kind == "grouped":
        chosen = chosen * factor
    tl.store(out.weights + row * FORM.top + line, chosen, mask=exists)
    tl.store(out.experts + row * FORM.top + line, numbers, mask=exists)


def route(logits: Tensor, rule: Rule, out: Routed) -> None:
    """Choose experts.

    Args:
        logits: ``(N, E)``, any float dtype; rows may be further apart than that.
        rule: how.
        out: ``(N, top)`` each, contiguous.
    """
    rows, count = logits.shape
    groups, best, bias, factor = 1, 1, None, 1.0
    scaled = rule.renormalised if isinstance(rule, Softmax | GroupedSigmoid) else isinstance(rule, SoftmaxOfTop)
    if isinstance(rule, GroupedSigmoid):
        groups, best, bias, factor = rule.groups, min(rule.best_groups, rule.groups), rule.bias, rule.factor
    if rows:
        _route[(rows,)](
            logits,
            bias,
            out,
            logits.stride(0),
            factor,
            FORM=_RouteForm(KINDS[type(rule)], rule.top, scaled, groups, best, count // groups),
            TOPS=power_of_two(rule.top),
            ROWS=power_of_two(groups),
            WIDTH=power_of_two(count // groups),
            num_warps=1 if count <= 128 else 4,
        )


def empty(rows: int, top: int, device: torch.device) -> Routed:
    """Room for the tokens of a bucket."""
    return Routed(torch.zeros(rows, top, device=device), torch.zeros(rows, top, dtype=torch.int32, device=device))
