"""The launches around a step, against the tensor operations that they replace, on rows in every state."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from engine.backends.cuda.kernels import rope, steps
from engine.backends.cuda.runtime import simulated_steps
from engine.backends.cuda.runtime.loop import FOREIGN, NOTHING, RING_STEPS
from engine.backends.cuda.runtime.loop_state import LoopState
from engine.backends.cuda.runtime.operations import Sampled
from engine.backends.cuda.runtime.rows import NO_STOP, NUM_FIELDS, Field, RowLayout
from engine.backends.cuda.runtime.sampling_state import REPORT_WORDS
from engine.backends.cuda.runtime.simulated_ops import PlainOperations
from engine.backends.cuda.runtime.tables import Tables
from engine.core.kv.layout import FULL, KvGroup, Reach
from engine.core.scheduler.plan import FAILED
from engine.model.layers.rotary import RopeScaling, Rotary
from isolation.ipc.messages import MAX_TOP_LOGPROBS
from tests.engine.backends.cuda.kernels.support import COUNTS, PLACE, for_each

pytestmark = pytest.mark.usefixtures("place")

GROUPS = (KvGroup(FULL, 4), KvGroup(Reach("window", 6), 8), KvGroup(Reach("chunk", 5), 4))
ROWS, LANES, STOPS, BLOCKS, VOCAB = 6, 5, 3, 40, 50


def state(tables: int, seed: int) -> LoopState:
    """Rows that live, are done, have a block of another row, or are about to end; and lanes without a row."""
    draw = torch.Generator().manual_seed(seed)
    placed = Tables(GROUPS[:tables], (16,) * tables, 24)
    layout = RowLayout(ROWS, LANES, STOPS, placed.width)
    lines = layout.lines

    def whole(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=draw)

    fields = whole(0, VOCAB, NUM_FIELDS, lines)
    fields[Field.POSITION] = whole(0, 40, lines)
    fields[Field.LIMIT] = fields[Field.POSITION] + whole(1, 5, lines)
    fields[Field.DONE] = whole(0, 2, lines) & whole(0, 2, lines)
    fields[Field.DONE, ROWS] = 1
    entries = whole(0, BLOCKS, lines, placed.width)
    stamps = whole(0, 1 << 40, BLOCKS)
    expected = stamps[entries]
    wrong = torch.rand(lines, placed.width, generator=draw) < 0.02
    expected[wrong] += 1
    entries[torch.rand(lines, placed.width, generator=draw) < 0.01] = BLOCKS + 3
    lanes = torch.randperm(ROWS, generator=draw)[:LANES]
    lanes[whole(0, LANES, 1)] = ROWS
    stops = whole(0, VOCAB, lines, STOPS)
    stops[whole(0, 2, lines, STOPS) == 0] = NO_STOP
    return LoopState(
        layout=layout,
        tables=placed,
        fields=fields,
        stops=stops,
        entries=entries,
        expected=expected,
        lanes=lanes,
        firsts=torch.tensor(placed.firsts),
        stamps=stamps,
        ring=torch.full((RING_STEPS, LANES), 7),
        reports=torch.zeros(RING_STEPS, LANES, REPORT_WORDS, dtype=torch.int32),
        turn=whole(0, 200, 1),
    )


def sampled(bucket: int, seed: int) -> Sampled:
    """Tokens, some of which end a row or are none, and reports."""
    draw = torch.Generator().manual_seed(seed + 1)
    tokens = torch.randint(0, VOCAB, (bucket,), generator=draw)
    tokens[torch.rand(bucket, generator=draw) < 0.2] = FAILED
    ids = torch.randint(-1, VOCAB, (bucket, MAX_TOP_LOGPROBS), generator=draw).int()
    tops = torch.randn(bucket, MAX_TOP_LOGPROBS, generator=draw)
    return Sampled(tokens, torch.randn(bucket, generator=draw), ids, tops)


@pytest.mark.parametrize("count", COUNTS)
def test_steps_begin_and_end_as_specified(count: int) -> None:
    """Any tables and buckets: what lanes compute, and all of the loop's memory behind the step, are the same numbers;
    entries that are read too."""
    seen: set[int] = set()

    def check(drawn: tuple[int, int, int]) -> None:
        tables, bucket, seed = drawn
        ours, theirs = state(tables, seed), state(tables, seed)
        found, wanted = (
            steps.begin_step(ours, bucket),
            simulated_steps.begin_step(PlainOperations().faults, theirs, bucket),
        )
        for name in ("rows", "tokens", "positions", "lengths", "choosers", "places"):
            assert torch.equal(getattr(found, name).long(), getattr(wanted, name)), name
        for one, other in zip(found.slots, wanted.slots, strict=True):
            assert torch.equal(one, other)
        reads = theirs.tables.read(wanted.positions, wanted.lengths)
        for number, (begins, ends) in enumerate(reads):
            first = theirs.tables.firsts[number]
            for lane, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
                part = slice(begin - first, max(begin, end) - first)
                assert torch.equal(found.tables[number][lane, part], wanted.tables[number][lane, part])
        chosen = sampled(bucket, seed)
        steps.end_step(ours, found, chosen)
        simulated_steps.end_step(theirs, wanted, chosen)
        line = theirs.ring[(int(theirs.turn) - 1) % RING_STEPS]
        seen.update(line.tolist())
        for name in ("fields", "ring", "turn"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
        live = theirs.reports[(int(theirs.turn) - 1) % RING_STEPS, :bucket]
        assert torch.equal(ours.reports[(int(theirs.turn) - 1) % RING_STEPS, :bucket], live)

    for_each(max(count, 12), st.tuples(st.integers(1, 3), st.integers(1, LANES), st.integers(0, 9_999)), check)
    assert {NOTHING, FOREIGN, FAILED} < seen, "rows of every kind were among them"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rotations_are_the_model_s(dtype: torch.dtype) -> None:
    """Near and far positions, whole and partial heads, with and without a factor: within a rounding of the tables that
    the model computes."""
    positions = torch.tensor([0, 1, 77, 4_095, 131_071])
    for scaling in (RopeScaling(theta=500_000.0), RopeScaling(partial=0.5, attention_factor=1.3)):
        rotary = Rotary(scaling, 24, PLACE)
        for found, table in zip(rope.rotations(rotary, positions, dtype), rotary.tables(positions, dtype), strict=True):
            bound = 1e-6 if dtype == torch.float32 else 2.0**-7
            torch.testing.assert_close(found.float(), table.float(), rtol=0, atol=bound)
