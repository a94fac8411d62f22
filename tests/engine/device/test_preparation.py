"""What is got ready beside the weights, and the order in which an engine for a GPU starts."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from engine import load
from engine.config import EngineConfig
from engine.device.preparation import preparing
from engine.errors import ConfigurationError, ModelLoadError
from engine.load import load_engine
from tests.engine.support import make_engine, model_config, random_model, save_model

WAIT_S = 30.0


def test_steps_run_while_weights_are_read() -> None:
    """Each side waits for the other: neither could go on if one came after the other. The thread is gone then."""
    reading, prepared = threading.Event(), threading.Event()

    def step() -> None:
        assert reading.wait(WAIT_S)
        prepared.set()

    before = threading.active_count()
    with preparing("cuda", [step]):
        reading.set()
        assert prepared.wait(WAIT_S)
    assert threading.active_count() == before


def test_errors_come_out() -> None:
    """A step's error comes out after the reading; one of the reading goes before it, and no thread is left."""

    def fail() -> None:
        raise ConfigurationError("no compiled kernels")

    done = []
    with pytest.raises(ConfigurationError, match="no compiled kernels"), preparing("cuda", [fail]):
        done.append("read")
    assert done == ["read"]
    before = threading.active_count()
    with pytest.raises(ModelLoadError, match="short"), preparing("cuda", [fail]):
        raise ModelLoadError("a file is short")
    assert threading.active_count() == before


def test_on_the_processor_there_is_no_thread() -> None:
    """No step is taken there."""
    before = threading.active_count()
    with preparing("cpu", [lambda: pytest.fail("a step was taken")]):
        assert threading.active_count() == before


def test_an_engine_reads_its_weights_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Preparation begins before the weights and has ended before anything is put around the model."""
    order: list[str] = []

    class Recorded:
        def __init__(self, device: str) -> None:
            order.append(f"begins on {device}")

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            order.append("ends")

    save_model(tmp_path, model_config())
    read, put = load.load_model, load.build_engine
    monkeypatch.setattr(load, "preparing", Recorded)
    monkeypatch.setattr(load, "load_model", lambda *a, **b: (order.append("reads"), read(*a, **b))[1])
    monkeypatch.setattr(load, "build_engine", lambda *a: (order.append("puts around"), put(*a))[1])
    load_engine(EngineConfig(model_dir=str(tmp_path), model_digest="00", kv_bytes=1 << 20), warm=False)
    assert order == ["begins on cpu", "reads", "ends", "puts around"]


def test_the_largest_step_is_recorded_first() -> None:
    """Warm-up computes and records buckets from the largest down, each twice; control: requests then take what they
    need, in any order, without another recording."""
    engine = make_engine(random_model(model_config(), packed=False), backend="device", num_blocks=64)
    replayer = engine.runner._launcher._replayer
    seen: list[int] = []
    run = replayer.run

    def watched(bucket: int) -> torch.Tensor:
        seen.append(bucket)
        return run(bucket)

    replayer.run = watched
    engine.runner.prove()
    assert seen == [16, 16, 12, 12, 8, 8, 4, 4, 2, 2, 1, 1]
    tapes = dict(replayer._tapes)
    assert all(tape is not None for tape in tapes.values())
    engine.warm_up()
    assert replayer._tapes == tapes
