"""Mounts, environment and limits of each sandbox: a pure function from the configuration to a ``SandboxSpec``."""

from __future__ import annotations

from pathlib import Path

from appliance.common.adapter_files import AdapterFiles
from appliance.common.catalog import ModelFiles
from appliance.common.config import ApplianceConfig, ModelConfig
from appliance.common.residency import TEXT_MEMORY_BYTES
from appliance.supervisor.threads import SINGLE_THREAD, ThreadPlan, plan_threads
from isolation.gvisor.environment import SWEPT, guest_environment
from isolation.gvisor.spec import Limits, Mount, Rootfs, SandboxSpec
from isolation.host.cores import read_cores
from isolation.image.python_rootfs import python_rootfs
from isolation.image.rootfs import image_rootfs
from isolation.ipc.messages import Role

GUEST_SOCKET = "/ipc/host.sock"
"""Path of the host's socket inside a sandbox."""

GUEST_KERNELS = "/kernels/compiled"
"""Path of the compiled kernels inside an engine's sandbox."""

GUEST_ADAPTERS = "/adapters"
"""Folder of the adapters inside an engine's sandbox, each in a folder of its digest's name."""


GUEST_MODEL = "/model"
"""Folder of the model's files inside a sandbox."""

FOLDERS = {Role.ENGINE: (GUEST_MODEL, GUEST_ADAPTERS, str(Path(GUEST_KERNELS).parent)), Role.TEXT: (GUEST_MODEL,)}
"""Folders that all sandboxes of a role have, each with what its program opens once it has met its host."""


def engine_place(config: ApplianceConfig, model: ModelConfig, tenant: str = "") -> int:
    """Position of an engine among the engines, which take the NUMA nodes in turn: models in the order of the
    configuration, and a tenant's own engine after the shared one of its model."""
    return [one.name for one in config.models].index(model.name) + bool(tenant)


def role_threads(config: ApplianceConfig, role: Role, place: int = 0, ranks: int = 1) -> ThreadPlan:
    """Plan the threads of a sandbox on this machine.

    Args:
        config: of the appliance.
        role: of the sandbox; a text sandbox computes in one thread.
        place: from ``engine_place``; a text sandbox has none.
        ranks: processes that compute an engine together.
    """
    return plan_threads(read_cores(), config.sandbox.cores, place, ranks) if role is Role.ENGINE else SINGLE_THREAD


def sandbox_spec(
    config: ApplianceConfig,
    files: ModelFiles,
    role: Role,
    name: str,
    socket_dir: Path,
    threads: ThreadPlan = SINGLE_THREAD,
) -> SandboxSpec:
    """Spec of the sandbox of one role of one model; ``threads`` from ``role_threads``."""
    engine = role is Role.ENGINE
    rootfs = role_rootfs(config, role)
    mounts = (Mount(socket_dir, "/ipc"), *_model_mounts(config, files.engine if engine else files.text))
    if engine:
        mounts = (*mounts, *_adapter_mounts(files.adapters))
    if engine and config.sandbox.kernels is not None:
        mounts = (*mounts, Mount(config.sandbox.kernels, GUEST_KERNELS))
    limits = Limits(
        memory_bytes=config.sandbox.memory_bytes if engine else TEXT_MEMORY_BYTES,
        cpu_quota_cores=config.sandbox.cores or None,
    )
    module = "engine.ranks" if threads.ranks > 1 else "engine" if engine else "engine.text"
    arguments = (GUEST_SOCKET, str(threads.ranks)) if threads.ranks > 1 else (GUEST_SOCKET,)
    return SandboxSpec(
        name=name,
        argv=rootfs.argv(module, *arguments),
        # An engine sees ids alone, and overwrites them itself.
        env=guest_environment(threads=threads.count, extra=SWEPT if config.wipe_memory and not engine else ()),
        rootfs=rootfs,
        mounts=mounts,
        limits=limits,
        cpus=threads.cpus,
    )


def _model_mounts(config: ApplianceConfig, pairs: tuple[tuple[str, Path], ...]) -> tuple[Mount, ...]:
    """Mounts of the model's files that the role needs, and no others. Without a sandbox there is nothing to hide."""
    if config.sandbox.unsafe_no_sandbox:
        return (Mount(pairs[0][1].parent, "/model"),)
    return tuple(Mount(path, f"/model/{inside}") for inside, path in pairs)


def _adapter_mounts(adapters: tuple[AdapterFiles, ...]) -> tuple[Mount, ...]:
    """Mounts of the two files of each adapter; a folder has its digest as its name, so it tells no tenant's."""
    found = {f"{GUEST_ADAPTERS}/{one.digest}/{name}": path for one in adapters for name, path in one.places}
    return tuple(Mount(path, target) for target, path in found.items())


def role_rootfs(config: ApplianceConfig, role: Role) -> Rootfs:
    """Binds of the running Python, or the built image when the configuration names one."""
    if config.sandbox.image is not None:
        return image_rootfs(config.sandbox.image / role.name.lower())
    return python_rootfs(role.name.lower())
