"""Checkpoints of a sandbox whose weights are a file mapping, beside one whose weights are anonymous memory.

gVisor saves anonymous memory with a checkpoint and copies it back at a restore, in one thread. Pages of a file on a
read-only mount are not saved: after a restore they are mapped from the host's page cache. This measures both for the
same bytes: size of the checkpoint, seconds from the restore to the first line of the program, seconds of the first and
of later passes over all weights, and of matrix-vector products that read them once, as a decode step does.

Kinds of memory:

* ``anonymous``: a tensor, as the engine has its packed weights today;
* ``private``: the same tensor, over whose pages the file is mapped in place (``MAP_FIXED``, ``MAP_PRIVATE``), so that
  addresses stay valid;
* ``private populate`` and ``private willneed``: the same, and after the restore ``MADV_POPULATE_READ`` or
  ``MADV_WILLNEED`` first;
* ``shared``: ``MAP_SHARED`` and ``PROT_READ``.

Run as root: ``python bench/mapped_weights.py [--mib 1024] [--rounds 3] [--kinds KIND ...]``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from appliance.selftest import intruder
from isolation.gvisor.environment import guest_environment
from isolation.gvisor.gvisor_runtime import GvisorRuntime
from isolation.gvisor.snapshot import save_template
from isolation.gvisor.spec import Limits, Mount, SandboxSpec
from isolation.image.python_rootfs import python_rootfs

KINDS = ("anonymous", "private", "private populate", "private willneed", "shared")

THREADS = 2

WAITS = "waits"
"""Line of the guest when it may be saved."""

LINE_TIMEOUT_S = 120.0

TARGET = "/prepared"
"""Mount point of the file."""

GUEST = r"""
import ctypes, json, socket, sys, time
import torch
kind, mib, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(threads)
size, width = mib << 20, 4096
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t) + (ctypes.c_int,) * 3 + (ctypes.c_long,)
libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
room = torch.empty(size + 4096, dtype=torch.uint8)
start = -room.data_ptr() % 4096
weights = room[start:start + size].view(torch.float32).view(-1, width)
with open("/prepared", "rb") as file:
    assert file.readinto(weights.view(-1).numpy()) == size
if kind != "anonymous":
    with open("/prepared", "rb") as file:
        protection, flags = (1, 1 | 16) if kind == "shared" else (3, 2 | 16)
        at = libc.mmap(weights.data_ptr(), size, protection, flags, file.fileno(), 0)
    assert at == weights.data_ptr(), ctypes.get_errno()
vector = torch.full((width,), 0.5)
def read():
    return int(weights.view(torch.int64).sum())
def product():
    # In pieces of 16 MiB, as layers are.
    for piece in weights.split(1024):
        torch.mv(piece, vector)
def timed(work, rounds=1):
    took = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return round(min(took), 4)
expected = read()
product()
before = timed(product, 10)
print("waits", flush=True)
while True:
    host = socket.socket(socket.AF_UNIX)
    try:
        host.connect("/ipc/host.sock")
        break
    except OSError:
        host.close()
        time.sleep(0.005)
print("met", flush=True)
advised = 0
began = time.perf_counter()
if kind.endswith("populate"):
    advised = libc.madvise(weights.data_ptr(), size, 22) and ctypes.get_errno()
if kind.endswith("willneed"):
    advised = libc.madvise(weights.data_ptr(), size, 3) and ctypes.get_errno()
advise_s = time.perf_counter() - began
first_product, second_product = timed(product), timed(product)
found = dict(advise_s=round(advise_s, 4), advise_errno=advised, first_product_s=first_product,
    second_product_s=second_product, product_s=timed(product, 10), product_before_s=before,
    read_s=timed(read, 3), same=read() == expected)
