"""Biases of requests in the samplers and through an engine; ``docs/sampling.md`` says what they do."""

from __future__ import annotations

from array import array
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.backends.common.masks import MaskedLogits
from engine.backends.common.sampler import Sampler
from engine.backends.cuda.runtime.operations import SamplingColumns
from engine.backends.cuda.runtime.rows import NUM_FIELDS, Field, words_of
from engine.backends.cuda.runtime.sampling_state import ChoiceMemory
from engine.backends.cuda.runtime.simulated_ops import PlainOperations
from engine.core.engine import Engine
from engine.core.offline import generate
from engine.core.scheduler.plan import Admission, RowMask
from isolation.ipc.codec import encode
from isolation.ipc.errors import LocalProtocolError
from isolation.ipc.logit_bias import MAX_LOGIT_BIASES, LogitBias
from isolation.ipc.messages import FailureCode
from isolation.ipc.sampling import Sampling
from tests.engine.support import make_engine, model_config, random_model, submit

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB = 97
GREEDY = Sampling(temperature=0.0)


def bias_of(given: dict[int, float]) -> LogitBias:
    """Biases of these ids."""
    return LogitBias(array("I", sorted(given)), array("f", [given[one] for one in sorted(given)]))


def admission(row: int, sampling: Sampling, bias: LogitBias | None, **fields: object) -> Admission:
    """A request with a short prompt takes a row."""
    return Admission(
        row, array("I", [3, 5, 5]), 2, sampling, **{"logprobs": -1, "blocks": (), **fields}, logit_bias=bias
    )


def chosen(logits: torch.Tensor, one: Admission) -> int:
    """The token of a row in a batch of its own."""
    sampler = Sampler(1, logits.shape[-1])
    sampler.admit(one._replace(row=0))
    return sampler.sample(logits[None], [0], np.array([9])).token_ids[0]


def on_device(logits: torch.Tensor, one: Admission) -> int:
    """The token of a row by the tensor operations of the device backend."""
    memory = ChoiceMemory(2, logits.shape[-1], frozenset(), torch.device("cpu"))
    memory.admit([one])
    if one.logit_bias is not None:
        memory.bias([one])
    words = torch.full((NUM_FIELDS, 2), -1)
    words[Field.PENALTY_LINE, 0] = 0
    words[Field.BIASES] = torch.tensor([0 if one.logit_bias is None else len(one.logit_bias), 0])
    words[len(Field) :] = torch.tensor([words_of(one.sampling)] * 2).T
    columns = SamplingColumns(words, memory.counts, memory.masks, memory.bias_ids, memory.biases)
    return int(
        PlainOperations().sample(logits[None], torch.zeros(1, dtype=torch.int64), torch.tensor([9]), columns).tokens
    )


@pytest.mark.parametrize("place", [chosen, on_device])
def test_a_bias_is_added_before_penalties(place) -> None:
    """Greedy takes the largest biased score; a repetition penalty divides the biased score and not the model's own. So
    of two ids one wins that would not if the bias came last. Control: without the bias another id wins."""
    logits = torch.full((VOCAB,), -9.0)
    logits[3], logits[8] = 1.0, 4.0
    assert place(logits, admission(0, GREEDY, None)) == 8
    assert place(logits, admission(0, GREEDY, bias_of({3: 5.0}))) == 3
    halved = Sampling(temperature=0.0, repetition_penalty=2.0)
    # (1 + 5) / 2 = 3 stays below 4; bias after penalty would be 1 / 2 + 5 = 5.5.
    assert place(logits, admission(0, halved, bias_of({3: 5.0}))) == 8
    assert place(logits, admission(0, halved, bias_of({3: 8.0}))) == 3


def test_biased_draws_are_those_of_biased_logits() -> None:
    """Under every number of the table: the token of a biased row is, bit by bit, that of a row whose logits have the
    bias in them, on the host and on the device. Control: without the bias some tokens differ."""
    generator = torch.Generator().manual_seed(1)
    bias = bias_of({token: float(torch.randn((), generator=generator)) * 3 for token in range(0, VOCAB, 4)})
    differ = 0
    for seed in range(60):
        sampling = Sampling(0.8, 30, 0.9, 0.01, 0.95, 1.2, 0.3, 0.1, seed)
        logits = 3 * torch.randn(VOCAB, generator=generator)
        added = logits.clone()
        added[torch.tensor(bias.ids).long()] += torch.tensor(bias.values)
        wanted = chosen(added, admission(0, sampling, None))
        assert chosen(logits, admission(0, sampling, bias)) == wanted == on_device(logits, admission(0, sampling, bias))
        differ += wanted != chosen(logits, admission(0, sampling, None))
    assert differ > 10


def test_a_grammar_wins_over_a_bias() -> None:
    """An id that a mask forbids stays forbidden at +100, and one that it allows is chosen at -100."""
    sampler = Sampler(1, VOCAB)
    sampler.admit(admission(0, GREEDY, bias_of({3: 100.0, 8: -100.0})))
    mask = {0: RowMask((1 << 8).to_bytes(16, "little"), accepting=False)}
    masked = MaskedLogits(frozenset()).apply(torch.zeros(1, VOCAB), [0], mask)
    assert sampler.sample(masked, [0], np.array([1])).token_ids == [8]


