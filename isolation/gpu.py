"""What a sandbox with a GPU gets, worked out of facts: device nodes, libraries, environment. Pure.

No hook of a container toolkit has a part in it. A sandbox gets the control node, the one of unified memory and those of
the cards that it was given: no node of other cards, of displays (modeset), of tools, of instances (caps), no socket of
a daemon. Of the driver it sees two libraries under the names by which programs ask for them. Left out on purpose are
libnvidia-ptxjitcompiler, libnvidia-nvvm and libnvidia-gpucomp: they are compilers, and what serves compiles nothing.
So a kernel has to be there as machine code for the card, and CUDA is told not to look for a compiler.
"""

from __future__ import annotations

from isolation.errors import GpuError
from isolation.gpu_drivers import check_driver
from isolation.gpu_facts import CONTROL, CONTROL_MAJOR, CONTROL_MINOR, CUDA, MANAGEMENT, MEMORY, GpuFacts, Node
from isolation.spec import Device, GpuAccess, Mount

AUTO = "auto"
"""Every card that the machine has."""

DRIVER_CAPABILITIES = "compute,utility"
"""What gVisor passes on to the driver: computing, and questions (NVML). No graphics, no video, no profiling."""

LIBRARY_DIR = "/nvidia"
"""Where a sandbox finds the driver's libraries."""

ENVIRONMENT = (
    # No compiler is there: without this CUDA would look for one when a kernel has no code for the card.
    ("CUDA_CACHE_DISABLE", "1"),
    ("CUDA_DISABLE_PTX_JIT", "1"),
    ("LD_LIBRARY_PATH", LIBRARY_DIR),
    # runsc reads it out of the configuration; said even where it is what runsc assumes.
    ("NVIDIA_DRIVER_CAPABILITIES", DRIVER_CAPABILITIES),
    # Triton would look for its parts among the records of installed packages, which no sandbox has.
    ("TRITON_BACKENDS_IN_TREE", "1"),
    # And it would start ldconfig to find libcuda.
    ("TRITON_LIBCUDA_PATH", LIBRARY_DIR),
)
"""Of a program in a sandbox with a GPU, beside ``isolation.environment``. NVIDIA_VISIBLE_DEVICES is not among it: it
would make runsc look for the toolkit's hook, and which cards there are follows from the nodes."""


def gpu_access(facts: GpuFacts, wanted: str | tuple[int, ...], runsc: int) -> GpuAccess | None:
    """What a sandbox gets that is to have these cards.

    Args:
        facts: of the machine.
        wanted: ``auto`` for all cards there are, none among them; or indices.
        runsc: release date as a number.

    Returns:
        None: ``auto``, on a machine without a driver or a card.

    Raises:
        GpuError: the machine cannot give it; what is missing or does not fit, and the mend.
    """
    if wanted == AUTO and not facts.driver and not facts.cards:
        return None
    if not facts.driver:
        raise GpuError("no driver of NVIDIA's is loaded", hint="install it, then: modprobe nvidia")
    check_driver(facts.driver, runsc)
    cards = facts.cards if isinstance(wanted, str) else tuple(sorted(set(wanted)))
    if not cards:
        raise GpuError("there is no /dev/nvidia0: the driver has made no card's node", hint="nvidia-modprobe -u -c=0")
    cut = [str(index) for index in cards if index in facts.mig]
    if cut:
        raise GpuError(
            f"GPU {', '.join(cut)} is cut up into MIG instances, which gVisor cannot pass on",
            hint="nvidia-smi -i INDEX -mig 0, or leave the card out of the model's gpu",
        )
    names = (CONTROL, MEMORY, *(f"nvidia{index}" for index in cards))
    devices = tuple(_device(facts, name) for name in names)
    libraries = tuple(_library(facts, name) for name in (CUDA, MANAGEMENT))
    return GpuAccess(facts.driver, devices, libraries, ENVIRONMENT)


def _device(facts: GpuFacts, name: str) -> Device:
    """A node that is what its name says: a link, or a node with the numbers of something else, would hand the sandbox
    another device of the host's."""
    path = f"/dev/{name}"
    node = facts.node(name)
    if node is None:
        raise GpuError(f"there is no {path}", hint=node_mend(name))
    numbers = expected_numbers(facts, node)
    if numbers is None:
        raise GpuError("the module nvidia-uvm is not loaded", hint=node_mend(name))
    if not node.character or (node.major, node.minor) != numbers:
        raise GpuError(
            f"{path} is not the driver's device {numbers[0]}:{numbers[1]}",
            hint=f"find out who made it, remove it, then: {node_mend(name)}",
        )
    if not node.open_to_all:
        raise GpuError(
            f"{path} is not readable and writable for all, and a sandbox is nobody", hint=f"chmod 666 {path}"
        )
    return Device(path, *numbers)


def expected_numbers(facts: GpuFacts, node: Node) -> tuple[int, int] | None:
    """Major and minor number that a node must have; None where the driver gives none."""
    if node.name == MEMORY:
        return None if facts.memory_major is None else (facts.memory_major, 0)
    return CONTROL_MAJOR, CONTROL_MINOR if node.index is None else node.index


def node_mend(name: str) -> str:
    """The command that makes a node."""
    if name == MEMORY:
        return "modprobe nvidia-uvm && nvidia-modprobe -u -c=0"
    index = name.removeprefix("nvidia")
    return f"nvidia-modprobe -c={index if index.isdigit() else 0}"


def _library(facts: GpuFacts, name: str) -> Mount:
    found = facts.library(name)
    if found is None:
        others = facts.versions(name)
        there = f"there is {', '.join(others)}" if others else "none is there"
        raise GpuError(
            f"{name} of the driver's version {facts.driver} is needed, and {there}",
            hint="install the libraries of the module's version, or restart the machine after an upgrade of the driver",
        )
    if not found.open_to_all:
        raise GpuError(f"{found.path} is not readable for all, and a sandbox is nobody", hint=f"chmod o+r {found.path}")
    return Mount(found.path, f"{LIBRARY_DIR}/{name}.1")
