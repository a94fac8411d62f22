"""The backends of this build: one row each, in the order in which errors name them.

A backend is a folder under ``engine.backends`` and a row of ``LOADERS``.
"""

from __future__ import annotations

import engine.backends.cuda.load as device
import engine.backends.native.load as native
import engine.backends.null_load as null
import engine.backends.plain.load as plain
from engine.backends.common.loading import Loaded, Loader, LoadSource
from engine.backends.cuda.runtime.model import obstacle as device_obstacle
from engine.config import EngineConfig
from engine.errors import ConfigurationError, UnsupportedError

LOADERS = {
    "device": Loader(device.load, device_obstacle),
    "plain": Loader(plain.load),
    "native": Loader(native.load, native.supports),
    "embed": Loader(plain.load_embedding),
    "classify": Loader(plain.load_classifier),
    "null": Loader(null.load),
}
"""Loader of each backend."""

RUNNERS = ("embed", "classify", "null")
"""Backends that ``EngineConfig.runner`` chooses; ``EngineConfig.backend`` chooses among the others."""

ON_HOST = ("native", "plain")
"""Backends that are tried in this order where the processor computes."""


def choices() -> tuple[str, ...]:
    """Values that ``EngineConfig.backend`` may have."""
    return "auto", *(name for name in LOADERS if name not in RUNNERS)


def candidates(config: EngineConfig) -> tuple[str, ...]:
    """Backends to be tried for a configuration, the best first.

    ``auto`` takes the device backend where torch has a GPU. ``plain`` is the processor in any case, with compiled
    kernels where there are some.

    Raises:
        ConfigurationError: a GPU is there and does not start.
    """
    if config.runner in RUNNERS:
        return (config.runner,)
    if device.uses_device(config):
        return ("device",)
    return ON_HOST if config.backend in ("auto", "plain") else (config.backend,)


def load_backend(source: LoadSource) -> Loaded:
    """The first candidate that runs this model on this machine.

    Raises:
        ConfigurationError: none does, or the configuration asks for what this build or machine cannot do.
        ModelLoadError: the model's files cannot be used.
    """
    names = candidates(source.config)
    if source.config.quantization == "fp8" and names != ("device",):
        raise ConfigurationError(
            f"weights: fp8 are for engines on a GPU, and backend {names[0]} computes this one: give the model a GPU, "
            "or take weights: int8, which rounds to 8 bits on the processor"
        )
    for name in names:
        try:
            return LOADERS[name].load(source)
        except UnsupportedError as error:
            source.refused = str(error)
    raise ConfigurationError(
        f"backend {source.config.backend} does not run this model here: {source.refused}; set backend to plain, which "
        "computes every supported model on the CPU"
    )
