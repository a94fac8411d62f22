"""Prompt chunks on a device: computed as they come, in one pass, without a recording; the host waits for nothing.

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
from engine.backends.cuda.runtime.operations import Chunks, Operations
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

    def run(self, chunks: list[Chunk]) -> Prefilled:
        """Start a step's chunks; what changed in tables was announced before. Rows whose prompts end decode from the
        next step on, with the token that the device has chosen."""
        parts, spans = self._described(chunks)
        sizes = [len(part) for part in parts]
        sent = torch.split(self._loop.copies.upload(np.concatenate(parts)), sizes)
        token_ids, positions, numbers, rows, starts, lengths, begins, wanted, ending = sent
        tables = self._loop.tables
        entries, sound = self._loop.rows(rows, starts, starts + lengths)
        slots = tables.slots(entries, numbers, positions, ~sound[numbers])
        placed = Chunks(begins, lengths.masked_fill(~sound, 0), starts, tables.split(entries), spans)
        logits = self._model.prefill(ChunkTokens(token_ids, positions, slots), placed, wanted)
        chosen, reports = torch.zeros_like(ending), None
        if len(ending):
            where = rows[ending], starts[ending] + lengths[ending]
            sampled = self._operations.sample(logits[: len(ending)], *where, self._loop.columns)
            chosen = sampled.tokens.masked_fill(~sound[ending], FOREIGN)
            self._loop.enter(where[0], chosen, where[1])
            if any(chunk.last and self._host.asked[chunk.row] >= 0 for chunk in chunks):
                reports = self._loop.copies.fetch(report_words(sampled))
        verdicts = torch.cat((chosen, torch.zeros_like(rows).masked_fill(~sound, FOREIGN)))
        return Prefilled(chunks, logits, self._loop.copies.fetch(verdicts), reports)

    def _described(self, chunks: list[Chunk]) -> tuple[list[Ints], tuple[tuple[int, int], ...]]:
        """Arrays of all tokens: ids, positions, number of the chunk; of all chunks: row, start, length, first token of
        the step; tokens whose logits are wanted; and which chunks end their prompts."""
        known = self._host.known
        begins = np.concatenate(([0], np.cumsum([chunk.length for chunk in chunks])[:-1])).astype(np.int64)
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
            np.array(ends + scored, dtype=np.int64),
            np.array([number for number, chunk in enumerate(chunks) if chunk.last], dtype=np.int64),
        ]
        return parts, tuple(zip(begins.tolist(), lengths.tolist(), strict=True))
