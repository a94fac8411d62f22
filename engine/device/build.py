"""Chooses the device backend, and puts it around a loaded model."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.device.configuration import launch_configuration
from engine.device.model import DeviceModel, check_supported
from engine.device.operations import Operations
from engine.device.plain import PlainOperations
from engine.device.presence import gpu_starts
from engine.device.runner import MOST_AHEAD, DeviceRunner
from engine.device.storage import DeviceStorage, spare_bytes
from engine.errors import ConfigurationError
from engine.kv.layout import MIN_BLOCKS, KvLayout
from engine.model.decoder import Decoder
from engine.scheduler.limits import SchedulerLimits

BACKENDS = ("auto", "device", "plain")
"""``auto``: the device backend where torch has a GPU, else the plain loop. ``device``: that backend in any case, on a
machine without a GPU in plain tensor operations, for tests. ``plain``: the plain loop, on the CPU."""


def uses_device(config: EngineConfig) -> bool:
    """Whether the device backend runs this engine.

    Raises:
        ConfigurationError: a GPU is there and does not start.
    """
    if config.runner != "model" or config.backend == "plain":
        return False
    return gpu_starts() or config.backend == "device"


def device_for(config: EngineConfig) -> str:
    """Where the weights go, as torch names it.

    Raises:
        ConfigurationError: a GPU is there and does not start.
    """
    return "cuda" if uses_device(config) and gpu_starts() else "cpu"


def without_spares(layout: KvLayout, rows: int) -> KvLayout:
    """The layout with so many blocks fewer as the device keeps for rows that it runs ahead of.

    Raises:
        ConfigurationError: too few are left.
    """
    left = layout.num_blocks - (spare_bytes(layout, rows) // layout.block_bytes)
    if left < MIN_BLOCKS:
        needed = spare_bytes(layout, rows) + (MIN_BLOCKS + 1) * layout.block_bytes
        raise ConfigurationError(
            f"the device backend keeps a spare block for each of {len(layout.tables)} block tables of {rows} rows, and "
            f"then too few are left: give kv_bytes of at least {needed}, or fewer max_num_seqs"
        )
    return replace(layout, num_blocks=left)


def make_operations(model: Decoder, compiled: str = "", configuration: str = "") -> Operations:
    """Kernels on a GPU, tensor operations on a CPU.

    Args:
        model: the weights, where they are to be computed with.
        compiled: folder of kernels that were compiled ahead; empty: Triton compiles them.
        configuration: which of them, by ``engine.device.configuration``.

    Raises:
        ConfigurationError: none of those kernels are for this GPU.
    """
    if model.device.type != "cuda":
        return PlainOperations()
    layer, config = model.config.kv_layers[0], model.config
    if compiled:
        major, minor = torch.cuda.get_device_capability(model.device)
        cache = importlib.import_module("engine.kernels.gpu.cache")
        cache.open_cache(Path(compiled), f"sm_{major}{minor}", configuration)
    # Not at the top: torch's build for CPUs comes without Triton.
    kernels = importlib.import_module("engine.kernels.gpu.operations")
    found: Operations = kernels.kernel_operations(
        (config.num_heads, layer.heads), max(layer.key_dim, layer.value_dim), config.vocab_size, model.device
    )
    return found


def make_device_runner(
    config: EngineConfig,
    model: Decoder,
    layout: KvLayout,
    limits: SchedulerLimits,
    operations: Operations | None = None,
    *,
    eager: bool = False,
    most_ahead: int = MOST_AHEAD,
) -> DeviceRunner:
    """A runner around a model that is loaded and not packed yet, or whose memory is final (``engine.model.layers``) and
    may still be filled.

    Args:
        config: of the engine.
        model: the weights, where they are to be computed with.
        layout: of the blocks that the scheduler gives out.
        limits: of steps.
        operations: None: those that fit the model's device.
        eager: compute every step anew instead of replaying a recording.
        most_ahead: steps that are run ahead at once.

    Raises:
        ConfigurationError: the backend does not compute this model.
    """
    check_supported(model, int8=config.quantization == "int8")
    configuration = launch_configuration(model.config, model.dtype, layout.block_size, limits.max_num_seqs)
    run = operations or make_operations(model, config.gpu_kernels, configuration)
    storage = DeviceStorage(layout, limits.max_num_seqs, run, model.dtype, model.device)
    forward = DeviceModel(model, storage, run)
    if not model.packed:
        model.pack()
    return DeviceRunner(forward, storage, limits, run, eager=eager, most_ahead=most_ahead)