def test_logprobs_are_those_without_the_bias() -> None:
    """The chosen token's and the alternatives' are the model's own, to the bit, so a bias reads nothing out of it."""
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3))
    sampler = Sampler(2, VOCAB)
    sampler.admit(admission(0, GREEDY, bias_of({11: 100.0}), logprobs=5))
    sampler.admit(admission(1, GREEDY, None, logprobs=5))
    biased, plain = sampler.sample(logits.repeat(2, 1), [0, 1], np.array([1, 1])).logprobs
    assert (biased.top_ids, biased.top_logprobs) == (plain.top_ids, plain.top_logprobs)
    assert biased.logprob == float(logits.log_softmax(-1)[0, 11]) or biased.logprob < plain.logprob


def test_a_row_inherits_no_bias() -> None:
    """The next request of a row has none of the last one's, and what was kept of it is overwritten."""
    sampler = Sampler(1, VOCAB)
    sampler.admit(admission(0, GREEDY, bias_of({11: 100.0})))
    kept = sampler._biases._rows[0]
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3))
    assert sampler.sample(logits, [0], np.array([1])).token_ids == [11]
    sampler.admit(admission(0, GREEDY, None))
    assert sampler.wants_maximum([0]) and not kept[0].any() and not kept[1].any()
    assert sampler.sample(logits, [0], np.array([1])).token_ids == [int(logits.argmax())]


def engine_of(backend: str) -> Engine:
    """An engine around a small random model."""
    return make_engine(random_model(model_config(), packed=False), num_blocks=80, backend=backend)


@pytest.mark.parametrize("backend", ["plain", "device"])
def test_other_rows_keep_their_bits(backend: str) -> None:
    """Requests of another tenant, greedy and drawn, with log-probabilities: the same tokens and the same bits beside
    biased requests as beside those requests without their biases. Control: the biased ones choose other tokens."""
    sorts = (GREEDY, Sampling(temperature=0.9, seed=4), Sampling(temperature=0.7, repetition_penalty=1.2, seed=5))
    own = [submit(10 + place, [place + 1] * 9, 12, sampling=one, logprobs=3) for place, one in enumerate(sorts)]
    bias = bias_of({token: -100.0 if token % 2 else 7.0 for token in range(0, VOCAB, 3)})
    others = [submit(20 + place, [60 + place] * 9, 12, tenant=2, sampling=one) for place, one in enumerate(sorts)]
    plain = generate(engine_of(backend), [*own, *others])
    beside = generate(engine_of(backend), [*own, *(replace(one, logit_bias=bias) for one in others)])
    for one in own:
        assert beside[one.request].token_ids == plain[one.request].token_ids
        assert beside[one.request].logprobs == plain[one.request].logprobs
    assert all(beside[one.request].token_ids != plain[one.request].token_ids for one in others)
    assert all(token not in bias.ids or token % 2 == 0 for one in others for token in beside[one.request].token_ids)


@pytest.mark.parametrize("backend", ["plain", "device"])
def test_a_bias_survives_preemption_and_choices(backend: str) -> None:
    """An id at +100 is the only one that is put out, by every choice of a request."""
    asked = submit(1, [4, 5], 6, sampling=Sampling(temperature=1.0), logit_bias=bias_of({42: 100.0}), choices=3)
    answers = generate(engine_of(backend), [asked])
    assert {number: list(one.token_ids) for number, one in answers.items()} == {one: [42] * 6 for one in (1, 2, 3)}


def test_an_id_beyond_the_vocabulary_is_refused() -> None:
    """The engine does not take a request with one, whatever the host let through."""
    asked = [submit(number, [4], 2, logit_bias=bias_of({VOCAB + 1 - number: 1.0})) for number in (1, 2)]
    answers = generate(engine_of("plain"), asked)
    assert (answers[1].failure, answers[2].failure) == (FailureCode.INVALID, None)


@pytest.mark.parametrize(
    "bias",
    [
        LogitBias(array("I"), array("f")),
        LogitBias(array("I", [1, 1]), array("f", [1, 1])),
        LogitBias(array("I", [2, 1]), array("f", [1, 1])),
        LogitBias(array("I", [1, 2]), array("f", [1])),
        LogitBias(array("I", [1]), array("d", [1])),
        LogitBias(array("I", [1]), array("f", [100.1])),
        LogitBias(array("I", [1]), array("f", [float("nan")])),
        LogitBias(array("I", range(MAX_LOGIT_BIASES + 1)), array("f", [1] * (MAX_LOGIT_BIASES + 1))),
    ],
)
def test_what_the_wire_does_not_carry(bias: LogitBias) -> None:
    """No entry, ids twice or out of order, another number of values or other ones, and too many are refused."""
    with pytest.raises(LocalProtocolError):
        encode(submit(1, [4], 2, logit_bias=bias))
