"""Structured requests in the engine: each token under its mask, waiting alone, the same whatever happens meanwhile."""

from __future__ import annotations

import random
from array import array
from collections import defaultdict

import numpy as np
import pytest
import torch

from engine.backends.common.masks import MaskedLogits
from engine.core.engine import Engine
from engine.core.kv.layout import FULL, Reach, uniform_layers
from engine.core.scheduler.forecast import Forecast
from engine.core.scheduler.plan import FAILED, RowMask
from engine.model.layers.decoder import Decoder
from engine.serve import serve
from isolation.ipc.codec import Message
from isolation.ipc.engine import Drain, StepOutput, Submit
from isolation.ipc.grammar import Masks, MaskState
from isolation.ipc.logprob import TokenLogprobs
from isolation.ipc.messages import FailureCode, Finish
from isolation.ipc.sampling import Sampling
from tests.engine.support import make_engine, model_config, random_model, submit

VOCAB = 97
ALL = list(range(VOCAB))


@pytest.fixture(scope="module", params=[FULL, Reach("window", 6)], ids=str)
def model(request: pytest.FixtureRequest) -> Decoder:
    """A tiny random Llama, with one block table and with one for windows too."""
    return random_model(model_config(layers=uniform_layers(1, 2, 8) + uniform_layers(1, 2, 8, request.param)))


