"""Attention metadata of a step for the plain path, once for each reach that the model's layers have.

Decoding rows are cut into rectangles of blocks that waste at most half and fit the gather buffers; a prompt chunk gets
the blocks that it can see. Layers with a window or chunks read no block that lies wholly behind what they see.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.backends.common.batch import StepArrays
from engine.backends.common.block_table import BlockTables, Ints, first_seen
from engine.backends.common.storage import KvStorage
from engine.backends.plain.paged_attention import AttentionBatch, ChunkContext, DecodeGroup, ReachBatch
from engine.core.kv.layout import Reach
from engine.core.scheduler.plan import Chunk

SMALL_WIDTH = 8
"""Blocks up to which rows are put together whatever their lengths: padding is then cheaper than another product."""


class Grouping:
    """Makes the attention metadata of a step from the rows' block tables."""

    def __init__(self, storage: KvStorage) -> None:
        layout = storage.layout
        self._gather_tokens = storage.gather_blocks * layout.block_size
        self._reaches = [(reach, layout.table_of(reach)) for reach in layout.reaches]
        self._dtype = storage.dtype
        self._device = storage.device

    def batch(self, arrays: StepArrays, lengths: Ints, chunks: list[Chunk]) -> AttentionBatch:
        """Metadata of one step.

        Args:
            arrays: the step, its decoding rows by falling length.
            lengths: most positions that each decoding row attends to, its own included.
            chunks: prompt chunks; their tokens follow those of the decoding rows.
        """
        rows = arrays.rows[: arrays.num_decode]
        reaches = []
        places = [self._tensor(by_table) for by_table in arrays.slots]
        for reach, number in self._reaches:
            tables = arrays.tables[number]
            place = len(rows)
            contexts = []
            for chunk in chunks:
                contexts.append(self._context(reach, tables, chunk, place))
                place += chunk.length
            groups = self._groups(reach, tables, rows, lengths)
            reaches.append(ReachBatch(places[number], groups, tuple(contexts)))
        return AttentionBatch(tuple(reaches))

    def _context(self, reach: Reach, tables: BlockTables, chunk: Chunk, place: int) -> ChunkContext:
        end = chunk.start + chunk.length
        queries = np.arange(chunk.start, end)
        first = first_seen(reach, queries)
        stop = place + chunk.length
        if chunk.start == 0:
            mask = None if reach.covers(end) else self._mask(_hidden(queries, queries, first))
            return ChunkContext(place, stop, None, end, mask)
        size = tables.block_size
        begin = int(first[0]) // size
        blocks = tables.tables[chunk.row, begin : -(-end // size)]
        seen = np.arange(begin * size, end)
        return ChunkContext(place, stop, self._tensor(blocks), len(seen), self._mask(_hidden(queries, seen, first)))

    def _groups(self, reach: Reach, tables: BlockTables, rows: Ints, lengths: Ints) -> tuple[DecodeGroup, ...]:
        begins = first_seen(reach, lengths - 1) // tables.block_size
        widths = -(-lengths // tables.block_size) - begins
        groups = []
        start = 0
        while start < len(rows):
            most = self._gather_tokens // tables.block_size
            part = slice(start, _similar(widths[start:].tolist(), most) + start)
            blocks = tables.rectangle(rows[part], begins[part], int(widths[part].max()))
            ends = lengths[part] - begins[part] * tables.block_size
            groups.append(self._group(reach, start, blocks, lengths[part], ends))
            start = part.stop
        return tuple(groups)

    def _group(self, reach: Reach, start: int, blocks: Ints, lengths: Ints, ends: Ints) -> DecodeGroup:
        """Rows from ``start`` on. ``ends``: their lengths, counted from the first token of their blocks."""
        length = int(ends.max())
        mask = None
        if reach.kind != "full" or int(ends.min()) < length:
            places = np.arange(length)
            first = first_seen(reach, lengths - 1) - (lengths - ends)
            hidden = (places >= ends[:, None]) | (places < first[:, None])
            mask = self._mask(hidden)[:, None, None, :] if hidden.any() else None
        return DecodeGroup(start, start + len(lengths), self._tensor(blocks), length, mask)

    def _mask(self, hidden: NDArray[np.bool_]) -> Tensor:
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(self._tensor(hidden), -torch.inf)

    def _tensor(self, values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(self._device)


def _similar(widths: list[int], gather_blocks: int) -> int:
    """How many of the first rows make one rectangle, given the blocks that each reads and that fit the buffers."""
    most = least = widths[0]
    for count, width in enumerate(widths):
        most, least = max(most, width), min(least, width)
        wasteful = most > SMALL_WIDTH and 2 * least < most
        if count and (wasteful or (count + 1) * most > gather_blocks):
            return count
    return len(widths)


def _hidden(queries: Ints, seen: Ints, first: Ints) -> NDArray[np.bool_]:
    """Which of the positions ``seen`` each query does not attend to."""
    hidden: NDArray[np.bool_] = (seen > queries[:, None]) | (seen < first[:, None])
    return hidden
