"""Log-probabilities of prompts: exact against ``transformers``, in any chunks, bounded a step, blind to the cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.core.engine import Engine
from engine.core.offline import Answer, collect, generate
from engine.core.scheduler.forecast import Forecast
from engine.core.scheduler.limits import SCORED_ROWS
from engine.model.layers.decoder import Decoder
from engine.startup.load import load_engine
from isolation.ipc.codec import decode, encode
from isolation.ipc.messages import FailureCode
from isolation.ipc.sampling import Sampling
from tests.engine.model.families.table import VOCAB, save_reference
from tests.engine.support import make_engine, model_config, random_model, submit

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model() -> Decoder:
    """A random model."""
    return random_model(model_config())


def scores(answer: Answer) -> tuple[list[float], list[int], list[float]]:
    """The columns of all parts, which follow each other from position 1 on."""
    assert answer.failure is None
    place = 1
    columns: tuple[list[float], list[int], list[float]] = ([], [], [])
    for part in answer.prompts:
        assert part.start == place
        place += len(part.logprobs)
        for column, values in zip(columns, (part.logprobs, part.top_ids, part.top_logprobs), strict=True):
            column.extend(values)
    return columns


@pytest.fixture(params=["plain", "compiled"])
def kernels(request: pytest.FixtureRequest, kernel_dir: Callable[..., Path]) -> str:
    """Where the kernels are; empty for the plain path."""
    return str(kernel_dir()) if request.param == "compiled" else ""


@pytest.mark.parametrize("deterministic", [False, True])
def test_they_are_those_of_transformers(tmp_path: Path, kernels: str, deterministic: bool) -> None:
    """Prompts of many lengths, together and in small chunks: each token's log-probability and the likeliest ids' agree
    with the reference to 1e-4."""
    reference = save_reference(tmp_path)
    config = EngineConfig(
        model_dir=str(tmp_path),
        model_digest="00",
        block_size=4,
        kv_bytes=1 << 20,
        max_num_seqs=8,
        max_num_batched_tokens=48,
        threads=2 if kernels else 1,
        kernels=kernels,
    )
    engine = load_engine(config, warm=False)
    assert engine.runner.forward.checks_owners == bool(kernels)
    generator = np.random.default_rng(1)
    prompts = [generator.integers(3, VOCAB, length).tolist() for length in (1, 2, 47, 48, 49, 100)]
    loads = [
        submit(number, prompt, 3, prompt_logprobs=number, deterministic=deterministic and number % 2 == 0)
        for number, prompt in enumerate(prompts)
    ]
    answers = generate(engine, loads)
    for number, prompt in enumerate(prompts):
        logprobs, top_ids, top_logprobs = scores(answers[number])
        with torch.no_grad():
            exact = reference(torch.tensor([prompt])).logits[0].log_softmax(-1)
        assert len(logprobs) == len(prompt) - 1
        assert len(top_ids) == len(top_logprobs) == number * len(logprobs)
        for place, logprob in enumerate(logprobs):
            assert abs(logprob - float(exact[place, prompt[place + 1]])) < TOLERANCE
            part = slice(place * number, (place + 1) * number)
            best = exact[place].topk(number).values.tolist()
            assert np.allclose(top_logprobs[part], best, atol=TOLERANCE)
            assert np.allclose([float(exact[place, one]) for one in top_ids[part]], best, atol=TOLERANCE)


def test_a_step_computes_a_bounded_number_of_lines(model: Decoder) -> None:
    """However many long prompts are scored together, no step has more lines of logits than the named bound, and its
    frame comes through the codec."""
    engine = make_engine(model, num_blocks=400, max_context=300, max_num_batched_tokens=256, max_num_seqs=4)
    widest: list[int] = []
    forward = engine.runner.forward

    class Watched:
        checks_owners = forward.checks_owners

        def __call__(self, *step):
            found = forward(*step)
            widest.append(len(found.logits))
            return found

    engine.runner.forward = Watched()
    for number in range(6):
        prompt = [(number + place) % 97 for place in range(250)]
        engine.add(submit(number, prompt, 9, tenant=number, prompt_logprobs=20))
    answers: dict[int, Answer] = {}
    step = engine.step

    def checked():
        output = step()
        assert output is None or decode(encode(output)) == output
        return output

    engine.step = checked
    while engine.has_work:
        collect(engine, answers)
        engine.scheduler.check_integrity()
    assert SCORED_ROWS <= max(widest) <= SCORED_ROWS + 4
    assert all(len(scores(answer)[0]) == 249 for answer in answers.values())


def test_the_cache_is_left_alone_and_left_filled(model: Decoder) -> None:
    """A scored prompt reuses nothing although it is there, gives the same numbers both times, and later requests find
    its blocks."""
    engine = make_engine(model)
    first = generate(engine, [submit(1, range(30), 4, prompt_logprobs=1)])[1]
    again = generate(engine, [submit(2, range(30), 4, prompt_logprobs=1)])[2]
    plain = generate(engine, [submit(3, range(30), 4)])[3]
    assert (first.cached_tokens, again.cached_tokens, plain.cached_tokens) == (0, 0, 28)
    assert scores(first) == scores(again)
    assert first.token_ids == again.token_ids == plain.token_ids


@pytest.mark.parametrize("deterministic", [False, True])
def test_under_preemption_and_load_every_position_comes_once(
    model: Decoder, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In little memory, beside others: no gap, nothing twice, the same numbers as alone (the same bits where the
    request is deterministic); choices beside the first have none."""
    monkeypatch.setattr(Forecast, "fits", lambda *_args, **_named: True)
    loads = [
        submit(
            10 * number,
            [(7 * number + place) % 97 for place in range(5 + 6 * number)],
            14,
            tenant=number % 2,
            prompt_logprobs=3 if number % 3 else -1,
            choices=1 + number % 2,
            deterministic=deterministic,
            sampling=Sampling(seed=number),
        )
        for number in range(10)
    ]
    engine = make_engine(model, num_blocks=32, max_context=80, max_num_seqs=8)
    together: dict[int, Answer] = {}
    for one in loads:
        engine.add(one)
    while engine.has_work:
        collect(engine, together)
        engine.scheduler.check_integrity()
    assert engine.scheduler.num_preempted
    for one in loads:
        alone = generate(make_engine(model), [replace(one, choices=1)])[one.request]
        found, expected = scores(together[one.request]), scores(alone)
        assert found[1] == expected[1]
        for column in (0, 2):
            assert np.allclose(found[column], expected[column], atol=0 if deterministic else TOLERANCE, rtol=0)
        assert one.choices == 1 or not together[one.request + 1].prompts


def test_a_prompt_with_broken_logits_fails_alone(model: Decoder) -> None:
    """NaN in the logits of a prompt: finite numbers on the wire, the request fails, its neighbour does not."""

    def broken(*inputs: object) -> torch.Tensor:
        logits = forward(*inputs)
        if len(logits) > 2:
            logits[:] = torch.nan
        return logits

    engine: Engine = make_engine(model)
    forward = model.forward
    engine.runner.forward.model = type("Broken", (), {"forward": staticmethod(broken)})()
    answers = generate(engine, [submit(1, range(9), 4, prompt_logprobs=2)])
    assert answers[1].failure is FailureCode.INTERNAL
    assert len(answers[1].prompts[0].logprobs) == 8
    assert len(generate(engine, [submit(2, range(9), 4)])[2].token_ids) == 4
