"""Sleep of loops that look at something now and then: all of a process wake up together.

Each wake-up of an idle process costs some 50 to 100 us of processor time, whatever is done in it. So these loops do not
sleep for their period but until its next multiple on the clock of the event loop: those with periods of 0.5, 1, 2 and
5 s wake a process twice a second, not nearly four times.
"""

from __future__ import annotations

import asyncio

LEAST_PART = 0.1
"""Part of the period that a sleep takes at least: a timer that ends a little early does not make its loop run twice."""


def until_next(now: float, period_s: float) -> float:
    """Return the seconds from ``now`` until a multiple of the period: ``LEAST_PART`` to 1 + ``LEAST_PART`` periods."""
    return ((now + LEAST_PART * period_s) // period_s + 1) * period_s - now


async def aligned_sleep(period_s: float) -> None:
    """Sleep until the next multiple of the period, at most 1.1 periods.

    Args:
        period_s: seconds from one wake-up to the next of a loop that does nothing but sleep.
    """
    await asyncio.sleep(until_next(asyncio.get_running_loop().time(), period_s))
