"""Loader of the compiled kernels."""

from __future__ import annotations

from functools import partial
from itertools import islice

import torch

from engine.backends.common.loading import Loaded, LoadSource, load_on_host, sizes
from engine.backends.common.storage import KvStorage
from engine.backends.native.library import UnusableKernelsError, open_libraries
from engine.backends.native.plain_form import check_supported
from engine.backends.native.program import NativeModel
from engine.backends.native.trial import Heads, try_forms
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
    """The program over a storage, in the form that is fastest here; takes the model's matrices over.

    Raises:
        UnusableKernelsError: the library or the model cannot be used, or plain operations are faster.
    """
    layer = check_supported(model, limits.max_context)[0]
    int8 = config.quantization == "int8"
    # Only sampling is left to tensor operations; a second pool of threads would slow the kernels' own down.
    torch.set_num_threads(1)
    try:
        trial = try_forms(
            # Only the best library: another one's numbers differ in their last bits, and what is a little faster today
            # may not be tomorrow, when a deterministic request is sent again.
            islice(open_libraries(config.kernels), 1),
            (layer.qkv, layer.out, layer.gate_up, layer.down),
            Heads(model.config.num_heads, model.config.num_kv_heads, model.config.head_dim),
            most_rows=limits.max_num_seqs,
            int8=int8,
        )
        best = trial.best
        if best.library is None:
            raise UnusableKernelsError(f"they are slower here: {trial}")
        library = best.library.started(config.threads)
    except UnusableKernelsError:
        torch.set_num_threads(config.threads)
        raise
    return NativeModel(library, model, storage, limits, int8=int8, compressed=best.compressed, trial=str(trial))
