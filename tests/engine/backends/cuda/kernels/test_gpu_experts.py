"""Routing, and the products of experts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from engine.backends.cuda.kernels import grouped, routing
from engine.backends.cuda.kernels.grouped import Dealt, ExpertMap, ProductTile
from engine.backends.cuda.kernels.operations import KernelOperations
from engine.backends.cuda.kernels.routing import Routed
from engine.backends.cuda.kernels.tile_sizes import ExpertRow, configuration
from engine.backends.cuda.runtime.operations import ExpertMaps
from engine.model.layers.layers import Linear, Memory, silu_mul
from engine.model.layers.routing import GroupedSigmoid, Router, SigmoidOfTop, Softmax, SoftmaxOfTop
from tests.engine.backends.cuda.kernels import references
from tests.engine.backends.cuda.kernels.support import COUNTS, DTYPES, PLACE, assert_close, for_each, noise, poisoned
from tests.native import ON_CARD

pytestmark = pytest.mark.usefixtures("place")

TILE = ProductTile(16, 16, 16)


@st.composite
def routings(draw: st.DrawFn) -> tuple[Tensor, routing.Rule]:
    """Logits, no two of a row alike, and a way to route."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9_999)))
    groups = draw(st.sampled_from((1, 2, 4)))
    experts = groups * draw(st.integers(2, 9))
    rows = draw(st.integers(0, 5))
    # Exact steps between scores: the order is the same whatever an exponential's last bit is.
    logits = torch.stack([torch.randperm(experts, generator=generator) for _ in range(rows)] or [torch.zeros(experts)])
    logits = (logits[:rows].float() - experts / 2) / 4
    best_groups = draw(st.integers(1, groups))
    top = draw(st.integers(1, min(6, experts // groups * best_groups)))
    bias = torch.randperm(experts, generator=generator).float() / (16 * experts)
    rule = draw(
        st.sampled_from(
            (
                Softmax(top, True),
                Softmax(top, False),
                SoftmaxOfTop(top),
                SigmoidOfTop(top),
                GroupedSigmoid(top, bias, groups, best_groups, True, 2.5),
                GroupedSigmoid(top, bias, groups, best_groups, False, 1.0),
            )
        )
    )
    return logits, rule


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", COUNTS)
def test_routing_chooses_what_the_model_does(count: int, dtype: torch.dtype) -> None:
    """Experts in the same order and weights within float32's rounding, for every way that published models route."""

    def check(case: tuple[Tensor, routing.Rule]) -> None:
        logits, rule = case
        logits = logits.to(dtype)
        out = routing.empty(len(logits), rule.top, PLACE)
        out.weights.fill_(torch.nan)
        out.experts.fill_(-1)
        routing.route(logits, rule, out)
        weights, experts = rule(logits.float()) if len(logits) else (torch.zeros(0, rule.top), torch.zeros(0, rule.top))
        assert out.experts.tolist() == experts.tolist()
        assert_close(out.weights, weights, torch.float32, 2.5)

    for_each(count, routings(), check)


def test_among_equals_the_lower_expert_is_chosen() -> None:
    """Ties have an order, so that a token's experts never depend on its neighbours."""
    out = routing.empty(1, 3, PLACE)
    routing.route(torch.tensor([[1.0, 2.0, 2.0, 1.0]]), SoftmaxOfTop(3), out)
    assert out.experts.tolist() == [[1, 2, 0]]


def test_a_broken_row_of_logits_stays_inside_the_experts() -> None:
    """Scores that are no numbers choose experts that exist, each once, with weights that are no numbers."""
    out = routing.empty(1, 3, PLACE)
    routing.route(torch.full((1, 5), torch.nan), SoftmaxOfTop(3), out)
    assert sorted(out.experts[0].tolist()) == [0, 1, 2]
    assert out.weights.isnan().all()


@st.composite
def products(draw: st.DrawFn) -> tuple[int, int, int, int, int, str, bool, bool, int]:
    """Tokens, experts, top, inputs, outputs, when rows are weighed, rows by pair, bias, seed."""
    experts = draw(st.integers(1, 9))
    return (
        draw(st.sampled_from((0, 1, 3, 20))),
        experts,
        draw(st.integers(1, min(3, experts))),
        draw(st.integers(1, 40)),
        draw(st.integers(1, 40)),
        draw(st.sampled_from(("no", "before", "after"))),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.integers(0, 9_999)),
    )


def routed(generator: torch.Generator, tokens: int, experts: int, top: int) -> Routed:
    """Random experts, none twice for a token, and weights."""
    rows = [torch.randperm(experts, generator=generator)[:top] for _ in range(tokens)]
    chosen = torch.stack(rows) if rows else torch.zeros(0)
    weights = torch.rand(tokens, top, generator=generator)
    return Routed(weights, chosen.int().view(tokens, top))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", COUNTS)
def test_every_pair_meets_its_expert(count: int, dtype: torch.dtype) -> None:
    """Products of any shape, however tokens are routed, none dropped; then each token's sum."""

    def check(case: tuple[int, int, int, int, int, str, bool, bool, int]) -> None:
        tokens, experts, top, inputs, outputs, weigh, by_pair, biased, seed = case
        generator = torch.Generator().manual_seed(seed)
        where = routed(generator, tokens, experts, top)
        dealt = Dealt.empty(tokens, top, experts, TILE.rows, PLACE)
        dealt.tile_experts.fill_(7_777)
        grouped.deal(where, TILE.rows, dealt)
        flat = where.experts.flatten()
        assert dealt.order.tolist() == flat.argsort(stable=True).tolist()
        x = noise(generator, tokens * top if by_pair else tokens, inputs, dtype=dtype)
        weight = noise(generator, experts, outputs, inputs, dtype=dtype)
        linear = ExpertMap(weight, noise(generator, experts, outputs, dtype=dtype) if biased else None)
        out = poisoned(tokens * top, outputs, dtype=torch.float32)
        grouped.multiply(x, linear, where, dealt, out, tile=TILE, weigh=weigh)
        if not tokens:
            return
        wanted = references.multiplied(x, linear, where, weigh)
        assert_close(out, wanted, torch.float32, 40.0)
        total = poisoned(tokens, outputs, dtype=dtype)
        grouped.add_up(out, where, total)
        assert_close(total, wanted.view(tokens, top, outputs).sum(1), dtype, 40.0 if dtype == torch.float32 else 0.01)

    for_each(count, products(), check)


def test_sums_run_in_the_order_of_experts() -> None:
    """A token's sum is the same bits in whichever order its experts were chosen. Control: another order differs."""
    parts = torch.tensor([[1e8], [1.0], [-1e8]])
    one = Routed(torch.ones(1, 3), torch.tensor([[0, 1, 2]], dtype=torch.int32))
    other = Routed(torch.ones(1, 3), torch.tensor([[2, 0, 1]], dtype=torch.int32))
    third = Routed(torch.ones(1, 3), torch.tensor([[0, 2, 1]], dtype=torch.int32))
    sums = []
    for where, pairs in ((one, parts), (other, parts[[2, 0, 1]]), (third, parts)):
        out = torch.zeros(1, 1)
        grouped.add_up(pairs.contiguous(), where, out)
        sums.append(out.item())
    assert sums[0] == sums[1] == 0.0
    assert sums[2] == 1.0


@pytest.mark.parametrize(("biased", "weigh_inputs"), [(False, False), (True, True)], ids=["plain", "biased, before"])
def test_torch_multiplies_experts_as_the_kernel_does(biased: bool, weigh_inputs: bool) -> None:
    """A row of the table sends steps from so many tokens on to torch's products of groups: within the roundings of what
    stands between two maps, our kernel's results. Some experts have no token. Control: the table does nothing below its
    number of tokens, and another expert's map changes the result."""
    generator = torch.Generator().manual_seed(5)
    experts, hidden, inner, tokens = 6, 16, 16, 4
    memory = Memory(torch.bfloat16, PLACE)
    router = Linear.empty(hidden, experts, bias=False, memory=memory)
    router.loaded.copy_(noise(generator, experts, hidden, dtype=torch.bfloat16))

    def drawn(*shape: int) -> Tensor:
        return noise(generator, *shape).mul_(shape[-1] ** -0.5).to(torch.bfloat16)

    rule = SoftmaxOfTop(2)
    maps = ExpertMaps(
        Router(router, rule),
        rule,
        drawn(experts, 2 * inner, hidden),
        drawn(experts, hidden, inner),
        drawn(experts, 2 * inner) if biased else None,
        drawn(experts, hidden) if biased else None,
        silu_mul,
        weigh_inputs,
    )
    chosen = replace(configuration("", 16), experts=TILE)
    row = ExpertRow(experts, hidden, inner, tokens, "a test")
    ours = KernelOperations((2, 1), 16, chosen, 4)
    theirs = KernelOperations((2, 1), 16, replace(chosen, by_torch=(row,)), 4)
    x = noise(generator, tokens, hidden, dtype=torch.bfloat16)
    found, asked = theirs.experts(x, maps), ours.experts(x, maps)
    assert (found.double() - asked.double()).abs().max() < 0.02 * asked.double().abs().max()
    assert torch.equal(theirs.experts(x[1:], maps), ours.experts(x[1:], maps))
    if not ON_CARD:
        assert not torch.equal(found, asked)
    maps.down.copy_(maps.down.roll(1, 0))
    assert (theirs.experts(x, maps).double() - asked.double()).abs().max() > 0.1 * asked.double().abs().max()
