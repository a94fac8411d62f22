"""Loader of the device backend: chooses where it computes, sizes its memory, and builds it around a model."""

from __future__ import annotations

import importlib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from engine.backends.common.loading import Loaded, LoadSource, dtype_name, layout_for, limits_for, weight_form
from engine.backends.cuda.runtime.budget import cap_share, check_room, kv_bytes_of, read_card, reserve_bytes, step_shape
from engine.backends.cuda.runtime.device_memory import return_freed
from engine.backends.cuda.runtime.launch_digest import launch_configuration
from engine.backends.cuda.runtime.mixing import Mixing
from engine.backends.cuda.runtime.model import DeviceModel, obstacle
from engine.backends.cuda.runtime.operations import Operations
from engine.backends.cuda.runtime.preparation import WeightMemory, bytes_of, filling, reading, release_locked
from engine.backends.cuda.runtime.presence import check_architecture, gpu_starts, visible_gpus
from engine.backends.cuda.runtime.runner import MOST_AHEAD, DeviceRunner
from engine.backends.cuda.runtime.simulated_ops import PlainOperations
from engine.backends.cuda.runtime.staging import staged_blocks
from engine.backends.cuda.runtime.storage import DeviceStorage, spare_bytes
from engine.config import EngineConfig
from engine.core.kv.layout import MIN_BLOCKS, KvLayout
from engine.core.scheduler.limits import SchedulerLimits
from engine.errors import ConfigurationError
from engine.model.checkpoint.weights import unread_model
from engine.model.layers.decoder import Decoder


def load(source: LoadSource) -> Loaded:
    """Build the backend. Weights on disk are read while everything else is put around their memory, and as many steps
    are recorded meanwhile as there is time for.

    Raises:
        ConfigurationError: the backend does not compute this model, or the card has no room for it.
        ModelLoadError: the model's files cannot be used.
    """
    config = source.config
    if source.given is not None:
        return _loaded(build(config, source.given))
    place = torch.device(source.device or device_for(config))
    scaled = config.quantization == "fp8"
    if scaled and place.type == "cuda":
        check_architecture(torch.cuda.get_device_capability(place))

    def room(weights: int) -> None:
        if place.type == "cuda":
            check_room(read_card(place), config.gpu_share, weights)

    with unread_model(
        config.model_dir,
        source.description,
        dtype=config.dtype,
        device=place,
        room=room,
        scaled=scaled,
        parallel=source.parallel,
        open_codec=source.open_codec,
    ) as unread:
        if config.palette:
            # Palettes are made of weights, and kernels chosen by time: nothing is recorded before both are there.
            with reading(filling(unread)):
                pass
            return _loaded(_released(build(config, unread.model), place))
        with reading(filling(unread)) as under_way:
            runner = build(config, unread.model)
            memory = WeightMemory(runner.model, unread)
            runner.record(enough=under_way.over)
        memory.check()
    return _loaded(_released(runner, place))


def _loaded(runner: DeviceRunner) -> Loaded:
    return Loaded(backend=runner, content=runner.content, weights=runner.weights)


def _released(runner: DeviceRunner, place: torch.device) -> DeviceRunner:
    release_locked(place)
    return runner


def build(config: EngineConfig, model: Decoder) -> DeviceRunner:
    """A runner around a model, with as much KV memory as configuration and card leave.

    Raises:
        ConfigurationError: the backend does not compute this model, or there is too little memory.
    """
    rows = min(config.max_num_seqs, config.max_num_batched_tokens)
    operations, said = None, ""
    if config.palette and not obstacle(config, model):
        # Before KV takes what is left of the card.
        digest = launch_configuration(model.config, model.dtype, config.block_size, rows)
        operations = make_operations(model, config.gpu_kernels, digest)
        said = _palettes(config, model, operations)
    config = with_card_kv(config, model)
    layout = layout_for(config, model.config, dtype_name(model.dtype), model.parallel)
    layout = without_spares(layout, rows)
    limits = limits_for(config, model.config, layout)
    runner = make_device_runner(config, model, layout, limits, operations)
    runner.note = said
    palettes = operations is not None and operations.has_palettes
    runner.weights = weight_form(model.dtype, fp8=model.scaled, palettes=palettes)
    return runner


