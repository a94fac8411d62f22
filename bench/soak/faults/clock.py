"""The calendar clock jumps. Clocks that nobody may set (CLOCK_MONOTONIC) do not."""

from __future__ import annotations

import json
import time

from appliance.selftest.raw_http import request_bytes, talk
from bench.soak.clients import TIMEOUT_S
from bench.soak.ground import Fault, Ground
from bench.soak.questions import BODIES, MARK_BITS, encoded

NEAR_S = 120.0
"""Of four jumps at least two are an hour or more."""

JUMPS_S = (3_600.0, -3_600.0, 86_400.0 * 400, -86_400.0 * 400, 0.5, -0.5)


async def _jumps(ground: Ground) -> str:
    assert ground.clock is not None, "it was asked for before"
    worst = 0.0
    try:
        for jump in ground.draw.sample(JUMPS_S, 4):
            ground.clock(jump)
            await ground.last(0.5, 1.5)
            if abs(jump) > abs(worst):
                worst, off = jump, await _off_s(ground)
    finally:
        ground.clock(0.0)
    return f"answers were dated {off:+.0f} s off" if abs(off - worst) < NEAR_S else ""


async def _off_s(ground: Ground) -> float:
    """By how much the time in an answer differs from ours."""
    proof = ("authorization", f"Bearer {ground.served.keys['alpha']}"), ("content-type", "application/json")
    body = encoded(BODIES["whole"], 1 + ground.draw.getrandbits(MARK_BITS))
    answer = await talk(ground.served.http_port, request_bytes("POST", "/v1/completions", body, *proof), TIMEOUT_S)
    return float(json.loads(answer.partition(b"\r\n\r\n")[2])["created"]) - time.time()


FAULTS = (
    Fault(
        "clock-jumps",
        "the calendar clock of the host processes jumps by up to 400 days",
        _jumps,
        needs=lambda ground: "" if ground.clock else "no C compiler, or no overlay file system",
    ),
)
