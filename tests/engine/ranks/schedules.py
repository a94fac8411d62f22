"""Fuzzed schedules for an engine, the same from the same seed: arrivals, aborts, shared prefixes, more than fits."""

from __future__ import annotations

import random
from array import array
from dataclasses import asdict, dataclass, field

from engine.core.engine import Engine
from engine.core.offline import Answer, collect
from engine.core.scheduler.plan import StepPlan
from isolation.ipc.engine import Submit
from isolation.ipc.grammar import Masks, MaskState
from isolation.ipc.sampling import Sampling
from tests.engine.support import namespace

LIMITS = {"block_size": 4, "kv_bytes": 1 << 17, "max_num_seqs": 6, "max_num_batched_tokens": 24, "max_context": 96}
"""Small enough that prompts come in chunks and rows wait."""

REQUESTS = 6
PROMPT = 40
OUTPUT = 12
WRONG_STAMP = 1 << 40
"""No block has it."""

ABORT_SHARE = 0.15
ARRIVE_SHARE = 0.5


@dataclass(slots=True)
class Told:
    """What came for one request."""

    token_ids: list[int]
    best: list[list[float]] = field(default_factory=list)
    """Log-probability of each token, and of the two likeliest."""
    prompt: list[float] = field(default_factory=list)
    """Log-probabilities of the prompt's tokens, where they were asked for."""
    aborted: bool = False


def draw(seed: int, vocab: int, **fields: object) -> list[Submit]:
    """The requests of a schedule; ``fields`` are theirs, and ``sampled``: tokens are drawn with penalties."""
    dice = random.Random(seed)
    shared = [dice.randrange(3, vocab) for _ in range(PROMPT)]
    submits = []
    for number in range(REQUESTS):
        begin = shared[: dice.choice((0, 0, 9, 24))]
        prompt = [*begin, *(dice.randrange(3, vocab) for _ in range(dice.randint(1, PROMPT)))]
        tenant = namespace(dice.randint(1, 2))
        values = {"sampling": Sampling(temperature=0.0), "ignore_eos": True, "logprobs": 2, **fields}
        if values.pop("sampled", False):
            values["sampling"] = Sampling(temperature=0.9, seed=number, repetition_penalty=1.2)
        submits.append(Submit(number + 1, tenant, array("I", prompt), dice.randint(1, OUTPUT), **values))
    return submits


def play(engine: Engine, seed: int, submits: list[Submit]) -> dict[int, Answer]:
    """Run them together, each from some step on; some are aborted. Structured ones get a mask for each token."""
    dice = random.Random(seed + 1)
    waiting, answers = list(submits), {}
    while waiting or engine.has_work:
        while waiting and (not engine.has_work or dice.random() < ARRIVE_SHARE):
            submit = waiting.pop(0)
            answers[submit.request] = Answer()
            engine.add(submit)
            if submit.structured:
                mask(engine, answers)
        if answers and dice.random() < ABORT_SHARE / REQUESTS:
            engine.abort(dice.choice(sorted(answers)))
        collect(engine, answers)
        if submits[0].structured:
            mask(engine, answers)
    return answers


def mask(engine: Engine, answers: dict[int, Answer]) -> None:
    """Allow every request every other id, by the place of its next token; who waits for no mask passes it over."""
    width = -(-engine.ready().vocab_size // 32)
    places = [len(answer.token_ids) for answer in answers.values()]
    words = b"".join((0x55555555 << place % 2).to_bytes(4, "little") * width for place in places)
    engine.set_masks(Masks(array("Q", answers), array("I", places), bytes([MaskState.OPEN] * len(places)), words))


def play_fault(engine: Engine, vocab: int) -> dict[int, Answer]:
    """Two requests, of which the first is given a block of the second in the middle of its output."""
    answers: dict[int, Answer] = {}
    for number in (1, 2):
        prompt = array("I", [(number * 5 + place) % vocab for place in range(9)])
        engine.add(Submit(number, namespace(number), prompt, OUTPUT, Sampling(temperature=0.0), ignore_eos=True))
    schedule = engine.scheduler.schedule

    def spoil(*, now_ns: int) -> StepPlan | None:
        plan = schedule(now_ns=now_ns)
        engine.scheduler.schedule = schedule
        first, second = (engine.scheduler._live.by_id[number] for number in (1, 2))
        plan.grown_rows.append(first.row)
        plan.grown_indices.append(0)
        plan.grown_blocks.append(second.kv.blocks[0])
        plan.grown_stamps.append(WRONG_STAMP)
        return plan

    while min(len(answers.get(number, Answer()).token_ids) for number in (1, 2)) < 2:
        collect(engine, answers)
    engine.scheduler.schedule = spoil
    while engine.has_work:
        collect(engine, answers)
    return answers


def told(answers: dict[int, Answer]) -> dict[str, dict[str, object]]:
    """Answers as JSON takes them."""
    return {
        str(request): asdict(
            Told(
                list(answer.token_ids),
                [[one.logprob, *one.top_logprobs] for one in answer.logprobs],
                [value for part in answer.prompts for value in part.logprobs],
                answer.failure is not None,
            )
        )
        for request, answer in answers.items()
    }
