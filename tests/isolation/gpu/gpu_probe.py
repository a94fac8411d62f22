"""Boots a real sandbox with GPU nodes on a machine without one: ``python -m tests.isolation.gpu.gpu_probe RUNSC DIR
ABI [saved]``.

Makes a /dev of its own in a mount namespace of its own, with nodes that no driver stands behind. With an ABI runsc is
told the driver's version, as the product never does. With ``saved`` the program is saved before it has looked at the
nodes, and what a copy of it saw is told. Tells one JSON line.
"""

import ctypes
import json
import os
import stat
import sys
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from isolation.errors import SandboxStartError
from isolation.gpu.bundle_additions import gpu_access
from isolation.gvisor.environment import guest_environment
from isolation.gvisor.gvisor_runtime import GvisorRuntime
from isolation.gvisor.runsc import RunscCommand, find_runsc
from isolation.gvisor.snapshot import save_template
from isolation.gvisor.spec import Limits, SandboxSpec
from isolation.image.python_rootfs import python_rootfs
from tests.isolation.gpu.gpu_machine import FACTS, RUNSC, make_node

CLONE_NEWNS = 0x2_0000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x4_0000
LIBC = ctypes.CDLL(None, use_errno=True)

SAVED_GUEST = """
import time
print("waits", flush=True)
for _ in range(60):
    time.sleep(0.1)
"""
"""Before the guest: some seconds, in which it is saved."""

GUEST = """
import json, os
opened = []
for name in ("nvidiactl", "nvidia-uvm", "nvidia0"):
    try:
        os.close(os.open("/dev/" + name, os.O_RDWR))
    except OSError as error:
        opened.append(error.errno)
print(json.dumps({
    "devices": sorted(name for name in os.listdir("/dev") if "nvidia" in name),
    "libraries": sorted(os.listdir("/nvidia")), "path": os.environ["LD_LIBRARY_PATH"], "opened": opened,
}))
"""


def mount(source: str, target: Path | str, kind: str | None, flags: int) -> bool:
    """mount(2)."""
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind)]
    return LIBC.mount(*words, flags, None) == 0


def own_dev(folder: Path) -> bool:
    """Put a copy of /dev with nodes of a GPU in its place, for this process and its children alone."""
    if LIBC.unshare(CLONE_NEWNS) or not mount("none", "/", None, MS_REC | MS_PRIVATE):
        return False
    if not mount("tmpfs", folder, "tmpfs", 0):
        return False
    for entry in os.scandir("/dev"):
        status, copy = entry.stat(follow_symlinks=False), folder / entry.name
        if stat.S_ISLNK(status.st_mode):
            copy.symlink_to(os.readlink(entry.path))
        elif stat.S_ISDIR(status.st_mode):
            copy.mkdir()
            mount(entry.path, copy, None, MS_BIND | MS_REC)
        elif stat.S_ISCHR(status.st_mode) and not entry.name.startswith("nvidia"):
            make_node(copy, os.major(status.st_rdev), os.minor(status.st_rdev), stat.S_IMODE(status.st_mode))
    for node in FACTS.nodes:
        make_node(folder / node.name, node.major, node.minor)
    return mount(str(folder), "/dev", None, MS_BIND | MS_REC)


def boot(runsc: Path, folder: Path, *, saved: bool) -> dict[str, object]:
    """What the program in the sandbox saw, or why there was none."""
    rootfs = python_rootfs("text")
    libraries = tuple(replace(one, path=folder / one.path.name) for one in FACTS.libraries)
    for one in libraries:
        one.path.write_bytes(b"\x7fELF")
        one.path.chmod(0o644)
    spec = SandboxSpec(
        name="gpu",
        argv=(rootfs.python, "-s", "-S", "-P", "-c", SAVED_GUEST * saved + GUEST),
        env=guest_environment(threads=1),
        rootfs=rootfs,
        mounts=(),
        limits=Limits(512 << 20),
        gpu=gpu_access(replace(FACTS, libraries=libraries), "auto", RUNSC),
    )
    with (
        tempfile.TemporaryDirectory(prefix="ath-", ignore_cleanup_errors=True) as place,
        closing(GvisorRuntime(find_runsc([runsc]), Path(place))) as runtime,
    ):
        image = None
        try:
            if saved:
                (image := folder / "image").mkdir()
                save_template(runtime, replace(spec, name="template"), image, waits_line="waits", timeout_s=30.0)
            sandbox = runtime.boot(spec, image=image)
        except SandboxStartError as error:
            return {"refused": str(error)}
        try:
            status = sandbox.wait(60.0)
            assert status == 0, (status, sandbox.output_tail())
            return {"said": len(sandbox.output_tail()), **json.loads(sandbox.output_tail()[-1])}
        finally:
            sandbox.delete()
            runtime.cleanup_stale()


def main(runsc: str, folder: str, abi: str, saved: str = "") -> None:
    """Boot once and tell."""
    (dev := Path(folder) / "dev").mkdir()
    if not own_dev(dev):
        print("no mount namespace")
        return
    if abi:
        plain = RunscCommand._gpu_flags
        RunscCommand._gpu_flags = lambda self: (*plain(self), f"--nvproxy-driver-version={abi}")
    Path(folder).chmod(0o755)
    print(json.dumps(boot(Path(runsc), Path(folder), saved=bool(saved))))


if __name__ == "__main__":
    main(*sys.argv[1:])
