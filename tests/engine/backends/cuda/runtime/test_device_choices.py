"""What some rows ask of the choice of their tokens, on the device: masks, counts, log-probabilities, their wiping."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.backends.common.masks import MaskedLogits
from engine.backends.common.sampler import Sampler
from engine.backends.cuda.runtime.operations import Sampled, SamplingColumns
from engine.backends.cuda.runtime.rows import GREEDY, NUM_FIELDS, Field, words_of
from engine.backends.cuda.runtime.sampling_state import ChoiceMemory, entries, packed, report_words
from engine.backends.cuda.runtime.simulated_ops import PlainOperations
from engine.core.engine import Engine
from engine.core.offline import Answer, collect
from engine.core.scheduler.plan import FAILED, Admission, RowMask
from isolation.ipc.engine import Submit
from isolation.ipc.messages import MAX_TOP_LOGPROBS
from isolation.ipc.sampling import Sampling
from tests.engine.backends.cuda.runtime.toy import BLOCK, CPU, VOCAB, Schedule, mask_of, toy_engine
from tests.engine.support import namespace

pytestmark = pytest.mark.usefixtures("one_thread")

EOS = frozenset({3, 90, 5_000})


def columns(
    memory: ChoiceMemory, rows: int, sampling: Sampling = GREEDY, **fields: torch.Tensor | int
) -> SamplingColumns:
    """Rows that ask for these numbers, and of the other fields (by name) for nothing but these."""
    words = torch.full((NUM_FIELDS, rows), -1)
    words[Field.LIMIT] = 1 << 30
    words[len(Field) :] = torch.tensor([words_of(replace(sampling, seed=row)) for row in range(rows)]).T
    for name, values in fields.items():
        words[Field[name.upper()]] = values
    return SamplingColumns(words, memory.counts, memory.masks, memory.bias_ids, memory.biases)


def choose(logits: torch.Tensor, given: SamplingColumns) -> Sampled:
    """A token for each line, the rows in order."""
    return PlainOperations().sample(logits, torch.arange(len(logits)), torch.arange(len(logits)) + 9, given)


def test_masks_are_those_of_the_plain_loop() -> None:
    """Shorter and longer than the vocabulary, accepting or not, with ids that end a text set or not: the same ids are
    allowed as ``engine.backends.common.masks`` allows."""
    draw = random.Random(4)
    masks = [RowMask(draw.randbytes(4 * draw.choice((1, 3, 4, 9))), accepting=bool(place % 2)) for place in range(40)]
    memory = ChoiceMemory(41, VOCAB, EOS, CPU)
    memory.put(dict(enumerate(masks)))
    wanted = MaskedLogits(EOS).apply(torch.zeros(40, VOCAB), list(range(40)), dict(enumerate(masks)))
    bits = (memory.masks[:40].unsqueeze(2) >> torch.arange(32)) & 1
    assert torch.equal(bits.flatten(1)[:, :VOCAB] == 1, wanted == 0)
    assert packed([], 4, np.zeros(0, dtype=np.int64)).shape == (0, 4)


def test_a_row_that_may_choose_nothing_fails_alone() -> None:
    """Nothing allowed, or no finite logit among what is: the row gives no token and nothing is counted for it; its
    neighbour under the same penalties does and is."""
    memory = ChoiceMemory(4, VOCAB, frozenset(), CPU)
    memory.put({0: RowMask(bytes(16), accepting=False), 1: RowMask(b"\x01" + bytes(15), accepting=False)})
    lines = torch.arange(3)
    given = columns(memory, 3, mask_line=torch.tensor([0, 1, -1]), penalty_line=lines, logprobs=torch.full((3,), 2))
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    logits[1, 0] = torch.nan
    found = choose(logits, given)
    assert found.tokens.tolist() == [FAILED, FAILED, int(logits[2].argmax())]
    assert memory.counts[:3].sum(1).tolist() == [0, 0, 2]
    assert (found.top_ids[:2] == -1).all() and (found.top_ids[2, :2] >= 0).all() and (found.top_ids[2, 2:] == -1).all()


def test_counts_begin_with_what_is_known() -> None:
    """A row that comes back after a preemption has the counts of its prompt and of its output so far: it chooses what
    the sampler of the plain loop chooses, which counts for itself."""
    known = array("I", [5, 6, 5, 7, 7, 7, 9])
    sampling = Sampling(temperature=0.0, repetition_penalty=1.7, presence_penalty=0.4, frequency_penalty=0.6)
    admission = Admission(1, known, 3, sampling, -1, ())
    memory, sampler = ChoiceMemory(3, VOCAB, frozenset(), CPU), Sampler(2, VOCAB)
    memory.counts.fill_(77)
    memory.admit([admission])
    sampler.admit(admission)
    assert {place: int(memory.counts[1, place]) for place in (4, 5, 6, 7, 9)} == {4: 0, 5: 1, 6: 1, 7: 4, 9: 2}
    given = columns(memory, 2, sampling, penalty_line=1)
    generator = torch.Generator().manual_seed(2)
    for _ in range(30):
        logits = torch.randn(1, VOCAB, generator=generator)
        assert choose(logits, given).tokens.tolist() == sampler.sample(logits, [1], np.array([9])).token_ids


def test_reports_say_what_the_plain_loop_says() -> None:
    """Through words and back: log-probabilities of the token and of alternatives, as many as were asked for, none that
    a mask forbids, and more than there are ids give as many as there are."""
    for vocab in (VOCAB, 7):
        memory, sampler = ChoiceMemory(3, vocab, frozenset(), CPU), Sampler(2, vocab)
        mask = RowMask(b"\x29" + bytes(3), accepting=False)
        memory.put({1: mask})
        asked = np.array([MAX_TOP_LOGPROBS, MAX_TOP_LOGPROBS])
        for row in range(2):
            sampler.admit(Admission(row, array("I", [1]), 1, Sampling(temperature=0.0), MAX_TOP_LOGPROBS, ()))
        logits = 4 * torch.randn(2, vocab, generator=torch.Generator().manual_seed(3))
        given = columns(memory, 2, mask_line=torch.tensor([-1, 1]), logprobs=torch.from_numpy(asked))
        words = report_words(choose(logits, given)).numpy()
        masked = MaskedLogits(frozenset()).apply(logits, [0, 1], {1: mask})
        wanted = sampler.sample(masked, [0, 1], np.array([9, 9])).logprobs
        found = entries(np.array([0, 1]), words, asked)
        assert found == wanted and len(found[1].top_ids) == 3


def test_what_a_row_left_is_overwritten() -> None:
    """Counts and masks of a request that has ended are zero. Control: they are not while it runs."""
    engine: Engine = toy_engine(Schedule(30, 64), eager=True, most_ahead=1)
    sampling = Sampling(temperature=0.0, repetition_penalty=1.3)
    engine.add(Submit(1, namespace(1), array("I", [4, 5, 6]), 3, sampling, ignore_eos=True, structured=True))
    answers: dict[int, Answer] = {}
    choices = engine.runner._choices
    for place in range(3):
        engine.scheduler.set_mask(1, place, mask_of(1, place))
        while engine.has_work:
            collect(engine, answers)
        assert bool(choices.counts.any()) == bool(choices.masks.any()) == (place < 2)
    assert len(answers[1].token_ids) == 3


def test_a_structured_row_holds_nobody_up() -> None:
    """Beside a structured request the others' tokens are run ahead of all the same, and its own ride along: there are
    hardly more steps on the device than tokens of one of the others. Control: without running ahead none is early."""
    early, turns = [], []
    for most_ahead in (2, 0):
        engine = toy_engine(Schedule(60, 64), eager=True, most_ahead=most_ahead)
        for number in (1, 2, 3):
            sampling = Sampling(temperature=0.0, frequency_penalty=number / 2)
            prompt = array("I", range(number, number + 8))
            engine.add(
                Submit(number, namespace(1), prompt, 36, sampling, ignore_eos=True, structured=number == 3, logprobs=1)
            )
        answers: dict[int, Answer] = {}
        while engine.has_live_requests:
            place = len(answers[3].token_ids) if 3 in answers else 0
            engine.scheduler.set_mask(3, place, mask_of(3, place))
            collect(engine, answers)
        assert [len(answers[number].logprobs) for number in (1, 2, 3)] == [36] * 3
        early.append(engine.runner.num_ahead)
        turns.append(engine.runner._launcher._turn)
    assert early[0] >= 0.9 * 2 * 35 and early[1] == 0
    assert BLOCK >= 2 and turns[0] <= turns[1] + 4
