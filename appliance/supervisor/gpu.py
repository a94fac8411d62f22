"""GPUs of a model: from its configuration and the machine to what its engine's sandbox gets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import structlog

from appliance.common.config import ApplianceConfig, ModelConfig
from appliance.common.errors import StartError
from isolation.errors import GpuError
from isolation.gpu.bundle_additions import gpu_access
from isolation.gpu.gpu_facts import GpuFacts, look_at_gpus
from isolation.gvisor.gvisor_runtime import GvisorRuntime
from isolation.gvisor.runtime import Runtime
from isolation.gvisor.spec import Mount, SandboxSpec
from isolation.image.manifest import KERNELS_DIR
from isolation.ipc.messages import Role

log = structlog.get_logger()

GUEST_GPU_KERNELS = "/gpu-kernels"
"""Path at which an engine finds kernels compiled for its GPU."""


def with_gpu(
    spec: SandboxSpec, config: ApplianceConfig, model: ModelConfig, runtime: Runtime, facts: GpuFacts | None = None
) -> SandboxSpec:
    """Spec of the engine's sandbox with the model's GPUs, or unchanged.

    Args:
        spec: without any.
        config: of the appliance.
        model: whose engine it is.
        runtime: that boots it; one without a wall hides no GPU and is given none.
        facts: of the machine; None: it is looked at, if the model is to have a GPU.

    Raises:
        StartError: the model is to have what this machine cannot give.
    """
    if model.gpu == "off" or not isinstance(runtime, GvisorRuntime):
        return spec
    try:
        access = gpu_access(look_at_gpus() if facts is None else facts, model.gpu, runtime.runsc.version)
    except GpuError as error:
        raise StartError(
            f"model {model.name} cannot have its GPU: {error}; `athanor doctor` says more, `gpu: off` does without"
        ) from error
    if access is None:
        log.info("no GPU on this machine: the model runs on the processor", model=model.name)
        return spec
    log.info("a sandbox with a GPU", model=model.name, driver=access.driver, nodes=[one.path for one in access.devices])
    kernels = gpu_kernels(config)
    if kernels is None:
        raise StartError(
            f"model {model.name} is to have a GPU, and there are no compiled kernels for it, which no sandbox can "
            "compile: `athanor kernels gpu` does, `sandbox: gpu_kernels:` names the folder; or `gpu: off`"
        )
    # Not pinned: the card may be beside another node than the one that the engine's turn gives it.
    return replace(spec, gpu=access, mounts=(*spec.mounts, Mount(kernels, GUEST_GPU_KERNELS)), cpus=())


def gpu_kernels(config: ApplianceConfig) -> Path | None:
    """Folder of kernels compiled for GPUs: the configured one, else that of the image."""
    if config.sandbox.gpu_kernels is not None:
        return config.sandbox.gpu_kernels
    image = config.sandbox.image
    baked = None if image is None else image / Role.ENGINE.name.lower() / KERNELS_DIR[1:]
    return baked if baked is not None and baked.is_dir() else None


def guest_gpu_kernels(spec: SandboxSpec, runtime: Runtime) -> str:
    """Path at which the engine of this sandbox finds compiled kernels; empty where it has none."""
    if all(mount.target != GUEST_GPU_KERNELS for mount in spec.mounts):
        return ""
    return runtime.guest_path(spec, GUEST_GPU_KERNELS)
