"""From a configuration to an engine that is ready to step: backend, scheduler, warm-up."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import torch

from engine.backends.common.host_runner import HostRunner
from engine.backends.common.loading import Loaded, LoadSource
from engine.backends.common.pipelined import PipelinedRunner
from engine.backends.common.ranked import LeadingRunner
from engine.backends.cuda.runtime.budget import MOST_SHARE
from engine.backends.native.coding import open_codec
from engine.backends.native.manifest import FORMS
from engine.config import EngineConfig
from engine.core.backend import Backend
from engine.core.engine import Engine
from engine.core.fairness.tenancy import Fairness
from engine.core.kv.block_pool import BlockPool
from engine.core.kv.leaving import SpillChannel
from engine.core.kv.prefix_cache import PrefixCache
from engine.core.kv.spill import MAX_BLOCK_BYTES, SpillTier
from engine.core.public_prefixes import Publisher
from engine.core.scheduler.scheduler import Scheduler
from engine.errors import ConfigurationError
from engine.model.checkpoint.config import ModelConfig
from engine.model.checkpoint.registry import load_model_config
from engine.model.checkpoint.weights import DTYPE_NAMES
from engine.model.coded.codec import WeightCodec
from engine.model.layers.decoder import Decoder
from engine.model.layers.parallel import ALONE, Parallel
from engine.model.layers.pooling import POOLINGS
from engine.sandbox.rank_place import RankPlace
from engine.startup.backends_table import choices, load_backend
from engine.startup.memory_estimate import predict_memory
from engine.startup.warmup import warm_up

QUANTIZATIONS = ("none", "int8", "fp8")
"""Forms that weights may be brought into while they are loaded."""

Say = Callable[[str], None]
"""Takes one line for people."""


def load_engine(
    config: EngineConfig,
    *,
    device: str = "",
    warm: bool = True,
    spill: SpillChannel | None = None,
    parallel: Parallel = ALONE,
    place: RankPlace | None = None,
    say: Say = lambda _: None,
) -> Engine:
    """Load the model that the configuration names and make it ready.

    Args:
        config: of the engine.
        device: where the weights go, as torch names it; empty for what the configuration says.
        warm: run the largest steps once.
        spill: the KV spill tier's channel; without effect where ``spill_obstacle`` names a reason.
        parallel: which part of the model this rank holds.
        place: of rank 0 among the others, which follow (``engine.startup.ranks``); None: there are none.
        say: takes lines about what was loaded.

    Raises:
        ConfigurationError: the configuration asks for what this build or machine cannot do.
        ModelLoadError: the model's files cannot be used.
    """
    check_config(config)
    torch.set_num_threads(config.threads)
    labelled = config.runner == "classify"
    found = load_model_config(config.model_dir, headless=config.headless, labelled=labelled)
    description = found.within(config.max_context)
    codec = cache(partial(_codec, config, say))
    source = LoadSource(config=config, description=description, device=device, parallel=parallel, open_codec=codec)
    loaded = load_backend(source)
    if place is not None:
        loaded = leading(loaded, place)
    engine = assemble(config, description, loaded, spill)
    engine.form, engine.weights = FORMS.index(source.form), loaded.weights
    del source, codec
    # What read the weights refers to itself, and has a buffer of up to 64 MiB.
    gc.collect()
    release_free_memory()
    if warm:
        warm_up(engine)
        # What is there now stays: the collector need not look at it again.
        gc.collect()
        gc.freeze()
    say(f"engine computes with {loaded.backend.description}")
    if loaded.weights.word:
        say(f"engine holds its weights as {loaded.weights.word}")
    if loaded.form is not None:
        need = predict_memory(config, description, loaded.backend, loaded.form, parallel)
        say(f"engine holds {need}" + (f", in the first of {parallel.ranks} ranks" if parallel.ranks > 1 else ""))
    if config.adapters:
        _tell_adapters(config, loaded, say)
    if spill is not None and engine.spill is None:
        say(f"engine keeps its KV: {spill_obstacle(config, loaded.backend)}")
    return engine


def leading(loaded: Loaded, place: RankPlace) -> Loaded:
    """The backend of rank 0, which has the others do what it does. Its blocks do not leave: each rank has a part."""
    assert isinstance(loaded.backend, HostRunner), "ranks compute with plain operations"
    own = loaded.backend
    backend: Backend = PipelinedRunner(own, place) if place.stages > 1 else LeadingRunner(own, place)
    return replace(loaded, backend=backend, content=None, bank=None)


def _tell_adapters(config: EngineConfig, loaded: Loaded, say: Say) -> None:
    """Say which adapters an engine has, and why it has no others."""
    asked, bank = len(config.adapter_folders), loaded.bank
    if bank is None:
        say(f"engine has none of {asked} adapters: its backend computes none")
        return
    say(f"engine has {len(bank.numbers)} of {asked} adapters, {bank.held_bytes / (1 << 20):,.0f} MiB")
    for source, error in bank.refused:
        say(f"engine leaves out adapter {source.digest.hex()}: {error}")


def _codec(config: EngineConfig, say: Say) -> WeightCodec:
    """What decodes coded tensors, called when there are some."""
    codec = open_codec(config.kernels, config.threads)
    say(f"engine decodes its weights with {codec.name}")
    return codec


def build_engine(config: EngineConfig, model: Decoder, spill: SpillChannel | None = None) -> Engine:
    """An engine around a model in memory, which is not warmed up: for tests and measurements."""
    loaded = load_backend(LoadSource(config=config, description=model.config, parallel=model.parallel, given=model))
    return assemble(config, model.config, loaded, spill)


def assemble(
    config: EngineConfig, description: ModelConfig, loaded: Loaded, spill: SpillChannel | None = None
) -> Engine:
    """Put scheduler, prefix cache and loop around a backend."""
    backend = loaded.backend
    layout, limits, capabilities = backend.storage.layout, backend.limits, backend.capabilities
    pool = BlockPool(layout.num_blocks)
    origin = description.kv_origin(config.model_digest) + _ranks_origin(config)
    cache = PrefixCache(
        pool,
        root=layout.root(origin),
        block_size=layout.block_size,
        caching=limits.prefix_caching,
        groups=layout.groups,
        adapters={digest: layout.root(origin, digest.hex()) for digest in limits.adapters},
    )
    scheduler = Scheduler(limits, pool, cache, Fairness(limits, pool))
    tier = publisher = None
    if capabilities.publish:
        publisher = Publisher(scheduler, pool, cache, exact=lambda: backend.capabilities.deterministic)
    if spill is not None and loaded.content is not None and not spill_obstacle(config, backend):
        tier = SpillTier(spill, loaded.content, pool, cache, backend.adopt)
    return Engine(scheduler, backend, vectors=loaded.vectors, spill=tier, publisher=publisher)


def _ranks_origin(config: EngineConfig) -> str:
    """What block names of an engine of several ranks begin with beside the model: each layout has names of its own."""
    if config.ranks == 1:
        return ""
    return f"/ranks/{config.tensor_parallel}/{config.pipeline_parallel}/{config.expert_parallel}"


def spill_obstacle(config: EngineConfig, backend: Backend) -> str:
    """Why the blocks of such an engine cannot leave it; empty when they can."""
    layout = backend.storage.layout
    if config.runner != "model" or not config.prefix_caching:
        return "it caches no prefixes"
    if not backend.capabilities.spill:
        return "blocks of its backend cannot be copied, or it was loaded without spill"
    if len(layout.tables) > 1 or layout.groups:
        return "its layers keep windows, and a prefix is then more than a row of blocks"
    if layout.block_bytes > MAX_BLOCK_BYTES:
        size = layout.block_bytes
        return f"a block has {size} bytes and {MAX_BLOCK_BYTES} can leave at once; take a smaller block_size"
    return ""


def release_free_memory() -> None:
    """Give back to the system what the C library's heap holds unused after loading.

    Later the heap keeps what is freed, so that a step meets no page fault.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def check_config(config: EngineConfig) -> None:
    """Check the ranges that types do not tell.

    Raises:
        ConfigurationError: a number is out of range, or a dtype unknown.
    """
    positive = ("threads", "block_size", "kv_bytes", "max_num_seqs", "max_num_batched_tokens", "max_waiting")
    for name in positive:
        if getattr(config, name) < 1:
            raise ConfigurationError(f"{name} is {getattr(config, name)}; it must be at least 1")
    if not 0 <= config.gpu_share <= MOST_SHARE:
        raise ConfigurationError(f"gpu_share is {config.gpu_share}; it must be 0 to {MOST_SHARE} percent")
    if config.max_context < 2:
        raise ConfigurationError(f"max_context is {config.max_context}; it must be at least 2")
    if config.runner not in ("model", "embed", "classify", "null"):
        raise ConfigurationError(f"runner is {config.runner!r}; it must be model, embed, classify or null")
    if config.pooling != "auto" and (config.runner != "embed" or config.pooling not in POOLINGS):
        raise ConfigurationError(f"pooling must be auto, or for the embed runner one of: {', '.join(POOLINGS)}")
    if config.step_us < 0 or (config.step_us and config.runner != "null"):
        raise ConfigurationError(f"step_us is {config.step_us}; it must be at least 0, and is for the null runner only")
    if config.backend not in choices():
        raise ConfigurationError(f"backend is {config.backend!r}; it must be one of: {', '.join(choices())}")
    if config.dtype != "auto" and config.dtype not in DTYPE_NAMES:
        raise ConfigurationError(f"dtype must be auto or one of: {', '.join(DTYPE_NAMES)}")
    if config.quantization not in QUANTIZATIONS:
        raise ConfigurationError(f"quantization must be one of: {', '.join(QUANTIZATIONS)}")
    if config.palette and config.quantization != "none":
        raise ConfigurationError(
            f"palettes are of matrices as they are stored, and quantization is {config.quantization}"
        )
