"""The list of system calls on a GPU: what it says, and a real process under it with other files for the driver's."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

import pytest

from engine.errors import LockdownError
from engine.sandbox.allowed_calls import MAP_ANONYMOUS, MAP_PRIVATE, MAP_SHARED, PROT_EXEC, Bells, Call, engine_calls
from engine.sandbox.allowed_calls_gpu import (
    MOST_DESCRIPTORS,
    Descriptors,
    find_descriptors,
    gpu_engine_calls,
    hold_management,
    open_descriptors,
)
from engine.sandbox.filter import ALLOW, MACHINES, TRAP, compile_filter
from engine.sandbox.lockdown import lock_down
from tests.engine.sandbox.test_lockdown import run

BELLS = Bells(5, 6)
CALLS = gpu_engine_calls(Descriptors((9, 11), (12,)), BELLS)
PLAIN = engine_calls(BELLS, threads=1, generates_code=False)


def says(calls: tuple[Call, ...], name: str, *arguments: int, machine: str = "x86_64") -> bool:
    """Whether the filter lets a call through."""
    call = next(call for call in CALLS if call.name == name)
    number = call.x86_64 if machine == "x86_64" else call.aarch64
    assert number is not None
    answer = run(compile_filter(calls, machine), number, *arguments, arch=MACHINES[machine].audit_arch)
    assert answer in (ALLOW, TRAP)
    return answer == ALLOW


@pytest.mark.parametrize("machine", list(MACHINES))
def test_the_drivers_descriptors_decide(machine: str) -> None:
    """Ioctls go to its nodes only, reads and writes to bells and its events; maps may be shared, never executable."""
    shared, private = MAP_SHARED, MAP_PRIVATE | MAP_ANONYMOUS
    assert [fd for fd in range(16) if says(CALLS, "ioctl", fd, machine=machine)] == [9, 11]
    assert [fd for fd in range(16) if says(CALLS, "write", fd, machine=machine)] == [2, 6, 12]
    assert [fd for fd in range(16) if says(CALLS, "read", fd, machine=machine)] == [5, 12]
    assert says(CALLS, "mmap", 0, 4096, 3, shared, 9, machine=machine)
    assert says(CALLS, "mmap", 0, 4096, 3, private, machine=machine)
    for flags in (shared | MAP_ANONYMOUS, MAP_PRIVATE, MAP_SHARED | MAP_PRIVATE):
        assert not says(CALLS, "mmap", 0, 4096, 3, flags, machine=machine)
    assert not says(CALLS, "mmap", 0, 4096, PROT_EXEC, shared, machine=machine)
    assert not says(CALLS, "mprotect", 0, 4096, PROT_EXEC, machine=machine)


def test_a_cpu_engine_has_none_of_it() -> None:
    """The other list has no ioctl, no shared map; and this one nothing that opens, starts or connects anything."""
    assert not says(PLAIN, "ioctl", 9)
    assert not says(PLAIN, "mmap", 0, 4096, 3, MAP_SHARED, 9)
    names = {call.name for call in CALLS}
    assert not names & {"open", "openat", "openat2", "clone", "clone3", "fork", "execve", "socket", "connect", "dup"}
    assert len(names) == len(CALLS) <= 40
    assert all(len(call.reason.split()) >= 3 for call in CALLS)


def test_a_driver_with_nothing_or_too_much_open_is_refused() -> None:
    """No node at all means that something else is the GPU; too many do not fit a filter, whose most are compiled."""
    with pytest.raises(LockdownError, match="none of its driver's device nodes"):
        gpu_engine_calls(Descriptors((), (3,)), BELLS)
    with pytest.raises(LockdownError, match="more than a filter can name"):
        gpu_engine_calls(Descriptors(tuple(range(MOST_DESCRIPTORS + 1)), ()), BELLS)
    most = Descriptors(tuple(range(100, 100 + MOST_DESCRIPTORS)), tuple(range(400, 400 + MOST_DESCRIPTORS // 2)))
    calls = gpu_engine_calls(most, BELLS, Bells(7, 8))
    assert all(says(calls, "ioctl", fd) for fd in most.nodes)
    assert all(says(calls, "read", fd) for fd in (*most.wakes, 5, 7))


def test_descriptors_are_told_apart() -> None:
    """The driver's are nodes, events and pipes that are not the channel's and not those of standard output."""
    inbound, outbound = os.pipe()
    theirs, other = os.pipe()
    event, null = os.eventfd(0), os.open(os.devnull, os.O_RDWR)
    try:
        links = open_descriptors()
        assert links[event] == "anon_inode:[eventfd]"
        links |= {null: "/dev/nvidia0", 2: "pipe:[1]"}
        found = find_descriptors(links, (inbound, outbound))
        assert found.nodes == (null,)
        assert {theirs, other, event} <= set(found.wakes)
        assert not {0, 1, 2, inbound, outbound, null} & set(found.wakes)
    finally:
        for fd in (inbound, outbound, theirs, other, event, null):
            os.close(fd)


def test_a_machine_without_the_drivers_library_is_no_error() -> None:
    """Where NVML is absent nothing is opened, and nothing raised: what it is for is told by its absence alone."""
    before = open_descriptors()
    there = any(map(os.path.exists, ("/dev/nvidiactl", "/nvidia")))
    assert hold_management() is False or there
    assert there or open_descriptors().keys() == before.keys()


LIBC = ctypes.CDLL(None)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]


def _status(action: Callable[[Bells, int, int], object]) -> int:
    """The status of a child that is locked down with a file for the driver's node, and does this."""
    pid = os.fork()
    if pid == 0:
        try:
            inbound, outbound = os.pipe()
            node, event = os.memfd_create("node"), os.eventfd(1)
            os.truncate(node, 4096)
            bells = Bells(inbound, outbound)
            lock_down(gpu_engine_calls(Descriptors((node,), (event,)), bells))
            action(bells, node, event)
        except OSError:
            pass
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_real_process_under_the_list() -> None:
    """The kernel lets through what a driver needs on its own descriptors, and ends the process for the same on others
    and for everything that opens."""
    within: tuple[Callable[[Bells, int, int], object], ...] = (
        lambda _bells, node, _event: os.isatty(node),  # an ioctl
        lambda _bells, node, _event: LIBC.mmap(None, 4096, 3, MAP_SHARED, node, 0),
        lambda _bells, _node, event: os.eventfd_read(event),
        lambda _bells, _node, event: os.eventfd_write(event, 1),
        lambda bells, _node, _event: os.write(bells.outbound, b"x"),
    )
    beyond: tuple[Callable[[Bells, int, int], object], ...] = (
        lambda bells, _node, _event: os.isatty(bells.inbound),
        lambda _bells, node, _event: os.read(node, 1),
        lambda _bells, _node, _event: os.open("/dev/null", os.O_RDWR),
        lambda _bells, _node, _event: os.eventfd(0),
        lambda _bells, node, _event: LIBC.mmap(None, 4096, 1 | PROT_EXEC, MAP_SHARED, node, 0),
        lambda _bells, node, _event: os.dup(node),
    )
    assert [_status(action) for action in within] == [0] * len(within)
    assert [_status(action) for action in beyond] == [-signal.SIGSYS] * len(beyond)
