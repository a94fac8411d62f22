"""Mixture of experts, dropless: every token reaches every expert that it is sent to, however many others are.

The tokens of a step are sorted by expert; each expert that has tokens is applied to its own in one go. A row's sum over
its experts runs in float32 and in the order of the experts, whatever else is in the batch. Each rank holds the experts
of ``parallel.of_experts.share`` and all of the router, so all choose alike; their sums are added. Every rank has every
row, so nothing is sent to an expert: dividing the rows first, sending them to their experts and gathering the results
takes three exchanges in place of one (``bench.rank_collectives`` measures both).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from engine.model.checkpoint.checklist import Checklist
from engine.model.layers.blocks import Block, StepContext
from engine.model.layers.layers import Linear, Memory, silu_mul
from engine.model.layers.parallel import Parallel, Span
from engine.model.layers.routing import Route, Router
from engine.model.layers.sharded import Columns, column_linear

GATED = ("gate_proj", "up_proj", "down_proj")
"""Usual names of an expert's maps."""


class Expert(NamedTuple):
    """A gated MLP that one rank holds whole."""

    gate_up: Linear
    down: Linear


class Experts(NamedTuple):
    """The experts of one layer that this rank holds."""

    held: tuple[Expert, ...]
    first: int
    """Number of the first of them."""
    total: int
    """Number of experts on all ranks together."""


def separate_experts(
    checklist: Checklist, *, count: int, hidden: int, inner: int, names: tuple[str, str, str] = GATED
) -> Experts:
    """Experts that are published one by one: ``experts.NUMBER.NAME.weight``."""
    first, last = checklist.parallel.of_experts.share(count)
    gate, up, down = names
    nothing = checklist.memory.empty(0, hidden), checklist.memory.empty(0, inner)
    wide = checklist.memory.several(last - first, 2 * inner, hidden)
    narrow = checklist.memory.several(last - first, hidden, inner)
    held = []
    for number in range(count):
        own = checklist.under("experts", number)
        if first <= number < last:
            both = [Columns(gate, inner, (0, inner)), Columns(up, inner, (0, inner))]
            gate_up = column_linear(own, both, hidden, room=wide[number - first])
            back = column_linear(own, [Columns(down, hidden, (0, hidden))], inner, room=narrow[number - first])
            held.append(Expert(gate_up, back))
        else:
            # Nothing of it is read; it is on the list, so that all ranks refuse the same checkpoints.
            for name, shape in ((gate, (inner, hidden)), (up, (inner, hidden)), (down, (hidden, inner))):
                own.want(f"{name}.weight", shape, nothing[name == down], part={0: (0, 0)})
    return Experts(tuple(held), first, count)


def stacked_experts(checklist: Checklist, *, count: int, hidden: int, inner: int, bias: bool = False) -> Experts:
    """Experts that are published in one tensor a map, inputs before outputs: ``experts.gate_up_proj``."""
    first, last = checklist.parallel.of_experts.share(count)
    below = checklist.under("experts")
    gate_up = _stacked(below, "gate_up_proj", (count, hidden, 2 * inner), (first, last), bias=bias)
    down = _stacked(below, "down_proj", (count, inner, hidden), (first, last), bias=bias)
    return Experts(tuple(map(Expert, gate_up, down)), first, count)


def _stacked(checklist: Checklist, name: str, shape: tuple[int, int, int], held: Span, *, bias: bool) -> list[Linear]:
    _, inputs, outputs = shape
    memory = checklist.memory
    # An empty part of the tensor is asked for by a rank that holds no expert, too.
    checklist.want(name, shape, memory.empty(0, inputs, outputs), part={0: (0, 0)})
    if bias:
        checklist.want(f"{name}_bias", (shape[0], outputs), memory.empty(0, outputs), part={0: (0, 0)})
    count = held[1] - held[0]
    weights = memory.several(count, outputs, inputs)
    biases = memory.several(count, outputs) if bias else [None] * count
    linears = []
    for number, weight, own_bias in zip(range(*held), weights, biases, strict=True):
        linear = checklist.pack(Linear(weight, own_bias))
        part = {0: (number, number + 1)}
        checklist.want(name, shape, linear.loaded.t().unsqueeze(0), part=part)
        if linear.bias is not None:
            checklist.want(f"{name}_bias", (shape[0], outputs), linear.bias.unsqueeze(0), part=part)
        linears.append(linear)
    return linears


