"""Experts: how tokens are routed, that none is dropped, and that the order of a sum does not depend on the batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.backends.common.storage import KvStorage
from engine.backends.plain.paged_attention import AttentionBatch, PagedAttention
from engine.backends.plain.tile_attention import Tile, TileAttention
from engine.core.kv.layout import KvLayout, uniform_layers
from engine.model.checkpoint.checklist import Checklist
from engine.model.layers.blocks import StepContext
from engine.model.layers.experts import Experts, MixtureOfExperts, make_router, separate_experts, stacked_experts
from engine.model.layers.layers import Memory, silu_mul
from engine.model.layers.parallel import Parallel
from engine.model.layers.routing import GroupedSigmoid, Route, SigmoidOfTop, Softmax, SoftmaxOfTop

MEMORY = Memory(torch.float32, torch.device("cpu"))
HIDDEN, INNER, EXPERTS = 8, 5, 7

Row = list[float]


def step_layout() -> KvLayout:
    """The layout of a storage that nothing is written to."""
    return KvLayout(layers=uniform_layers(1, 1, 2), block_size=1, dtype="float32", num_blocks=1)


def step() -> StepContext:
    """A step that nobody here looks at."""
    storage = KvStorage(step_layout(), max_context=1, dtype=torch.float32, device=MEMORY.device)
    nothing = torch.zeros(0, dtype=torch.int64)
    return StepContext(nothing, (), PagedAttention(storage, AttentionBatch(())))


def block(
    route: Route, parallel: Parallel | None = None, *, stacked: bool = False, int8: bool = False, seed: int = 0
) -> tuple[MixtureOfExperts, dict[str, Tensor]]:
    """A block with random weights and the published tensors that it was filled from."""
    checklist = Checklist(MEMORY, parallel or Parallel())
    router = make_router(checklist, "gate", hidden=HIDDEN, count=EXPERTS, route=route)
    make: Callable[..., Experts] = partial(stacked_experts, bias=True) if stacked else separate_experts
    experts = make(checklist, count=EXPERTS, hidden=HIDDEN, inner=INNER)
    published = {}
    for number, (name, piece) in enumerate(sorted(checklist.pieces.items())):
        published[name] = torch.randn(piece.shape, generator=torch.Generator().manual_seed(100 * seed + number))
        for home in piece.homes:
            home.target.copy_(published[name][tuple(slice(*span) for span in home.part)])
    for linear in checklist.linears:
        linear.pack(int8=int8)
    return MixtureOfExperts(checklist.parallel, router, experts), published


def rows(count: int, seed: int = 3) -> Tensor:
    """Random rows."""
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))


def expected(x: Tensor, published: dict[str, Tensor], route: Route) -> Tensor:
    """Every row by itself, in float64, from the published tensors."""
    doubles = {name: tensor.double() for name, tensor in published.items()}
    weights, chosen = route((x.double() @ doubles["gate.weight"].t()).float())
    out = torch.zeros(x.shape, dtype=torch.float64)
    for row, place in itertools.product(range(len(x)), range(chosen.shape[1])):
        expert = int(chosen[row, place])
        gate, up, down = (doubles[f"experts.{expert}.{name}.weight"] for name in ("gate_proj", "up_proj", "down_proj"))
        inner = torch.nn.functional.silu(gate @ x[row].double()) * (up @ x[row].double())
        out[row] += float(weights[row, place]) * (down @ inner)
    return out


@pytest.mark.parametrize("count", [1, 2, 50])
@pytest.mark.parametrize("top", [1, 3, EXPERTS])
def test_every_row_reaches_every_expert_that_it_is_sent_to(count: int, top: int) -> None:
    """Nothing is dropped, however many rows one expert gets: the sum over a row's experts, one by one in float64."""
    route = Softmax(top, renormalised=False)
    mixture, published = block(route)
    x = rows(count)
    assert torch.allclose(mixture(x, step()).double(), expected(x, published, route), atol=1e-4)
    crowd = rows(1).repeat(count, 1)
    assert torch.allclose(mixture(crowd, step()).double(), expected(crowd, published, route), atol=1e-4)


