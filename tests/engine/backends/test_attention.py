"""Paged attention against attention written out token by token: every reach, width, cap and sink, in any schedule."""

from __future__ import annotations

from array import array

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.backends.attention import AttentionRule
from engine.backends.common.batch import BatchBuilder
from engine.backends.common.storage import KvStorage
from engine.backends.plain.grouping import Grouping
from engine.backends.plain.paged_attention import PagedAttention
from engine.core.kv.layout import FULL, KvLayout, LayerLayout, Reach
from engine.core.scheduler.limits import SchedulerLimits
from engine.core.scheduler.plan import Admission, Chunk, StepPlan
from isolation.ipc.sampling import Sampling

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK = 4
CONTEXT = 64
ROWS = 3
GROUP = 2
LAYERS = (
    LayerLayout(heads=2, key_dim=8, value_dim=8),
    LayerLayout(heads=2, key_dim=8, value_dim=8, reach=Reach("window", 5)),
    LayerLayout(heads=1, key_dim=6, value_dim=10, reach=Reach("window", 17)),
    LayerLayout(heads=3, key_dim=4, value_dim=4, reach=Reach("chunk", 12)),
    LayerLayout(heads=1, key_dim=12, value_dim=7, latent=True),
    LayerLayout(heads=1, key_dim=12, value_dim=7, latent=True, reach=Reach("chunk", 7)),
)
RULES = {
    "plain": AttentionRule(0.3),
    "cap": AttentionRule(0.7, cap=1.5),
    "sinks": AttentionRule(0.5, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, -0.5])),
    "both": AttentionRule(1.0, cap=3.0, sinks=torch.tensor([0.1, 1.0, -2.0, 0.3, 2.0, 1.5])),
}


def visible(reach: Reach, query: int) -> range:
    """Positions that a token sees, as the papers put it."""
    if reach.kind == "window":
        return range(max(0, query - reach.size + 1), query + 1)
    if reach.kind == "chunk":
        return range(query - query % reach.size, query + 1)
    return range(query + 1)


def written_out(q_hd: Tensor, k_skd: Tensor, v_skv: Tensor, seen: range, rule: AttentionRule) -> Tensor:
    """One token's attention by its definition; ``(H, V)`` in float64."""
    lines = []
    for head, query in enumerate(q_hd.double()):
        kv_head = head * k_skd.shape[1] // len(q_hd)
        scores = k_skd[list(seen), kv_head].double() @ query * rule.scale
        if rule.cap:
            scores = rule.cap * torch.tanh(scores / rule.cap)
        weights = scores.exp()
        total = weights.sum() + (0 if rule.sinks is None else rule.sinks[head].double().exp())
        lines.append(weights / total @ v_skv[list(seen), kv_head].double())
    return torch.stack(lines)


def make_limits() -> SchedulerLimits:
    """Bounds of a small batch."""
    return SchedulerLimits(
        max_num_seqs=ROWS,
        max_num_batched_tokens=256,
        max_waiting=1,
        max_context=CONTEXT,
        block_size=BLOCK,
        vocab_size=9,
    )