def words(ids: list[int]) -> bytes:
    """A mask that allows these ids."""
    bits = np.zeros(-(-VOCAB // 32) * 32, dtype=np.uint8)
    bits[ids] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def masks(*rows: tuple[int, int, list[int]], state: MaskState = MaskState.OPEN) -> Masks:
    """One frame of masks: request, position and allowed ids of each row."""
    requests, positions, allowed = zip(*rows, strict=True)
    return Masks(array("Q", requests), array("I", positions), bytes([state] * len(rows)), b"".join(map(words, allowed)))


def run(engine: Engine, submits: list[Submit], allow, *, seed: int) -> dict[int, list[int]]:
    """All requests to their ends; each mask comes some random steps after its token. ``allow(request, position)`` are
    the ids of a mask."""
    rng = random.Random(seed)
    tokens: dict[int, list[int]] = defaultdict(list)
    structured = {item.request for item in submits if item.structured}
    due: list[tuple[int, int, int]] = []
    live = set()
    for item in submits:
        engine.add(item)
        live.add(item.request)
        if item.structured:
            due.append((rng.randrange(3), item.request, 0))
    for step in range(5_000):
        if not live:
            return tokens
        come = [entry for entry in due if entry[0] <= step]
        due = [entry for entry in due if entry[0] > step]
        rng.shuffle(come)
        if come:
            engine.set_masks(masks(*((request, position, allow(request, position)) for _, request, position in come)))
        engine.scheduler.check_integrity()
        output = engine.step() if engine.has_work else None
        for request, token, finish in (
            zip(output.requests, output.token_ids, output.finishes, strict=True) if output else ()
        ):
            tokens[request].append(token)
            if finish:
                live.discard(request)
            elif request in structured:
                due.append((step + rng.randrange(1, 6), request, len(tokens[request])))
    raise AssertionError("the requests do not come to their ends")


def load(*, structured: bool, count: int = 6) -> list[Submit]:
    """Greedy, sampled and penalised requests of several lengths, of two tenants."""
    rng = random.Random(4)
    items = []
    for request in range(1, count + 1):
        sampling = (
            Sampling(temperature=0.0),
            Sampling(temperature=1.0, seed=request, top_p=0.9),
            Sampling(temperature=0.8, seed=request, repetition_penalty=1.3),
        )[request % 3]
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30))]
        items.append(
            submit(
                request, prompt, rng.randrange(5, 30), tenant=1 + request % 2, sampling=sampling, structured=structured
            )
        )
    return items


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.full)])
def test_masks_that_allow_all_change_nothing(
    model: Decoder, short: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every token allowed, structured requests give the tokens of plain ones, in whatever rhythm the masks come,
    and with requests preempted where memory is short."""
    num_blocks = 64
    if short:
        monkeypatch.setattr(Forecast, "fits", lambda *_args, **_named: True)
        # What holds the longest request and little more.
        num_blocks = 14 if model.config.kv_layers[1].reach == FULL else 11
    fields = {"num_blocks": num_blocks, "max_context": 64, "max_num_batched_tokens": 16}
    plain = run(make_engine(model, **fields), load(structured=False), None, seed=seed)
    engine = make_engine(model, **fields)
    assert run(engine, load(structured=True), lambda *_: ALL, seed=seed) == plain
    assert (engine.scheduler.num_preempted > 0) == short


def test_every_token_obeys_its_own_mask(model: Decoder) -> None:
    """Greedy, sampled and penalised, each token is one of its mask's."""

    def allow(request: int, position: int) -> list[int]:
        return sorted(random.Random(1_000 * request + position).sample(ALL, 3))

    tokens = run(make_engine(model, max_context=64), load(structured=True), allow, seed=3)
    for request, ids in tokens.items():
        assert all(token in allow(request, position) for position, token in enumerate(ids))


def test_neighbours_do_not_wait(model: Decoder) -> None:
    """While a structured request waits for its mask, its neighbour gets a token in every step; alone, it leaves the
    engine nothing to do."""
    engine = make_engine(model)
    engine.add(submit(1, [3, 4, 5], 20, structured=True))
    assert not engine.has_work
    engine.add(submit(2, [6, 7], 8))
    received = []
    while engine.has_work:
        output = engine.step()
        received += list(output.requests) if output else []
    assert received == [2] * 8
    assert engine.has_live_requests
    engine.set_masks(masks((1, 0, [9])))
    assert engine.has_work
    output = engine.step()
    assert (list(output.requests), list(output.token_ids)) == ([1], [9])
    assert engine.urgent
    assert not engine.has_work


def test_a_mask_serves_once_and_only_its_position(model: Decoder) -> None:
    """Masks of other positions, of unknown requests and of requests that have one already are passed over."""
    engine = make_engine(model)
    engine.add(submit(1, [3, 4], 5, structured=True))
    engine.set_masks(masks((1, 1, [5]), (77, 0, [5])))
    assert not engine.has_work
    engine.set_masks(masks((1, 0, [6])))
    engine.set_masks(masks((1, 0, [7])))
    assert list(engine.step().token_ids) == [6]
    engine.set_masks(masks((1, 0, [8])))
    assert not engine.has_work


def test_the_end_is_allowed_where_the_grammar_accepts(model: Decoder) -> None:
    """The model's own end of text is forbidden in an open state whatever the bits say, and allowed in an accepting
    one even where it is no bit."""
    masked = MaskedLogits(frozenset({2}))
    logits = torch.zeros(2, VOCAB)
    table = {0: RowMask(words([2, 5]), accepting=False), 1: RowMask(words([5]), accepting=True)}
    result = masked.apply(logits, [0, 1], table)
    assert result[0].isfinite().nonzero().flatten().tolist() == [5]
    assert result[1].isfinite().nonzero().flatten().tolist() == [2, 5]
    assert not logits.any()


def test_ids_beyond_the_mask_are_forbidden_and_bits_beyond_the_logits_ignored() -> None:
    """A mask may be narrower or wider than the logits, or empty; rows without one keep their logits."""
    masked = MaskedLogits(frozenset())
    narrow, wide = RowMask(b"\xff\xff\xff\xff", accepting=False), RowMask(b"\xff" * 64, accepting=False)
    result = masked.apply(torch.zeros(4, VOCAB), [0, 1, 2, 3], {0: narrow, 1: wide, 2: RowMask(b"", accepting=False)})
    assert [int(row.isfinite().sum()) for row in result] == [32, VOCAB, 0, VOCAB]


def test_an_empty_mask_fails_its_request_alone(model: Decoder) -> None:
    """A request that may choose nothing fails; its neighbour's token comes in the same step."""
    engine = make_engine(model)
    engine.add(submit(1, [3, 4], 5, structured=True))
    engine.add(submit(2, [3, 4], 5))
    engine.set_masks(masks((1, 0, [])))
    output = engine.step()
    assert [(failure.request, failure.code) for failure in output.failures] == [(1, FailureCode.INTERNAL)]
    assert list(output.requests) == [2]
    assert FAILED not in output.token_ids


def test_logprobs_are_those_of_what_is_allowed(model: Decoder) -> None:
    """Under a mask of three ids at most three alternatives are told, and their probabilities make one."""
    engine = make_engine(model)
    engine.add(submit(1, [3, 4], 5, structured=True, logprobs=5))
    engine.set_masks(masks((1, 0, [5, 6, 7])))
    [entry] = engine.step().logprobs
    assert isinstance(entry, TokenLogprobs)
    assert set(entry.top_ids) == {5, 6, 7}
    assert np.exp(entry.top_logprobs).sum() == pytest.approx(1.0)


def test_a_stop_ends_a_structured_request(model: Decoder) -> None:
    """A stop id that its mask allows ends it, and nothing of it is left."""
    engine = make_engine(model)
    engine.add(submit(1, [3, 4], 5, structured=True, stop_ids=(9,)))
    engine.set_masks(masks((1, 0, [9])))
    assert list(engine.step().finishes) == [Finish.STOP]
    assert not engine.has_live_requests
    assert not engine.has_work


def test_an_abort_ends_a_held_request(model: Decoder) -> None:
    """A request that waits for its mask, with a row or without, ends when it is aborted."""
    engine = make_engine(model)
    for request in (1, 2):
        engine.add(submit(request, [3, 4], 5, structured=True))
    engine.set_masks(masks((1, 0, [9])))
    engine.step()
    engine.abort(1)
    engine.abort(2)
    engine.scheduler.check_integrity()
    assert {failure.request for failure in engine.step().failures} == {1, 2}
    assert not engine.has_live_requests


class Scripted:
    """A channel whose host answers each token of a structured request by a mask; it counts the sleeps."""

    def __init__(self, messages: list[Message]) -> None:
        self.inbound = messages
        self.tokens: list[int] = []
        self.sleeps = 0

    def send(self, message: Message, *, urgent: bool) -> None:
        assert isinstance(message, StepOutput)
        assert urgent
        for request, token, finish in zip(message.requests, message.token_ids, message.finishes, strict=True):
            self.tokens.append(token)
            if not finish:
                self.inbound.append(masks((request, len(self.tokens), [token + 1])))

    def receive(self, limit: int) -> list[Message]:
        taken, self.inbound = self.inbound[:limit], self.inbound[limit:]
        return taken

    def wait(self, timeout_s: float) -> bool:
        self.sleeps += 1
        return True


def test_a_drain_waits_for_masks(model: Decoder) -> None:
    """Drained engines end only when their structured requests have, and sleep between two tokens."""
    first: list[Message] = [submit(1, [3], 6, structured=True), masks((1, 0, [40])), Drain()]
    channel = Scripted(first)
    serve(make_engine(model), channel)
    assert channel.tokens == [40, 41, 42, 43, 44, 45]
