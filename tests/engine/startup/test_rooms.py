"""What warm-up leaves in an engine that is saved with its model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.backends.common.host_runner import HostRunner
from engine.backends.native.library import open_libraries
from engine.backends.native.program import NativeModel
from engine.config import EngineConfig
from engine.core.scheduler.plan import StepPlan
from engine.startup.load import load_engine
from tests.engine.support import model_config, save_model

pytestmark = pytest.mark.usefixtures("one_thread")


def test_rooms_of_a_warm_engine_are_zero(tmp_path: Path, kernel_dir: Callable[..., Path]) -> None:
    """Rooms for activations, which the largest steps have filled, hold zeros after warm-up: a checkpoint holds no page
    of zeros. Control: one more step leaves something in them, so they are what steps write."""
    save_model(tmp_path, model_config())
    kernels = str(kernel_dir())
    config = EngineConfig(
        model_dir=str(tmp_path),
        model_digest="00",
        kernels=kernels,
        form=next(iter(open_libraries(kernels))).variant,  # A trial of so small a model may choose plain operations.
        threads=2,  # As other tests of one process: a library that was started with more than asked for is refused.
        kv_bytes=1 << 20,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        max_context=96,
    )
    runner = load_engine(config).runner
    assert isinstance(runner, HostRunner) and isinstance(runner.forward, NativeModel)
    rooms = runner.forward._builder.rooms
    assert len(rooms) > 5 and not any(room.any() for room in rooms)
    runner.execute(StepPlan(decode_rows=[0, 1]))
    assert any(room.any() for room in rooms)
