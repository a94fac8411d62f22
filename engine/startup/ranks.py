"""An engine of several ranks: what such an engine may be asked for, and the part of each rank."""

from __future__ import annotations

import gc

import torch

from engine.backends.common.host_runner import HostRunner
from engine.backends.common.loading import LoadSource
from engine.backends.common.ranked import FollowingRunner
from engine.backends.native.coding import open_codec
from engine.config import EngineConfig
from engine.errors import ConfigurationError
from engine.model.checkpoint.config import ModelConfig
from engine.model.checkpoint.registry import load_model_config
from engine.model.layers.parallel import Parallel
from engine.model.layers.shared_group import SharedGroup
from engine.sandbox.rank_link import MOST_RANKS, RankLink
from engine.startup.backends_table import candidates, load_backend
from engine.startup.load import check_config, release_free_memory


def parallel_of(link: RankLink) -> Parallel:
    """The part of the model that the rank at this end holds."""
    return Parallel(rank=link.rank, size=link.size, group=SharedGroup(link))


def check_ranks(config: EngineConfig, started: int) -> None:
    """Check what several ranks are asked for, before weights are read; with one rank everything is allowed.

    Args:
        config: of the engine.
        started: ranks that were forked.

    Raises:
        ConfigurationError: ranks do not compute it, or it cannot be dealt to so many.
    """
    size = config.tensor_parallel
    if size != started:
        raise ConfigurationError(f"tensor_parallel is {size} and the program was started with ranks: {started}")
    if size == 1:
        return
    check_config(config)
    if not 1 < size <= MOST_RANKS:
        raise ConfigurationError(f"tensor_parallel is {size}; it must be 1 to {MOST_RANKS}")
    refused = {
        f"runner {config.runner}": config.runner != "model",
        f"quantization {config.quantization}": config.quantization != "none",
        "adapters": bool(config.adapters),
        "a GPU": config.runner == "model" and candidates(config)[0] == "device",
    }
    for what, asked in refused.items():
        if asked:
            raise ConfigurationError(
                f"tensor_parallel is {size} and ranks do not compute {what} yet: take one or the other"
            )
    check_shape(load_model_config(config.model_dir), size)


def check_shape(model: ModelConfig, size: int) -> None:
    """Check that a model can be dealt: heads evenly, inner width, experts and vocabulary in any way.

    Raises:
        ConfigurationError: it cannot; the message has both numbers.
    """
    parallel = Parallel(rank=0, size=size)
    parallel.heads(model.num_heads)
    parallel.kv_layers(model.kv_layers)
    if model.intermediate_size < size:
        raise ConfigurationError(f"an MLP's inner width of {model.intermediate_size} cannot be dealt to {size} ranks")


def load_follower(config: EngineConfig, link: RankLink) -> FollowingRunner:
    """Load the part of a rank that follows; called by every rank but the first, which has checked the configuration.

    Raises:
        ConfigurationError, ModelLoadError: as ``load_engine``.
    """
    torch.set_num_threads(config.threads)
    description = load_model_config(config.model_dir).within(config.max_context)
    source = LoadSource(
        config=config,
        description=description,
        parallel=parallel_of(link),
        open_codec=lambda: open_codec(config.kernels, config.threads),
    )
    backend = load_backend(source).backend
    assert isinstance(backend, HostRunner), "ranks compute with plain operations"
    runner = FollowingRunner.of(backend)
    del source, backend
    release_free_memory()
    gc.collect()
    gc.freeze()
    return runner