def admission(row: int, length: int) -> Admission:
    """A row with scattered blocks of its own for the whole context."""
    blocks = tuple(1 + row + ROWS * ((place * 5) % 16) for place in range(CONTEXT // BLOCK))
    return Admission(row, array("I", [1] * length), length, Sampling(), -1, blocks)


class Case:
    """Random queries, keys and values of each row, and what a schedule gave for them."""

    def __init__(self, layer: LayerLayout, rule: AttentionRule, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        heads = layer.heads * GROUP

        def numbers(count: int, dim: int) -> Tensor:
            return torch.randn(ROWS, CONTEXT, count, dim, generator=generator)

        self.layer, self.heads = layer, heads
        self.rule = AttentionRule(rule.scale, rule.cap, None if rule.sinks is None else rule.sinks[:heads])
        self.q, self.k = numbers(heads, layer.key_dim), numbers(layer.heads, layer.key_dim)
        self.v = self.k[..., : layer.value_dim] if layer.latent else numbers(layer.heads, layer.value_dim)
        self.seen: dict[tuple[int, int], Tensor] = {}
        # A layer of another reach before it, so that places and reaches are not the same numbers.
        layout = KvLayout(
            layers=(LayerLayout(heads=1, key_dim=2, value_dim=2), layer),
            block_size=BLOCK,
            dtype="float32",
            num_blocks=ROWS * 16,
        )
        self.storage = KvStorage(layout, max_context=CONTEXT, dtype=torch.float32, device=torch.device("cpu"))
        self.builder = BatchBuilder(make_limits(), self.storage)
        self.grouping = Grouping(self.storage)

    def step(self, plan: StepPlan) -> None:
        """One step through the builder and the attention."""
        for one in plan.admissions:
            self.builder.intake.admit(one)
        batch = self.builder.arrays(plan, by_length=True)
        lengths = batch.positions[: batch.num_decode] + 1
        attend = PagedAttention(self.storage, self.grouping.batch(batch, lengths, plan.prefills))
        order = batch.positions.tolist()
        rows = [0] * len(order)
        for row, place in zip(plan.sample_rows, batch.wanted.tolist(), strict=True):
            rows[place] = row
        place = len(plan.decode_rows)
        for chunk in plan.prefills:
            rows[place : place + chunk.length] = [chunk.row] * chunk.length
            place += chunk.length
        q, k, v = (part[rows, order] for part in (self.q, self.k, self.v))
        qkv = q, k, None if self.layer.latent else v
        result = attend(1, qkv, self.rule).unflatten(1, (self.heads, -1))
        for line, place in enumerate(zip(rows, order, strict=True)):
            self.seen[place] = result[line]
        self.builder.advance(plan, [1] * len(plan.sample_rows))

    def check(self) -> None:
        """Every token's result is what its definition gives."""
        for (row, position), result in self.seen.items():
            seen = visible(self.layer.reach, position)
            expected = written_out(self.q[row, position], self.k[row], self.v[row], seen, self.rule)
            assert torch.allclose(result.double(), expected, atol=1e-5), (row, position)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("layer", LAYERS, ids=str)
@settings(max_examples=3, deadline=None)
@given(st.data())
def test_every_schedule_gives_what_the_definition_gives(layer: LayerLayout, rule: str, data: st.DataObject) -> None:
    """Rows of any length, cut into chunks anywhere, others decoding beside them, then all decoding."""
    case = Case(layer, RULES[rule], data.draw(st.integers(0, 99)))
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=ROWS, max_size=ROWS))
    started: list[int] = []
    for row, length in enumerate(lengths):
        cuts = sorted(data.draw(st.sets(st.integers(1, length), max_size=3)) | {length})
        start = 0
        for end in cuts:
            plan = StepPlan(decode_rows=list(started), prefills=[Chunk(row, start, end - start, end == length)])
            if start == 0:
                plan.admissions.append(admission(row, length))
            case.step(plan)
            start = end
        started.append(row)
    for _ in range(9):
        case.step(StepPlan(decode_rows=list(started)))
    assert len(case.seen) >= sum(lengths) + 9 * ROWS
    case.check()


@pytest.mark.parametrize("reach", [Reach("window", 5), Reach("chunk", 12), Reach("window", 21), Reach("chunk", 9)])
def test_what_lies_behind_is_not_read(reach: Reach) -> None:
    """NaN in every block wholly behind what a layer sees reaches no result; in a layer that sees all, it does."""
    for layer_reach in (reach, FULL):
        case = Case(LayerLayout(heads=2, key_dim=8, value_dim=8, reach=layer_reach), RULES["plain"], 1)
        case.step(StepPlan(admissions=[admission(0, 31)], prefills=[Chunk(0, 0, 31, True)]))
        behind = visible(reach, 31).start // BLOCK
        assert behind >= 2
        for tensor in case.storage.tensors[2:]:
            tensor[list(admission(0, 31).blocks[:behind])] = torch.nan
        case.seen.clear()
        case.step(StepPlan(decode_rows=[0]))
        assert bool(case.seen[0, 31].isfinite().all()) == (layer_reach is not FULL)


def test_a_window_of_the_whole_context_is_the_whole_context() -> None:
    """A reach covers a context when it is as long; chunks too."""
    assert FULL.covers(1 << 40)
    for kind in ("window", "chunk"):
        assert Reach(kind, 8).covers(8)
        assert not Reach(kind, 8).covers(9)
