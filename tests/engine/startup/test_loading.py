"""What is left of loading when an engine is there."""

from __future__ import annotations

import gc
from pathlib import Path

from engine.config import EngineConfig
from engine.model.checkpoint.staging import Staging
from engine.startup.load import load_engine
from tests.engine.support import model_config, save_model


def _stagings() -> int:
    return sum(isinstance(one, Staging) for one in gc.get_objects())


def test_the_buffer_of_reading_is_gone_before_the_heap_gives_back(tmp_path: Path) -> None:
    """An engine that was loaded holds no staging buffer, though the collector has not run by itself; else the heap
    keeps up to 64 MiB for good. Control: one that is referred to is found."""
    save_model(tmp_path, model_config())
    gc.collect()
    before = _stagings()
    gc.disable()
    try:
        engine = load_engine(
            EngineConfig(model_dir=str(tmp_path), model_digest="00", kv_bytes=1 << 20, dtype="bfloat16"), warm=False
        )
        assert _stagings() == before and engine is not None
        held = Staging.__new__(Staging)
        assert _stagings() == before + (1 if gc.is_tracked(held) else 0) and gc.is_tracked(held)
    finally:
        gc.enable()
