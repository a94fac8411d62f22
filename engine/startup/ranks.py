"""An engine of several ranks: what such an engine may be asked for, and the part of each rank."""

from __future__ import annotations

import gc
from array import array
from dataclasses import replace

import torch

from engine.backends.common.host_runner import HostRunner
from engine.backends.common.loading import LoadSource
from engine.backends.common.ranked import FollowingRunner
from engine.backends.native.coding import open_codec
from engine.config import EngineConfig
from engine.errors import ConfigurationError
from engine.model.checkpoint.config import ModelConfig
from engine.model.checkpoint.registry import load_model_config
from engine.model.layers.parallel import Parallel, Span
from engine.model.layers.shared_group import SharedGroup
from engine.model.layers.stage_pipe import StagePipe
from engine.sandbox.rank_memory import MOST_RANKS
from engine.sandbox.rank_place import RankPlace
from engine.startup.backends_table import candidates, load_backend
from engine.startup.load import check_config, release_free_memory
from engine.startup.stages import count_experts, cut_layers, measure_layers


def parallel_of(place: RankPlace, config: EngineConfig, stages: tuple[Span, ...] = ()) -> Parallel:
    """The part of the model that the rank at a place holds; ``stages``: layers of each stage, where there are
    several."""
    meeting = place.meeting
    group = SharedGroup(meeting) if meeting.size > 1 else None
    queue = place.queue
    one = Parallel(rank=meeting.rank, size=meeting.size, group=group)
    if config.tensor_parallel == 1 and meeting.size > 1:
        one = Parallel(experts=one)
    if queue is None:
        return one
    return replace(one, layers=stages[place.stage], stages=stages, pipe=StagePipe(queue))


def lead_parallel(place: RankPlace, config: EngineConfig) -> Parallel:
    """The part of rank 0, which cuts the layers by what they take on this machine, and tells the others."""
    stages = plan_stages(config)
    place.link.everyone.tell(array("q", [bound for span in stages for bound in span]).tobytes())
    return parallel_of(place, config, stages)


def plan_stages(config: EngineConfig) -> tuple[Span, ...]:
    """Layers of each stage of a pipeline, by measured times; none where there is one stage."""
    if config.pipeline_parallel == 1:
        return ()
    torch.set_num_threads(config.threads)
    model = load_model_config(config.model_dir).within(config.max_context)
    costs = measure_layers(model, _divided(config), config.dtype)
    return cut_layers(costs.layers, config.pipeline_parallel, costs.head)


def _divided(config: EngineConfig) -> Parallel:
    """What one rank holds of a layer, without anything to exchange with others."""
    if config.tensor_parallel > 1 or config.expert_parallel == 1:
        return Parallel(size=config.tensor_parallel)
    return Parallel(experts=Parallel(size=config.expert_parallel))


def check_ranks(config: EngineConfig, started: int) -> None:
    """Check what several ranks are asked for, before weights are read; with one rank everything is allowed.

    Args:
        config: of the engine.
        started: ranks that were forked.

    Raises:
        ConfigurationError: ranks do not compute it, or it cannot be dealt to so many.
    """
    size = config.ranks
    if size != started:
        raise ConfigurationError(f"{layout_words(config)} are {size} ranks and the program was started with {started}")
    if size == 1:
        return
    check_config(config)
    if not 1 < size <= MOST_RANKS:
        raise ConfigurationError(f"{layout_words(config)} are {size} ranks; there may be 1 to {MOST_RANKS}")
    refused = {
        f"runner {config.runner}": config.runner != "model",
        f"quantization {config.quantization}": config.quantization != "none",
        "adapters": bool(config.adapters),
        "a GPU": config.runner == "model" and candidates(config)[0] == "device",
    }
    for what, asked in refused.items():
        if asked:
            raise ConfigurationError(f"{layout_words(config)}: ranks do not compute {what} yet; take one or the other")
    check_shape(load_model_config(config.model_dir), config)


def layout_words(config: EngineConfig) -> str:
    """The numbers that say how ranks divide a model, as the configuration has them."""
    names = "tensor_parallel", "pipeline_parallel", "expert_parallel"
    return ", ".join(f"{name} {getattr(config, name)}" for name in names if getattr(config, name) > 1) or "no ranks"


def check_shape(model: ModelConfig, config: EngineConfig) -> None:
    """Check that a model can be dealt: heads evenly, inner width, experts and vocabulary in any way, a layer at least
    to each stage.

    Raises:
        ConfigurationError: it cannot; the message has both numbers.
    """
    tensor, stages, dealt = config.tensor_parallel, config.pipeline_parallel, config.expert_parallel
    parallel = Parallel(rank=0, size=tensor)
    parallel.heads(model.num_heads)
    parallel.kv_layers(model.kv_layers)
    if model.intermediate_size < tensor:
        raise ConfigurationError(f"an MLP's inner width of {model.intermediate_size} cannot be dealt to {tensor} ranks")
    if model.num_layers < stages:
        raise ConfigurationError(f"{model.num_layers} layers cannot be cut into {stages} stages")
    if dealt == 1:
        return
    if tensor not in (1, dealt):
        raise ConfigurationError(
            f"tensor_parallel {tensor} and expert_parallel {dealt}: the same ranks deal heads and experts, so one of "
            f"the two is 1, or both are alike"
        )
    experts = count_experts(model)
    if experts < dealt:
        raise ConfigurationError(f"{experts} experts cannot be dealt to {dealt} ranks")


def load_follower(config: EngineConfig, place: RankPlace) -> FollowingRunner:
    """Load the part of a rank that follows; called by every rank but the first, which has checked the configuration.

    Raises:
        ConfigurationError, ModelLoadError: as ``load_engine``.
    """
    torch.set_num_threads(config.threads)
    bounds = array("q")
    bounds.frombytes(place.link.everyone.hear())
    stages = tuple(zip(bounds[::2], bounds[1::2], strict=True))
    description = load_model_config(config.model_dir).within(config.max_context)
    source = LoadSource(
        config=config,
        description=description,
        parallel=parallel_of(place, config, stages),
        open_codec=lambda: open_codec(config.kernels, config.threads),
    )
    backend = load_backend(source).backend
    assert isinstance(backend, HostRunner), "ranks compute with plain operations"
    runner = FollowingRunner.of(backend, place)
    del source, backend
    release_free_memory()
    gc.collect()
    gc.freeze()
    return runner
