"""Batches for an accelerator, from what was drawn in advance: the kinds of rows.py, made with numpy in a millisecond.

A batch is put together of pieces: a piece is a text or the beginning of one. What differs from rows.py: some words of
some questions are left out, anew each time, so that no single word decides; and where an answer begins, its topic is
told (`labels`), which a classifier beside the network learns to name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recipe.drawn import AFTER, BEFORE, FIRST_SYSTEM, NEWLINE, Drawn

KINDS = {"opening": 0.55, "single": 0.16, "chat": 0.18, "full": 0.04, "tools": 0.07}
MAX_POSITIONS = 4096
CHAT_TOKENS = 512
NO_LABEL = -100
_SYSTEM_SHARE = 0.3
_OPENING_TOKENS = (4, 14)
_QUESTION_WEIGHT = 0.1
_POOL = 16  # batches of like rows that are drawn and sorted together
_ROW_TOKENS = 32  # of an opening, on average, when a pool is drawn
_SINGLE_TOKENS = 90
_TOOLS_TOKENS = 260
_LONG_IN_CHAT = 0.04  # exchanges of a chat whose question is a whole page
_GAPS_SHARE = 0.5
_STEP = 8  # rows are as long as a multiple of this

_QUESTION, _ANSWER, _OTHER = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Packed:
    """One batch: ids, positions, targets and labels [B, T] int64, weights [B, T] float32.

    `labels` has the topic where an answer begins, and NO_LABEL elsewhere.
    """

    ids: Tensor
    positions: Tensor
    targets: Tensor
    labels: Tensor
    weights: Tensor

    def to(self, device: torch.device) -> Packed:
        """The batch on a device."""
        parts = (self.ids, self.positions, self.targets, self.labels, self.weights)
        return Packed(*(part.to(device, non_blocking=True) for part in parts))


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Pieces of text in the order in which they stand: text, length, row, kind, positions left out before, topic."""

    texts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    rows: NDArray[np.int64]
    kinds: NDArray[np.int64]
    gaps: NDArray[np.int64]
    topics: NDArray[np.int64]


