"""A machine with NVIDIA cards whose driver library is a pretended one."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from isolation.gpu.gpu_facts import Places
from tests.isolation.gpu.gpu_machine import DRIVER, VERSION

GIB = 1 << 30

WELL = {
    "state": 0,
    "total": 80 * GIB,
    "used": 60 * GIB,
    "busy": 93,
    "memory_busy": 41,
    "power": 512_000,
    "power_limit": 700_000,
    "temperature": 61,
    "slowdown": 90,
    "ecc": 0,
    "remapped": 0,
    "clocks": 4,
    "mig": 0,
    "xids": 0,
}
"""A card that nothing is the matter with; its clocks are held down by its limit of power."""

LOST, RESET, HANGS, CRASHES, UNLISTED = 15, 16, -1, -2, -3
"""Values of ``state`` in ``pretended_nvml.c``."""


@dataclass(frozen=True)
class Machine:
    """Where things are, and what its cards tell."""

    places: Places
    folder: Path

    def card(self, index: int = 0, **changes: int) -> None:
        """What a card tells from now on."""
        values = {**WELL, **changes}
        new = self.folder / "new"
        new.write_text("".join(f"{name} {value}\n" for name, value in values.items()))
        new.replace(self.folder / f"card{index}")

    def driver(self, status: int) -> None:
        """What NVML's initialisation returns from now on; 9: no driver is loaded."""
        (self.folder / "init").write_text(f"status {status}\n")


def build_library(folder: Path, *, old: bool = False) -> bytes:
    """Compile the pretended library in this folder; ``old``: with few functions."""
    source, target = Path(__file__).with_name("pretended_nvml.c"), folder / f"{old}.so"
    argv = ["gcc", "-shared", "-fPIC", "-w", *(["-DOLD"] if old else []), str(source), "-o", str(target)]
    subprocess.run(argv, check=True)
    return target.read_bytes()


def make_machine(folder: Path, library: bytes) -> Machine:
    """A machine with one card."""
    places = Places(proc=folder / "proc", libraries=(folder / "lib",), dev=folder / "dev")
    (places.proc / "driver/nvidia").mkdir(parents=True)
    (places.proc / "driver/nvidia/version").write_text(VERSION)
    places.dev.mkdir()
    places.libraries[0].mkdir()
    path = places.libraries[0] / f"libnvidia-ml.so.{DRIVER}"
    path.write_bytes(library)
    path.chmod(0o644)
    found = Machine(places, places.libraries[0])
    found.card()
    return found


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], bytes]:
    """Compiles the pretended library, once in each of its two forms."""
    folder, made = tmp_path_factory.mktemp("nvml"), dict[bool, bytes]()

    def library(old: bool) -> bytes:
        if old not in made:
            made[old] = build_library(folder, old=old)
        return made[old]

    return library


@pytest.fixture
def machine(tmp_path: Path, built: Callable[[bool], bytes], request: pytest.FixtureRequest) -> Machine:
    """A machine with one card; ``old`` as the fixture's parameter: its driver has few functions."""
    return make_machine(tmp_path, built(getattr(request, "param", "") == "old"))
