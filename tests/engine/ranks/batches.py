"""Deterministic requests in many batches of one engine, beside the same requests alone there."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from engine.core.engine import Engine
from engine.core.offline import Answer, generate
from isolation.ipc.engine import Submit
from tests.engine.ranks.schedules import REQUESTS, draw, play

DRAWS = 2
"""Draws of requests of which batches are made."""

DETERMINISTIC_SHARE = 0.7
"""Share of the deterministic ones in a batch; the others are ordinary."""


@dataclass(slots=True)
class Blindness:
    """What was compared."""

    batches: int = 0
    tokens: int = 0
    """Tokens of deterministic requests that were compared, with their log-probabilities, bit by bit."""
    ordinary: int = 0
    """Tokens of ordinary requests in the same batches, which are promised nothing."""
    ordinary_other: int = 0
    """Of these, those with other bits than alone: the control, where an engine computes by the batch."""
    wrong: list[tuple[int, int]] = field(default_factory=list)
    """Batch and place in the pool of each request with other bits than alone."""


def play_batches(engine: Engine, seed: int, vocab: int, count: int) -> Blindness:
    """Play so many batches, each of some requests of a pool that come and go by its own seed."""
    pool = [one for draws in range(DRAWS) for one in draw(seed * DRAWS + draws, vocab, deterministic=True)]
    alone = [_bits(generate(engine, [_as(one, 1)])[1]) for one in pool]
    found, dice = Blindness(), random.Random(seed)
    for batch in range(count):
        places = dice.sample(range(len(pool)), REQUESTS)
        strict = [dice.random() < DETERMINISTIC_SHARE for _ in places]
        asked = [
            _as(replace(pool[place], deterministic=one), number)
            for number, (place, one) in enumerate(zip(places, strict, strict=True), 1)
        ]
        answers = play(engine, seed * count + batch, asked)
        found.batches += 1
        for number, (place, one) in enumerate(zip(places, strict, strict=True), 1):
            bits = _bits(answers[number])
            same = sum(a == b for a, b in zip(bits, alone[place], strict=False))
            if one:
                found.tokens += same
                if same < len(bits):
                    found.wrong.append((batch, place))
            else:
                found.ordinary += len(bits)
                found.ordinary_other += len(bits) - same
    return found


def _as(submit: Submit, number: int) -> Submit:
    """The request under another number."""
    return replace(submit, request=number)


def _bits(answer: Answer) -> list[tuple[int, float, list[float]]]:
    """Token, its log-probability, and those of the two likeliest, of each place."""
    return [
        (token, one.logprob, list(one.top_logprobs))
        for token, one in zip(answer.token_ids, answer.logprobs, strict=True)
    ]
