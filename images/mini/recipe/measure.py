"""How good the network is: loss and exactness on phrasings that it was not trained on.

An answer is exact when greedy decoding gives the corpus' answer token for token, end mark
included. Each answer is fed to the network as it should be: when every next token is the
likeliest one, greedy decoding walks the same way, so one pass decides.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch.nn import functional as F

from recipe.corpus import Topic, variants
from recipe.model import MiniLlama
from recipe.rows import Exchange, collate, make_exchange, pad

_BATCH = 32  # rows in one pass


@dataclass(frozen=True, slots=True)
class Score:
    """Mean loss per answer token in nats, exact answers, questions, and what went wrong."""

    loss: float
    exact: int
    total: int
    wrong: tuple[str, ...]


def held_out(topics: Sequence[Topic]) -> list[tuple[str, str]]:
    """Every held-out question with its answer."""
    return [(question, topic.answer) for topic in topics for question in topic.held_out]


def trained_on(topics: Sequence[Topic]) -> list[tuple[str, str]]:
    """Every text that a training pattern stands for, with its answer."""
    return [(text, topic.answer) for topic in topics for pattern in topic.patterns for text in variants(pattern)]


def score(network: MiniLlama, tokenizer: Tokenizer, questions: Sequence[tuple[str, str]]) -> Score:
    """Loss and exactness where each question opens a conversation."""
    rows = [[make_exchange(tokenizer, *question)] for question in questions]
    return _score(network, rows, [question for question, _ in questions])


def score_late(
    network: MiniLlama, tokenizer: Tokenizer, questions: Sequence[tuple[str, str]], *, tokens: int, seed: int = 0
) -> Score:
    """As `score`, but each question comes after about `tokens` tokens of other exchanges."""
    rng = random.Random(seed)
    rows = []
    for question in questions:
        last = make_exchange(tokenizer, *question)
        row = [last]
        while sum(len(exchange.ids) for exchange in row) < tokens:
            row.insert(0, make_exchange(tokenizer, *rng.choice(questions)))
        rows.append(row)
    return _score(network, rows, [question for question, _ in questions])


@torch.no_grad()
def _score(network: MiniLlama, rows: Sequence[Sequence[Exchange]], labels: Sequence[str]) -> Score:
    """Score the last exchange of each row."""
    loss, tokens, wrong = 0.0, 0, []
    longest = max(sum(len(exchange.ids) for exchange in row) for row in rows)
    step = max(1, _BATCH * 128 // max(128, longest))
    for i in range(0, len(rows), step):
        part = rows[i : i + step]
        batch = pad([collate(row) for row in part])
        keep = batch.answers.clone()
        for j, row in enumerate(part):
            keep[j, : sum(len(exchange.ids) for exchange in row[:-1])] = False
        logits = network(batch.ids, batch.positions, keep)
        targets = batch.targets[keep]
        loss += float(F.cross_entropy(logits, targets, reduction="sum"))
        tokens += len(targets)
        missed = torch.zeros(keep.shape, dtype=torch.bool)
        missed[keep] = logits.argmax(-1) != targets
        wrong += [labels[i + j] for j in missed.any(1).nonzero().flatten().tolist()]
    return Score(loss / tokens, len(rows) - len(wrong), len(rows), tuple(wrong))
