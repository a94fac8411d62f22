"""``SandboxSpec`` to an OCI bundle: ``oci_config`` is pure, ``Bundle`` is the directory of one sandbox.

The configuration follows the OCI runtime specification 1.0.2. Annotations are never taken from anybody: newer runsc
lets some of them set runtime flags.
"""

from __future__ import annotations

import enum
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from isolation.errors import SandboxStartError
from isolation.spec import GUEST_UID, RESERVED_TARGETS, SandboxSpec

OCI_VERSION = "1.0.2"
_SKELETON_MODE = 0o755
_DEVICE_MODE = 0o666
"""As the driver makes its nodes; the user inside owns none of them."""
_TRASH_PREFIX = ".deleted-"
_CAPABILITY_SETS = ("bounding", "effective", "inheritable", "permitted", "ambient")


class Profile(enum.Enum):
    """Under which rights runsc is driven; both are tested."""

    ROOT = "root"
    """Real root: the sandbox process is moved to uid 65534 without capabilities, the gofer opens the files."""
    USERNS = "userns"
    """No root: we live in a user namespace of our own with one uid; the sandbox opens its files itself."""


def oci_config(spec: SandboxSpec, profile: Profile) -> dict[str, object]:
    """The ``config.json`` of a sandbox.

    Read-only root, uid 65532, five empty capability sets, no new privileges, no core files, an own pid, mount, ipc,
    uts and network namespace (no network but the sandbox's loopback). The user namespace is made by runsc around the
    whole sandbox (``ROOT``) or by us around runsc (``USERNS``), so none is asked for here.
    """
    environment = {
        "PATH": spec.rootfs.python.rpartition("/")[0],
        "PYTHONPATH": ":".join(spec.rootfs.python_path),
        **dict(spec.env),
        **dict(() if spec.gpu is None else spec.gpu.env),
    }
    # Page-locked memory for device transfers; pinning is bounded by the memory limit anyway.
    rlimits = {
        "RLIMIT_CORE": 0,
        "RLIMIT_MEMLOCK": spec.limits.memory_bytes,
        "RLIMIT_NOFILE": spec.limits.nofile,
    }
    return {
        "ociVersion": OCI_VERSION,
        "process": {
            "terminal": False,
            "user": {"uid": GUEST_UID, "gid": GUEST_UID},
            "args": list(spec.argv),
            "env": [f"{key}={value}" for key, value in sorted(environment.items())],
            "cwd": "/",
            "capabilities": {kind: [] for kind in _CAPABILITY_SETS},
            "rlimits": [{"type": name, "hard": value, "soft": value} for name, value in rlimits.items()],
            "noNewPrivileges": True,
        },
        "root": {"path": "rootfs", "readonly": True},
        "hostname": "sandbox",
        "mounts": _mounts(spec),
        "linux": _linux(spec),
        "annotations": {"org.athanor.profile": profile.value},
    }


def _linux(spec: SandboxSpec) -> dict[str, object]:
    """Namespaces; and devices, where the sandbox has a GPU: no other key of the configuration knows of one."""
    linux: dict[str, object] = {"namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount", "network")]}
    if spec.gpu is not None:
        linux["devices"] = [
            {"path": one.path, "type": "c", "major": one.major, "minor": one.minor, "fileMode": _DEVICE_MODE}
            for one in spec.gpu.devices
        ]
    return linux


def _mounts(spec: SandboxSpec) -> list[dict[str, object]]:
    binds = [
        _mount(mount.target, "bind", str(mount.source), "rbind", "ro", "nosuid", "nodev") for mount in spec.all_mounts()
    ]
    masks = [
        _mount(path, "tmpfs", "tmpfs", "ro", "nosuid", "nodev", "noexec", "size=4096", "mode=0555")
        for path in spec.rootfs.masks
    ]
    scratch = ("nosuid", "nodev", "noexec", "mode=1777", f"size={spec.tmpfs_bytes}")
    return [
        _mount("/proc", "proc", "proc", "nosuid", "nodev", "noexec"),
        *binds,
        *masks,
        _mount("/tmp", "tmpfs", "tmpfs", *scratch),  # noqa: S108 - a path inside the sandbox
        _mount("/dev/shm", "tmpfs", "tmpfs", *scratch),  # noqa: S108
    ]


