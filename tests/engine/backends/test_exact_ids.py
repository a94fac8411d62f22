"""A trained model's ids, exact: alone, in every batch, in every chunking, after preemption, from a cached prefix."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.core.engine import Engine
from engine.core.offline import Answer, collect, generate
from engine.core.scheduler.forecast import Forecast
from engine.startup.load import load_engine
from tests.engine.support import submit

Expected = list[tuple[list[int], list[int]]]


@pytest.fixture(scope="module")
def stories(shared_data: Path) -> Callable[..., Engine]:
    """Makes engines of a small trained model."""

    def make(**changes: object) -> Engine:
        values = {
            "model_dir": str(shared_data / "models" / "stories260K-hf"),
            "model_digest": "5707",
            "kv_bytes": 16 << 20,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 64,
            **changes,
        }
        return load_engine(EngineConfig(**values), warm=False)

    return make


@pytest.fixture(scope="module")
def expected(shared_data: Path) -> Expected:
    """Prompts and greedy continuations, computed once with transformers in float32."""
    lines = json.loads((shared_data / "expected" / "greedy_fp32.json").read_text())["stories260K"]
    return [(line["prompt_ids"], line["greedy_ids"]) for line in lines]


def test_greedy_ids_are_exact_alone(stories: Callable[..., Engine], expected: Expected) -> None:
    """Each prompt alone gives the reference's 64 ids."""
    engine = stories()
    for prompt, ids in expected:
        answer = generate(engine, [submit(1, prompt, len(ids))])[1]
        assert answer.token_ids == ids
        engine.scheduler.check_integrity()


def test_greedy_ids_are_exact_in_a_mixed_batch(stories: Callable[..., Engine], expected: Expected) -> None:
    """Sixteen requests of four tenants join while others decode, prefilled in small chunks: the same ids."""
    engine = stories(max_num_batched_tokens=17, prefix_caching=False)
    answers: dict[int, Answer] = {}
    for number in range(16):
        engine.add(submit(number, expected[number % 5][0], 64, tenant=number % 4))
        for _ in range(number % 3):
            collect(engine, answers)
            engine.scheduler.check_integrity()
    while engine.has_work:
        collect(engine, answers)
    assert [answers[number].token_ids for number in range(16)] == [expected[number % 5][1] for number in range(16)]


def some_or_all(some: tuple[int, ...], everything: range) -> list[object]:
    """A few sizes for every run, all of them for the full one."""
    rest = [pytest.param(size, marks=pytest.mark.full) for size in everything if size not in some]
    return [*some, *rest]


@pytest.mark.parametrize("count", some_or_all((1, 2, 3, 4, 17, 64), range(1, 65)))
def test_greedy_ids_are_exact_at_every_batch_size(
    stories: Callable[..., Engine], expected: Expected, count: int
) -> None:
    """So many requests at once, of three tenants, their prompts chunked by what the decodes leave: the same ids."""
    engine = stories(max_num_seqs=64, max_num_batched_tokens=80)
    answers = generate(
        engine, [submit(number, expected[number % 5][0], 64, tenant=number % 3) for number in range(count)]
    )
    assert [answers[number].token_ids for number in range(count)] == [
        expected[number % 5][1] for number in range(count)
    ]


@pytest.mark.parametrize("size", some_or_all((1, 2, 7, 16), range(1, 33)))
def test_greedy_ids_are_exact_chunked_at_every_size(
    stories: Callable[..., Engine], expected: Expected, size: int
) -> None:
    """A prompt and its known continuation, computed so many tokens at a time, goes on as it did in one piece."""
    prompt, ids = expected[2]
    engine = stories(max_num_seqs=1, max_num_batched_tokens=size, prefix_caching=False)
    answer = generate(engine, [submit(1, prompt + ids[:40], len(ids) - 40)])[1]
    assert answer.token_ids == ids[40:]


@pytest.mark.parametrize("caching", [True, False])
def test_greedy_ids_are_exact_after_preemption(
    stories: Callable[..., Engine], expected: Expected, caching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With far too few blocks, and no forecast that would hold them back, requests are preempted and computed again,
    to the same ids."""
    monkeypatch.setattr(Forecast, "fits", lambda *_args, **_named: True)
    probe = stories()
    block_bytes = probe.runner.storage.layout.block_bytes
    engine = stories(kv_bytes=15 * block_bytes, prefix_caching=caching)
    admissions: list[int] = []
    admit = engine.runner.batches.intake.admit
    engine.runner.batches.intake.admit = lambda one: (admissions.append(len(one.token_ids)), admit(one))
    for number in range(6):
        engine.add(submit(number, expected[number % 5][0], 64, tenant=number % 2))
    answers: dict[int, Answer] = {}
    while engine.has_work:
        collect(engine, answers)
        engine.scheduler.check_integrity()
    assert len(admissions) > 6
    assert max(admissions) > 20
    assert [answers[number].token_ids for number in range(6)] == [expected[number % 5][1] for number in range(6)]


def test_a_cached_prefix_gives_the_same_ids(stories: Callable[..., Engine], expected: Expected) -> None:
    """A prompt whose beginning is in the cache continues exactly as without, and reports what it found."""
    engine = stories()
    prompt, ids = expected[2]
    full = prompt + ids
    generate(engine, [submit(1, full[:50], 1)])
    answer = generate(engine, [submit(2, full[:60], len(full) - 60)])[2]
    assert answer.cached_tokens == 48
    assert answer.token_ids == full[60:]


def test_bfloat16_runs_the_same_model(stories: Callable[..., Engine], expected: Expected) -> None:
    """In bfloat16 most of the first tokens agree; it is another arithmetic, not another model."""
    engine = stories(dtype="bfloat16")
    agree = 0
    for prompt, ids in expected:
        agree += generate(engine, [submit(1, prompt, 8)])[1].token_ids == ids[:8]
    assert agree >= 3
