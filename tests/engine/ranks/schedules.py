"""Fuzzed schedules for an engine, the same from the same seed: arrivals, aborts, shared prefixes, more than fits."""

from __future__ import annotations

import random
from array import array
from dataclasses import asdict, dataclass, field

from engine.core.engine import Engine
from engine.core.offline import Answer, collect
from isolation.ipc.engine import Submit
from isolation.ipc.sampling import Sampling
from tests.engine.support import namespace

LIMITS = {"block_size": 4, "kv_bytes": 1 << 17, "max_num_seqs": 6, "max_num_batched_tokens": 24, "max_context": 96}
"""Small enough that prompts come in chunks and rows wait."""

REQUESTS = 6
PROMPT = 40
OUTPUT = 12
ABORT_SHARE = 0.15
ARRIVE_SHARE = 0.5


@dataclass(slots=True)
class Told:
    """What came for one request."""

    token_ids: list[int]
    best: list[list[float]] = field(default_factory=list)
    """Log-probability of each token, and of the two likeliest."""
    aborted: bool = False


def draw(seed: int, vocab: int, **fields: object) -> list[Submit]:
    """The requests of a schedule."""
    dice = random.Random(seed)
    shared = [dice.randrange(3, vocab) for _ in range(PROMPT)]
    submits = []
    for number in range(REQUESTS):
        begin = shared[: dice.choice((0, 0, 9, 24))]
        prompt = [*begin, *(dice.randrange(3, vocab) for _ in range(dice.randint(1, PROMPT)))]
        tenant = namespace(dice.randint(1, 2))
        values = {"sampling": Sampling(temperature=0.0), "ignore_eos": True, "logprobs": 2, **fields}
        submits.append(Submit(number + 1, tenant, array("I", prompt), dice.randint(1, OUTPUT), **values))
    return submits


def play(engine: Engine, seed: int, submits: list[Submit]) -> dict[int, Answer]:
    """Run them together, each from some step on; some are aborted."""
    dice = random.Random(seed + 1)
    waiting, answers = list(submits), {}
    while waiting or engine.has_work:
        while waiting and (not engine.has_work or dice.random() < ARRIVE_SHARE):
            submit = waiting.pop(0)
            answers[submit.request] = Answer()
            engine.add(submit)
        if answers and dice.random() < ABORT_SHARE / REQUESTS:
            engine.abort(dice.choice(sorted(answers)))
        collect(engine, answers)
    return answers


def told(answers: dict[int, Answer]) -> dict[str, dict[str, object]]:
    """Answers as JSON takes them."""
    return {
        str(request): asdict(
            Told(
                list(answer.token_ids),
                [[one.logprob, *one.top_logprobs] for one in answer.logprobs],
                answer.failure is not None,
            )
        )
        for request, answer in answers.items()
    }
