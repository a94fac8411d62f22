"""Keys of an entry of ``models`` that do not go together. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOST_RANKS = 8
"""Processes of one engine at the most, as ``engine.sandbox.rank_memory`` has it."""


def check_entry(values: Mapping[str, Any]) -> None:
    """Check the values of an entry against each other.

    Raises:
        ValueError: two of them do not go together; the message names both.
    """
    _check_adapters(values)
    _check_ranks(values)
    _check_external(values)
    if values["weights"] == "fp8" and (values["runner"] != "model" or not _on_device(values)):
        raise ValueError("weights: fp8 are for runner: model on a GPU: give the model a gpu, or take weights: int8")
    if values["weights"] == "fp8" and values["gpu_palette"]:
        raise ValueError("gpu_palette lays matrices in bfloat16 beside, and weights: fp8 has none: one of the two")
    if values["step_us"] and values["runner"] != "null":
        raise ValueError("step_us is for the null runner: a model takes the time it takes")
    if values["runner"] != "embed" and (values["pooling"] != "auto" or values["truncates"]):
        raise ValueError("pooling and truncates are for runner: embed")
    if values["runner"] != "classify" and (values["pairs"] != "joined" or values["labels"]):
        raise ValueError("pairs and labels are for runner: classify")


def _check_external(values: Mapping[str, Any]) -> None:
    if (values["runner"] == "external") != (values["external"] is not None):
        raise ValueError("runner: external and the section external go together: it says where the model is computed")
    if values["external"] is None:
        return
    beside = {
        "gpu": values["gpu"] != "off",
        "adapters": bool(values["adapters"]),
        "weights": values["weights"] != "stored",
        "keep": values["keep"] != "always",
    }
    for what, given in beside.items():
        if given:
            raise ValueError(f"{what} is for models that this appliance computes; leave it out with runner: external")


def _on_device(values: Mapping[str, Any]) -> bool:
    """Whether the device backend may compute the model."""
    return bool(values["backend"] == "device" or (values["backend"] == "auto" and values["gpu"] != "off"))


def _check_adapters(values: Mapping[str, Any]) -> None:
    names = [one.name for one in values["adapters"]]
    if len(set(names)) != len(names):
        raise ValueError("two adapters have one name")
    if names and (values["runner"] != "model" or values["gpu"] != "off"):
        raise ValueError("adapters are for runner: model, and are computed on the processor alone: gpu must be off")


def rank_words(values: Mapping[str, Any]) -> str:
    """The keys that say how the processes of an engine divide a model, with their values; empty for one process."""
    names = ("tensor_parallel", "pipeline_parallel", "expert_parallel")
    return ", ".join(f"{name} {values[name]}" for name in names if values[name] > 1)


def _check_ranks(values: Mapping[str, Any]) -> None:
    tensor, stages, experts = values["tensor_parallel"], values["pipeline_parallel"], values["expert_parallel"]
    ranks, words = stages * max(tensor, experts), rank_words(values)
    beside = {
        f"runner: {values['runner']}": values["runner"] != "model",
        "gpu": values["gpu"] != "off" or values["backend"] == "device",
        "adapters": bool(values["adapters"]),
        "weights: int8": values["weights"] == "int8",
    }
    for what, asked in beside.items():
        if ranks > 1 and asked:
            raise ValueError(f"{words} is not computed with {what}: take one")
    if ranks > MOST_RANKS:
        raise ValueError(f"{words} are {ranks} processes, and an engine has {MOST_RANKS} at the most")
    if experts > 1 and tensor not in (1, experts):
        raise ValueError(
            f"{words}: the same processes deal heads and experts, so one of the two is 1, or both are alike"
        )
