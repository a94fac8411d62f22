"""A GPU that is there and does not start ends the start; where there is none the processor computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.backends.cuda import load
from engine.backends.cuda.load import device_for, uses_device
from engine.backends.cuda.runtime import presence
from engine.backends.cuda.runtime.presence import gpu_starts, visible_gpus, why_not_started
from engine.config import EngineConfig
from engine.errors import ConfigurationError
from engine.startup.load import load_engine
from tests.engine.support import model_config, save_model


def test_a_gpu_that_does_not_start_is_an_error() -> None:
    """What CUDA said and the mend are in the message. Control: without a card there is no error, and nobody asks."""
    with pytest.raises(ConfigurationError, match=r"/dev/nvidia0, /dev/nvidia1.*\(driver too old\).*`gpu: off`"):
        gpu_starts(lambda: ("/dev/nvidia0", "/dev/nvidia1"), lambda: "driver too old")
    with pytest.raises(ConfigurationError, match="found no card"):
        gpu_starts(lambda: ("/dev/nvidia0",), lambda: "")
    assert not gpu_starts(lambda: (), lambda: "not asked")


def test_cards_are_nodes_with_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control node, unified memory and instances are no cards."""
    for name in ("nvidia0", "nvidia12", "nvidiactl", "nvidia-uvm", "nvidia1x", "null"):
        (tmp_path / name).touch()
    monkeypatch.setattr(presence, "DEVICES", tmp_path)
    assert [Path(node).name for node in visible_gpus()] == ["nvidia0", "nvidia12"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA starts here")
def test_cuda_says_why() -> None:
    """Without a GPU there is a reason, of one line."""
    reason = why_not_started()
    assert reason and "\n" not in reason


def test_an_engine_does_not_start_on_the_processor_beside_a_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a visible card and a CUDA that does not start the backends that would take it end with the error, before a
    weight is read; `plain`, which a model with `gpu: off` is told, starts. Control: without a card all of them do."""
    save_model(tmp_path, model_config())
    configs = {
        name: EngineConfig(model_dir=str(tmp_path), model_digest="00", backend=name, kv_bytes=1 << 20)
        for name in ("auto", "device", "plain")
    }
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [uses_device(config) for config in configs.values()] == [False, True, False]
    monkeypatch.setattr(load, "gpu_starts", lambda: gpu_starts(lambda: ("/dev/nvidia0",), lambda: "no driver"))
    for name in ("auto", "device"):
        with pytest.raises(ConfigurationError, match="CUDA does not start"):
            load_engine(configs[name], warm=False)
    assert device_for(configs["plain"]) == "cpu"
    load_engine(configs["plain"], warm=False)
    assert not uses_device(EngineConfig(model_dir="x", model_digest="00", runner="null"))
