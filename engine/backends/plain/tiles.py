"""The deterministic rows of a step on the plain path: cut into tiles of one shape, computed one tile after another.

Decoding rows share tiles, ``TILE`` of them at most; a prompt's chunk has tiles of its own. Since a row's numbers do not
depend on its place in a tile nor on what is beside it, chunk borders, preemption, cached prefixes and neighbours can be
any: ``is_exact`` tries that with the loaded model on the machine at hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.backends.common.batch import StepArrays
from engine.backends.common.block_table import BlockTables, Ints, first_seen
from engine.backends.common.storage import KvStorage
from engine.backends.plain.tile_attention import STRETCH, TILE, Tile, TileAttention, TileReach
from engine.core.kv.layout import NULL_BLOCK, KvGroup, Reach
from engine.core.scheduler.plan import Chunk
from engine.model.layers.blocks import NO_ADAPTERS
from engine.model.layers.decoder import Decoder

PROBE_PLACES = (0, 1, 6, 7, TILE - 1)
"""Places of a tile at which ``is_exact`` looks: ends, and where kernels of 6, 7 or 8 rows meet."""

PROBE_CONTEXT = 24
"""Tokens that the probes of ``is_exact`` attend to: to a single one every score gives the weight 1, and an order of
roundings in the scores would not show."""


class _Part(NamedTuple):
    """Tokens ``start .. stop`` of a step, at most ``TILE``; of one prompt or of decoding rows."""

    start: int
    stop: int
    prompt: bool


class Tiles:
    """Computes steps tile by tile."""

    def __init__(self, model: Decoder, storage: KvStorage) -> None:
        self._model = model
        self._storage = storage
        layout = storage.layout
        self._reaches = [(reach, layout.table_of(reach)) for reach in layout.reaches]
        self._dtype = storage.dtype
        self._device = storage.device

    def forward(self, arrays: StepArrays, chunks: list[Chunk]) -> Tensor:
        """Logits of the wanted tokens, shape ``(len(arrays.wanted), vocab_size)``.

        Args:
            arrays: a step with deterministic rows only.
            chunks: its prompt chunks; their tokens follow those of the decoding rows.
        """
        wanted = arrays.wanted
        logits = torch.empty(len(wanted), self._model.config.vocab_size, dtype=self._dtype, device=self._device)
        for part in _parts(arrays.num_decode, chunks):
            (lines,) = np.nonzero((wanted >= part.start) & (wanted < part.stop))
            out = self._compute(arrays, part, wanted[lines] - part.start)
            if len(lines):
                logits[self._tensor(lines)] = out[: len(lines)]
        return logits

    def is_exact(self) -> bool:
        """Whether a row of this model has the same logits wherever in a tile it stands and whatever is beside it.

        Only while no request is live: all rows attend to numbers put into the null block, which the caller has to zero
        afterwards.
        """
        vocab, layout = self._model.config.vocab_size, self._storage.layout
        draw = np.random.default_rng(0)
        noise = torch.Generator(self._device).manual_seed(0)
        for tensor in self._storage.tensors:
            tensor[NULL_BLOCK].normal_(generator=noise)
        seen: set[bytes] = set()
        for place in PROBE_PLACES:
            token_ids = draw.integers(0, vocab, TILE)
            token_ids[place] = vocab // 2
            arrays = _probe(token_ids, layout.tables, self._model.config.max_positions)
            logits = self._compute(arrays, _Part(0, TILE, prompt=False), np.arange(TILE))
            seen.add(logits[place].float().numpy().tobytes())
        return len(seen) == 1

    def _compute(self, arrays: StepArrays, part: _Part, wanted: Ints) -> Tensor:
        """Logits of ``wanted`` places of a tile, padded to ``TILE``; of none, when none are wanted."""
        tokens = self._tensor(_padded(arrays.token_ids[part.start : part.stop]))
        positions = _padded(arrays.positions[part.start : part.stop])
        places = _padded(wanted) if len(wanted) else wanted
        attend = TileAttention(self._storage, self._tile(arrays, part, positions))
        adapters = NO_ADAPTERS
        if len(arrays.adapters):
            adapters = self._tensor(_padded(arrays.adapters[part.start : part.stop]))
        logits = self._model.forward(
            tokens, self._tensor(positions), attend, self._tensor(places), adapters, alone=True
        )
        tokens.zero_()
        return logits

    def _tile(self, arrays: StepArrays, part: _Part, positions: Ints) -> Tile:
        length = -(-(int(positions.max()) + 1) // STRETCH) * STRETCH
        reaches = tuple(
            TileReach(
                slots=self._tensor(arrays.slots[number][part.start : part.stop]),
                blocks=self._tensor(_blocks(reach, arrays, number, part, length)),
                mask=self._mask(reach, positions, length),
            )
            for reach, number in self._reaches
        )
        return Tile(len(reaches[0].slots), length, reaches)

    def _mask(self, reach: Reach, positions: Ints, length: int) -> Tensor:
        places = np.arange(length)
        hidden = (places > positions[:, None]) | (places < first_seen(reach, positions)[:, None])
        mask = torch.zeros(TILE, length, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(self._tensor(hidden), -torch.inf)[:, None, None, :]

    def _tensor(self, values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(self._device)


def _blocks(reach: Reach, arrays: StepArrays, number: int, part: _Part, length: int) -> Ints:
    """Blocks of one table up to ``length``, for each token of a tile or for all of a prompt's; the null block for those
    that none of them sees, which may be somebody else's by now."""
    table = arrays.tables[number]
    width = -(-length // table.block_size)
    known = min(width, table.tables.shape[1])
    stop = part.start + 1 if part.prompt else part.stop
    # A prompt's first token looks back furthest.
    rows, positions = arrays.rows[part.start : stop], arrays.positions[part.start : stop]
    blocks: Ints = np.full((1 if part.prompt else TILE, width), NULL_BLOCK, dtype=np.int64)
    unseen = np.arange(known) < first_seen(reach, positions)[:, None] // table.block_size
    blocks[: len(rows), :known] = np.where(unseen, NULL_BLOCK, table.tables[rows, :known])
    return blocks


def _parts(num_decode: int, chunks: list[Chunk]) -> Iterator[_Part]:
    for start in range(0, num_decode, TILE):
        yield _Part(start, min(start + TILE, num_decode), prompt=False)
    place = num_decode
    for chunk in chunks:
        end = place + chunk.length
        for start in range(place, end, TILE):
            yield _Part(start, min(start + TILE, end), prompt=True)
        place = end


def _padded(values: Ints) -> Ints:
    """``TILE`` numbers, zeros behind those given."""
    padded = np.zeros(TILE, dtype=np.int64)
    padded[: len(values)] = values
    return padded


def _probe(token_ids: Ints, groups: tuple[KvGroup, ...], most: int) -> StepArrays:
    """A tile of tokens that are written nowhere and attend to the null block, again and again."""
    zeros = np.zeros(TILE, dtype=np.int64)
    context = min(PROBE_CONTEXT, most)
    return StepArrays(
        token_ids=token_ids,
        positions=np.full(TILE, context - 1),
        slots=(zeros[:0],) * len(groups),
        rows=zeros,
        tables=tuple(BlockTables(1, context, group.block_size) for group in groups),
        stamps=zeros[:0],
        wanted=np.arange(TILE),
        num_decode=TILE,
        adapters=zeros[:0],
    )
