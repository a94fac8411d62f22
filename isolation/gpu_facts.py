"""What a machine has of NVIDIA's GPUs and their driver: looked at, never changed, and with no program of theirs run.

Everything comes out of folders that ``Places`` names, so the same looks at a machine and at a folder made like one.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

CONTROL, MEMORY = "nvidiactl", "nvidia-uvm"
"""The node by which a program speaks to the driver, and that of its unified memory; every program needs both."""

CONTROL_MAJOR, CONTROL_MINOR = 195, 255
"""Device numbers of the control node; a card has its index for the minor number (Linux, devices.txt)."""

CUDA, MANAGEMENT = "libcuda.so", "libnvidia-ml.so"
"""What a sandbox sees of the driver: CUDA's own interface, and the one by which torch asks how full the memory is when
it fails to get some."""

_NODE = re.compile(r"nvidia(\d{1,3}|ctl|-uvm)")
_VERSION = r"\d+\.\d+(?:\.\d+)?"
_MODULE = re.compile(rf"Kernel Module.*?\s({_VERSION})\s")
_OTHERS_MAY = stat.S_IROTH | stat.S_IWOTH


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where to look."""

    dev: Path = Path("/dev")
    proc: Path = Path("/proc")
    libraries: tuple[Path, ...] = (
        Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib/aarch64-linux-gnu"), Path("/usr/lib64"), Path("/usr/lib"),
        Path("/usr/lib/x86_64-linux-gnu/nvidia/current"),
    )  # fmt: skip
    """Folders in which distributions and NVIDIA's installer put the driver's libraries."""
    mps: Path = Path("/tmp/nvidia-mps")  # noqa: S108 - where MPS puts its pipes unless it is told otherwise
    run: Path = Path("/run")


@dataclass(frozen=True, slots=True)
class Node:
    """A device node of the driver's."""

    name: str
    major: int
    minor: int
    character: bool
    """Whether it is a character device itself: no link, no file."""
    open_to_all: bool
    """Whether everybody may read and write: a sandbox is nobody."""

    @property
    def index(self) -> int | None:
        """Of the card whose node it is."""
        return int(self.name.removeprefix("nvidia")) if self.name[-1].isdigit() else None


@dataclass(frozen=True, slots=True)
class Library:
    """A library of the driver's, one version of it."""

    name: str
    version: str
    path: Path
    open_to_all: bool = True
    """Whether everybody may read it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """What was found."""

    driver: str = ""
    """Version of the kernel's module; empty where none is loaded."""
    models: tuple[str, ...] = ()
    """Names of the cards, as the driver gives them."""
    nodes: tuple[Node, ...] = ()
    libraries: tuple[Library, ...] = ()
    memory_major: int | None = None
    """Device number of nvidia-uvm; None: that module is not loaded."""
    mig: tuple[int, ...] = ()
    """Indices of cards that are cut up into instances."""
    mps: bool = False
    """Whether the daemon of the multi-process service listens."""
    persistent: bool = False
    """Whether the persistence daemon runs, which keeps cards initialised while nobody uses them."""

    @property
    def cards(self) -> tuple[int, ...]:
        """Indices that have a node."""
        return tuple(sorted(node.index for node in self.nodes if node.index is not None))

    def node(self, name: str) -> Node | None:
        """A node by its name below /dev."""
        return next((node for node in self.nodes if node.name == name), None)

    def versions(self, library: str) -> tuple[str, ...]:
        """The versions of a library that are there."""
        return tuple(sorted({one.version for one in self.libraries if one.name == library}))

    def library(self, name: str) -> Library | None:
        """A library in the version of the kernel's module; no other works with it."""
        return next((one for one in self.libraries if (one.name, one.version) == (name, self.driver)), None)


def look_at_gpus(places: Places | None = None) -> GpuFacts:
    """Look; a folder or file that is not there or may not be read counts as absent."""
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
    """Files named NAME.VERSION; the links beside them, with fewer numbers, are passed over."""
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
