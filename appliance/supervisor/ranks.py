"""Whether a model can be dealt to several processes on this machine, told before a sandbox is started. Pure but for the
reading of the model's shape."""

from __future__ import annotations

from appliance.common.config import ModelConfig
from appliance.common.figures import counted
from appliance.common.model_shape import ModelShape, read_shape
from appliance.supervisor.threads import ThreadPlan


def rank_problem(model: ModelConfig, threads: ThreadPlan) -> str:
    """Say why an engine of several ranks is not started; empty where it can be, or has one rank."""
    if threads.ranks == 1:
        return ""
    return cores_problem(model.name, threads) or shape_problem(model.name, read_shape(model.folder), threads.ranks)


def cores_problem(name: str, threads: ThreadPlan) -> str:
    """Say that there are fewer cores than ranks; empty where there are enough."""
    if threads.cores >= threads.ranks:
        return ""
    return (
        f"{name} has tensor_parallel {threads.ranks}, and its sandbox may use {counted(threads.cores, 'core')}: ranks "
        f"wait for each other in every layer, so each needs its own ({threads.reason})"
    )


def shape_problem(name: str, shape: ModelShape | None, ranks: int) -> str:
    """Say that heads cannot be dealt evenly; empty where they can, or where the engine has to read the shape itself."""
    if shape is None:
        return ""
    begin = f"{name} has tensor_parallel {ranks}, and"
    if shape.heads % ranks:
        return f"{begin} {shape.heads} attention heads cannot be dealt evenly to {ranks} ranks"
    if shape.kv_heads % ranks and ranks % shape.kv_heads:
        return f"{begin} {shape.kv_heads} key-value heads cannot be dealt evenly to {ranks} ranks"
    if shape.intermediate < ranks:
        return f"{begin} an MLP's inner width of {shape.intermediate} cannot be dealt to {ranks} ranks"
    return ""
