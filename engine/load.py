"""From a configuration to an engine that is ready to step: model, KV memory, scheduler, warm-up."""

from __future__ import annotations

import gc
from dataclasses import replace

import torch

from engine.config import EngineConfig
from engine.device.budget import MOST_SHARE, check_room, kv_bytes_of, read_card
from engine.device.build import BACKENDS, device_for, make_device_runner, uses_device, without_spares
from engine.device.preparation import Memory, filling, reading
from engine.device.runner import DeviceRunner
from engine.embedding import EmbeddingRunner
from engine.errors import ConfigurationError
from engine.heap import release_free_memory
from engine.kernels.library import UnusableKernelsError, open_library
from engine.kernels.plain_form import check_supported
from engine.kernels.program import NativeModel
from engine.kv.block_pool import BlockPool
from engine.kv.groups import divide
from engine.kv.layout import KvLayout, fit_layout
from engine.kv.prefix_cache import PrefixCache
from engine.kv.spill import MAX_BLOCK_BYTES, SpillChannel, SpillTier
from engine.kv.spill_content import BlockContent
from engine.kv.storage import KvStorage
from engine.loop import Engine
from engine.memory import Form, MemoryNeed, predict_memory
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder
from engine.model.parallel import ALONE, Parallel
from engine.model.pooling import POOLINGS, read_pooling
from engine.model.registry import load_model_config
from engine.model.weights import DTYPE_NAMES, load_model, unread_model
from engine.null import build_null_engine
from engine.publishing import Publisher
from engine.runner import Runner
from engine.scheduler.limits import SchedulerLimits
from engine.scheduler.scheduler import Scheduler

QUANTIZATIONS = ("none", "int8")
"""Forms that weights may be brought into while they are loaded."""


def load_engine(
    config: EngineConfig, *, device: str = "", warm: bool = True, spill: SpillChannel | None = None
) -> Engine:
    """Load the model that the configuration names and make it ready.

    ``device``: where the weights go; empty for what the configuration says. ``spill``: where KV blocks go that find no
    place; without effect for what ``spill_obstacle`` names.

    Raises:
        ConfigurationError: the configuration asks for what this build or machine cannot do.
        ModelLoadError: the model's files cannot be used.
    """
    check_config(config)
    torch.set_num_threads(config.threads)
    embeds = config.runner == "embed"
    description = load_model_config(config.model_dir, headless=embeds).within(config.max_context)
    if config.runner == "null":
        layout = layout_for(config, description, "float32" if config.dtype == "auto" else config.dtype)
        engine = build_null_engine(config, limits_for(config, description, layout), layout)
        _settle_memory()
        return engine
    place = torch.device(device or device_for(config))
    if uses_device(config):
        engine = load_on_device(config, description, place)
    else:
        model = load_model(
            config.model_dir, description, dtype=config.dtype, device=place, packed=False, headless=embeds
        )
        engine = build_embedding_engine(config, model) if embeds else build_engine(config, model, spill)
    release_free_memory()
    if warm:
        engine.warm_up()
        _settle_memory()
    return engine


def load_on_device(config: EngineConfig, description: ModelConfig, place: torch.device) -> Engine:
    """An engine on the device backend: weights are read while all else is put around their memory, and as many steps
    are recorded meanwhile as there is time for.

    Raises:
        ConfigurationError: the backend does not compute this model, or the card has no room for it.
        ModelLoadError: the model's files cannot be used.
    """

    def room(weights: int) -> None:
        if place.type == "cuda":
            check_room(read_card(place), config.gpu_share, weights)

    with unread_model(config.model_dir, description, dtype=config.dtype, device=place, room=room) as unread:
        with reading(filling(unread)) as under_way:
            engine = build_engine(config, unread.model)
            runner = engine.runner
            assert isinstance(runner, DeviceRunner), "the device backend has a runner of its own"
            memory = Memory(runner.model, unread)
            runner.record(enough=under_way.over)
        memory.check()
    return engine


def _settle_memory() -> None:
    """What is there now stays: the collector need not look at it again."""
    gc.collect()
    gc.freeze()


