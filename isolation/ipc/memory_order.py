"""What this wire asks of the processor and of Python's memory operations.

Two processes share plain memory and no lock. Three facts make that sound on x86-64, and the
module refuses any other machine, because a weaker memory order would break it silently:

1. *A cursor is never torn.* ``memoryview.cast("Q")[i]`` reads and writes an aligned 64-bit word
   with one instruction. ``struct.pack_into`` does not: it fills its target with zeros first, and
   a reader sees the zeros.
2. *Frame before cursor.* Stores become visible in program order, loads are done in program order,
   and no store overtakes an older load (total store order, Intel SDM volume 3, "Memory Ordering
   in P6 and More Recent Processor Families"). So a reader that sees the new tail sees the frame
   under it, and a writer that sees the new head may overwrite what lies below it. CPython moves
   no item assignment past another.
3. *Flag before look.* A peer that goes to sleep stores its flag and then looks at the cursor; a
   writer stores the cursor and then looks at the flag. Here x86-64 does reorder: a load may
   overtake an older store to another address, and then both miss each other. Two Python
   processes that do nothing else on two cores miss each other in 1 to 4 of 100 rounds. The remedy
   is a full fence between store and load on both sides. ``fence`` gets one from an uncontended
   lock: taking it is a locked instruction, which drains the store buffer.

That a lock fences is a property of CPython on this processor and no promise of the language. So
nobody stakes its life on it. The host looks again ``LOOK_AGAIN_S`` after it has sent something or
has lain down to wait, at both rings: at its own for frames whose bell was lost, and at the guest's
for a sleeper whose bell was (``Channel.remind``).
A lost wake-up would cost that time once, never a hang. It can only be lost while the sleeper lies
down, so who has looked again in vain may look less and less often. That suffices because a store leaves the
store buffer within nanoseconds by itself: at the next look the other side's cursor is there. The guest does not look
again by itself: an idle sandbox is woken by nothing but what is sent to it.
"""

from __future__ import annotations

import os
import sys
from _thread import allocate_lock

from isolation.ipc.errors import UnsupportedMachineError

LOOK_AGAIN_S = 0.1
"""Seconds that the host trusts the doorbells before looking at the rings themselves."""

LOOK_AGAIN_GROWTH = 8
"""Factor from the time before one look to the time before the next. The first look finds whatever was lost; further
ones are for a kernel that loses a wake-up."""

LOOK_AGAIN_AT_MOST_S = 4.0
"""Longest time between two looks, in seconds: less than the gateway waits for the answer to a probe
(``appliance.gateway.sandboxes.probe.LATE_S``), so that no lost wake-up counts as a sandbox that hangs."""


def later_look_s(look_s: float) -> float:
    """Return the seconds before the look that follows one in vain, from the seconds before that one."""
    return min(LOOK_AGAIN_GROWTH * look_s, LOOK_AGAIN_AT_MOST_S)


_lock = allocate_lock()
_acquire = _lock.acquire
_release = _lock.release


def fence() -> None:
    """Make all earlier stores of this thread visible before any later load of it; about 0.1 us."""
    # A second thread may hold the lock for some 100 ns. Then this acquire waits, and still fences.
    _acquire()
    _release()


def require_total_store_order() -> None:
    """Refuse machines on which the reasoning above does not hold.

    Raises:
        UnsupportedMachineError: the processor is not x86-64, or integers are not little-endian.
    """
    machine = os.uname().machine
    if machine not in ("x86_64", "AMD64") or sys.byteorder != "little":
        raise UnsupportedMachineError(f"the shared-memory wire needs the memory order of x86-64, and this is {machine}")
