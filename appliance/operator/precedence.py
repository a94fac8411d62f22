"""Precedence of the gateway's loop: it is served before threads that compute, as long as it leaves them their part.

Beside sandboxes that start, a loop of the ordinary nice value waits for a core up to 0.1 s. A loop that waits most of
the time takes nothing from anybody by going first. One that computes without end, as while a tenant floods it with
requests that are refused, takes nine tenths of its core. It is one thread: where there are several processors the
others are left, and where there is one it gives its precedence back until it has less to do (``bench/flood.py``).
"""

from __future__ import annotations

import os
import time

from appliance.common.aligned_sleep import aligned_sleep
from isolation.host.kernel_file import read_kernel_file

NICENESS = -10
"""Nice value of the loop: nine times the weight of an ordinary thread (sched(7)). Beside models that wake it takes a
tenth of a core."""

PERIOD_S = 2.0
"""Seconds between two looks at what the loop takes: that of the watch over engines, which wakes the loop as well."""

MOST_SHARE = 0.5
"""Part of the time above which a loop that runs or waits for the processor has no precedence on it. Waits count, since
other programs of the machine may leave a flooded loop less than that."""

FREE_SHARE = 0.4
"""Part of the time for which a loop without precedence may run to have it again."""

FLOODED_SHARE = 0.8
"""Part above which a loop without precedence that runs or waits is flooded still, however little it gets: one that has
little to do waits at each of its turns, and not all the time."""

_TIMES = "/proc/thread-self/schedstat"
"""Nanoseconds for which the calling thread ran, and for which it was ready and had no processor (proc(5))."""


def precedes(before: bool, ran: float, wanted: float) -> bool:
    """Return whether a loop that ``ran`` for a part of the time, and ran or waited for the processor for another part,
    has precedence from now on. Pure."""
    return wanted <= MOST_SHARE if before else ran < FREE_SHARE and wanted < FLOODED_SHARE


class Precedence:
    """Precedence of the thread that makes this and calls its methods."""

    def __init__(self) -> None:
        self._usual = os.getpriority(os.PRIO_PROCESS, 0)
        self._permitted = False
        self.held = False
        """Whether the thread has precedence now."""
        self._then, self._times = time.monotonic(), _times()

    def take(self) -> None:
        """Take precedence, where this user may. Threads and processes that this one makes do not inherit it: where the
        kernel or a filter refuses that, nobody has precedence. Under systemd the unit's ``CPUWeight=`` does the same.
        """
        try:
            os.sched_setscheduler(0, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, os.sched_param(0))
        except OSError:
            return
        self._permitted = True
        self._hold(held=True)

    def look(self) -> None:
        """Give precedence back, or take it again, by how long the thread wanted the processor since the last look. What
        cannot be read now, as while no descriptor is left, is read at the next one."""
        now, times = time.monotonic(), _times()
        if times is None:
            return
        passed, before = max(now - self._then, 1e-9), self._times or times
        self._then, self._times = now, times
        ran, waited = ((then - first) / passed for then, first in zip(times, before, strict=True))
        if self._permitted and (held := precedes(self.held, ran, ran + waited)) is not self.held:
            self._hold(held=held)

    async def follow(self) -> None:
        """Look every ``PERIOD_S`` until cancelled; ends at once where there is nothing to give back, or others have
        processors besides."""
        while self._permitted and len(os.sched_getaffinity(0)) == 1:
            await aligned_sleep(PERIOD_S)
            self.look()

    def _hold(self, *, held: bool) -> None:
        try:
            os.setpriority(os.PRIO_PROCESS, 0, NICENESS if held else self._usual)
        except OSError:
            self._permitted = False
        else:
            self.held = held


def _times() -> tuple[float, float] | None:
    """Return the seconds for which the calling thread ran and waited for a processor so far; no waits where the kernel
    does not count them, None where it cannot be asked now."""
    try:
        ran, waited, _ = read_kernel_file(_TIMES).split()
    except FileNotFoundError:
        return time.thread_time(), 0.0
    except (OSError, ValueError):
        return None
    return int(ran) / 1e9, int(waited) / 1e9
