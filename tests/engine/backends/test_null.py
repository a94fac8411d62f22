"""The null runner: ids by rule, whatever runs beside, and a rhythm that can be set."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.backends.null import WALK_LENGTH, NullRunner, walk
from engine.config import EngineConfig
from engine.core.engine import Engine
from engine.core.kv.layout import KvLayout, uniform_layers
from engine.core.offline import Answer, generate
from engine.core.scheduler.plan import StepPlan
from engine.errors import ConfigurationError
from engine.startup.load import load_engine
from isolation.ipc.messages import Finish
from isolation.ipc.sampling import Sampling
from tests.engine.support import make_scheduler, model_config, save_model, submit


def null_engine(num_blocks: int = 64, **fields: object) -> Engine:
    """Scheduler and loop around a null runner."""
    scheduler, pool = make_scheduler(num_blocks=num_blocks, **fields)
    layout = KvLayout(layers=uniform_layers(1, 1, 2), block_size=4, dtype="float32", num_blocks=pool.num_blocks)
    return Engine(scheduler, NullRunner(scheduler.limits, layout))


def seeded(number: int, length: int, **fields: object) -> object:
    """A request with a seed of its own."""
    return submit(number, range(1, length + 1), sampling=Sampling(seed=1_000 + number), **fields)


def answers(engine: Engine, *numbers: int) -> dict[int, Answer]:
    """Requests of different lengths, run together."""
    return generate(engine, [seeded(number, 3 + number % 5, max_tokens=12) for number in numbers])


def test_ids_depend_on_the_request_alone() -> None:
    """Alone, in company, and preempted for want of blocks, a request gives the same ids; another seed gives others."""
    alone = {number: answers(null_engine(), number)[number].token_ids for number in range(8)}
    together = answers(null_engine(), *range(8))
    crowded = answers(null_engine(num_blocks=8, max_context=32), *range(8))
    for number in range(8):
        assert together[number].token_ids == alone[number] == crowded[number].token_ids
        assert len(alone[number]) == 12 and together[number].finish is Finish.LENGTH
    assert len({tuple(ids) for ids in alone.values()}) == 8


def test_ids_are_ordinary_ones() -> None:
    """None is an end of text, all lie inside the vocabulary, and they differ from each other."""
    eos = frozenset(range(400, 500))
    limits = null_engine(eos_ids=eos).scheduler.limits
    ids = walk(limits)
    assert len(ids) == WALK_LENGTH and not eos.intersection(ids)
    assert all(250 <= token < 750 for token in ids)
    assert len(set(ids)) > 300


def test_logprobs_are_there_for_who_asked() -> None:
    """One entry a token, certain, without alternatives; none for the neighbour."""
    result = generate(null_engine(), [seeded(1, 3, max_tokens=5, logprobs=2), seeded(2, 3, max_tokens=5)])
    assert [entry.logprob for entry in result[1].logprobs] == [0.0] * 5
    assert result[2].logprobs == []


def test_a_step_takes_the_time_it_was_given() -> None:
    """Steps follow each other at the set distance; work done meanwhile counts, and a pause is not made up for."""
    clock, slept = [100.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock[0] += seconds

    limits = null_engine().scheduler.limits
    layout = KvLayout(layers=uniform_layers(1, 1, 2), block_size=4, dtype="float32", num_blocks=8)
    runner = NullRunner(limits, layout, 0.010, lambda: clock[0], sleep)
    step = StepPlan(decode_rows=[0])
    runner.execute(step)
    assert slept == [], "the first step after a pause comes at once"
    clock[0] += 0.004
    runner.execute(step)
    assert slept == [pytest.approx(0.006)]
    clock[0] += 0.0095
    runner.execute(step)
    assert len(slept) == 1, "half a millisecond is no sleep"
    clock[0] += 5.0
    runner.execute(step)
    runner.execute(step)
    assert slept[1:] == [pytest.approx(0.010)]
    runner.execute(StepPlan())
    assert len(slept) == 2, "a plan without tokens is no step"


def config(folder: Path, **fields: object) -> EngineConfig:
    """A configuration of a model that has no weights."""
    return EngineConfig(model_dir=str(folder), model_digest="00", kv_bytes=1 << 20, **fields)


def test_no_weights_are_read(tmp_path: Path) -> None:
    """Without weights a model cannot be loaded, and a null engine of its shape can; it says the model's limits."""
    description = model_config()
    save_model(tmp_path, description)
    (tmp_path / "model.safetensors").unlink()
    engine = load_engine(config(tmp_path, runner="null"))
    assert engine.ready().vocab_size == description.vocab_size
    assert len(generate(engine, [submit(1, [1, 2], max_tokens=4)])[1].token_ids) == 4
    with pytest.raises(Exception, match="safetensors"):
        load_engine(config(tmp_path))


@pytest.mark.parametrize("fields", [{"runner": "nil"}, {"step_us": 5}, {"runner": "null", "step_us": -1}])
def test_a_wrong_runner_is_refused(tmp_path: Path, fields: dict[str, object]) -> None:
    """An unknown runner, a pace for a model, a pace below zero."""
    with pytest.raises(ConfigurationError, match="runner|step_us"):
        load_engine(config(tmp_path, **fields))
