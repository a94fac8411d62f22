"""The deterministic rows of a step on a device: cut into tiles of one size, computed one tile after another.

A library chooses how it multiplies by the number of rows, so a row's bits depend on how many there are. Here every
product has the same number: decoding rows and prompts' chunks together fill tiles, and the last one is padded. All
other operations compute a row in one order, whatever is beside it, and attention is that of prompts for decoding rows
too, which computes a token's tiles from the beginning of its sequence. So borders of chunks, preemptions and neighbours
can be any. ``is_exact`` tries with the loaded model whether a row is the same wherever it stands in a tile.

Nothing of this is recorded or run ahead of: a step of such rows waits for its plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.backends.cuda.runtime.host_rows import HostRows, Ints
from engine.backends.cuda.runtime.loop import FOREIGN, DeviceLoop
from engine.backends.cuda.runtime.model import ChunkTokens, DeviceModel
from engine.backends.cuda.runtime.operations import Chunks, Operations
from engine.backends.cuda.runtime.prefill import Prefilled
from engine.backends.cuda.runtime.sampling_state import report_words
from engine.backends.cuda.runtime.storage import DeviceStorage
from engine.core.scheduler.plan import Chunk

GPU_TOKENS = 128
"""Tokens of a tile on a GPU: so many are multiplied in about the time that weights take to be read."""

CPU_TOKENS = 16
"""Tokens of a tile on a processor, where the backend is tested."""

PROBE_POSITION = 23
"""Position of the token that ``is_exact`` tries: with a single one before it every score would give the weight 1."""

PROBE_BLOCK = 1
"""Any block but the null block; nobody has one then."""


@dataclass(frozen=True, slots=True)
class TilePiece:
    """A stretch of a chunk that lies in one tile."""

    chunk: int
    """Which of the step's chunks."""
    row: int
    start: int
    """Position of its first token."""
    tokens: Ints
    ends: bool
    """Whether the chunk's prompt ends with it, so that a token is chosen behind its last one."""
    scored: range
    """Places of tokens whose logits are wanted too."""


def cut(chunks: list[Chunk], tokens: list[Ints], size: int) -> Iterator[list[TilePiece]]:
    """The tiles of a step.

    Args:
        chunks: of rows that each occur once; a decoding row has one of one token.
        tokens: of each chunk.
        size: tokens of a tile.
    """
    tile: list[TilePiece] = []
    room = size
    for number, (chunk, ids) in enumerate(zip(chunks, tokens, strict=True)):
        done = 0
        while done < chunk.length:
            count = min(room, chunk.length - done)
            start = chunk.start + done
            first = chunk.score_from - 1 - start
            scored = range(min(max(first, 0), count), min(max(first + chunk.num_scored, 0), count))
            ends = chunk.last and done + count == chunk.length
            tile.append(TilePiece(number, chunk.row, start, ids[done : done + count], ends, scored))
            done, room = done + count, room - count
            if not room:
                yield tile
                tile, room = [], size
    if tile:
        yield tile


@dataclass(frozen=True, slots=True)
class _Lines:
    """Which lines of all tiles' logits are whose, in the order of tiles."""

    ended: list[int]
    """Lines behind which a token is chosen."""
    scored: list[int]

    @property
    def order(self) -> list[int]:
        """Lines in the order in which ``Prefilled`` has them."""
        return self.ended + self.scored


