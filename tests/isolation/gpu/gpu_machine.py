"""A folder that looks like a machine with one GPU, and the facts of such a machine."""

from __future__ import annotations

import os
from pathlib import Path

from isolation.gpu.gpu_facts import GpuFacts, Library, Node, Places

DRIVER = "550.90.07"
RUNSC = 20_240_729
"""A runsc that knows that driver."""

VERSION = f"""NVRM version: NVIDIA UNIX x86_64 Kernel Module  {DRIVER}  Fri May 31 09:35:42 UTC 2024
GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)
"""

FACTS = GpuFacts(
    driver=DRIVER,
    models=("NVIDIA H100 80GB HBM3",),
    nodes=(
        Node("nvidia-uvm", 510, 0, character=True, open_to_all=True),
        Node("nvidia0", 195, 0, character=True, open_to_all=True),
        Node("nvidiactl", 195, 255, character=True, open_to_all=True),
    ),
    libraries=(
        Library("libcuda.so", DRIVER, Path(f"/usr/lib/libcuda.so.{DRIVER}")),
        Library("libnvidia-ml.so", DRIVER, Path(f"/usr/lib/libnvidia-ml.so.{DRIVER}")),
    ),
    memory_major=510,
    persistent=True,
)
"""Nothing is wrong here."""


def make_machine(folder: Path) -> Places:
    """The folder; its device nodes need root."""
    places = Places(
        dev=folder / "dev", proc=folder / "proc", libraries=(folder / "lib",), mps=folder / "mps", run=folder / "run"
    )
    nvidia = places.proc / "driver/nvidia"
    (nvidia / "gpus/0000:04:00.0").mkdir(parents=True)
    (nvidia / "version").write_text(VERSION)
    (nvidia / "gpus/0000:04:00.0/information").write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   41\n")
    (nvidia / "capabilities/gpu0/mig").mkdir(parents=True)
    (nvidia / "capabilities/gpu0/mig/config").touch()
    (places.proc / "devices").write_text("Character devices:\n195 nvidia\n510 nvidia-uvm\n\nBlock devices:\n  7 loop\n")
    places.libraries[0].mkdir()
    for name in ("libcuda.so", "libnvidia-ml.so", "libnvidia-ptxjitcompiler.so"):
        (places.libraries[0] / f"{name}.{DRIVER}").write_bytes(b"\x7fELF")
        (places.libraries[0] / f"{name}.{DRIVER}").chmod(0o644)
        (places.libraries[0] / f"{name}.1").symlink_to(f"{name}.{DRIVER}")
    (places.run / "nvidia-persistenced").mkdir(parents=True)
    (places.run / "nvidia-persistenced/socket").touch()
    places.dev.mkdir()
    for name, major, minor in (
        ("nvidiactl", 195, 255),
        ("nvidia0", 195, 0),
        ("nvidia-uvm", 510, 0),
        ("nvidia-uvm-tools", 510, 1),
        ("nvidia-modeset", 195, 254),
    ):
        make_node(places.dev / name, major, minor)
    return places


def make_node(path: Path, major: int, minor: int, mode: int = 0o666) -> None:
    """A character device."""
    os.mknod(path, 0o020000 | mode, os.makedev(major, minor))
    path.chmod(mode)
