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

NICENESS = -10
"""Nice value of the loop: nine times the weight of an ordinary thread (sched(7)). Beside models that wake it takes a
tenth of a core."""

PERIOD_S = 2.0
"""Seconds between two looks at what the loop takes: that of the watch over engines, which wakes the loop as well."""

MOST_SHARE = 0.5
"""Part of the processors' time above which the loop has no precedence: as much as it would have beside one other."""

FREE_SHARE = 0.25
"""Part below which it has precedence again: less than it would take without, where the flood went on."""


def precedes(before: bool, share: float) -> bool:
    """Return whether a loop that took this part of the processors' time has precedence from now on. Pure."""
    return share <= MOST_SHARE if before else share < FREE_SHARE


class Precedence:
    """Precedence of the thread that makes this and calls its methods."""

    def __init__(self) -> None:
        self._processors = len(os.sched_getaffinity(0))
        self._usual = os.getpriority(os.PRIO_PROCESS, 0)
        self._permitted = False
        self.held = False
        """Whether the thread has precedence now."""
        self._then, self._used_s = time.monotonic(), time.thread_time()

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
        """Give precedence back, or take it again, by what the thread used since the last look."""
        now, used_s = time.monotonic(), time.thread_time()
        share = (used_s - self._used_s) / max(self._processors * (now - self._then), 1e-9)
        self._then, self._used_s = now, used_s
        if self._permitted and (held := precedes(self.held, share)) is not self.held:
            self._hold(held=held)

    async def follow(self) -> None:
        """Look every ``PERIOD_S`` until cancelled; ends at once where there is nothing to give back."""
        while self._permitted:
            await aligned_sleep(PERIOD_S)
            self.look()

    def _hold(self, *, held: bool) -> None:
        try:
            os.setpriority(os.PRIO_PROCESS, 0, NICENESS if held else self._usual)
        except OSError:
            self._permitted = False
        else:
            self.held = held
