"""Counts what a decoding step of a Llama starts on a device, on memory without contents; a child of test_launches.

One line of JSON: for each way to compute the launches of a layer, those outside of layers, and their names. Kernels and
tensor operations that start something count; views and room that is taken do not.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from engine.backends.common.loading import layout_for, limits_for
from engine.backends.cuda.kernels.operations import kernel_operations
from engine.backends.cuda.load import make_device_runner
from engine.config import EngineConfig
from engine.model.checkpoint.registry import build_model
from tests.engine.support import model_config

META = torch.device("meta")
FREE = ("empty", "empty_like", "new_empty", "empty_strided", "lift_fresh", "detach", "alias", "new_empty_strided")
"""Operations that start nothing."""


class Counting(TorchDispatchMode):
    """Tensor operations by name, without views."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, _types: object, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        result = func(*args, **(kwargs or {}))
        starts = name not in FREE and not func.is_view
        if name in ("to", "_to_copy"):
            starts = result.dtype != args[0].dtype
        if starts:
            self.found[name] += 1
        return result


def counted(layers: int, rows: int, *, separate: bool) -> Counter[str]:
    """What one step starts."""
    description = model_config(
        num_layers=layers,
        hidden_size=256,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        intermediate_size=512,
        vocab_size=1_024,
    )
    config = EngineConfig(
        model_dir="", model_digest="00", block_size=16, kv_bytes=1 << 30, max_num_seqs=rows, max_context=256
    )
    layout = layout_for(config, description, "bfloat16")
    limits = limits_for(config, description, layout)
    model, _ = build_model(description, torch.bfloat16, META)
    run = kernel_operations((4, 2), 64, 1_024, META, "sm_90", separate=separate)
    runner = make_device_runner(config, model, layout, limits, run)
    with torch.inference_mode():
        runner._loop.step(rows)
        with Counting() as counting:
            JITFunction.run = lambda kernel, *_args, **_options: counting.found.update([kernel.fn.__name__])
            runner._loop.step(rows)
            JITFunction.run = skip
    return counting.found


def skip(_kernel: object, *_args: object, **_options: object) -> None:
    """Start nothing."""


def main() -> None:
    """Count with two and with three layers: the difference is one layer."""
    JITFunction.run = skip
    lines = {}
    for name, rows, separate in (("fused", 8, False), ("many rows", 64, False), ("separate", 8, True)):
        two, three = (counted(layers, rows, separate=separate) for layers in (2, 3))
        layer = three - two
        lines[name] = {
            "layer": sum(layer.values()),
            "outside": sum(two.values()) - 2 * sum(layer.values()),
            "of_layer": dict(layer),
            "of_step": dict(two - layer - layer),
        }
    print(json.dumps(lines))


main()
