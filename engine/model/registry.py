"""Which class runs which architecture: a table, no import by name."""

from __future__ import annotations

from engine.errors import ModelLoadError
from engine.model.config import SUPPORTED_ARCHITECTURES
from engine.model.llama import LlamaForCausalLM

MODELS: dict[str, type[LlamaForCausalLM]] = {"LlamaForCausalLM": LlamaForCausalLM}
"""Every name of ``SUPPORTED_ARCHITECTURES`` and its class."""


def model_class(architecture: str) -> type[LlamaForCausalLM]:
    """The class of an architecture.

    Raises:
        ModelLoadError: it is not supported.
    """
    if architecture not in MODELS:
        raise ModelLoadError(
            f"architecture {architecture} is not supported; supported are: {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    return MODELS[architecture]