class ExactPass:
    """Computes the deterministic rows of steps."""

    def __init__(
        self, loop: DeviceLoop, model: DeviceModel, storage: DeviceStorage, operations: Operations, host: HostRows
    ) -> None:
        self._loop = loop
        self._model = model
        self._storage = storage
        self._device = storage.device
        self._operations = operations
        self._host = host
        self._size = CPU_TOKENS if self._device.type == "cpu" else GPU_TOKENS

    def run(self, rows: list[int], chunks: list[Chunk]) -> Prefilled:
        """Start a step of these decoding rows and prompts' chunks; what changed in tables was announced before. Its
        chunks are one of each row, then those given. The rows do not decode by themselves afterwards."""
        host, copies = self._host, self._loop.copies
        own = [Chunk(row, int(host.position[row]), 1, True) for row in rows]
        tokens = [host.last[row : row + 1] for row in rows]
        tokens += [host.known[chunk.row][chunk.start : chunk.start + chunk.length] for chunk in chunks]
        given = own + chunks
        tiles = list(cut(given, tokens, self._size))
        found = [self._compute(tile) for tile in tiles]
        lines = _lines(tiles)
        pieces = [piece.chunk for tile in tiles for piece in tile]
        ending = [number for number, chunk in enumerate(given) if chunk.last]
        where = [(chunk.row, chunk.start + chunk.length) for chunk in given if chunk.last]
        parts = [pieces, ending, [row for row, _ in where], [known for _, known in where], lines.order]
        told = np.array([one for part in parts for one in part], dtype=np.int64)
        sent = torch.split(copies.upload(told), [len(part) for part in parts])
        unsound = torch.cat([~sound for _, sound in found]).long()
        foreign = torch.zeros(len(given), dtype=torch.int64, device=self._device).index_add_(0, sent[0], unsound) > 0
        logits = torch.cat([part for part, _ in found])
        if lines.order != list(range(len(lines.order))):
            logits = logits.index_select(0, sent[4])
        chosen, reports = torch.zeros_like(sent[1]), None
        if ending:
            sampled = self._operations.sample(logits[: len(ending)], sent[2], sent[3], self._loop.columns)
            chosen = sampled.tokens.masked_fill(foreign[sent[1]], FOREIGN)
            if any(chunk.last and host.asked[chunk.row] >= 0 for chunk in given):
                reports = copies.fetch(report_words(sampled))
        verdicts = copies.fetch(torch.cat((chosen, foreign.long() * FOREIGN)))
        return Prefilled(given, logits, verdicts, reports)

    def _compute(self, tile: list[TilePiece]) -> tuple[Tensor, Tensor]:
        """Logits of a tile's wanted tokens, and of each piece whether all blocks were its own."""
        size, count = self._size, sum(len(piece.tokens) for piece in tile)
        lengths = np.array([len(piece.tokens) for piece in tile], dtype=np.int64)
        begins = np.cumsum(lengths) - lengths
        wanted = [place for begin, piece in zip(begins.tolist(), tile, strict=True) for place in _wanted(begin, piece)]
        numbers = np.full(size, -1, dtype=np.int64)
        numbers[:count] = np.repeat(np.arange(len(tile)), lengths)
        parts = [
            _padded(np.concatenate([piece.tokens for piece in tile]), size),
            _padded(np.concatenate([np.arange(len(piece.tokens)) + piece.start for piece in tile]), size),
            numbers,
            _padded(np.array(wanted, dtype=np.int64), size),
            np.array([piece.row for piece in tile], dtype=np.int64),
            np.array([piece.start for piece in tile], dtype=np.int64),
            lengths,
            begins,
        ]
        sent = torch.split(self._loop.copies.upload(np.concatenate(parts)), [len(part) for part in parts])
        token_ids, positions, numbered, lines, rows, starts, sizes, firsts = sent
        tables = self._loop.tables
        entries, sound = self._loop.rows(rows, starts, starts + sizes)
        owners = numbered.clamp(min=0)
        slots = tables.slots(entries, owners, positions, (numbered < 0) | ~sound[owners])
        spans = tuple(zip(begins.tolist(), lengths.tolist(), strict=True))
        placed = Chunks(firsts, sizes.masked_fill(~sound, 0), starts, tables.split(entries), spans)
        logits = self._model.prefill(ChunkTokens(token_ids, positions, slots), placed, lines)
        # A copy: a view would keep a whole tile's logits until the last tile is computed.
        return logits[: len(wanted)].clone(), sound

    def is_exact(self, vocab_size: int) -> bool:
        """Whether a row of this model has the same logits wherever in a tile it stands and whatever is beside it. Only
        while no request is live: it attends to numbers put into a block, which the caller has to zero afterwards."""
        noise = torch.Generator(self._device).manual_seed(0)
        for memory in self._storage.memory:
            memory[PROBE_BLOCK].normal_(generator=noise)
        draw = np.random.default_rng(0)
        size = self._size
        places = (0, 1, size // 2 - 1, size - 1)
        return len({self._probe(draw.integers(0, vocab_size, size), place) for place in places}) == 1

    def _probe(self, token_ids: Ints, place: int) -> bytes:
        """Bits of the logits of one token at a place of a tile, beside others that attend to nothing; they are written
        nowhere."""
        token_ids[place] = 1
        size, tables, device = self._size, self._loop.tables, self._device
        positions = np.full(size, PROBE_POSITION, dtype=np.int64)
        sent = self._loop.copies.upload(np.array((token_ids, positions, np.arange(size)), dtype=np.int64))
        placed = self._loop.copies.upload(np.array(((place,), (1,), (PROBE_POSITION,)), dtype=np.int64))
        entries = torch.full((1, tables.width), PROBE_BLOCK, dtype=torch.int64, device=device)
        nowhere = torch.full((size,), -1, dtype=torch.int64, device=device)
        chunks = Chunks(placed[0], placed[1], placed[2], tables.split(entries), ((place, 1),))
        tokens = ChunkTokens(sent[0], sent[1], tuple(nowhere for _ in tables.groups))
        logits = self._model.prefill(tokens, chunks, sent[2])
        return logits[place].float().cpu().numpy().tobytes()


def _wanted(begin: int, piece: TilePiece) -> list[int]:
    """Places in the tile whose logits are wanted, the last one first."""
    ended = [begin + len(piece.tokens) - 1] if piece.ends else []
    return ended + [begin + place for place in piece.scored]


def _lines(tiles: list[list[TilePiece]]) -> _Lines:
    """Lines of the tiles' logits, one behind another."""
    lines, place = _Lines([], []), 0
    for piece in (piece for tile in tiles for piece in tile):
        if piece.ends:
            lines.ended.append(place)
            place += 1
        lines.scored.extend(range(place, place + len(piece.scored)))
        place += len(piece.scored)
    return lines


def _padded(values: Ints, size: int) -> Ints:
    """As many numbers as a tile has tokens, zeros behind those given."""
    padded = np.zeros(size, dtype=np.int64)
    padded[: len(values)] = values
    return padded