def make_router(
    checklist: Checklist,
    name: str,
    *,
    hidden: int,
    count: int,
    route: Route,
    bias: bool = False,
    dtype: torch.dtype | None = None,
) -> Router:
    """A router over the published map of this name; ``dtype`` where it is not the model's."""
    memory = Memory(dtype or checklist.memory.dtype, checklist.memory.device)
    linear = Linear.empty(hidden, count, bias=bias, memory=memory)
    checklist.want(f"{name}.weight", (count, hidden), linear.loaded)
    if linear.bias is not None:
        checklist.want(f"{name}.bias", (count,), linear.bias)
    return Router(linear, route)


class MixtureOfExperts:
    """Rows through the experts that the router chooses for them, plus the shared expert, if there is one."""

    def __init__(
        self,
        parallel: Parallel,
        router: Router,
        experts: Experts,
        *,
        shared: Block | None = None,
        activation: Callable[[Tensor], Tensor] = silu_mul,
        weigh_inputs: bool = False,
    ) -> None:
        """Put the parts together.

        Args:
            parallel: this rank's place; ``of_experts`` are those that deal the experts.
            router: chooses.
            experts: those of this rank.
            shared: every row goes through it, with weight 1.
            activation: between an expert's two maps.
            weigh_inputs: a row is multiplied by its weight before an expert, not after.
        """
        self._parallel = parallel.of_experts
        self.router = router
        self.experts = experts
        self.shared = shared
        self.activation = activation
        self.weigh_inputs = weigh_inputs

    def __call__(self, x: Tensor, step: StepContext, /) -> Tensor:
        """Apply to rows of shape ``(N, hidden)``."""
        out = self._parallel.all_reduce(self._tiled(x) if step.attend.fixed_shapes else self._routed(x)).to(x.dtype)
        return out if self.shared is None else out.add_(self.shared(x, step))

    def _routed(self, x: Tensor) -> Tensor:
        """This rank's part of every row's sum, float32."""
        weights, chosen = self.router(x)
        # Stable: an expert sees its rows in the order of the batch.
        order = chosen.flatten().argsort(stable=True)
        rows = order // chosen.shape[1]
        factors = weights.flatten()[order].unsqueeze(1)
        counts = chosen.flatten().bincount(minlength=self.experts.total).tolist()
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        start = sum(counts[: self.experts.first])
        for expert, count in zip(self.experts.held, counts[self.experts.first :], strict=False):
            if count:
                part = slice(start, start + count)
                y = self._apply(expert, x.index_select(0, rows[part]), factors[part])
                # No row is twice among those of one expert: what is added where does not depend on any order.
                out.index_add_(0, rows[part], y)
                start += count
        return out

    def _tiled(self, x: Tensor) -> Tensor:
        """This rank's part of every row's sum with products of fixed shapes: all rows go through each expert that any
        row is sent to."""
        weights, chosen = self.router(x)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        factors = torch.zeros(len(x), self.experts.total, device=x.device).scatter_(1, chosen, weights)
        sent = torch.zeros_like(factors, dtype=torch.bool).scatter_(1, chosen, True)
        hit = sent.any(0).tolist()
        for number, expert in enumerate(self.experts.held, self.experts.first):
            if hit[number]:
                y = self._apply(expert, x, factors[:, number : number + 1])
                out += y.masked_fill_(~sent[:, number : number + 1], 0.0)
        return out

    def _apply(self, expert: Expert, x: Tensor, factors: Tensor) -> Tensor:
        if self.weigh_inputs:
            return expert.down(self.activation(expert.gate_up(x * factors.to(x.dtype)))).float()
        return expert.down(self.activation(expert.gate_up(x))).float() * factors
