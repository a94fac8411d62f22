"""A mount namespace of the harness's own: whatever is filled, overlaid or left behind there is not this machine's.

Once inside, ``/tmp`` and ``/dev/shm`` are empty disks of a known size, so that everything that appears in them is the
appliance's; two small disks stand for those on which an operator puts the audit log and spilled KV. All of it goes with
the last process of the namespace, however that ends.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bench.soak.errors import UnavailableError
from isolation.errors import ProcessError
from isolation.host.process import run

CLONE_NEWNS = 0x0002_0000

RUN = Path("/run")
TEMPORARY = Path("/tmp")
SHARED_MEMORY = Path("/dev/shm")

TEMPORARY_BYTES = 256 << 20
"""Bytes of ``/tmp``: state, log and run directory of the appliance take a few, the rest is what a fault may fill."""

SMALL_BYTES = 48 << 20
"""Bytes of each small disk."""

MOUNT_S = 20.0


@dataclass(frozen=True, slots=True)
class Room:
    """The disks of a private namespace."""

    temporary: Path
    """Where the appliance's state, log and run directory are."""
    audit: Path
    """A disk of the audit log's own."""
    spill: Path
    """A disk of spilled KV's own."""
    scratch: Path
    """The harness's own files; not looked at by any invariant."""


def enter() -> Room:
    """Move this process into a private mount namespace and make its disks; for a process with one thread.

    Raises:
        UnavailableError: this user may not mount, or what runs lies where disks are to be.
    """
    refuse_covered(Path(__file__).resolve(), Path(sys.prefix))
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() != 0 or libc.unshare(CLONE_NEWNS) != 0:
        raise UnavailableError("faults are injected into disks and processes of a private namespace: run it as root")
    scratch = Path("/run/athanor-soak")
    try:
        run(("mount", "--make-rprivate", "/"), timeout_s=MOUNT_S)
        _disk(RUN, SMALL_BYTES)
        _disk(TEMPORARY, TEMPORARY_BYTES)
        _disk(SHARED_MEMORY, TEMPORARY_BYTES)
        disks = [scratch / name for name in ("audit", "spill")]
        for place in disks:
            place.mkdir(parents=True)
            _disk(place, SMALL_BYTES)
    except (OSError, ProcessError) as error:
        raise UnavailableError(f"this machine mounts no private disks: {error}") from error
    TEMPORARY.chmod(0o1777)
    os.environ.pop("TMPDIR", None)
    tempfile.tempdir = str(TEMPORARY)
    return Room(TEMPORARY, disks[0], disks[1], scratch)


def refuse_covered(*needed: Path) -> None:
    """What the namespace's disks would hide from it cannot be run in it.

    Raises:
        UnavailableError: one of these lies under a directory that becomes an empty disk.
    """
    for path in needed:
        for disk in (RUN, TEMPORARY, SHARED_MEMORY):
            if path.is_relative_to(disk):
                raise UnavailableError(f"{path} lies in {disk}, which is an empty disk to the soak: run it elsewhere")


def overlay(target: Path, room: Room) -> Path:
    """Put a writable layer over a directory; gives where its changes lie.

    Raises:
        UnavailableError: the kernel has no overlay file system.
    """
    upper, work = (room.scratch / f"{target.name}-{kind}" for kind in ("upper", "work"))
    upper.mkdir(exist_ok=True)
    work.mkdir(exist_ok=True)
    options = f"lowerdir={target},upperdir={upper},workdir={work}"
    try:
        run(("mount", "-t", "overlay", "overlay", "-o", options, str(target)), timeout_s=MOUNT_S)
    except ProcessError as error:
        raise UnavailableError(f"no layer can be put over {target}: {error}") from error
    return upper


def _disk(place: Path, size: int) -> None:
    run(("mount", "-t", "tmpfs", "-o", f"size={size},mode=0755", "tmpfs", str(place)), timeout_s=MOUNT_S)