def _mount(target: str, kind: str, source: str, *options: str) -> dict[str, object]:
    return {"destination": target, "type": kind, "source": source, "options": list(options)}


class Bundle:
    """The directory of one sandbox: ``config.json``, the skeleton ``rootfs`` and runsc's files beside them."""

    def __init__(self, path: Path, *, gpu: bool = False) -> None:
        self.path = path
        self.gpu = gpu
        """Whether the sandbox has a GPU: runsc then needs flags of its own."""

    @property
    def pid_file(self) -> Path:
        """Where runsc writes the sandbox's process id."""
        return self.path / "pid"

    @property
    def log_file(self) -> Path:
        """Runsc's own log of this sandbox."""
        return self.path / "runsc.log"

    @classmethod
    def create(cls, parent: Path, spec: SandboxSpec, profile: Profile) -> Bundle:
        """Write the bundle of ``spec`` under ``parent``.

        Raises:
            SandboxStartError: a sandbox of that name exists, or a mount's source is missing.
        """
        path = parent / spec.name
        try:
            path.mkdir(mode=0o700)
        except FileExistsError as error:
            raise SandboxStartError(f"a sandbox named {spec.name} exists already") from error
        bundle = cls(path, gpu=spec.gpu is not None)
        try:
            _make_skeleton(path / "rootfs", spec)
            config = json.dumps(oci_config(spec, profile), indent=1)
            (path / "config.json").write_text(config)
        except BaseException:
            bundle.delete()
            raise
        return bundle

    def delete(self) -> None:
        """Remove the directory so that no half of it can be seen: rename, then remove. Idempotent."""
        trash = self.path.with_name(_TRASH_PREFIX + self.path.name)
        shutil.rmtree(trash, ignore_errors=True)
        try:
            os.rename(self.path, trash)
        except FileNotFoundError:
            return
        shutil.rmtree(trash)


@contextmanager
def bundle_directory(parent: Path, spec: SandboxSpec, profile: Profile) -> Iterator[Bundle]:
    """A bundle for the time of a ``with`` block."""
    bundle = Bundle.create(parent, spec, profile)
    try:
        yield bundle
    finally:
        bundle.delete()


def _make_skeleton(root: Path, spec: SandboxSpec) -> None:
    """Make the mount points: an empty directory or file for each target, so that runsc has nothing to invent.

    A target below another mount must exist in that mount's source; it is checked, since runsc's own message for a
    missing one names neither.
    """
    _make_directory(root)
    targets = {mount.target: mount.source for mount in spec.all_mounts()}
    for target in RESERVED_TARGETS:
        _make_directory(root / target[1:])
    for target, source in targets.items():
        if not source.exists():
            raise SandboxStartError(f"{source}, to be mounted at {target}, does not exist")
        over = _covering(target, targets)
        if over is not None:
            inside = targets[over] / target[len(over) + 1 :]
            if not inside.exists():
                raise SandboxStartError(f"mount point {target} does not exist in {targets[over]}")
            continue
        place = root / target[1:]
        if source.is_dir():
            _make_directory(place)
        else:
            _make_directory(place.parent)
            place.touch(mode=0o644)


def _covering(target: str, targets: dict[str, Path]) -> str | None:
    parts = target.split("/")
    for count in range(len(parts) - 1, 1, -1):
        prefix = "/".join(parts[:count])
        if prefix in targets:
            return prefix
    return None


def _make_directory(path: Path) -> None:
    """``mkdir -p`` with 0755 whatever the umask: the sandbox's user must be able to pass."""
    if path.is_dir():
        return
    if path.parent != path and not path.parent.is_dir():
        _make_directory(path.parent)
    path.mkdir()
    path.chmod(_SKELETON_MODE)