def build_engine(config: EngineConfig, model: Decoder, spill: SpillChannel | None = None) -> Engine:
    """Put KV memory, scheduler and runner around a model, on compiled kernels where there are some."""
    config = with_card_kv(config, model)
    layout = layout_for(config, model.config, str(model.dtype).removeprefix("torch."), model.parallel)
    if uses_device(config):
        layout = without_spares(layout, min(config.max_num_seqs, config.max_num_batched_tokens))
    limits = limits_for(config, model.config, layout)
    runner: Runner | DeviceRunner
    if uses_device(config):
        runner = make_device_runner(config, model, layout, limits)
    else:
        storage = KvStorage(layout, max_context=limits.max_context, dtype=model.dtype, device=model.device)
        runner = make_runner(config, model, storage, limits)
    pool = BlockPool(layout.num_blocks)
    root = layout.root(model.config.kv_origin(config.model_digest))
    cache = PrefixCache(
        pool, root=root, block_size=layout.block_size, caching=limits.prefix_caching, groups=layout.groups
    )
    scheduler = Scheduler(limits, pool, cache)
    engine = Engine(scheduler, runner)
    engine.publisher = Publisher(scheduler, pool, cache, exact=lambda: runner.deterministic)
    if spill is not None and isinstance(runner, Runner) and not spill_obstacle(config, layout):
        engine.spill = SpillTier(spill, BlockContent(runner.storage), pool, cache, runner.adopt)
    return engine


def with_card_kv(config: EngineConfig, model: Decoder) -> EngineConfig:
    """The configuration with the KV that this engine's share of its card leaves, now that the weights' memory is
    taken.

    Raises:
        ConfigurationError: it leaves none.
    """
    if not config.gpu_share or model.device.type != "cuda":
        return config
    return replace(config, kv_bytes=kv_bytes_of(read_card(model.device), config.gpu_share))


def spill_obstacle(config: EngineConfig, layout: KvLayout) -> str:
    """Why the blocks of such an engine cannot leave it; empty when they can."""
    if config.runner != "model" or not config.prefix_caching:
        return "it caches no prefixes"
    if uses_device(config):
        return "blocks of the device backend lie on the device"
    if len(layout.tables) > 1 or layout.groups:
        return "its layers keep windows, and a prefix is then more than a row of blocks"
    if layout.block_bytes > MAX_BLOCK_BYTES:
        size = layout.block_bytes
        return f"a block has {size} bytes and {MAX_BLOCK_BYTES} can leave at once; take a smaller block_size"
    return ""


def build_embedding_engine(config: EngineConfig, model: Decoder) -> Engine:
    """The same around a model that gives vectors: on the plain path, without a cache of prefixes, whose tokens would be
    missing from a mean."""
    pooling = read_pooling(config.pooling, config.model_dir)
    layout = layout_for(config, model.config, str(model.dtype).removeprefix("torch."))
    limits = replace(
        limits_for(config, model.config, layout),
        # A text is followed by one token of no meaning, which takes no KV.
        max_context=min(
            config.max_context, model.config.max_positions, layout.capacity(config.max_num_batched_tokens) - 1
        ) + 1,
        eos_ids=frozenset(),
        prefix_caching=False,
    )
    storage = KvStorage(layout, max_context=limits.max_context, dtype=model.dtype, device=model.device)
    if not model.packed:
        model.pack(int8=config.quantization == "int8")
    runner = EmbeddingRunner(model, storage, limits, pooling)
    pool = BlockPool(layout.num_blocks)
    root = layout.root(config.model_digest)
    cache = PrefixCache(
        pool, root=root, block_size=layout.block_size, caching=limits.prefix_caching, groups=layout.groups
    )
    return Engine(Scheduler(limits, pool, cache), runner, vectors=runner)


