"""A short slice of the processor for a thread that wakes often and works little, as the gateway's does.

Linux gives a thread that wakes the core by its virtual deadline: the slice that it asks for counts, not its urgency.
With the slice of a thread that computes it may wait for several of those, some milliseconds each; with a short one it
is served before them and takes no larger share than before (EEVDF: the kernel's documentation of the scheduler,
"sched-eevdf"; slices of one's own since Linux 6.12). What asks for a slice gives up the core that much more often,
which costs a thread that computes for long, so threads made later do not inherit it.
"""

from __future__ import annotations

import ctypes
import platform

SLICE_NS = 100_000
"""Nanoseconds of the slice: the least that the kernel takes. A turn of the gateway's loop that answers a request takes
about as long."""

_CALLS = {"x86_64": (315, 314), "aarch64": (275, 274)}
"""Numbers of ``sched_getattr`` and ``sched_setattr``, which the C library of Debian 12 does not offer."""

_OTHER = 0
"""SCHED_OTHER, the policy of threads that have asked for none."""

_RESET_ON_FORK = 1
"""SCHED_FLAG_RESET_ON_FORK."""


class _Attributes(ctypes.Structure):
    """``struct sched_attr`` of Linux, its first version (sched_setattr(2))."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def ask_short_slice() -> bool:
    """Ask for a slice of ``SLICE_NS`` for the calling thread; its nice value stays.

    Returns:
        Whether the kernel has it now. False: a kernel before 6.12, which keeps its own slices, an unknown
        architecture, another policy than the ordinary one, or a refusal.
    """
    return set_slice(0, SLICE_NS) and slice_of(0) == SLICE_NS


def slice_of(thread: int) -> int:
    """Return the nanoseconds of a thread's slice (its number; 0: the calling one); 0 where the kernel tells none."""
    found = _attributes(thread)
    return 0 if found is None else int(found.runtime)


def set_slice(thread: int, nanoseconds: int) -> bool:
    """Ask for a slice for a thread of the ordinary policy; 0: the kernel's own. Returns whether nothing was in the
    way; what the kernel made of it tells ``slice_of``."""
    now = _attributes(thread)
    if now is None or now.policy != _OTHER:
        return False
    wanted = _Attributes(now.size, _OTHER, now.flags | _RESET_ON_FORK, now.nice, runtime=nanoseconds)
    return not _libc().syscall(_CALLS[platform.machine()][1], thread, ctypes.byref(wanted), 0)


def _attributes(thread: int) -> _Attributes | None:
    """Attributes of a thread; None where they cannot be had."""
    if platform.machine() not in _CALLS:
        return None
    found, size = _Attributes(), ctypes.sizeof(_Attributes)
    if _libc().syscall(_CALLS[platform.machine()][0], thread, ctypes.byref(found), size, 0):
        return None
    found.size = size
    return found


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
