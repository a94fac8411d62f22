"""Device nodes, libraries and environment that a sandbox with a GPU gets, derived from facts. Pure.

No container-toolkit hook is involved. A sandbox gets the control node, the unified-memory node and the nodes of its own
cards. It gets no node of other cards, of displays (modeset), of tools or of MIG instances (caps), and no daemon's
socket. It sees two libraries of the driver, under the names by which programs load them. libnvidia-ptxjitcompiler,
libnvidia-nvvm and libnvidia-gpucomp are left out on purpose: they are compilers, and a serving sandbox compiles
nothing. So every kernel must be present as machine code for the card, and CUDA is configured not to look for a
compiler.
"""

from __future__ import annotations

from isolation.errors import GpuError
from isolation.gpu.gpu_drivers import check_driver
from isolation.gpu.gpu_facts import CONTROL, CONTROL_MAJOR, CONTROL_MINOR, CUDA, MANAGEMENT, MEMORY, GpuFacts, Node
from isolation.gvisor.spec import Device, GpuAccess, Mount

AUTO = "auto"
"""Configuration value that selects every card of the machine."""

DRIVER_CAPABILITIES = "compute,utility"
"""Driver capabilities that gVisor forwards: compute and NVML queries. No graphics, video or profiling."""

LIBRARY_DIR = "/nvidia"
"""Directory inside the sandbox that holds the driver's libraries."""

ENVIRONMENT = (
    # The sandbox has no compiler: without this, CUDA would look for one when a kernel has no code for the card.
    ("CUDA_CACHE_DISABLE", "1"),
    ("CUDA_DISABLE_PTX_JIT", "1"),
    ("LD_LIBRARY_PATH", LIBRARY_DIR),
    # Read by runsc from the configuration; stated explicitly even where it is runsc's default.
    ("NVIDIA_DRIVER_CAPABILITIES", DRIVER_CAPABILITIES),
    # Without it, Triton searches the metadata of installed packages, which sandboxes do not contain.
    ("TRITON_BACKENDS_IN_TREE", "1"),
    # Without it, Triton starts ldconfig to find libcuda.
    ("TRITON_LIBCUDA_PATH", LIBRARY_DIR),
)
"""Extra environment of a program in a sandbox with a GPU, beside ``isolation.gvisor.environment``.
NVIDIA_VISIBLE_DEVICES is absent: it would make runsc look for the toolkit's hook, and the device nodes already
determine the cards."""


def gpu_access(
    facts: GpuFacts, wanted: str | tuple[int, ...], runsc: int, listed: tuple[str, ...] = ()
) -> GpuAccess | None:
    """Compute what a sandbox gets for the requested cards.

    Args:
        facts: what ``look_at_gpus`` found on the machine.
        wanted: ``auto`` for all cards of the machine (possibly none), or indices.
        runsc: release date as a number.
        listed: drivers that this runsc lists itself (``isolation.gpu.listed_drivers``); empty: the table counts.

    Returns:
        None: for ``auto`` on a machine without a driver or a card.

    Raises:
        GpuError: the machine cannot provide it; the message names what is missing or incompatible, and the remedy.
    """
    if wanted == AUTO and not facts.driver and not facts.cards:
        return None
    if not facts.driver:
        raise GpuError("no driver of NVIDIA's is loaded", hint="install it, then: modprobe nvidia")
    check_driver(facts.driver, runsc, listed)
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


def plain_environment(facts: GpuFacts, card: int) -> tuple[tuple[str, str], ...]:
    """Return the environment of a program without a sandbox that computes on one card: it sees the machine's libraries
    by itself, and is told which card is its own, since nothing hides the others.

    Args:
        facts: of the machine.
        card: index of the card.
    """
    memory, library = facts.memory_of(card), facts.library(CUDA)
    own = {"LD_LIBRARY_PATH", "NVIDIA_DRIVER_CAPABILITIES", "TRITON_LIBCUDA_PATH"}
    values = [(name, value) for name, value in ENVIRONMENT if name not in own]
    values.append(("CUDA_DEVICE_ORDER", "PCI_BUS_ID"))
    values.append(("CUDA_VISIBLE_DEVICES", str(facts.cards.index(card)) if memory is None else memory.uuid))
    if library is not None:
        # Without it, Triton starts ldconfig to find libcuda.
        values.append(("TRITON_LIBCUDA_PATH", str(library.path.parent)))
    return tuple(sorted(values))


def _device(facts: GpuFacts, name: str) -> Device:
    """Check that a node is a device with the expected numbers: a link, or other numbers, would expose another device of
    the host."""
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
    """Return the major and minor number that a node must have; None where the driver assigns none."""
    if node.name == MEMORY:
        return None if facts.memory_major is None else (facts.memory_major, 0)
    return CONTROL_MAJOR, CONTROL_MINOR if node.index is None else node.index


def node_mend(name: str) -> str:
    """Return the command that creates a device node."""
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
