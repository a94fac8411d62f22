"""The calendar clock jumps. Clocks that nobody may set (CLOCK_MONOTONIC) do not."""

from __future__ import annotations

from bench.soak.ground import Fault, Ground

JUMPS_S = (3_600.0, -3_600.0, 86_400.0 * 400, -86_400.0 * 400, 0.5, -0.5)


async def _jumps(ground: Ground) -> None:
    assert ground.clock is not None, "it was asked for before"
    try:
        for jump in ground.draw.sample(JUMPS_S, 4):
            ground.clock(jump)
            await ground.last(0.5, 1.5)
    finally:
        ground.clock(0.0)


FAULTS = (
    Fault("clock-jumps", "the calendar clock of the host processes jumps by up to 400 days", _jumps,
          needs=lambda ground: "" if ground.clock else "no C compiler, or no overlay file system"),
)  # fmt: skip
