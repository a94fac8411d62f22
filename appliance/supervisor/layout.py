"""Mounts, environment and limits of each sandbox: a pure function from the configuration to a ``SandboxSpec``."""

from __future__ import annotations

import os
from pathlib import Path

from appliance.common.catalog import ModelFiles
from appliance.common.config import ApplianceConfig
from appliance.common.residency import TEXT_MEMORY_BYTES
from isolation.gvisor.environment import SWEPT, guest_environment
from isolation.gvisor.spec import Limits, Mount, Rootfs, SandboxSpec
from isolation.image.python_rootfs import python_rootfs
from isolation.image.rootfs import image_rootfs
from isolation.ipc.messages import Role

GUEST_SOCKET = "/ipc/host.sock"
"""Path of the host's socket inside a sandbox."""

GUEST_KERNELS = "/kernels"
"""Path of the compiled kernels inside an engine's sandbox."""


def machine_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def engine_threads(config: ApplianceConfig) -> int:
    """Threads of an engine: one fewer than its cores, since the sandbox's kernel and the gateway need one to be
    quick."""
    cores = config.sandbox.cores or machine_cores()
    return max(1, int(min(cores, machine_cores())) - 1)


def sandbox_spec(config: ApplianceConfig, files: ModelFiles, role: Role, name: str, socket_dir: Path) -> SandboxSpec:
    """Spec of the sandbox of one role of one model."""
    engine = role is Role.ENGINE
    rootfs = role_rootfs(config, role)
    mounts = (Mount(socket_dir, "/ipc"), *_model_mounts(config, files.engine if engine else files.text))
    if engine and config.sandbox.kernels is not None:
        mounts = (*mounts, Mount(config.sandbox.kernels, GUEST_KERNELS))
    threads = engine_threads(config) if engine else 1
    limits = Limits(
        memory_bytes=config.sandbox.memory_bytes if engine else TEXT_MEMORY_BYTES,
        cpu_quota_cores=config.sandbox.cores or None,
    )
    module = "engine" if engine else "engine.text"
    return SandboxSpec(
        name=name,
        argv=rootfs.argv(module, GUEST_SOCKET),
        # An engine sees ids alone, and overwrites them itself.
        env=guest_environment(threads=threads, extra=SWEPT if config.wipe_memory and not engine else ()),
        rootfs=rootfs,
        mounts=mounts,
        limits=limits,
    )


def _model_mounts(config: ApplianceConfig, pairs: tuple[tuple[str, Path], ...]) -> tuple[Mount, ...]:
    """Mounts of the model's files that the role needs, and no others. Without a sandbox there is nothing to hide."""
    if config.sandbox.unsafe_no_sandbox:
        return (Mount(pairs[0][1].parent, "/model"),)
    return tuple(Mount(path, f"/model/{inside}") for inside, path in pairs)


def role_rootfs(config: ApplianceConfig, role: Role) -> Rootfs:
    """Binds of the running Python, or the built image when the configuration names one."""
    if config.sandbox.image is not None:
        return image_rootfs(config.sandbox.image / role.name.lower())
    return python_rootfs(role.name.lower())