def whole_numbers(mixture: MixtureOfExperts) -> None:
    """Give the experts weights whose products are exact in any order, so that only the sum over experts rounds."""
    generator = torch.Generator().manual_seed(1)
    for expert in mixture.experts.held:
        for linear in expert:
            linear._transposed = torch.randint(-2, 3, linear._transposed.shape, generator=generator).float()


def exact_block() -> tuple[MixtureOfExperts, Tensor]:
    """A block and rows whose products are all exact, so that only the sum over experts rounds."""
    mixture, _ = block(Softmax(5, renormalised=True))
    whole_numbers(mixture)
    mixture.activation = lambda gate_up: gate_up[:, :INNER]
    mixture.router.linear.weight = mixture.router.linear.loaded.mul(8).round().div(8)
    return mixture, torch.randint(-3, 4, (24, HIDDEN), generator=torch.Generator().manual_seed(2)).float()


@settings(max_examples=40, deadline=None)
@given(order=st.permutations(list(range(24))), size=st.integers(1, 24))
def test_a_sum_over_experts_does_not_depend_on_the_batch(order: list[int], size: int) -> None:
    """With products that are exact a row's result has the same bits in any company and order."""
    mixture, x = exact_block()
    whole = mixture(x, step())
    chosen = torch.tensor(order[:size])
    assert torch.equal(mixture(x[chosen], step()), whole[chosen])


def test_a_sum_runs_in_the_order_of_experts() -> None:
    """The results of single experts, added in their order, are the block's bits; control: in another order they are
    not."""
    mixture, x = exact_block()
    whole, every = mixture(x, step()), mixture.experts
    parts = []
    for number, expert in enumerate(every.held):
        mixture.experts = Experts((expert,), number, EXPERTS)
        parts.append(mixture(x, step()))
    forwards, backwards = torch.zeros_like(x), torch.zeros_like(x)
    for part, other in zip(parts, reversed(parts), strict=True):
        forwards += part
        backwards += other
    assert torch.equal(forwards, whole)
    assert not torch.equal(backwards, whole)


@pytest.mark.parametrize("weigh_inputs", [False, True])
def test_in_a_tile_every_product_has_the_shape_of_the_tile(weigh_inputs: bool) -> None:
    """Rows computed as a tile agree with the same rows in any batch; experts see all rows or are not used. Control:
    outside of a tile they see their own."""
    mixture, _ = block(Softmax(2, renormalised=True))
    mixture.weigh_inputs = weigh_inputs
    seen: list[int] = []

    def activation(gate_up: Tensor) -> Tensor:
        seen.append(len(gate_up))
        return silu_mul(gate_up)

    mixture.activation = activation
    x = rows(16)
    in_tiles = TileAttention(
        KvStorage(step_layout(), max_context=1, dtype=torch.float32, device=MEMORY.device), Tile(0, 0, ())
    )
    tiled = mixture(x, replace(step(), attend=in_tiles))
    assert set(seen) == {16}
    seen.clear()
    assert torch.allclose(tiled, mixture(x, step()), atol=1e-5)
    assert sum(seen) == 2 * 16
    assert len(seen) > 1


@pytest.mark.parametrize("size", [2, 3, 9])
@pytest.mark.parametrize("stacked", [False, True])
def test_ranks_hold_each_expert_once_and_name_all(size: int, stacked: bool) -> None:
    """The parts of all ranks add up to the whole, also where there are fewer experts than ranks; every rank's list
    names every published tensor."""
    route = SoftmaxOfTop(3)
    mixture, published = block(route, stacked=stacked)
    x = rows(20)
    total = torch.zeros_like(x)
    for rank in range(size):
        part, names = block(route, Parallel(rank=rank, size=size), stacked=stacked)
        assert names.keys() == published.keys()
        total += part(x, step())
    assert torch.allclose(total, mixture(x, step()), atol=1e-4)


def test_the_router_is_never_rounded_to_8_bits() -> None:
    """Experts in int8 stay near those in float32, and every row goes where it went."""
    exact, _ = block(Softmax(2, renormalised=True))
    rounded, _ = block(Softmax(2, renormalised=True), int8=True)
    x = rows(64)
    assert torch.equal(exact.router(x)[1], rounded.router(x)[1])
    difference = (exact(x, step()) - rounded(x, step())).std() / exact(x, step()).std()
    assert 1e-4 < difference < 0.05


