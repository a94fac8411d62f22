"""Conversion of a ``SandboxSpec`` to an OCI bundle: ``oci_config`` is pure, ``Bundle`` is one sandbox's directory.

The configuration follows the OCI runtime specification 1.0.2. Annotations are never taken from input: newer runsc lets
some of them set runtime flags.
"""

from __future__ import annotations

import enum
import json
import os
import shutil
from pathlib import Path

from isolation.errors import SandboxStartError
from isolation.gvisor.spec import GUEST_UID, RESERVED_TARGETS, SandboxSpec

OCI_VERSION = "1.0.2"
_SKELETON_MODE = 0o755
_FOLDERS = "folders"
"""Directory of the bundle with the sources of ``SandboxSpec.folders``; runsc takes a relative source as below it."""
_DEVICE_MODE = 0o666
"""Mode of device nodes, as the driver creates them; the user inside owns none of them."""
_TRASH_PREFIX = ".deleted-"
_CAPABILITY_SETS = ("bounding", "effective", "inheritable", "permitted", "ambient")


class Profile(enum.Enum):
    """Privileges under which runsc is driven; both profiles are tested."""

    ROOT = "root"
    """Real root: the sandbox process runs as uid 65534 without capabilities, and the gofer opens the files."""
    USERNS = "userns"
    """No root: the supervisor runs in its own user namespace with one uid; the sandbox process opens files itself."""


def oci_config(spec: SandboxSpec, profile: Profile) -> dict[str, object]:
    """Build the ``config.json`` of a sandbox.

    The configuration asks for a read-only root, uid 65532, five empty capability sets, no new privileges, no core
    files, and separate pid, mount, ipc, uts and network namespaces (the network has only a loopback device). It asks
    for no user namespace: runsc makes one around the sandbox (``ROOT``), or the supervisor made one around runsc
    (``USERNS``).
    """
    environment = {
        "PATH": spec.rootfs.python.rpartition("/")[0],
        "PYTHONPATH": ":".join(spec.rootfs.python_path),
        **dict(spec.env),
        **dict(() if spec.gpu is None else spec.gpu.env),
    }
    # Page-locked memory for device transfers; pinning is bounded by the memory limit anyway.
    rlimits = {"RLIMIT_CORE": 0, "RLIMIT_MEMLOCK": spec.limits.memory_bytes, "RLIMIT_NOFILE": spec.limits.nofile}
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
    """Build the namespaces, and the devices of a sandbox with a GPU; no other key mentions a GPU."""
    linux: dict[str, object] = {"namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount", "network")]}
    if spec.gpu is not None:
        linux["devices"] = [
            {"path": one.path, "type": "c", "major": one.major, "minor": one.minor, "fileMode": _DEVICE_MODE}
            for one in spec.gpu.devices
        ]
    return linux


def _mounts(spec: SandboxSpec) -> list[dict[str, object]]:
    # Before what lies in them: the gofer mounts in this order, and shows a restored sandbox whose checkpoint has the
    # folder alone what it has mounted there.
    places = [*((one, _FOLDERS + one) for one in spec.folders)]
    places += [(mount.target, str(mount.source)) for mount in spec.all_mounts()]
    binds = [_mount(target, "bind", source, "rbind", "ro", "nosuid", "nodev") for target, source in places]
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
    """Directory of one sandbox: ``config.json``, the skeleton ``rootfs`` and runsc's files."""

    def __init__(self, path: Path, *, gpu: bool = False) -> None:
        self.path = path
        self.gpu = gpu
        """Whether the sandbox has a GPU, which needs extra runsc flags."""

    @property
    def pid_file(self) -> Path:
        """Path to which runsc writes the sandbox's process id."""
        return self.path / "pid"

    @property
    def log_file(self) -> Path:
        """Path of runsc's log for this sandbox."""
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
            for folder in spec.folders:
                _make_directory(path / _FOLDERS / folder[1:])
            _make_skeleton(path / "rootfs", spec, path / _FOLDERS)
            config = json.dumps(oci_config(spec, profile), indent=1)
            (path / "config.json").write_text(config)
        except BaseException:
            bundle.delete()
            raise
        return bundle

    def delete(self) -> None:
        """Remove the directory atomically: rename it, then delete. Idempotent."""
        trash = self.path.with_name(_TRASH_PREFIX + self.path.name)
        shutil.rmtree(trash, ignore_errors=True)
        try:
            os.rename(self.path, trash)
        except FileNotFoundError:
            return
        shutil.rmtree(trash)


def _make_skeleton(root: Path, spec: SandboxSpec, folders: Path) -> None:
    """Create the mount points: an empty directory or file for each target, so that runsc need not create them; those in
    the sandbox's folders below ``folders``, which is mounted there.

    A target below another mount must exist in that mount's source; this is checked here because runsc's own error names
    neither.
    """
    _make_directory(root)
    targets = {mount.target: mount.source for mount in spec.all_mounts()}
    for target in (*RESERVED_TARGETS, *spec.folders):
        _make_directory(root / target[1:])
    inside_folders = tuple(f"{folder}/" for folder in spec.folders)
    for target, source in targets.items():
        if not source.exists():
            raise SandboxStartError(f"{source}, to be mounted at {target}, does not exist")
        over = _covering(target, targets)
        if over is not None:
            inside = targets[over] / target[len(over) + 1 :]
            if not inside.exists():
                raise SandboxStartError(f"mount point {target} does not exist in {targets[over]}")
            continue
        place = (folders if target.startswith(inside_folders) else root) / target[1:]
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
    """Create a directory like ``mkdir -p`` with mode 0755 whatever the umask, so that the sandbox's user can traverse
    it."""
    if path.is_dir():
        return
    if path.parent != path and not path.parent.is_dir():
        _make_directory(path.parent)
    path.mkdir()
    path.chmod(_SKELETON_MODE)
