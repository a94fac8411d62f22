"""Loader of the null backend; apart from it, because descriptions of models come with tensors."""

from __future__ import annotations

from engine.backends.common.loading import Loaded, LoadSource, layout_for, limits_for
from engine.backends.null import NullRunner
from isolation.ipc.messages import WeightForm


def load(source: LoadSource) -> Loaded:
    """Build the runner for the model's description alone."""
    config, description = source.config, source.description
    dtype = "float32" if config.dtype == "auto" else config.dtype
    layout = layout_for(config, description, dtype, source.parallel)
    backend = NullRunner(limits_for(config, description, layout), layout, config.step_us / 1e6)
    return Loaded(backend=backend, weights=WeightForm.NONE)
