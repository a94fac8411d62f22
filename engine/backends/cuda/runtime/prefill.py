"""Prompt chunks on a device: computed as they come, in one pass, without a recording; the host waits for nothing.

Decoding rows may take part in the pass: their lanes come first, before all tokens of chunks. They are looked up and
advance as in a step of their own (``engine.backends.cuda.runtime.loop``), and their tokens go to the ring. Maps of
layers are read once for all tokens, attention is that of each kind, and the tokens of lanes and of prompts that end are
chosen together.

All that the host has to say of a step's chunks travels as one array. Slots follow on the device from the same block
tables that decoding reads, after the stamps in them were compared: nothing is read or written for a chunk whose table
names a block that is not its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.backends.cuda.runtime.copying import Fetched
from engine.backends.cuda.runtime.host_rows import HostRows, Ints
from engine.backends.cuda.runtime.loop import FOREIGN, DeviceLoop
from engine.backends.cuda.runtime.model import ChunkTokens, DeviceModel
from engine.backends.cuda.runtime.operations import Beside, Chunks, Operations
from engine.backends.cuda.runtime.sampling_state import report_words
from engine.backends.cuda.runtime.storage import DeviceStorage
from engine.core.scheduler.plan import Chunk


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A step's chunks, on their way."""

    chunks: list[Chunk]
    logits: Tensor
    """Logits of the last tokens of chunks that end their prompts, then of the tokens before scored ones."""
    verdicts: Fetched
    """For each chunk that ends its prompt the token that the device chose, then for each chunk ``FOREIGN`` where it was
    not computed."""
    reports: Fetched | None
    """For each chunk that ends its prompt a report (``engine.backends.cuda.runtime.sampling_state``), if some row asked
    for one."""


class Prefill:
    """Computes the chunks of steps."""

    def __init__(
        self, loop: DeviceLoop, model: DeviceModel, storage: DeviceStorage, operations: Operations, host: HostRows
    ) -> None:
        self._loop = loop
        self._model = model
        self._operations = operations
        self._host = host

    def run(self, chunks: list[Chunk], lanes: int = 0) -> Prefilled:
        """Start a step's chunks; what changed in tables was announced before. Rows whose prompts end decode from the
        next step on, with the token that the device has chosen. ``lanes``: those that compute a step in the same
        pass."""
        parts, spans = self._described(chunks, lanes)
        sizes = [len(part) for part in parts]
        sent = torch.split(self._loop.copies.upload(np.concatenate(parts)), sizes)
        token_ids, positions, numbers, rows, starts, lengths, begins, wanted, ending = sent
        tables = self._loop.tables
        entries, sound = self._loop.rows(rows, starts, starts + lengths)
        slots = tables.slots(entries, numbers, positions, ~sound[numbers])
        placed = Chunks(begins, lengths.masked_fill(~sound, 0), starts, tables.split(entries), spans)
        tokens, begun, beside = ChunkTokens(token_ids, positions, slots), None, None
        if lanes:
            begun = self._operations.begin_step(self._loop.state, lanes)
            beside = Beside(begun.lengths, begun.tables)
            joined = (torch.cat(pair) for pair in zip(begun.slots, slots, strict=True))
            tokens = ChunkTokens(
                torch.cat((begun.tokens, token_ids)), torch.cat((begun.positions, positions)), tuple(joined)
            )
        logits = self._model.prefill(tokens, placed, wanted, beside)
        chosen, reports = torch.zeros_like(ending), None
        if len(ending) or begun is not None:
            where = rows[ending], starts[ending] + lengths[ending]
            choosers, places = where
            if begun is not None:
                choosers, places = torch.cat((begun.choosers, choosers)), torch.cat((begun.places, places))
            sampled = self._operations.sample(logits[: lanes + len(ending)], choosers, places, self._loop.columns)
            if begun is not None:
                self._operations.end_step(self._loop.state, begun, sampled.part(0, lanes))
                sampled = sampled.part(lanes, lanes + len(ending))
        if len(ending):
            chosen = sampled.tokens.masked_fill(~sound[ending], FOREIGN)
            self._loop.enter(where[0], chosen, where[1])
            if any(chunk.last and self._host.asked[chunk.row] >= 0 for chunk in chunks):
                reports = self._loop.copies.fetch(report_words(sampled))
        verdicts = torch.cat((chosen, torch.zeros_like(rows).masked_fill(~sound, FOREIGN)))
        return Prefilled(chunks, logits[lanes:], self._loop.copies.fetch(verdicts), reports)

    def _described(self, chunks: list[Chunk], lanes: int) -> tuple[list[Ints], tuple[tuple[int, int], ...]]:
        """Arrays of all chunks' tokens: ids, positions, number of the chunk; of all chunks: row, start, length, first
        token of the step; tokens whose logits are wanted, those of lanes first; and which chunks end their prompts."""
        known = self._host.known
        begins = np.concatenate(([0], np.cumsum([chunk.length for chunk in chunks])[:-1])).astype(np.int64) + lanes
        ends = [int(begin) + chunk.length - 1 for begin, chunk in zip(begins, chunks, strict=True) if chunk.last]
        scored: list[int] = []
        for begin, chunk in zip(begins.tolist(), chunks, strict=True):
            first = begin + chunk.score_from - 1 - chunk.start
            scored += range(first, first + chunk.num_scored)
        lengths = np.array([chunk.length for chunk in chunks], dtype=np.int64)
        parts = [
            np.concatenate([known[chunk.row][chunk.start : chunk.start + chunk.length] for chunk in chunks]),
            np.concatenate([np.arange(chunk.start, chunk.start + chunk.length) for chunk in chunks]),
            np.repeat(np.arange(len(chunks)), lengths),
            np.array([chunk.row for chunk in chunks], dtype=np.int64),
            np.array([chunk.start for chunk in chunks], dtype=np.int64),
            lengths,
            begins,
            np.array([*range(lanes), *ends, *scored], dtype=np.int64),
            np.array([number for number, chunk in enumerate(chunks) if chunk.last], dtype=np.int64),
        ]
        return parts, tuple(zip(begins.tolist(), lengths.tolist(), strict=True))