def softmax(values: Row) -> Row:
    """By its definition."""
    powers = torch.tensor(values, dtype=torch.float64).exp()
    return list((powers / powers.sum()).tolist())


def best(values: Row, count: int) -> list[int]:
    """Places of the largest."""
    return sorted(range(len(values)), key=lambda place: -values[place])[:count]


def spread(values: Row) -> float:
    """The least distance between two of them."""
    return min(abs(one - other) for one, other in itertools.pairwise(sorted(values)))


def by_hand(kind: str, logits: Row, bias: Row) -> dict[int, float]:
    """What a published model's paper says, in plain Python: weights by expert."""
    odds = [1 / (1 + float(torch.tensor(-one, dtype=torch.float64).exp())) for one in logits]
    if kind == "softmax, then top":
        chances = softmax(logits)
        return {one: chances[one] for one in best(logits, 3)}
    if kind == "renormalised":
        chances = softmax(logits)
        chosen = best(logits, 3)
        return {one: chances[one] / sum(chances[other] for other in chosen) for one in chosen}
    if kind == "top, then softmax":
        chosen = best(logits, 3)
        return dict(zip(chosen, softmax([logits[one] for one in chosen]), strict=True))
    if kind == "sigmoid of top":
        return {one: odds[one] for one in best(logits, 3)}
    rated = [odd + one for odd, one in zip(odds, bias, strict=True)]
    votes = [sum(sorted(rated[4 * group : 4 * group + 4])[-2:]) for group in range(3)]
    # What is nearly a tie may go either way in float32.
    assume(min(spread(rated), spread(votes)) > 1e-5)
    allowed = {4 * group + place for group in best(votes, 2) for place in range(4)}
    chosen = [one for one in best(rated, 12) if one in allowed][:3]
    return {one: 2.5 * odds[one] / sum(odds[other] for other in chosen) for one in chosen}


ROUTES: dict[str, Callable[[Tensor], Route]] = {
    "softmax, then top": lambda _: Softmax(3, renormalised=False),
    "renormalised": lambda _: Softmax(3, renormalised=True),
    "top, then softmax": lambda _: SoftmaxOfTop(3),
    "sigmoid of top": lambda _: SigmoidOfTop(3),
    "groups": lambda bias: GroupedSigmoid(3, bias, 3, 2, renormalised=True, factor=2.5),
}


@pytest.mark.parametrize("kind", ROUTES)
@settings(max_examples=60, deadline=None)
@given(
    logits=st.lists(st.integers(-400, 400), min_size=12, max_size=12, unique=True),
    bias=st.lists(st.integers(-50, 50), min_size=12, max_size=12),
)
def test_routes_are_what_they_say(kind: str, logits: list[int], bias: list[int]) -> None:
    """Each way of routing against its definition, row by row."""
    numbers = [one / 100 for one in logits]
    offsets = [one / 61 + place * 1e-4 for place, one in enumerate(bias)]
    route = ROUTES[kind](torch.tensor(offsets))
    weights, experts = route(torch.tensor([numbers, [0.0] * 12, numbers]))
    ours = dict(zip(experts[0].tolist(), weights[0].tolist(), strict=True))
    assert ours == pytest.approx(by_hand(kind, numbers, offsets), abs=1e-5)
    assert torch.equal(weights[0], weights[2])


def test_a_broken_row_breaks_nobody_else() -> None:
    """A row of NaN goes somewhere and comes back as NaN; the others keep their bits."""
    mixture, _ = block(GroupedSigmoid(2, torch.zeros(EXPERTS), 1, 1, renormalised=True, factor=1.0))
    x = rows(6)
    calm = mixture(x, step())
    x[2] = torch.nan
    wild = mixture(x, step())
    assert wild[2].isnan().all()
    kept = [0, 1, 3, 4, 5]
    assert torch.allclose(wild[kept], calm[kept], atol=1e-6)
