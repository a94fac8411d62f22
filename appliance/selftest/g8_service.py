"""G8: neither a request nor a death ends service for others."""

from __future__ import annotations

import asyncio
import os
from statistics import median

from appliance.common.figures import counted
from appliance.selftest import deaths, fuzzed_requests
from appliance.selftest.intruder import CannotBeShownError
from appliance.selftest.real_appliance import RealAppliance, real_appliance
from appliance.selftest.result import Result, judged

COMMAND = "athanor selftest --only G8"

REQUESTS = (1_500, 100_000)
"""Fuzzed requests, in the short and the full form."""

KILLS = (4, 200)
"""Processes killed, in the short and the full form: engine, text, gateway and supervisor in turn, each once or fifty
times."""

SEED = 20_261_122
RECOVERY_S = 5.0
"""Largest number of seconds from a kill to the next right answer."""


def run(full: bool) -> list[Result]:
    """Run the rows about the effect of requests and deaths on service."""
    try:
        with real_appliance() as appliance:
            return asyncio.run(served(appliance, REQUESTS[full], KILLS[full]))
    except CannotBeShownError as error:
        return [Result("G8.service", "absent", str(error), "it starts here", COMMAND)]


async def served(appliance: RealAppliance, requests: int, kills: int) -> list[Result]:
    """Send fuzzed requests to a whole appliance, and kill its processes."""
    before = await appliance.generations()
    fuzzed = await fuzzed_requests.send(appliance, requests, SEED)
    after = await appliance.generations()
    died = sum(after.values()) - sum(before.values())
    good = fuzzed.by_status["200"] + fuzzed.by_status["OK"]
    said = f"{counted(died, 'sandbox', 'sandboxes')} died of {fuzzed.sent} fuzzed requests, {good} of which were served"
    said += f"; {len(fuzzed.odd)} odd answers" + "".join(f"; {one}" for one in fuzzed.odd[:3])
    found = await deaths.kill_again_and_again(appliance, kills, SEED)
    times = {role: [seconds for seconds, whose in found.recovery_s if whose == role] for role in found.kills}
    by_role = ", ".join(f"{role} {max(some):.1f} s (median {median(some):.1f})" for role, some in times.items())
    harmless = found.wrong == 0 and found.untyped == 0 and not found.left
    passed = harmless and found.slowest_s <= RECOVERY_S
    figure = f"slowest recovery from {counted(kills, 'kill')}: {by_role}; "
    figure += f"{counted(found.wrong, 'wrong answer')} of {found.answered}, "
    figure += f"{counted(found.untyped, 'untyped error')}, {counted(len(found.left), 'thing')} left"
    figure += f", {counted(len(appliance.checkpoints()), 'checkpoint')}"
    figure += f" (load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores)"
    figure += "".join(f"; {one}" for one in found.left[:3])
    return [
        judged(
            "G8.fuzz",
            died == 0 and not fuzzed.odd and good > 0,
            figure=said,
            bar="0 deaths, 0 odd answers",
            command=COMMAND,
        ),
        judged(
            "G8.deaths", passed, figure=figure, bar=f"<= {RECOVERY_S:g} s, 0 wrong, 0 untyped, 0 left", command=COMMAND
        ),
        judged(
            "G8.deaths.control",
            found.boots >= kills // 4 * 2,
            figure=f"{counted(found.boots, 'boot')} counted after {counted(kills, 'kill')}",
            bar="deaths are seen",
            command=COMMAND,
        ),
    ]
