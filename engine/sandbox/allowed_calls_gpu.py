"""The system calls of an engine on a GPU after warm-up: data, and which descriptors they may be made on.

It was made from what is known of CUDA after its start, and an H200 has run an engine under it, outside of gVisor
(driver 580.159, torch 2.11; ``docs/gpu.md``): no call was missing. Launches and copies are writes into mapped memory
and make no call; taking and mapping memory, events and modules that are loaded at their first use are ioctls on the
driver's nodes and maps of them; waits are polls and futexes, woken through event descriptors and pipes that the driver
made when it started. A call that is missing here ends the engine at its first use, so an error of this list is loud and
never a hole. What is not here on purpose:

* open: a name lies in memory, out of a filter's sight. So everything that has to be open is open before: the nodes, and
  NVML, which torch asks when memory runs out. Page-locked memory needs a new descriptor of the driver for each piece,
  and is all taken by the warm-up.
* executable memory, threads: a kernel for the card is data to the host, and the driver's threads run by then.

gVisor's kernel decides which ioctls reach the driver (nvproxy has a list for each version of it); numbers of NVIDIA's
commands are not filtered a second time, since a filter sees no further than the command's number.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from engine.errors import LockdownError
from engine.sandbox.allowed_calls import (
    ENDING,
    MAP_ANONYMOUS,
    MAP_PRIVATE,
    MAP_SHARED,
    NO_CODE,
    PROT_EXEC,
    STDERR,
    WAITING,
    Argument,
    Bells,
    Call,
)
from engine.sandbox.allowed_calls import MEMORY as HOST_MEMORY

NODES = "/dev/nvidia"
"""How the paths of the driver's nodes begin."""

EVENTS = "anon_inode:[eventfd]"
PIPE = "pipe:["

MOST_DESCRIPTORS = 240
"""A condition of a filter can jump over 255 instructions: one for each value. CUDA keeps some dozen."""

_MANAGEMENT = "libnvidia-ml.so.1"
_OPEN = Path("/proc/self/fd")


@dataclass(frozen=True, slots=True)
class Descriptors:
    """What the driver has opened in this process."""

    nodes: tuple[int, ...]
    """Descriptors of its device nodes."""
    wakes: tuple[int, ...]
    """Event descriptors and pipes by which its threads are woken."""


def gpu_engine_calls(found: Descriptors, bells: Bells, spill: Bells | None = None) -> tuple[Call, ...]:
    """The list of an engine on a GPU.

    Args:
        found: the driver's descriptors at the time of lock-down.
        bells: the channel's pipes.
        spill: those of the channel to the supervisor, if there is one.

    Raises:
        LockdownError: the driver has no node open, or more than a filter can name.
    """
    if not found.nodes:
        raise LockdownError("the engine computes on a GPU and has none of its driver's device nodes open")
    if len(found.nodes) > MOST_DESCRIPTORS or len(found.wakes) > MOST_DESCRIPTORS // 2:
        raise LockdownError(
            f"the driver has {len(found.nodes)} nodes and {len(found.wakes)} events open, more than a filter can name"
        )
    pairs = (bells,) if spill is None else (bells, spill)
    outbound = (*(pair.outbound for pair in pairs), STDERR, *found.wakes)
    inbound = (*(pair.inbound for pair in pairs), *found.wakes)
    memory = tuple(call for call in HOST_MEMORY if call.name != "mmap")
    return (
        *_on(found.nodes, ON_NODES),
        Call(
            "write",
            1,
            64,
            "ring the host's bell; wake a thread of the driver; the last line on stderr",
            (Argument(0, outbound),),
        ),
        Call(
            "read",
            0,
            63,
            "take the rings off our own bell; a thread of the driver has been woken",
            (Argument(0, inbound),),
        ),
        *WAITING,
        DEVICE_MMAP,
        *memory,
        *DEVICE,
        NO_CODE,
        *ENDING,
    )


def _on(descriptors: tuple[int, ...], calls: tuple[Call, ...]) -> tuple[Call, ...]:
    """The calls with one more condition: the first argument is one of these descriptors."""
    return tuple(replace(call, arguments=(Argument(0, descriptors), *call.arguments)) for call in calls)


ON_NODES = (Call("ioctl", 16, 29, "the driver takes and maps memory, loads modules, makes events"),)
"""What is called on the driver's nodes and on nothing else. Further ones are a line each, with the reason, once
``athanor sandbox calls --collect`` has reported them from a card."""

DEVICE_MMAP = Call(
    "mmap",
    9,
    222,
    "tensors; memory of the device, shared with the driver through its node; never executable",
    (
        Argument(2, (0,), PROT_EXEC),
        Argument(3, (MAP_PRIVATE | MAP_ANONYMOUS, MAP_SHARED), MAP_SHARED | MAP_PRIVATE | MAP_ANONYMOUS),
    ),
)
"""Shared maps of any open descriptor: a filter cannot ask for one pair of flag and descriptor or another. What is open
is the driver's nodes, the ring, which is mapped already, and read-only files."""

DEVICE = (
    Call("nanosleep", 35, 101, "the driver's waits that spin and then sleep"),
    Call("mbind", 237, 235, "the driver places page-locked memory"),
    Call("get_mempolicy", 239, 236, "the driver asks where memory lies"),
)
"""What the driver's library calls beside what it shares with the engine; further ones are a line each, as above."""


def find_descriptors(links: Mapping[int, str], ours: tuple[int, ...]) -> Descriptors:
    """Sort out what is open. Pure.

    Args:
        links: what each descriptor is, as /proc names it.
        ours: those of the channels; standard input, output and error are never the driver's.
    """
    others = {fd: link for fd, link in sorted(links.items()) if fd > STDERR and fd not in ours}
    return Descriptors(
        tuple(fd for fd, link in others.items() if link.startswith(NODES)),
        tuple(fd for fd, link in others.items() if link == EVENTS or link.startswith(PIPE)),
    )


def hold_management() -> bool:
    """Open NVML for good, if it is there: torch asks it what is free when memory runs out, and it would have to open
    nodes then. Gives whether it is open; only before lock-down."""
    try:
        import ctypes  # here alone: nothing of the engine holds a way to foreign code once it serves

        return int(ctypes.CDLL(_MANAGEMENT).nvmlInit_v2()) == 0
    except (OSError, AttributeError):
        return False


def open_descriptors() -> dict[int, str]:
    """The open descriptors of this process and what they are; only before lock-down."""
    links = {}
    for name in os.listdir(_OPEN):
        try:
            links[int(name)] = os.readlink(_OPEN / name)
        except OSError:
            continue  # the one by which the folder was listed
    return links
