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
    return cores_problem(model, threads) or shape_problem(model, read_shape(model.folder))


def cores_problem(model: ModelConfig, threads: ThreadPlan) -> str:
    """Say that there are fewer cores than ranks; empty where there are enough."""
    if threads.cores >= threads.ranks:
        return ""
    return (
        f"{model.name} has {model.rank_words}, which are {threads.ranks} processes, and its sandbox may use "
        f"{counted(threads.cores, 'core')}: ranks wait for each other in every step, so each needs its own "
        f"({threads.reason})"
    )


def shape_problem(model: ModelConfig, shape: ModelShape | None) -> str:
    """Say that heads, experts or layers cannot be dealt; empty where they can, or where the engine has to read the
    shape itself."""
    if shape is None:
        return ""
    begin, ranks = f"{model.name} has {model.rank_words}, and", model.tensor_parallel
    if shape.heads % ranks:
        return f"{begin} {shape.heads} attention heads cannot be dealt evenly to {ranks} ranks"
    if shape.kv_heads % ranks and ranks % shape.kv_heads:
        return f"{begin} {shape.kv_heads} key-value heads cannot be dealt evenly to {ranks} ranks"
    if shape.intermediate < ranks:
        return f"{begin} an MLP's inner width of {shape.intermediate} cannot be dealt to {ranks} ranks"
    if shape.layers < model.pipeline_parallel:
        return f"{begin} {counted(shape.layers, 'layer')} cannot be cut into {model.pipeline_parallel} stages"
    if model.expert_parallel > 1 and not shape.experts:
        return f"{begin} the model has no experts: leave expert_parallel out"
    if 0 < shape.expert_count < model.expert_parallel:
        return f"{begin} {counted(shape.expert_count, 'expert')} cannot be dealt to {model.expert_parallel} ranks"
    return ""
