"""Several outputs of one prompt: the prompt is computed once, outputs are those of single requests, nothing stays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from engine.core.engine import Engine
from engine.core.kv.layout import FULL, Reach, uniform_layers
from engine.core.offline import Answer, collect, generate
from engine.core.scheduler.forecast import Forecast
from engine.model.layers.decoder import Decoder
from isolation.ipc.engine import Submit
from isolation.ipc.messages import FailureCode
from isolation.ipc.sampling import Sampling
from tests.engine.support import make_engine, model_config, random_model, submit

HOT = Sampling(temperature=2.0, seed=(1 << 64) - 2)


WINDOWS = (FULL, Reach("window", 6))
CHUNKS = (Reach("chunk", 12), Reach("window", 9))


@pytest.fixture(scope="module", params=[(FULL, FULL), WINDOWS, CHUNKS], ids=str)
def model(request: pytest.FixtureRequest) -> Decoder:
    """A random model with one block table, with one for windows too, and with none for whole contexts."""
    layers = tuple(layer for reach in request.param for layer in uniform_layers(1, 2, 8, reach))
    return random_model(model_config(layers=layers))


@pytest.fixture(scope="module")
def single(model: Decoder) -> Callable[[int, int], list[int]]:
    """Tokens of a single request, alone in an engine of its own, by the length of its prompt and the number that its
    seed is behind the first one; each once."""

    @functools.cache
    def tokens(length: int, index: int) -> list[int]:
        asked = submit(1, range(length), 9, sampling=replace(HOT, seed=(HOT.seed + index) % (1 << 64)))
        return generate(make_engine(model), [asked])[1].token_ids

    return tokens


def run(engine: Engine, submits: list[Submit]) -> dict[int, Answer]:
    """Run submissions to their end, with all promises checked at every step; answers by wire id."""
    answers: dict[int, Answer] = {}
    for one in submits:
        engine.add(one)
    while engine.has_work:
        collect(engine, answers)
        engine.scheduler.check_integrity()
    return answers


def computed_tokens(engine: Engine) -> list[int]:
    """Tokens of each prompt chunk that the engine's runner is given, from now on."""
    lengths: list[int] = []
    execute = engine.runner.execute

    def counted(plan):
        lengths.extend(chunk.length for chunk in plan.prefills)
        return execute(plan)

    engine.runner.execute = counted
    return lengths


