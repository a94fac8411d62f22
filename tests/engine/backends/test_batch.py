"""Batch builder: attention groups, slots and positions for any mix of lengths."""

from __future__ import annotations

from array import array

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.backends.common.batch import BatchBuilder
from engine.backends.common.block_table import BlockTables
from engine.backends.common.storage import KvStorage
from engine.backends.plain.forward import PlainForward, StepBatch
from engine.backends.plain.grouping import SMALL_WIDTH
from engine.core.kv.layout import KvLayout, uniform_layers
from engine.core.scheduler.limits import SchedulerLimits
from engine.core.scheduler.plan import Admission, Chunk, StepPlan
from isolation.ipc.sampling import Sampling
from tests.engine.support import model_config, random_model

BLOCK = 4
CONTEXT = 400
ROWS = 12
MODEL = random_model(model_config())


class Rows(BatchBuilder):
    """Rows of the plain path, with the batches that it builds."""

    def __init__(self, limits: SchedulerLimits, storage: KvStorage) -> None:
        super().__init__(limits, storage)
        self._plain = PlainForward(MODEL, storage)

    def build(self, plan: StepPlan) -> StepBatch:
        """The inputs of a forward pass."""
        return self._plain.batch(plan, self)


def make_builder(gather_blocks: int) -> Rows:
    """A builder whose gather buffers hold few blocks."""
    layout = KvLayout(layers=uniform_layers(1, 1, 2), block_size=BLOCK, dtype="float32", num_blocks=2_000)
    storage = KvStorage(layout, max_context=CONTEXT, dtype=torch.float32, device=torch.device("cpu"))
    storage.gather_blocks = gather_blocks
    limits = SchedulerLimits(
        max_num_seqs=ROWS,
        max_num_batched_tokens=4_800,
        max_waiting=1,
        max_context=CONTEXT,
        block_size=BLOCK,
        vocab_size=50,
    )
    return Rows(limits, storage)


def admit(builder: Rows, row: int, length: int) -> tuple[int, ...]:
    """A row with known tokens and blocks of its own; gives the blocks."""
    blocks = tuple(1 + row * 100 + index for index in range(-(-(length + 1) // BLOCK)))
    tokens = array("I", [(row + place) % 50 for place in range(length)])
    builder.intake.admit(Admission(row, tokens, length, Sampling(), -1, blocks))
    return blocks


@given(st.lists(st.integers(1, CONTEXT - 2), min_size=1, max_size=ROWS), st.integers(100, 140))
def test_groups_cover_every_row_once_and_read_its_own_blocks(lengths: list[int], gather_blocks: int) -> None:
    """Rows are cut into rectangles that fit the buffers and waste at most half; each row sees exactly its context."""
    builder = make_builder(gather_blocks)
    tables = {row: admit(builder, row, length) for row, length in enumerate(lengths)}
    prefill = StepPlan(prefills=[Chunk(row, 0, length, True) for row, length in enumerate(lengths)])
    builder.build(prefill)
    builder.advance(prefill, [row % 50 for row in range(len(lengths))])
    batch = builder.build(StepPlan(decode_rows=list(range(len(lengths)))))
    order = [0] * len(lengths)
    for row, place in enumerate(batch.wanted.tolist()):
        order[place] = row
    assert batch.positions.tolist() == [lengths[row] for row in order]
    assert batch.token_ids.tolist() == [row % 50 for row in order]
    assert batch.next_positions.tolist() == [length + 1 for length in lengths]
    assert batch.attention.reaches[0].slots.tolist() == [
        tables[row][lengths[row] // BLOCK] * BLOCK + lengths[row] % BLOCK for row in order
    ]
    covered = []
    for group in batch.attention.reaches[0].groups:
        rows = order[group.start : group.stop]
        covered += rows
        table = group.blocks.view(len(rows), -1)
        width = table.shape[1]
        assert len(group.blocks) <= gather_blocks
        assert group.length == max(lengths[row] for row in rows) + 1
        for line, row in enumerate(rows):
            own = -(-(lengths[row] + 1) // BLOCK)
            assert width <= SMALL_WIDTH or own * 2 >= width
            assert tuple(table[line].tolist()) == tables[row] + (0,) * (width - own)
            seen = torch.ones(group.length, dtype=torch.bool) if group.mask is None else group.mask[line, 0, 0] == 0
            assert seen.tolist() == [place <= lengths[row] for place in range(group.length)]
    assert covered == order


@given(st.integers(1, CONTEXT - 2), st.data())
def test_chunks_see_everything_up_to_themselves(length: int, data: st.DataObject) -> None:
    """A prompt cut anywhere: each chunk has its tokens, positions and slots, and a causal view of what is before."""
    builder = make_builder(200)
    table = admit(builder, 3, length)
    cuts = sorted(data.draw(st.sets(st.integers(1, length), max_size=4)) | {length})
    start = 0
    for end in cuts:
        plan = StepPlan(prefills=[Chunk(3, start, end - start, end == length)])
        batch = builder.build(plan)
        (chunk,) = batch.attention.reaches[0].chunks
        places = range(start, end)
        assert batch.token_ids.tolist() == [(3 + place) % 50 for place in places]
        assert batch.positions.tolist() == list(places)
        slots = batch.attention.reaches[0].slots.tolist()
        assert slots == [table[place // BLOCK] * BLOCK + place % BLOCK for place in places]
        assert batch.wanted.tolist() == ([end - start - 1] if end == length else [])
        if start:
            assert chunk.blocks.tolist() == list(table[: -(-end // BLOCK)])
            visible = (chunk.mask == 0).tolist()
            assert visible == [[other <= place for other in range(end)] for place in places]
        else:
            assert (chunk.blocks, chunk.mask) == (None, None)
        builder.advance(plan, [0] * len(plan.sample_rows))
        start = end


def test_a_row_inherits_no_block_of_its_last_request() -> None:
    """A table is replaced as a whole: behind the new blocks there is the null block, nobody's old one."""
    tables = BlockTables(2, 40, BLOCK)
    tables.assign(0, (5, 6, 7, 8))
    tables.grow([0], [4], [9], [0])
    assert tables.tables[0].tolist() == [5, 6, 7, 8, 9, 0, 0, 0, 0, 0]
    tables.assign(0, (3,))
    assert tables.rectangle(np.array([0]), np.array([0]), 10).tolist() == [3, 0, 0, 0, 0, 0, 0, 0, 0, 0]