class Packer:
    """Makes batches of about `tokens` tokens; deterministic in `seed`.

    In every other question the share `dropped` of its tokens is left out.
    """

    def __init__(self, drawn: Drawn, *, tokens: int, seed: int, dropped: float) -> None:
        self._drawn = drawn
        self._tokens = tokens
        self._dropped = dropped
        self._rng = np.random.default_rng(seed)
        self._short = np.flatnonzero(~drawn.long)
        self._long = np.flatnonzero(drawn.long)
        self._pools: dict[str, list[Packed]] = {"opening": [], "single": []}

    def batches(self) -> Iterator[Packed]:
        """Batches without end."""
        kinds, shares = list(KINDS), np.array(list(KINDS.values()))
        while True:
            kind = str(self._rng.choice(kinds, p=shares / shares.sum()))
            if kind in self._pools:
                yield self._alike(kind)
            elif kind == "chat":
                yield self._chat(max(1, self._tokens // CHAT_TOKENS), CHAT_TOKENS)
            elif kind == "tools":
                yield self._dialogues(max(1, self._tokens // _TOOLS_TOKENS))
            else:
                tokens = int(self._rng.choice((1024, 2048, 3072, MAX_POSITIONS)))
                yield self._chat(max(1, self._tokens // tokens), tokens)

    def _alike(self, kind: str) -> Packed:
        """One batch of rows of like length."""
        pool = self._pools[kind]
        if not pool:
            each = _ROW_TOKENS if kind == "opening" else _SINGLE_TOKENS
            asked = self._rng.choice(self._short, _POOL * max(1, self._tokens // each))
            answer = self._answer_lengths(asked)
            if kind == "opening":
                answer = np.minimum(answer, self._rng.integers(*_OPENING_TOKENS, len(asked), endpoint=True))
            system = np.where(
                self._rng.random(len(asked)) < _SYSTEM_SHARE, self._rng.integers(0, self._drawn.systems, len(asked)), -1
            )
            heads = self._drawn.texts.lengths[FIRST_SYSTEM + system]
            length = answer + self._question_lengths(asked) + np.where(system >= 0, heads, 0)
            order = np.argsort(length, kind="stable")
            asked, answer, system, length = asked[order], answer[order], system[order], length[order]
            end = len(asked)
            while end:
                begin = max(0, end - max(1, self._tokens // int(length[end - 1])))
                part = slice(begin, end)
                rows = np.arange(end - begin)
                pool.append(self._pack(self._exchanges(rows, asked[part], answer[part], system[part])))
                end = begin
            self._rng.shuffle(pool)  # type: ignore[arg-type]
        return pool.pop()

    def _chat(self, rows: int, tokens: int) -> Packed:
        """Rows full of exchanges, half of the short ones with gaps between exchanges in the positions."""
        parts = []
        for row in range(rows):
            asked = self._rng.choice(self._short, tokens // 24)
            if len(self._long):
                pages = self._rng.random(len(asked)) < _LONG_IN_CHAT
                asked[pages] = self._rng.choice(self._long, int(pages.sum()))
            answer = self._answer_lengths(asked)
            ends = np.cumsum(answer + self._question_lengths(asked))
            asked = asked[: int(np.searchsorted(ends, tokens)) + 1]
            system = np.full(len(asked), -1)
            if self._rng.random() < _SYSTEM_SHARE:
                system[0] = self._rng.integers(0, self._drawn.systems)
            gaps = np.zeros(len(asked), dtype=np.int64)
            if tokens <= CHAT_TOKENS and self._rng.random() < _GAPS_SHARE:
                room = int(self._rng.integers(0, MAX_POSITIONS - tokens - 1, endpoint=True))
                for _ in range(int(self._rng.integers(1, 4))):
                    gap = int(self._rng.integers(0, room, endpoint=True))
                    gaps[self._rng.integers(0, len(asked))] += gap
                    room -= gap
            parts.append(self._exchanges(np.full(len(asked), row), asked, answer[: len(asked)], system, gaps))
        return self._pack(_together(parts), most=tokens)

    def _dialogues(self, rows: int) -> Packed:
        """Dialogues with tools, one a row, word for word."""
        tools = self._drawn.tools
        chosen = self._rng.integers(0, len(tools.lengths), rows)
        lengths = np.minimum(tools.lengths[chosen], self._tokens + 1)
        row, at = _ragged(lengths)
        index = tools.starts[chosen][row] + at
        marks = self._drawn.said[index]
        return _lay_out(tools.tokens[index], row, at, marks, np.full(len(index), NO_LABEL), rows)

    def _exchanges(
        self,
        rows: NDArray[np.int64],
        asked: NDArray[np.int64],
        answer: NDArray[np.int64],
        system: NDArray[np.int64],
        gaps: NDArray[np.int64] | None = None,
    ) -> _Pieces:
        """Exchanges as pieces: system message, the frame around the question, question, beginning of the answer."""
        drawn, count = self._drawn, len(asked)
        topics = drawn.topics[asked]
        there = system >= 0
        texts = np.stack(
            (
                np.where(there, FIRST_SYSTEM + system, BEFORE),
                np.full(count, BEFORE),
                drawn.first_question + asked,
                np.full(count, AFTER),
                drawn.first_answer + topics,
                np.full(count, NEWLINE),
            ),
            axis=1,
        )
        lengths = drawn.texts.lengths[texts]
        lengths[:, 0][~there] = 0
        lengths[:, 5][answer < lengths[:, 4]] = 0
        lengths[:, 4] = answer
        kinds = np.tile((_OTHER, _OTHER, _QUESTION, _OTHER, _ANSWER, _OTHER), (count, 1))
        left_out = np.zeros_like(texts)
        if gaps is not None:
            left_out[:, 0] = gaps
        return _Pieces(
            texts=texts.ravel(),
            lengths=lengths.ravel(),
            rows=np.repeat(rows, texts.shape[1]),
            kinds=kinds.ravel(),
            gaps=left_out.ravel(),
            topics=np.repeat(topics, texts.shape[1]),
        )

    def _pack(self, pieces: _Pieces, most: int | None = None) -> Packed:
        """Token by token; of every other question some tokens are left out."""
        texts = self._drawn.texts
        piece, at = _ragged(pieces.lengths)
        tokens = texts.tokens[texts.starts[pieces.texts][piece] + at]
        shift = np.cumsum(pieces.gaps)
        first = np.searchsorted(pieces.rows, np.arange(pieces.rows[-1] + 1))
        shift -= (shift - pieces.gaps)[first][pieces.rows]
        kinds = pieces.kinds[piece]
        thinned = self._rng.random(len(pieces.lengths)) < 0.5
        kept = (kinds != _QUESTION) | ~thinned[piece] | (self._rng.random(len(tokens)) >= self._dropped)
        piece, tokens, kinds, at = piece[kept], tokens[kept], kinds[kept], at[kept]
        rows = pieces.rows[piece]
        column = np.arange(len(rows)) - np.searchsorted(rows, rows)
        if most is not None:
            inside = column <= most
            piece, tokens, kinds, at, rows, column = (part[inside] for part in (piece, tokens, kinds, at, rows, column))
        answers = kinds == _ANSWER
        labels = np.where(answers & (at == 0), pieces.topics[piece], NO_LABEL)
        return _lay_out(tokens, rows, column, answers, labels, int(rows[-1]) + 1, shift[piece])

    def _answer_lengths(self, asked: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._drawn.texts.lengths[self._drawn.first_answer + self._drawn.topics[asked]]

    def _question_lengths(self, asked: NDArray[np.int64]) -> NDArray[np.int64]:
        """With what is around them."""
        lengths = self._drawn.texts.lengths
        return lengths[self._drawn.first_question + asked] + lengths[BEFORE] + lengths[AFTER] + 1


def held_out(drawn: Drawn, rows: int = 64) -> Iterator[Packed]:
    """The questions that are measured only, with their answers, `rows` at a time."""
    texts, count = drawn.texts, len(drawn.held_out_topics)
    around = [texts.tokens[texts.starts[i] : texts.starts[i] + texts.lengths[i]] for i in (BEFORE, AFTER)]
    for begin in range(0, count, rows):
        parts = []
        for i in range(begin, min(begin + rows, count)):
            topic = int(drawn.held_out_topics[i])
            at = drawn.held_out.starts[i]
            question = drawn.held_out.tokens[at : at + drawn.held_out.lengths[i]]
            answer = drawn.first_answer + topic
            at = texts.starts[answer]
            parts.append(
                (np.concatenate((around[0], question, around[1])), texts.tokens[at : at + texts.lengths[answer]], topic)
            )
        lengths = np.array([len(prompt) + len(answer) for prompt, answer, _ in parts])
        row, column = _ragged(lengths)
        tokens = np.concatenate([np.concatenate((prompt, answer)) for prompt, answer, _ in parts])
        begins = np.array([len(prompt) for prompt, _, _ in parts])[row]
        labels = np.where(column == begins, np.array([topic for _, _, topic in parts])[row], NO_LABEL)
        yield _lay_out(tokens, row, column, column >= begins, labels, len(parts))


def _together(parts: list[_Pieces]) -> _Pieces:
    """Pieces of several rows, one after the other."""
    names = ("texts", "lengths", "rows", "kinds", "gaps", "topics")
    return _Pieces(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def _ragged(lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each element of pieces of so many elements: number of its piece, and its place in it."""
    piece = np.repeat(np.arange(len(lengths)), lengths)
    return piece, np.arange(len(piece)) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def _lay_out(
    tokens: NDArray[np.uint16],
    rows: NDArray[np.int64],
    columns: NDArray[np.int64],
    answers: NDArray[np.bool_],
    labels: NDArray[np.int64],
    count: int,
    shift: NDArray[np.int64] | None = None,
) -> Packed:
    """Tokens as a batch: inputs, and as targets what comes one later."""
    length = -(-int(columns.max()) // _STEP) * _STEP
    ids = np.zeros((count, length + 1), dtype=np.int64)
    positions, targets = np.zeros_like(ids), np.zeros_like(ids)
    told = np.full_like(ids, NO_LABEL)
    weights = np.zeros(ids.shape, dtype=np.float32)
    ids[rows, columns] = tokens
    positions[rows, columns] = columns if shift is None else columns + shift
    later = columns > 0
    row, column = rows[later], columns[later] - 1
    targets[row, column] = tokens[later]
    weights[row, column] = np.where(answers[later], 1.0, _QUESTION_WEIGHT)
    told[row, column] = labels[later]
    # What is after a row's last token predicts nothing: its input is only padding.
    parts = (ids, positions, targets, told, weights)
    return Packed(*(torch.from_numpy(np.ascontiguousarray(part[:, :length])) for part in parts))
