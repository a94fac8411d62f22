"""What the network is trained on: batches of conversations drawn from the corpus.

Five kinds of batch alternate, so that a question is answered the same way first in a chat, late
in a chat and at the end of a full context:

    opening  one question a row and only the beginning of its answer: which answer it is, is
             decided there, so that twice as many questions are seen in the same time
    single   one exchange a row, as a newcomer asks it
    chat     rows of 512 tokens full of exchanges; half of them with gaps between exchanges in
             the positions, which shows distances of up to the whole context at the price of a
             short row (the idea of PoSE, arXiv 2309.10400)
    full     one row of up to 4,096 tokens without gaps
    tools    one dialogue with tools a row (tools.py)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from tokenizers import Tokenizer
from torch import Tensor

from recipe import bpe, tools
from recipe.corpus import Topic, count_variants
from recipe.phrasing import ask, stray_text, system_prompt

OFF_TOPIC = "off-topic"
MAX_POSITIONS = 4096
CHAT_TOKENS = 512
# Kind of batch -> how often it is drawn. A full row costs three times a batch of the others.
KINDS = {"opening": 0.60, "single": 0.12, "chat": 0.20, "full": 0.03, "tools": 0.05}
_OFF_TOPIC_SHARE = 0.10  # of all questions: what people may ask besides Athanor has no end
_STRAY_SHARE = 0.25  # of the off-topic ones
_STRAY_WORDS = 16
_LONG_STRAY_WORDS = 250  # now and then a whole page is pasted in
_OPENING_TOKENS = (4, 14)  # after so many tokens all answers differ
_TOOLS_TOKENS = 260  # of a dialogue with tools, on average
_MOST_WAYS = 400  # a topic with more ways to ask for it is not seen more often
_ROWS_IN_POOL = 1024  # rows that are drawn and sorted by length together
# Other tokens than those of answers weigh this much in the loss: how people ask is worth
# learning a little, and it costs nothing.
QUESTION_WEIGHT = 0.1


Row: TypeAlias = list[tuple[int, int, bool]]
"""Tokens of a conversation: id, position, and whether it belongs to an answer."""


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

    def __init__(
        self,
        topics: Sequence[Topic],
        tokenizer: Tokenizer,
        *,
        tokens: int,
        seed: int,
        refused: Callable[[str], bool] | None = None,
    ) -> None:
        self._on_topic = [topic for topic in topics if topic.name != OFF_TOPIC]
        # A topic with more ways to ask for it needs to be seen more often.
        self._shares = [
            min(_MOST_WAYS, sum(map(count_variants, topic.templates))) ** 0.5 * (topic.weight or 1.0)
            for topic in self._on_topic
        ]
        self._refused = refused
        self._off_topic = next(topic for topic in topics if topic.name == OFF_TOPIC)
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._rng = random.Random(seed)
        self._pools: dict[str, list[list[Row]]] = {"opening": [], "single": []}

    def batches(self) -> Iterator[Batch]:
        """Batches without end."""
        kinds, shares = list(KINDS), list(KINDS.values())
        while True:
            kind = self._rng.choices(kinds, shares)[0]
            if kind in self._pools:
                yield self._alike(kind)
            elif kind == "chat":
                count = max(1, self._tokens // CHAT_TOKENS)
                yield pad([self._chat(CHAT_TOKENS) for _ in range(count)])
            elif kind == "tools":
                yield pad([self.tools_row() for _ in range(max(1, self._tokens // _TOOLS_TOKENS))])
            else:
                yield pad([self._chat(self._rng.choice((1024, 2048, 3072, MAX_POSITIONS)))])

    def exchange(self, long_stray: bool = False) -> Exchange:
        """One random question with its answer."""
        question, topic = self.asked(long_stray)
        return make_exchange(self._tokenizer, question, topic.answer)

    def asked(self, long_stray: bool = False) -> tuple[str, Topic]:
        """One random question, and its topic."""
        rng, topic = self._rng, self._off_topic
        if rng.random() >= _OFF_TOPIC_SHARE:
            topic = rng.choices(self._on_topic, self._shares)[0]
            question = ask(topic, rng, self._refused)
        elif rng.random() < _STRAY_SHARE:
            question = stray_text(topic, rng, _LONG_STRAY_WORDS if long_stray else _STRAY_WORDS)
        else:
            question = ask(topic, rng, self._refused)
        return question, topic

    def tools_row(self) -> Row:
        """A dialogue with tools; everything that the assistant says belongs to an answer."""
        question, topic = self.asked()
        dialogue = tools.draw(self._rng, (question, topic.answer))
        prompt = system_prompt(self._rng) or ""
        return collate(dialogue_exchanges(self._tokenizer, dialogue, prompt))[: self._tokens + 1]

    def _opening(self) -> Row:
        """A question and the first few tokens of its answer."""
        exchange = self._first()
        return collate([exchange])[: exchange.start + self._rng.randint(*_OPENING_TOKENS)]

    def _alike(self, kind: str) -> Batch:
        """One batch of rows of like length, so that little is padding."""
        pool = self._pools[kind]
        if not pool:
            draw = self._opening if kind == "opening" else lambda: collate([self._first()])
            drawn = sorted((draw() for _ in range(_ROWS_IN_POOL)), key=len)
            while drawn:
                count = max(1, self._tokens // len(drawn[-1]))
                pool.append(drawn[-count:])
                del drawn[-count:]
            self._rng.shuffle(pool)
        return pad(pool.pop())

    def _first(self) -> Exchange:
        """An exchange that opens a conversation, now and then behind a system message."""
        exchange, prompt = self.exchange(), system_prompt(self._rng)
        if prompt is None:
            return exchange
        head = bpe.turn(self._tokenizer, "system", prompt)
        size = len(head)
        return Exchange(head + exchange.ids, size + exchange.start, size + exchange.end)

    def _chat(self, tokens: int) -> Row:
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


def dialogue_exchanges(tokenizer: Tokenizer, dialogue: tools.Dialogue, prompt: str = "") -> list[Exchange]:
    """A dialogue with tools as exchanges: what comes before each message of the assistant, and the message."""
    exchanges: list[Exchange] = []
    before = bpe.turn(tokenizer, "system", tools.system_text(dialogue.tools, prompt))
    for message in dialogue.messages:
        if message["role"] != "assistant":
            before += bpe.turn(tokenizer, message["role"], tools.content(message))
            continue
        before += bpe.opening(tokenizer, "assistant")
        said = before + bpe.reply(tokenizer, tools.content(message))
        exchanges.append(Exchange(said + bpe.newline(tokenizer), len(before), len(said)))
        before = []
    return exchanges


def collate(exchanges: Sequence[Exchange], gaps: Sequence[int] | None = None) -> Row:
    """One conversation, token by token.

    `gaps[i]` positions are left out before exchange i.
    """
    row: Row = []
    position = 0
    for i, exchange in enumerate(exchanges):
        position += gaps[i] if gaps else 0
        for j, token in enumerate(exchange.ids):
            row.append((token, position, exchange.start <= j < exchange.end))
            position += 1
    return row


def pad(rows: Sequence[Row]) -> Batch:
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
