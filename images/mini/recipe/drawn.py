"""Questions drawn in advance, as one file of arrays: what training on an accelerator reads instead of the corpus.

Drawing takes a processor a minute for every million questions, an accelerator trains on them many times over. The file
also spares the machine with the accelerator the tokenizer and the corpus: numpy and torch are enough there.

Every text is kept as token ids, one after the other. Texts are, in this order: what comes before a question, after it,
and after its answer (`BEFORE`, `AFTER`, `NEWLINE`), system messages, the answer of each topic, and questions, of which
`topics` has the topics. Dialogues with tools and held-out questions are kept beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

BEFORE, AFTER, NEWLINE, FIRST_SYSTEM = range(4)


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts as token ids: text `i` is `tokens[starts[i] : starts[i] + lengths[i]]`."""

    tokens: NDArray[np.uint16]
    lengths: NDArray[np.int64]
    starts: NDArray[np.int64]

    @classmethod
    def of(cls, tokens: NDArray[np.uint16], lengths: NDArray[np.int64]) -> Texts:
        """Texts one after the other."""
        return cls(tokens, lengths, np.cumsum(lengths) - lengths)


@dataclass(frozen=True, slots=True)
class Drawn:
    """What was drawn: texts, how many of them are system messages and answers, and the topics of the questions.

    `long` says which questions are long and belong in the middle of a chat. `tools` has dialogues, `said` which of
    their tokens the assistant said. `held_out` are questions that are measured only, of the topics `held_out_topics`.
    `tokenizer` is the tokenizer's file as text, and `vocabulary` its size.
    """

    texts: Texts
    systems: int
    answers: int
    topics: NDArray[np.int64]
    long: NDArray[np.bool_]
    tools: Texts
    said: NDArray[np.bool_]
    held_out: Texts
    held_out_topics: NDArray[np.int64]
    vocabulary: int
    tokenizer: str

    @property
    def first_answer(self) -> int:
        """Number of the text that is the answer of topic 0."""
        return FIRST_SYSTEM + self.systems

    @property
    def first_question(self) -> int:
        """Number of the text that is the first question."""
        return self.first_answer + self.answers


def save(drawn: Drawn, path: Path) -> None:
    """Write the file, compressed."""
    np.savez_compressed(
        path,
        tokens=drawn.texts.tokens,
        lengths=drawn.texts.lengths.astype(np.uint16),
        counts=np.array([drawn.systems, drawn.answers, drawn.vocabulary]),
        topics=drawn.topics.astype(np.uint16),
        long=np.packbits(drawn.long),
        tool_tokens=drawn.tools.tokens,
        tool_lengths=drawn.tools.lengths.astype(np.uint16),
        said=np.packbits(drawn.said),
        held_out=drawn.held_out.tokens,
        held_out_lengths=drawn.held_out.lengths.astype(np.uint16),
        held_out_topics=drawn.held_out_topics.astype(np.uint16),
        tokenizer=np.frombuffer(drawn.tokenizer.encode(), dtype=np.uint8),
    )


def load(path: Path) -> Drawn:
    """Read what `save` wrote."""
    with np.load(path) as file:
        systems, answers, vocabulary = map(int, file["counts"])
        topics = file["topics"].astype(np.int64)
        tools = Texts.of(file["tool_tokens"], file["tool_lengths"].astype(np.int64))
        return Drawn(
            texts=Texts.of(file["tokens"], file["lengths"].astype(np.int64)),
            systems=systems,
            answers=answers,
            topics=topics,
            long=np.unpackbits(file["long"], count=len(topics)).astype(bool),
            tools=tools,
            said=np.unpackbits(file["said"], count=len(tools.tokens)).astype(bool),
            held_out=Texts.of(file["held_out"], file["held_out_lengths"].astype(np.int64)),
            held_out_topics=file["held_out_topics"].astype(np.int64),
            vocabulary=vocabulary,
            tokenizer=file["tokenizer"].tobytes().decode(),
        )


def joined(texts: Sequence[Sequence[int]]) -> Texts:
    """Lists of token ids as texts."""
    lengths = np.array([len(text) for text in texts], dtype=np.int64)
    return Texts.of(np.array([token for text in texts for token in text], dtype=np.uint16), lengths)