def _palettes(config: EngineConfig, model: Decoder, operations: Operations) -> str:
    """Take palettes, within this engine's share of its card. Says what was chosen.

    Raises:
        ConfigurationError: there is no room for them.
    """
    on_card = model.device.type == "cuda"
    if on_card and config.gpu_share:
        cap_share(model.device, read_card(model.device), config.gpu_share)
    try:
        said = operations.take_palettes(model)
    except torch.OutOfMemoryError as error:
        raise ConfigurationError(
            "the GPU has no room for palettes beside the weights: leave gpu_palette out, raise gpu_share, or put fewer "
            "models on the card"
        ) from error
    if on_card:
        return_freed()
    return said


def with_card_kv(config: EngineConfig, model: Decoder) -> EngineConfig:
    """The configuration with the KV that this engine's share of its card leaves, now that the weights' memory is
    taken.

    Raises:
        ConfigurationError: nothing is left.
    """
    if not config.gpu_share or model.device.type != "cuda":
        return config
    card, reserve = read_card(model.device), reserve_bytes(step_shape(config, model))
    kv_bytes = kv_bytes_of(card, config.gpu_share, reserve)
    cap_share(model.device, card, config.gpu_share)
    return replace(config, kv_bytes=kv_bytes)


def uses_device(config: EngineConfig) -> bool:
    """Whether the device backend runs this engine.

    Raises:
        ConfigurationError: a GPU is there and does not start.
    """
    if config.runner != "model" or config.backend not in ("auto", "device"):
        return False
    return gpu_starts() or config.backend == "device"


def may_use_device(config: EngineConfig) -> bool:
    """Whether the device backend may run this engine, as far as that can be told without starting CUDA."""
    if config.runner != "model" or config.backend not in ("auto", "device"):
        return False
    return config.backend == "device" or bool(visible_gpus())


def import_kernels() -> None:
    """Import what a GPU's engine needs beside what all need, where a card is visible. CUDA is not started: a checkpoint
    of the program may be taken afterwards."""
    if visible_gpus():
        # Torch's build for CPUs comes without Triton; loading the model tells.
        with suppress(ImportError):
            importlib.import_module("engine.backends.cuda.kernels.operations")


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
        configuration: which of them, by ``engine.backends.cuda.runtime.launch_digest``.

    Raises:
        ConfigurationError: none of those kernels are for this GPU.
    """
    if model.device.type != "cuda":
        return PlainOperations()
    layer, config = model.config.kv_layers[0], model.config
    if compiled:
        major, minor = torch.cuda.get_device_capability(model.device)
        cache = importlib.import_module("engine.backends.cuda.kernels.cache")
        cache.open_cache(Path(compiled), f"sm_{major}{minor}", configuration)
    # Not at the top: torch's build for CPUs comes without Triton.
    kernels = importlib.import_module("engine.backends.cuda.kernels.operations")
    found: Operations = kernels.kernel_operations(
        (config.num_heads, layer.heads), max(layer.key_dim, layer.value_dim), config.vocab_size, model.device
    )
    return found


def make_device_runner(  # noqa: PLR0913 - as the runner has it
    config: EngineConfig,
    model: Decoder,
    layout: KvLayout,
    limits: SchedulerLimits,
    operations: Operations | None = None,
    *,
    eager: bool = False,
    most_ahead: int = MOST_AHEAD,
    mixing: Mixing | None = None,
) -> DeviceRunner:
    """A runner around a model that is loaded and not packed yet, or whose memory is final
    (``engine.model.layers.layers``) and may still be filled.

    Args:
        config: of the engine.
        model: the weights, where they are to be computed with.
        layout: of the blocks that the scheduler gives out.
        limits: of steps.
        operations: None: those that fit the model's device.
        eager: compute every step anew instead of replaying a recording.
        most_ahead: steps that are run ahead at once.
        mixing: when decoding rows join prompts; None: as the operations have it for a model of so many bytes.

    Raises:
        ConfigurationError: the backend does not compute this model.
    """
    reason = obstacle(config, model)
    if reason:
        raise ConfigurationError(
            f"the device backend does not compute this model: {reason}; "
            "set backend to plain, which computes every supported model on the CPU"
        )
    rows, scaled = limits.max_num_seqs, model.scaled
    configuration = launch_configuration(model.config, model.dtype, layout.block_size, rows, scaled=scaled)
    run = operations or make_operations(model, config.gpu_kernels, configuration)
    staged = staged_blocks(config, layout)
    storage = DeviceStorage(layout, limits.max_num_seqs, run, model.dtype, model.device, staged)
    forward = DeviceModel(model, storage, run)
    if not model.packed:
        model.pack()
    mixing = run.mixing.of_model(bytes_of(model)) if mixing is None else mixing
    return DeviceRunner(forward, storage, limits, run, eager=eager, most_ahead=most_ahead, mixing=mixing)
