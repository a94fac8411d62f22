"""The embeddings before training: what a bag of words can know of the topics.

A network that starts at random needs hundreds of steps to learn which words matter. A classifier that adds up the
embeddings of a question's tokens and names the topic learns the same in about a minute, from the same drawn questions.
Its embeddings are where training begins, so that words by which one thing is asked for lie close together from the
start. By itself it shows how many questions a corpus can answer, before anything is trained for long.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

from recipe.corpus import Topic
from recipe.phrasing import ask

_BATCH = 384  # questions a step
_LENGTH = 32  # tokens of a question that count
_DROPPED = 0.15  # share of tokens left out in every other step
_RATE = 4e-3
_SMOOTHING = 0.05
_SIZE = 0.03  # root of the mean square of what is returned


@dataclass(frozen=True, slots=True)
class Effort:
    """How many questions are drawn, and for how many steps the classifier is trained."""

    questions: int
    steps: int


EFFORT = Effort(questions=150_000, steps=3000)
"""Effort before a training: two minutes of one core; each question is met about eight times."""


def train_bag(
    topics: Sequence[Topic],
    tokenizer: Tokenizer,
    width: int,
    seed: int,
    *,
    refused: Callable[[str], bool] | None = None,
    effort: Effort = EFFORT,
) -> Bag:
    """Train a classifier of `width` numbers a token; deterministic in `seed`."""
    ids, labels = _drawn(topics, tokenizer, random.Random(seed), refused, effort.questions)
    generator = torch.Generator().manual_seed(seed)
    bag = Bag(tokenizer.get_vocab_size(), width, len(topics), generator)
    optimizer = torch.optim.Adam(bag.parameters(), lr=_RATE)
    for step in range(effort.steps):
        optimizer.param_groups[0]["lr"] = _RATE * (1 - step / effort.steps)
        chosen = torch.randint(0, len(ids), (_BATCH,), generator=generator)
        rows = ids[chosen]
        if step % 2:
            rows = rows.masked_fill(torch.rand(rows.shape, generator=generator) < _DROPPED, 0)
        loss = F.cross_entropy(bag(rows), labels[chosen], label_smoothing=_SMOOTHING)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return bag


class Bag(nn.Module):
    """A linear classifier of the sum of a question's embeddings; token 0 is padding."""

    def __init__(self, vocabulary: int, width: int, topics: int, generator: torch.Generator) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.topic = nn.Linear(width, topics)
        nn.init.normal_(self.embedding.weight, std=0.05, generator=generator)
        nn.init.normal_(self.topic.weight, std=width**-0.5, generator=generator)
        nn.init.zeros_(self.topic.bias)

    def start(self) -> Tensor:
        """Embeddings [vocabulary, width] from which a network's training begins."""
        weight = self.embedding.weight.detach()
        return weight * (_SIZE / weight.pow(2).mean().sqrt())

    @torch.no_grad()
    def tell(self, tokenizer: Tokenizer, texts: Sequence[str]) -> list[int]:
        """Number of the likeliest topic of each text."""
        told: list[int] = self(_encoded(tokenizer, texts)).argmax(-1).tolist()
        return told

    def forward(self, rows: Tensor) -> Tensor:
        """Scores [rows, topics]."""
        there = (rows > 0).float().unsqueeze(-1)
        total = (self.embedding(rows) * there).sum(1)
        scores: Tensor = self.topic(total / there.sum(1).clamp(min=1).sqrt())
        return scores


def _drawn(
    topics: Sequence[Topic], tokenizer: Tokenizer, rng: random.Random, refused: Callable[[str], bool] | None, count: int
) -> tuple[Tensor, Tensor]:
    """Token ids [count, length], padded by 0, of drawn questions, and the numbers of their topics."""
    weights = [topic.weight or 1.0 for topic in topics]
    chosen = rng.choices(range(len(topics)), weights, k=count)
    texts = [ask(topics[i], rng, refused) for i in chosen]
    return _encoded(tokenizer, texts), torch.tensor(chosen)


def _encoded(tokenizer: Tokenizer, texts: Sequence[str]) -> Tensor:
    """Token ids [texts, length], padded by 0."""
    ids = torch.zeros(len(texts), _LENGTH, dtype=torch.int64)
    for row, encoding in zip(ids, tokenizer.encode_batch(texts, add_special_tokens=False), strict=True):
        found = encoding.ids[:_LENGTH]
        row[: len(found)] = torch.tensor(found)
    return ids
