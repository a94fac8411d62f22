"""What the network is trained on: batches of conversations drawn from the corpus.

Four kinds of batch alternate, so that a question is answered the same way first in a chat, late
in a chat and at the end of a full context:

    opening  one question a row and only the beginning of its answer: which answer it is, is
             decided there, so that twice as many questions are seen in the same time
    single   one exchange a row, as a newcomer asks it
    chat     rows of 512 tokens full of exchanges; half of them with gaps between exchanges in
             the positions, which shows distances of up to the whole context at the price of a
             short row (the idea of PoSE, arXiv 2309.10400)
    full     one row of up to 4,096 tokens without gaps
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from recipe import bpe
from recipe.corpus import Topic, count_variants
from recipe.phrasing import ask, stray_text, system_prompt

OFF_TOPIC = "off-topic"
MAX_POSITIONS = 4096
CHAT_TOKENS = 512
# Kind of batch -> how often it is drawn. A full row costs three times a batch of the others.
KINDS = {"opening": 0.50, "single": 0.15, "chat": 0.30, "full": 0.05}
_OFF_TOPIC_SHARE = 0.15  # of all questions: what people may ask besides Athanor has no end
_STRAY_SHARE = 0.25  # of the off-topic ones
_STRAY_WORDS = 16
_LONG_STRAY_WORDS = 250  # now and then a whole page is pasted in
_OPENING_TOKENS = (4, 14)  # after so many tokens all answers differ
_SINGLES_IN_POOL = 16  # batches of single exchanges that are sorted by length together
# Other tokens than those of answers weigh this much in the loss: how people ask is worth
# learning a little, and it costs nothing.
QUESTION_WEIGHT = 0.1


@dataclass(frozen=True, slots=True)
class Exchange:
    """Token ids of a question and its answer; the answer's are `ids[start:end]`."""

    ids: list[int]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows for one step: ids, positions, targets [B, T] int64; weights float32; answers bool.

    `targets[b, t]` is the token after `ids[b, t]` and `weights[b, t]` what predicting it counts,
    0 for padding. `answers` is true where the target belongs to an answer.
    """

    ids: Tensor
    positions: Tensor
    targets: Tensor
    weights: Tensor
    answers: Tensor


class Source:
    """Draws batches of about `tokens` tokens from the topics; deterministic in `seed`."""

    def __init__(self, topics: Sequence[Topic], tokenizer: Tokenizer, *, tokens: int, seed: int) -> None:
        self._on_topic = [topic for topic in topics if topic.name != OFF_TOPIC]
        # A topic with more ways to ask for it needs to be seen more often.
        self._shares = [sum(map(count_variants, topic.patterns)) ** 0.5 for topic in self._on_topic]
        self._off_topic = next(topic for topic in topics if topic.name == OFF_TOPIC)
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._rng = random.Random(seed)
        self._pool: list[list[Exchange]] = []

    def batches(self) -> Iterator[Batch]:
        """Batches without end."""
        kinds, shares = list(KINDS), list(KINDS.values())
        while True:
            kind = self._rng.choices(kinds, shares)[0]
            if kind == "opening":
                yield pad([self._opening() for _ in range(max(1, self._tokens // 28))])
            elif kind == "single":
                yield pad([collate([exchange]) for exchange in self._singles()])
            elif kind == "chat":
                count = max(1, self._tokens // CHAT_TOKENS)
                yield pad([self._chat(CHAT_TOKENS) for _ in range(count)])
            else:
                yield pad([self._chat(self._rng.choice((1024, 2048, 3072, MAX_POSITIONS)))])

    def exchange(self, long_stray: bool = False) -> Exchange:
        """One random question with its answer."""
        rng, topic = self._rng, self._off_topic
        if rng.random() >= _OFF_TOPIC_SHARE:
            topic = rng.choices(self._on_topic, self._shares)[0]
            question = ask(topic, rng)
        elif rng.random() < _STRAY_SHARE:
            question = stray_text(topic, rng, _LONG_STRAY_WORDS if long_stray else _STRAY_WORDS)
        else:
            question = ask(topic, rng)
        return make_exchange(self._tokenizer, question, topic.answer)

    def _opening(self) -> list[tuple[int, int, bool]]:
        """A question and the first few tokens of its answer."""
        exchange = self._first()
        return collate([exchange])[: exchange.start + self._rng.randint(*_OPENING_TOKENS)]

    def _singles(self) -> list[Exchange]:
        """One batch of single exchanges of like length, so that little is padding."""
        if not self._pool:
            count = max(1, self._tokens // 56)  # an exchange has 56 tokens on average
            drawn = [self._first() for _ in range(count * _SINGLES_IN_POOL)]
            drawn.sort(key=lambda exchange: len(exchange.ids))
            self._pool = [drawn[i : i + count] for i in range(0, len(drawn), count)]
            self._rng.shuffle(self._pool)
        return self._pool.pop()

    def _first(self) -> Exchange:
        """An exchange that opens a conversation, now and then behind a system message."""
        exchange, prompt = self.exchange(), system_prompt(self._rng)
        if prompt is None:
            return exchange
        head = bpe.turn(self._tokenizer, "system", prompt)
        size = len(head)
        return Exchange(head + exchange.ids, size + exchange.start, size + exchange.end)

    def _chat(self, tokens: int) -> list[tuple[int, int, bool]]:
        """A conversation of `tokens` tokens."""
        exchanges = [self._first()]
        while sum(len(exchange.ids) for exchange in exchanges) <= tokens:
            exchanges.append(self.exchange(long_stray=self._rng.random() < 0.2))
        gaps = None
        if tokens <= CHAT_TOKENS and self._rng.random() < 0.5:
            gaps = _gaps(len(exchanges), MAX_POSITIONS - tokens - 1, self._rng)
        return collate(exchanges, gaps)[: tokens + 1]


def make_exchange(tokenizer: Tokenizer, question: str, answer: str) -> Exchange:
    """The token ids of one question and its answer, in the chat format.

    The newline after the answer's end mark is not part of the answer: generation has ended then.
    """
    prompt = bpe.turn(tokenizer, "user", question) + bpe.opening(tokenizer, "assistant")
    answered = prompt + bpe.reply(tokenizer, answer)
    return Exchange(answered + bpe.newline(tokenizer), len(prompt), len(answered))


def collate(exchanges: Sequence[Exchange], gaps: Sequence[int] | None = None) -> list[tuple[int, int, bool]]:
    """One conversation as (id, position, belongs to an answer) for each token.

    `gaps[i]` positions are left out before exchange i.
    """
    row: list[tuple[int, int, bool]] = []
    position = 0
    for i, exchange in enumerate(exchanges):
        position += gaps[i] if gaps else 0
        for j, token in enumerate(exchange.ids):
            row.append((token, position, exchange.start <= j < exchange.end))
            position += 1
    return row


def pad(rows: Sequence[list[tuple[int, int, bool]]]) -> Batch:
    """Shift rows by one token into inputs and targets, and pad them to the longest."""
    length = max(len(row) for row in rows) - 1
    ids = torch.zeros(len(rows), length, dtype=torch.int64)
    positions, targets = torch.zeros_like(ids), torch.zeros_like(ids)
    weights = torch.zeros(len(rows), length)
    answers = torch.zeros(len(rows), length, dtype=torch.bool)
    for i, row in enumerate(rows):
        tokens, places, marks = (list(column) for column in zip(*row, strict=True))
        size = len(row) - 1
        ids[i, :size] = torch.tensor(tokens[:-1])
        positions[i, :size] = torch.tensor(places[:-1])
        targets[i, :size] = torch.tensor(tokens[1:])
        answers[i, :size] = torch.tensor(marks[1:])
        weights[i, :size] = torch.where(answers[i, :size], 1.0, QUESTION_WEIGHT)
    return Batch(ids, positions, targets, weights, answers)


def _gaps(count: int, room: int, rng: random.Random) -> list[int]:
    """Share at most `room` positions out among the beginnings of `count` exchanges."""
    gaps = [0] * count
    room = rng.randint(0, room)
    for _ in range(rng.randint(1, 3)):
        part = rng.randint(0, room)
        gaps[rng.randrange(count)] += part
        room -= part
    return gaps
