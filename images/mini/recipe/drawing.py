"""Draw what training on an accelerator reads: questions by the million, as `Source` draws them for one core."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from recipe import bpe
from recipe.corpus import Topic
from recipe.drawn import Drawn, Texts, joined
from recipe.frames import SYSTEM_PROMPTS
from recipe.rows import Source

_LONG_EVERY = 250  # of the questions, one in so many may be a whole page that was pasted in
_LONG_TOKENS = 40  # from here on a question is long
_ENCODED = 20_000  # questions at a time: what the tokenizer gives back of each takes a kilobyte
_MARK = "x"  # a question by which the tokens around any question are found


@dataclass(frozen=True, slots=True)
class Amount:
    """How much is drawn: about 20 MB with the defaults."""

    questions: int = 1_200_000
    dialogues: int = 20_000


def draw(
    topics: Sequence[Topic],
    tokenizer: Tokenizer,
    *,
    seed: int,
    amount: Amount,
    refused: Callable[[str], bool] | None = None,
) -> Drawn:
    """Draw questions and dialogues; deterministic in `seed`. Questions that are `refused` are never drawn."""
    source = Source(topics, tokenizer, tokens=4096, seed=seed, refused=refused)
    numbers = {topic.name: number for number, topic in enumerate(topics)}
    asked = [source.asked(long_stray=i % _LONG_EVERY == 0) for i in range(amount.questions)]
    before, after = _around(tokenizer)
    systems = [bpe.turn(tokenizer, "system", prompt) for prompt in SYSTEM_PROMPTS]
    answers = [bpe.reply(tokenizer, topic.answer) for topic in topics]
    first = joined([before, after, bpe.newline(tokenizer), *systems, *answers])
    questions = _questions(tokenizer, [question for question, _ in asked], before, after)
    rows = [source.tools_row() for _ in range(amount.dialogues)]
    held_out = [(question, i) for i, topic in enumerate(topics) for question in topic.held_out]
    return Drawn(
        texts=Texts.of(
            np.concatenate((first.tokens, questions.tokens)), np.concatenate((first.lengths, questions.lengths))
        ),
        systems=len(systems),
        answers=len(answers),
        topics=np.array([numbers[topic.name] for _, topic in asked]),
        long=questions.lengths > _LONG_TOKENS,
        tools=joined([[token for token, _, _ in row] for row in rows]),
        said=np.array([said for row in rows for _, _, said in row]),
        held_out=_questions(tokenizer, [question for question, _ in held_out], before, after),
        held_out_topics=np.array([number for _, number in held_out]),
        vocabulary=tokenizer.get_vocab_size(),
        tokenizer=tokenizer.to_str(),
    )


def _around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Tokens before and after a question, up to where its answer begins."""
    (mark,) = tokenizer.encode(_MARK, add_special_tokens=False).ids
    whole = bpe.turn(tokenizer, "user", _MARK) + bpe.opening(tokenizer, "assistant")
    at = whole.index(mark)
    return whole[:at], whole[at + 1 :]


def _questions(tokenizer: Tokenizer, texts: Sequence[str], before: list[int], after: list[int]) -> Texts:
    """Tokens of questions as they stand in a turn of the user.

    A question whose first token would merge with what is before it is kept as it is by itself.
    """
    head = tokenizer.decode(before[1:])
    skipped = len(before) - 1
    parts = []
    for begin in range(0, len(texts), _ENCODED):
        some = texts[begin : begin + _ENCODED]
        encoded = tokenizer.encode_batch([head + text for text in some], add_special_tokens=False)
        found = [encoding.ids for encoding in encoded]
        alike = [ids[skipped:] if ids[:skipped] == before[1:] else None for ids in found]
        parts.append(
            joined(
                [
                    tokenizer.encode(text, add_special_tokens=False).ids if ids is None else ids
                    for ids, text in zip(alike, some, strict=True)
                ]
            )
        )
    return Texts.of(np.concatenate([part.tokens for part in parts]), np.concatenate([part.lengths for part in parts]))