def make_runner(config: EngineConfig, model: Decoder, storage: KvStorage, limits: SchedulerLimits) -> Runner:
    """A runner on compiled kernels, or on the plain path with the reason why."""
    int8 = config.quantization == "int8"
    reason = "none were given"
    if config.kernels and model.device.type == "cpu":
        try:
            check_supported(model, limits.max_context)
            if len(storage.layout.tables) > 1:
                raise UnusableKernelsError("they read one block table; this model has one for each reach")
            library = open_library(config.kernels, config.threads)
        except UnusableKernelsError as error:
            reason = str(error)
        else:
            # Sampling alone is left to tensor operations; a second pool of threads would get into the way of ours.
            torch.set_num_threads(1)
            program = NativeModel(library, model, storage, limits, int8=int8)
            return Runner(model, storage, limits, program, backend=program.description)
    if not model.packed:
        model.pack(int8=int8)
    return Runner(model, storage, limits, backend=f"plain operations; no compiled kernels: {reason}")


def memory_need(config: EngineConfig, runner: Runner) -> MemoryNeed:
    """What the engine around this runner is told to hold, worked out from descriptions alone."""
    model, program = runner.model, runner.program
    form = Form(
        dtype=model.dtype,
        int8=config.quantization == "int8",
        kernels=program is not None,
        compresses=isinstance(program, NativeModel) and program.compressed,
    )
    return predict_memory(config, model.config, runner.storage.layout, runner.limits, form, model.parallel)


def layout_for(config: EngineConfig, model: ModelConfig, dtype: str, parallel: Parallel = ALONE) -> KvLayout:
    """The KV layout of a model, or of this rank's part of it, under a configuration."""
    return fit_layout(
        kv_bytes=config.kv_bytes,
        layers=parallel.kv_layers(model.kv_layers),
        block_size=config.block_size,
        dtype=dtype,
        groups=divide(model.kv_layers, config.block_size, min(config.max_context, model.max_positions)),
    )


def limits_for(config: EngineConfig, model: ModelConfig, layout: KvLayout) -> SchedulerLimits:
    """The configuration's bounds, cut to what model and memory allow."""
    return SchedulerLimits(
        max_num_seqs=min(config.max_num_seqs, config.max_num_batched_tokens),
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_waiting=config.max_waiting,
        max_context=min(config.max_context, model.max_positions, layout.capacity(config.max_num_batched_tokens)),
        block_size=config.block_size,
        vocab_size=model.vocab_size,
        eos_ids=model.stop_ids,
        prefix_caching=config.prefix_caching,
        groups=layout.groups,
    )


def check_config(config: EngineConfig) -> None:
    """Check the ranges that types do not tell.

    Raises:
        ConfigurationError: a number is out of range, or a dtype unknown.
    """
    positive = (
        "threads", "block_size", "kv_bytes", "max_num_seqs", "max_num_batched_tokens", "max_waiting",
    )  # fmt: skip
    for name in positive:
        if getattr(config, name) < 1:
            raise ConfigurationError(f"{name} is {getattr(config, name)}; it must be at least 1")
    if not 0 <= config.gpu_share <= MOST_SHARE:
        raise ConfigurationError(f"gpu_share is {config.gpu_share}; it must be 0 to {MOST_SHARE} percent")
    if config.max_context < 2:
        raise ConfigurationError(f"max_context is {config.max_context}; it must be at least 2")
    if config.runner not in ("model", "embed", "null"):
        raise ConfigurationError(f"runner is {config.runner!r}; it must be model, embed or null")
    if config.pooling != "auto" and (config.runner != "embed" or config.pooling not in POOLINGS):
        raise ConfigurationError(f"pooling must be auto, or for the embed runner one of: {', '.join(POOLINGS)}")
    if config.step_us < 0 or (config.step_us and config.runner != "null"):
        raise ConfigurationError(f"step_us is {config.step_us}; it must be at least 0, and is for the null runner only")
    if config.backend not in BACKENDS:
        raise ConfigurationError(f"backend is {config.backend!r}; it must be one of: {', '.join(BACKENDS)}")
    if config.dtype != "auto" and config.dtype not in DTYPE_NAMES:
        raise ConfigurationError(f"dtype must be auto or one of: {', '.join(DTYPE_NAMES)}")
    if config.quantization not in QUANTIZATIONS:
        raise ConfigurationError(f"quantization must be one of: {', '.join(QUANTIZATIONS)}")