print("found " + json.dumps(found), flush=True)
"""


class Lines:
    """Lines of a guest, with the time when each came."""

    def __init__(self) -> None:
        self._came = threading.Condition()
        self._lines: list[tuple[float, str]] = []

    def hear(self, line: str) -> None:
        """Take a line."""
        with self._came:
            self._lines.append((time.monotonic(), line))
            self._came.notify_all()

    def wait(self, beginning: str) -> tuple[float, str]:
        """Return the first line that begins so, with its time.

        Raises:
            TimeoutError: none came.
        """

        def fits() -> tuple[float, str] | None:
            return next((one for one in self._lines if one[1].startswith(beginning)), None)

        with self._came:
            if not self._came.wait_for(lambda: fits() is not None, LINE_TIMEOUT_S):
                raise TimeoutError(f"the guest said {[line for _, line in self._lines]}")
            found = fits()
        assert found is not None
        return found


def guest_spec(name: str, kind: str, mib: int, ipc: Path, weights: Path) -> SandboxSpec:
    """Sandbox of one kind over one file."""
    rootfs = python_rootfs("engine")
    return SandboxSpec(
        name=name,
        argv=(rootfs.python, "-s", "-S", "-P", "-c", GUEST, kind, str(mib), str(THREADS)),
        env=guest_environment(threads=THREADS),
        rootfs=rootfs,
        mounts=(Mount(ipc, "/ipc"), Mount(weights, TARGET)),
        limits=Limits(3 * (mib << 20) + (2 << 30)),
    )


def folder_at(path: Path) -> Path:
    """Make an empty folder that the guest may enter."""
    path.mkdir(mode=0o755, parents=True)
    path.chmod(0o755)
    return path


def save(runtime: GvisorRuntime, folder: Path, kind: str, mib: int, weights: Path) -> dict[str, Any]:
    """Save a sandbox of one kind into a folder; gives the checkpoint's size and seconds."""
    began = time.monotonic()
    spec = guest_spec("template", kind, mib, folder_at(folder / "nobody"), weights)
    image = folder_at(folder / "image")
    save_template(
        runtime, spec, image, waits_line=WAITS, timeout_s=LINE_TIMEOUT_S, on_line=lambda line: print(line, flush=True)
    )
    size = sum(one.stat().st_size for one in image.iterdir())
    return {"checkpoint_mib": size >> 20, "made_s": round(time.monotonic() - began, 1)}


def restore(runtime: GvisorRuntime, folder: Path, kind: str, mib: int, weights: Path, number: int) -> dict[str, Any]:
    """Restore it once; gives seconds to the first line, and what the guest measured."""
    ipc, lines = folder_at(folder / f"ipc-{number}"), Lines()
    spec = guest_spec(f"copy-{number}", kind, mib, ipc, weights)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(ipc / "host.sock"))
        (ipc / "host.sock").chmod(0o666)
        listener.listen(4)
        began = time.monotonic()
        sandbox = runtime.boot(spec, lines.hear, folder / "image")
        try:
            met, _ = lines.wait("met")
            _, found = lines.wait("found ")
            busy = round(sandbox.processor_s(), 2)
        finally:
            sandbox.delete()
    load = round(os.getloadavg()[0], 1)
    return {"restore_s": round(met - began, 2), "processor_s": busy, "load": load} | json.loads(found[6:])


def measure(folder: Path, kinds: list[str], mib: int, rounds: int) -> list[dict[str, Any]]:
    """Save each kind once, then restore the kinds in turns."""
    weights = folder / "weights"
    block = os.urandom(1 << 20)
    with weights.open("wb") as file:
        for number in range(mib):
            # Exponents of float32 stay small: no product is of infinities.
            file.write(bytes(block[number:] + block[:number]).translate(bytes(min(one, 0x3F) for one in range(256))))
    weights.chmod(0o444)
    found = []
    with intruder.gvisor() as runtime:
        for kind in kinds:
            print(json.dumps({"kind": kind} | save(runtime, folder / kind, kind, mib, weights)), flush=True)
        # Another file of the same bytes stands in its place: a checkpoint is found by contents, not by inode.
        other = folder / "other"
        shutil.copyfile(weights, other)
        other.chmod(0o444)
        weights.unlink()
        for number in range(rounds):
            for kind in kinds:
                found.append({"kind": kind} | restore(runtime, folder / kind, kind, mib, other, number))
                print(json.dumps(found[-1]), flush=True)
    return found


def main() -> int:
    """Print each restore, then the medians of each kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1_024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ath-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        found = measure(folder, options.kinds, options.mib, options.rounds)
    for kind in options.kinds:
        rows = [row for row in found if row["kind"] == kind]
        numbers = {name: statistics.median(row[name] for row in rows) for name in rows[0] if name != "kind"}
        print(json.dumps({"kind": kind, "median": numbers}), flush=True)
    return 0 if all(row["same"] for row in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
