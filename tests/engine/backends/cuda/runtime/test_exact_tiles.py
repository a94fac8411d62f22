"""Tiles of deterministic rows: every token is in one of them once, whatever the chunks."""

from __future__ import annotations

import random

import numpy as np
import torch

from engine.backends.cuda.runtime.exact import CPU_TOKENS, ExactPass, cut
from engine.core.scheduler.plan import Chunk
from tests.engine.backends.cuda.runtime.toy import draw_schedule, toy_engine


def test_tiles_hold_every_token_once() -> None:
    """Chunks drawn at random: tiles have no more tokens than there is room and are full but for the last one; pieces
    have their chunk's tokens, its end and its scored tokens."""
    draw = random.Random(0)
    for _ in range(300):
        chunks, tokens, size = [], [], draw.choice((1, 4, 16))
        for row in range(draw.randint(1, 6)):
            start, length = draw.randint(0, 9), draw.choice((1, 1, draw.randint(1, 40)))
            first = draw.randint(start + 1, start + length)
            scored = draw.randint(0, start + length - first)
            chunks.append(Chunk(row, start, length, draw.random() < 0.5, first, scored))
            tokens.append(np.arange(length) + 1_000 * row)
        tiles = list(cut(chunks, tokens, size))
        counts = [sum(len(piece.tokens) for piece in tile) for tile in tiles]
        assert all(count == size for count in counts[:-1]) and 0 < counts[-1] <= size
        for number, chunk in enumerate(chunks):
            pieces = [piece for tile in tiles for piece in tile if piece.chunk == number]
            assert np.concatenate([piece.tokens for piece in pieces]).tolist() == tokens[number].tolist()
            places = [piece.start + place for piece in pieces for place in range(len(piece.tokens))]
            assert places == list(range(chunk.start, chunk.start + chunk.length))
            assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [chunk.last]
            scored = [piece.start + place for piece in pieces for place in piece.scored]
            assert scored == list(range(chunk.score_from - 1, chunk.score_from - 1 + chunk.num_scored))


class Products:
    """A model whose logits are a token's own, plus the place in the tile where ``leaky``."""

    def __init__(self, leaky: bool) -> None:
        self._leaky = leaky

    def prefill(self, tokens: object, _chunks: object, wanted: torch.Tensor) -> torch.Tensor:
        """One logit for each wanted token."""
        ids = tokens.token_ids[wanted]
        return (ids + (wanted if self._leaky else 0)).float().unsqueeze(1)


def test_a_row_that_knows_its_place_is_noticed() -> None:
    """The trial before serving accepts a model whose rows are the same anywhere in a tile, and no other."""
    runner = toy_engine(draw_schedule(0), eager=True, most_ahead=0).runner
    own = runner._exact
    assert own._size == CPU_TOKENS
    for leaky in (False, True):
        trial = ExactPass(runner._loop, Products(leaky), runner.storage, own._operations, runner._rows)
        assert trial.is_exact(97) is not leaky
