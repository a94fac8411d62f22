"""Templates: sandboxes that are saved to start others, how they are saved, and what their checkpoints are named by."""

from __future__ import annotations

import hashlib
import shutil
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from appliance.supervisor.boot import CONNECT_TIMEOUT_S, LOAD_TIMEOUT_S, BootPlan
from appliance.supervisor.sandbox_output import line_logger
from appliance.supervisor.saved_start import with_weights
from isolation.gvisor.checkpoint import Checkpoint, Label, ListedFolders, contents
from isolation.gvisor.runtime import Runtime
from isolation.gvisor.snapshot import save_template
from isolation.gvisor.spec import SandboxSpec
from isolation.ipc.messages import WAITS_LINE
from isolation.ipc.weights_file import WeightsFile
from isolation.ipc.weights_names import FILE_NAME, SOCKET_NAME

TEMPLATE_CORES = 0.5
"""Cores of a template, where cgroups bound it: serving comes first."""

MOST_AHEAD_BYTES = 3 << 30
"""Most memory of an engine that is saved with its model: a restore reads all of it, and the store holds 8 GiB."""

SOCKET_TARGET = "/ipc"
"""Mount point of the socket directory: the one mount in which a template differs."""

_NOWHERE = Path("/")
"""Stands for the socket directory in what a checkpoint's name is made of."""

NAME_CHARS = 12
"""Characters of a checkpoint's name that are shown, and are in its template's."""


def starts(plan: BootPlan) -> tuple[BootPlan, ...]:
    """Plans of the sandboxes that are saved to start this one, the fastest first: with the model, and with what it
    imports alone, which has nothing of a model where the sandbox has folders. A model on a GPU lies in the driver's
    memory, which cannot be saved."""
    base = replace(plan, spec=plan.spec.without_content())
    if plan.spec.gpu is not None or not 0 < plan.ahead_bytes <= MOST_AHEAD_BYTES:
        return (base,)
    argv = (*plan.spec.argv, plan.configuration.decode())
    return replace(plan, spec=replace(plan.spec, argv=argv)), base


def start_is_ahead(plan: BootPlan) -> bool:
    """Return whether a plan is one of ``starts`` that loads the model before it meets its host."""
    return plan.ahead_bytes > 0 and plan.spec.argv[-1] == plan.configuration.decode()


def start_is_base(plan: BootPlan) -> bool:
    """Return whether a plan is one of ``starts`` that sandboxes of all models of its kind begin with."""
    return bool(plan.spec.folders) and not start_is_ahead(plan)


def place_of(plan: BootPlan) -> tuple[str, str]:
    """Return role and model of the checkpoint of one of ``starts``; no model: the base."""
    return plan.role_name, "" if start_is_base(plan) else plan.model


def label_of(plan: BootPlan, runtime: Runtime, run_dir: Path) -> Label:
    """Return what is told of the checkpoint of a plan, which is made now by the supervisor of this run directory."""
    return Label(*place_of(plan), str(run_dir), time.time(), runtime.surroundings)


def key_of(runtime: Runtime, spec: SandboxSpec, listed: ListedFolders) -> str:
    """Name of the checkpoint of such sandboxes; empty where none can be made.

    One with a GPU can: its program starts CUDA after it has met its host, so that no node of the driver is open when it
    is saved (gVisor saves none). The driver's version is part of the name: the copy talks to that one.

    Raises:
        OSError: a file of the sandbox is gone.
    """
    identity = runtime.identity(placed(spec, _NOWHERE))
    if not identity:
        return ""
    mounts = tuple(mount for mount in spec.mounts if mount.target != SOCKET_TARGET)
    seen = contents(replace(spec, mounts=mounts), listed)
    driver = "" if spec.gpu is None else f"\0driver {spec.gpu.driver}"
    return hashlib.sha256(f"{identity}\0{seen}{driver}".encode()).hexdigest()


def save(runtime: Runtime, run_dir: Path, plan: BootPlan, key: str, draft: Path, stop: threading.Event) -> None:
    """Start a template, save it into a draft, end it; ``stop`` gives it up. Raises: IsolationError, OSError: it
    failed."""
    folder = run_dir / "ipc" / f"template-{key[:NAME_CHARS]}"
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, mode=0o755)
        folder.chmod(0o755)
        with _weights_file(plan, template(plan.spec, key, folder), draft, folder) as (spec, weights):
            save_template(
                runtime,
                spec,
                draft,
                waits_line=WAITS_LINE,
                timeout_s=LOAD_TIMEOUT_S if start_is_ahead(plan) else CONNECT_TIMEOUT_S,
                stop=stop,
                on_line=line_logger(spec.name),
                weights=weights,
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _weights_file(
    plan: BootPlan, spec: SandboxSpec, draft: Path, folder: Path
) -> Iterator[tuple[SandboxSpec, WeightsFile | None]]:
    """Make the file for the weights of a template with the model, listen for it in its socket directory, and mount the
    file; a template without the model has none."""
    if not start_is_ahead(plan):
        yield spec, None
        return
    with WeightsFile(draft / FILE_NAME, folder / SOCKET_NAME, plan.ahead_bytes) as file:
        yield with_weights(spec, draft), file


def useless(kept: Iterable[Checkpoint], usable: Sequence[tuple[str, str]], run_dir: Path) -> tuple[str, ...]:
    """Return the names of checkpoints that no model there is can begin with: of earlier files, settings or releases.

    Only those that this supervisor made, or a release that wrote no labels, since several may share a store. A base
    stays where no model of its role is there. Where sandboxes cannot be saved there are none.

    Args:
        kept: all of the store.
        usable: role and name of each that a model there is may begin with; an empty name where none can be made.
        run_dir: of this supervisor.
    """
    roles, keys = {role for role, _ in usable}, {key for _, key in usable}
    return (
        () if "" in keys else tuple(one.key for one in kept if one.key not in keys and one.label.is_of(run_dir, roles))
    )


def not_started(
    found: Iterable[tuple[tuple[str, str], str]], looked_for: Collection[tuple[str, str]], kept: Collection[str]
) -> dict[tuple[str, str], str]:
    """Return what sandboxes that have not started would look for, by role and model: what there is before what there is
    not.

    Args:
        found: role and model, and name, of each that a model there is may begin with.
        looked_for: those that sandboxes have looked for.
        kept: names of what there is.
    """
    places: dict[tuple[str, str], str] = {}
    for place, key in found:
        if key and place not in looked_for and places.get(place) not in kept:
            places[place] = key
    return places


def placed(spec: SandboxSpec, socket_dir: Path) -> SandboxSpec:
    """Spec with another socket directory."""
    moved = (replace(one, source=socket_dir) if one.target == SOCKET_TARGET else one for one in spec.mounts)
    return replace(spec, mounts=tuple(moved))


def template(spec: SandboxSpec, key: str, socket_dir: Path) -> SandboxSpec:
    """Template of a sandbox: another name, an empty socket directory, few processor cores."""
    cores = min(TEMPLATE_CORES, spec.limits.cpu_quota_cores or TEMPLATE_CORES)
    moved = placed(spec, socket_dir)
    return replace(moved, name=f"template-{key[:NAME_CHARS]}", limits=replace(spec.limits, cpu_quota_cores=cores))