@pytest.mark.parametrize(("caching", "retain"), [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("length", [41, 40, 3])
def test_the_prompt_is_computed_once(
    model: Decoder, single: Callable[[int, int], list[int]], length: int, caching: bool, retain: bool
) -> None:
    """All outputs but the first find the prompt's full blocks, with and without a cache; each is what a single request
    with its seed gives."""
    engine = make_engine(model, prefix_caching=caching)
    lengths = computed_tokens(engine)
    answers = run(engine, [submit(50, range(length), 9, sampling=HOT, choices=5, retain=retain, logprobs=2)])
    full = (length - 1) // 4 * 4
    assert [answers[50 + index].cached_tokens for index in range(5)] == [0] + [full] * 4
    assert sum(lengths) == length + 4 * (length - full)
    for index in range(5):
        assert answers[50 + index].token_ids == single(length, index)
        assert len(answers[50 + index].logprobs) == 9
    assert len({tuple(answer.token_ids) for answer in answers.values()}) > 3


def test_nothing_of_a_family_outlives_it_where_nothing_may(model: Decoder) -> None:
    """Without retention the memory is zero after the last output, and no later request finds the prompt; without a
    cache no later one finds it either. With both it is found (control)."""
    engine = make_engine(model)
    run(engine, [submit(1, range(30), 6, choices=4, retain=False, sampling=HOT)])
    assert not any(bool(tensor[1:].any()) for tensor in engine.runner.storage.tensors)
    assert engine.scheduler._pool.num_cached == 0
    assert run(engine, [submit(9, range(30), 2)])[9].cached_tokens == 0
    off = make_engine(model, prefix_caching=False)
    run(off, [submit(1, range(30), 6, choices=4, sampling=HOT)])
    assert off.scheduler._pool.num_cached == 0
    assert run(off, [submit(9, range(30), 2)])[9].cached_tokens == 0
    kept = make_engine(model)
    run(kept, [submit(1, range(30), 6, choices=4, sampling=HOT)])
    assert run(kept, [submit(9, range(30), 2)])[9].cached_tokens == 28


def test_a_familys_own_key_is_nobody_elses(model: Decoder) -> None:
    """Two families and a single request of one tenant over the same prompt, none to be kept, find nothing of each
    other."""
    engine = make_engine(model, num_blocks=200)
    loads = [submit(number, range(30), 12, choices=3, retain=False, sampling=HOT) for number in (10, 20)]
    answers = run(engine, [*loads, submit(30, range(30), 12, retain=False)])
    assert [answers[number].cached_tokens for number in (10, 20, 30)] == [0, 0, 0]
    assert [answers[number].cached_tokens for number in (11, 12, 21, 22)] == [28] * 4


@pytest.mark.parametrize("retain", [True, False])
def test_an_output_of_one_token_leaves_its_prompt_to_the_others(model: Decoder, retain: bool) -> None:
    """The first output ends with its first token: the others find the prompt all the same."""
    engine = make_engine(model)
    answers = run(engine, [submit(1, range(25), 1, choices=3, retain=retain)])
    assert [answers[number].cached_tokens for number in (1, 2, 3)] == [0, 24, 24]


def test_when_the_first_is_aborted_the_next_leads(model: Decoder) -> None:
    """Aborts before, while and after the prompt is computed end that output alone; the last one takes all with it."""
    engine = make_engine(model, max_num_batched_tokens=16)
    engine.add(submit(1, range(60), 8, choices=4, retain=False))
    engine.step()
    for number in (1, 3):
        engine.abort(number)
        engine.scheduler.check_integrity()
    answers: dict[int, Answer] = {}
    while engine.has_work:
        collect(engine, answers)
        engine.scheduler.check_integrity()
    assert [answers[number].failure for number in (1, 3)] == [FailureCode.ABORTED] * 2
    assert [len(answers[number].token_ids) for number in (2, 4)] == [8, 8]
    assert (answers[2].cached_tokens, answers[4].cached_tokens) == (16, 56)
    assert engine.scheduler.num_available_blocks == engine.runner.storage.layout.num_blocks
    engine.add(submit(10, range(60), 8, choices=4))
    for number in range(10, 14):
        engine.abort(number)
    assert not engine.has_live_requests


def test_bounds_are_held_against_all_outputs(model: Decoder) -> None:
    """Every output of a refused submission is answered: too many at once, too many waiting, an id in use."""
    engine = make_engine(model, max_waiting=5)
    engine.add(submit(1, range(5), choices=17))
    engine.add(submit(50, range(5), choices=6))
    engine.add(submit(100, range(5), 30, choices=4))
    engine.add(submit(102, range(5), choices=1))
    output = engine.step()
    failures = [(one.request, one.code) for one in output.failures]
    assert failures[:17] == [(number, FailureCode.INVALID) for number in range(1, 18)]
    assert failures[17:23] == [(number, FailureCode.OVERLOADED) for number in range(50, 56)]
    assert failures[23:] == [(102, FailureCode.INVALID)]
    answers: dict[int, Answer] = {}
    while engine.has_work:
        collect(engine, answers)
    assert sorted(answers) == [100, 101, 103]


@pytest.mark.parametrize("retain", [pytest.param(True, marks=pytest.mark.full), False])
def test_families_under_load_give_what_single_requests_give(
    model: Decoder, retain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Families, singles, aborts and preemptions in little memory: every output that was left alone is the single
    request's, and all memory is free in the end."""
    monkeypatch.setattr(Forecast, "fits", lambda *_args, **_named: True)
    generator = np.random.default_rng(5)
    engine = make_engine(model, num_blocks=40, max_context=70, max_num_seqs=6)
    loads, left = [], {}
    for number in range(10):
        tokens = generator.integers(0, 97, int(generator.integers(1, 40))).tolist()
        choices = int(generator.integers(1, 6))
        one = submit(
            100 * number,
            tokens,
            20,
            tenant=1 + number % 3,
            choices=choices,
            retain=retain or number % 2 == 0,
            sampling=Sampling(seed=number),
            deterministic=bool(number % 2),
        )
        loads.append(one)
        left |= {one.request + index: (one, index) for index in range(choices)}
    answers: dict[int, Answer] = {}
    while loads or engine.has_work:
        if loads:
            engine.add(loads.pop())
        if generator.integers(7) == 0 and left:
            gone = int(generator.choice(list(left)))
            if not answers.get(gone) or not answers[gone].finish:
                engine.abort(gone)
                del left[gone]
        collect(engine, answers)
        engine.scheduler.check_integrity()
    assert engine.scheduler.num_preempted
    assert engine.scheduler.num_available_blocks == engine.runner.storage.layout.num_blocks
    assert engine.scheduler.num_defects == 0
    alone = make_engine(model, num_blocks=200)
    for number, (one, index) in left.items():
        single = replace(one, request=1, choices=1, sampling=Sampling(seed=one.sampling.seed + index))
        assert answers[number].token_ids == generate(alone, [single])[1].token_ids
    assert len(left) > 10
