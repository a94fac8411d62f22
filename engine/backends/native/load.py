"""Loader of the compiled kernels."""

from __future__ import annotations

from functools import partial

import torch

from engine.backends.common.loading import Loaded, LoadSource, load_on_host, sizes
from engine.backends.common.storage import KvStorage
from engine.backends.native.library import UnusableKernelsError, open_library
from engine.backends.native.plain_form import check_supported
from engine.backends.native.program import NativeModel
from engine.config import EngineConfig
from engine.core.scheduler.limits import SchedulerLimits
from engine.model.layers.decoder import Decoder


def supports(config: EngineConfig, model: Decoder) -> str:
    """Why the kernels do not compute a model; empty when they do."""
    layout, limits = sizes(config, model)
    try:
        check_supported(model, limits.max_context)
    except UnusableKernelsError as error:
        return str(error)
    if len(layout.tables) > 1:
        return "they read one block table; this model has one for each reach"
    return ""


def load(source: LoadSource) -> Loaded:
    """Open the kernels and build the backend around the weights.

    Raises:
        UnusableKernelsError: none were given, they are of another build or processor, or they refuse this model.
    """
    config = source.config
    if not config.kernels:
        raise UnusableKernelsError("none were given")
    model = source.model
    if model.device.type != "cpu":
        raise UnusableKernelsError(f"they compute on the processor, and the weights are on {model.device.type}")
    reason = supports(config, model)
    if reason:
        raise UnusableKernelsError(reason)
    return load_on_host(source, partial(make_forward, config, model))


def make_forward(config: EngineConfig, model: Decoder, storage: KvStorage, limits: SchedulerLimits) -> NativeModel:
    """The program over a storage; takes the model's matrices over.

    Raises:
        UnusableKernelsError: the library or the model cannot be used.
    """
    library = open_library(config.kernels, config.threads)
    # Only sampling is left to tensor operations; a second pool of threads would slow the kernels' own down.
    torch.set_num_threads(1)
    return NativeModel(library, model, storage, limits, int8=config.quantization == "int8")
