"""NVIDIA cards and driver found on a machine: read-only, without running any of NVIDIA's programs.

All facts come from the folders named by ``Places``, so tests can use a folder tree made to look like a machine.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

CONTROL, MEMORY = "nvidiactl", "nvidia-uvm"
"""Names of the driver's control node and of the unified-memory node; every CUDA program needs both."""

CONTROL_MAJOR, CONTROL_MINOR = 195, 255
"""Device numbers of the control node; a card's minor number is its index (Linux, devices.txt)."""

CUDA, MANAGEMENT = "libcuda.so", "libnvidia-ml.so"
"""Driver libraries that a sandbox sees: the CUDA interface, and NVML, which torch asks for the memory in use when an
allocation fails."""

_NODE = re.compile(r"nvidia(\d{1,3}|ctl|-uvm)")
_VERSION = r"\d+\.\d+(?:\.\d+)?"
_MODULE = re.compile(rf"Kernel Module.*?\s({_VERSION})\s")
_OTHERS_MAY = stat.S_IROTH | stat.S_IWOTH


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Folders to inspect."""

    dev: Path = Path("/dev")
    proc: Path = Path("/proc")
    libraries: tuple[Path, ...] = (
        Path("/usr/lib/x86_64-linux-gnu"),
        Path("/usr/lib/aarch64-linux-gnu"),
        Path("/usr/lib64"),
        Path("/usr/lib"),
        Path("/usr/lib/x86_64-linux-gnu/nvidia/current"),
    )
    """Folders where distributions and NVIDIA's installer put the driver's libraries."""
    mps: Path = Path("/tmp/nvidia-mps")  # noqa: S108 - the default folder of MPS pipes
    run: Path = Path("/run")


@dataclass(frozen=True, slots=True)
class Node:
    """A device node of the NVIDIA driver."""

    name: str
    major: int
    minor: int
    character: bool
    """Whether it is a character device itself, not a link or file."""
    open_to_all: bool
    """Whether all users may read and write it: a sandbox runs as an unprivileged user."""

    @property
    def index(self) -> int | None:
        """Return the index of the card that this node belongs to."""
        return int(self.name.removeprefix("nvidia")) if self.name[-1].isdigit() else None


@dataclass(frozen=True, slots=True)
class Library:
    """One version of a driver library."""

    name: str
    version: str
    path: Path
    open_to_all: bool = True
    """Whether all users may read it."""


@dataclass(frozen=True, slots=True)
class CardMemory:
    """Memory of a card, as NVML says."""

    index: int
    """The N of /dev/nvidiaN."""
    uuid: str
    """Name by which CUDA_VISIBLE_DEVICES selects the card."""
    total: int
    """Bytes."""
    free: int
    """Bytes that no program holds."""
    mig: bool = False
    """Whether programs get instances of it alone, also where there is none yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """NVIDIA devices, libraries and daemons found on a machine."""

    driver: str = ""
    """Version of the kernel module; empty when none is loaded."""
    models: tuple[str, ...] = ()
    """Names of the cards, as reported by the driver."""
    nodes: tuple[Node, ...] = ()
    libraries: tuple[Library, ...] = ()
    memory_major: int | None = None
    """Major device number of nvidia-uvm; None when that module is not loaded."""
    mig: tuple[int, ...] = ()
    """Indices of cards partitioned into MIG instances, or, once their memory was asked for, in that mode."""
    mps: bool = False
    """Whether the MPS daemon (multi-process service) listens."""
    persistent: bool = False
    """Whether the persistence daemon runs, which keeps unused cards initialised."""
    memory: tuple[CardMemory, ...] = ()
    """Memory of the cards (``isolation.gpu.card_memory``); empty where it was not asked for or is not known."""
    memory_problem: str = ""
    """Why it is not known; empty where it is, or was not asked for."""

    @property
    def cards(self) -> tuple[int, ...]:
        """Return the indices of cards that have a device node."""
        return tuple(sorted(node.index for node in self.nodes if node.index is not None))

    def memory_of(self, card: int) -> CardMemory | None:
        """Return the memory of a card by its index; None where it is not known."""
        return next((one for one in self.memory if one.index == card), None)

    def node(self, name: str) -> Node | None:
        """Return a node by its name below /dev."""
        return next((node for node in self.nodes if node.name == name), None)

    def versions(self, library: str) -> tuple[str, ...]:
        """Return the installed versions of a library."""
        return tuple(sorted({one.version for one in self.libraries if one.name == library}))

    def library(self, name: str) -> Library | None:
        """Return a library in the kernel module's version; no other version works with it."""
        return next((one for one in self.libraries if (one.name, one.version) == (name, self.driver)), None)


def look_at_gpus(places: Places | None = None) -> GpuFacts:
    """Inspect the machine; a folder or file that is absent or unreadable counts as absent."""
    where = Places() if places is None else places
    nvidia = where.proc / "driver/nvidia"
    version = _MODULE.search(_read(nvidia / "version"))
    informations = (_read(path) for path in sorted(nvidia.glob("gpus/*/information")))
    found = (re.search(r"^Model:\s*(.+)$", text, re.MULTILINE) for text in informations)
    memory = re.search(rf"^\s*(\d+) {MEMORY}$", _read(where.proc / "devices"), re.MULTILINE)
    return GpuFacts(
        driver="" if version is None else version[1],
        models=tuple(match[1].strip() for match in found if match),
        nodes=_nodes(where.dev),
        libraries=_libraries(where.libraries),
        memory_major=None if memory is None else int(memory[1]),
        mig=tuple(sorted({int(match[1]) for match in _instances(nvidia / "capabilities")})),
        mps=(where.mps / "control").exists(),
        persistent=(where.run / "nvidia-persistenced/socket").exists(),
    )


def _instances(capabilities: Path) -> list[re.Match[str]]:
    found = (re.fullmatch(r"gpu(\d+)", path.parents[1].name) for path in capabilities.glob("gpu*/mig/gi*"))
    return [match for match in found if match]


def _nodes(dev: Path) -> tuple[Node, ...]:
    nodes = []
    for path in sorted(dev.glob("nvidia*")):
        if not _NODE.fullmatch(path.name):
            continue
        status = os.lstat(path)
        nodes.append(
            Node(
                path.name,
                os.major(status.st_rdev),
                os.minor(status.st_rdev),
                stat.S_ISCHR(status.st_mode),
                status.st_mode & _OTHERS_MAY == _OTHERS_MAY,
            )
        )
    return tuple(nodes)


def _libraries(folders: tuple[Path, ...]) -> tuple[Library, ...]:
    """Find files named NAME.VERSION; links with shorter version numbers are skipped."""
    found = []
    for folder in folders:
        for name in (CUDA, MANAGEMENT):
            for path in sorted(folder.glob(f"{name}.*")):
                version = path.name.removeprefix(f"{name}.")
                if re.fullmatch(_VERSION, version) and path.is_file():
                    readable = bool(path.stat().st_mode & stat.S_IROTH)
                    found.append(Library(name, version, path.resolve(), readable))
    return tuple(found)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
