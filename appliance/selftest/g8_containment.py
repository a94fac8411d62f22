"""G8: a request cannot end service for others, and a compromised sandbox reaches nothing.

Not covered: code that runs inside an engine reads the KV of every tenant of that engine; drivers of accelerators that
are passed into a sandbox; the processor's own side channels.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from signal import SIGSYS
from statistics import median

from appliance.selftest import deaths, exhaustion, fuzzed_requests, hostile_guest, intruder
from appliance.selftest.real_appliance import RealAppliance, real_appliance
from appliance.selftest.result import Result, judged
from isolation.gvisor.gvisor_runtime import GvisorRuntime
from isolation.ipc.messages import Role

COMMAND = "athanor selftest --only G8"
MOSTLY = 0.75
"""Share of the attacks that must succeed outside a sandbox, for the control: kernels differ in their features."""

ENDED = {Role.ENGINE: 0.9, Role.TEXT: 0.75}
"""Share of the attempts that end a locked-down process; the others need no unlisted call, and achieve nothing. A text
worker that looks up files gets "not found" and survives."""

CHANGED_FRAMES = (20_000, 1_000_000)
"""Frames read while they change, in the short and the full form."""

REQUESTS = (1_500, 100_000)
"""Fuzzed requests, in the short and the full form."""

KILLS = (4, 200)
"""Processes killed, in the short and the full form: engine, text, gateway and supervisor in turn, each once or fifty
times."""

SEED = 20_261_122
RECOVERY_S = 5.0
"""Largest number of seconds from a kill to the next right answer."""


def run(full: bool) -> list[Result]:
    """Run every row; a row that this machine cannot show does not prevent the others."""
    rows: list[Result] = []
    for name, part in (("sandbox", inside_sandboxes), ("service", whole_appliance)):
        try:
            rows += part(full)
        except intruder.CannotBeShownError as error:
            rows.append(Result(f"G8.{name}", "absent", str(error), "it starts here", COMMAND))
    return rows


def inside_sandboxes(full: bool) -> list[Result]:
    """Run the rows about what sandboxes cannot reach, take or break.

    Raises:
        CannotBeShownError: no real sandbox can be started here.
    """
    with intruder.gvisor() as runtime:
        control = intruder.outside()
        reached = [reach(role, intruder.inside(runtime, role), control) for role in (Role.ENGINE, Role.TEXT)]
        copy = reach(Role.ENGINE, intruder.inside(runtime, Role.ENGINE, restored=True), control)
        reached.append(replace(copy, id="G8.reach.restored"))
        for role in (Role.ENGINE, Role.TEXT):
            reached.append(locked(role, intruder.inside(runtime, role, locked=True), control))
        return [*reached, reach_control(control), *greed(runtime), *wire(runtime, CHANGED_FRAMES[full])]


def whole_appliance(full: bool) -> list[Result]:
    """Run the rows about the effect of requests and deaths on service.

    Raises:
        CannotBeShownError: the appliance does not start here.
    """
    with real_appliance() as appliance:
        return asyncio.run(served(appliance, REQUESTS[full], KILLS[full]))


async def served(appliance: RealAppliance, requests: int, kills: int) -> list[Result]:
    """Send fuzzed requests to a whole appliance, and kill its processes."""
    before = await appliance.generations()
    fuzzed = await fuzzed_requests.send(appliance, requests, SEED)
    after = await appliance.generations()
    died = sum(after.values()) - sum(before.values())
    good = fuzzed.by_status["200"] + fuzzed.by_status["OK"]
    said = f"{died} sandboxes died of {fuzzed.sent} fuzzed requests, {good} of which were served"
    said += f"; {len(fuzzed.odd)} odd answers" + "".join(f"; {one}" for one in fuzzed.odd[:3])
    found = await deaths.kill_again_and_again(appliance, kills, SEED)
    times = {role: [seconds for seconds, whose in found.recovery_s if whose == role] for role in found.kills}
    by_role = ", ".join(f"{role} {max(some):.1f} s (median {median(some):.1f})" for role, some in times.items())
    harmless = found.wrong == 0 and found.untyped == 0 and not found.left
    passed = harmless and found.slowest_s <= RECOVERY_S
    figure = f"slowest recovery from {kills} kills: {by_role}; {found.wrong} wrong answers of {found.answered}, "
    figure += f"{found.untyped} untyped errors, {len(found.left)} things left"
    figure += f", {len(appliance.checkpoints())} checkpoints"
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
            figure=f"{found.boots} boots counted after {kills} kills",
            bar="deaths are seen",
            command=COMMAND,
        ),
    ]


def reach(role: Role, found: intruder.Findings, control: intruder.Findings) -> Result:
    """Build the row of one sandbox: every attack of the control was tried, none reached anything."""
    reached = sorted(name for name, row in found.items() if row["outcome"] != "refused")
    missing = sorted(control.keys() - found.keys())
    figure = f"{len(reached)} of {len(found)} attempts reached anything"
    figure += "".join(f"; {name}: {found[name]['said']}" for name in reached[:5])
    figure += f"; not tried: {', '.join(missing)}" if missing else ""
    return judged(
        f"G8.reach.{role.name.lower()}",
        not reached and not missing,
        figure=figure,
        bar="0 reached, all tried",
        command=COMMAND,
    )


def locked(role: Role, found: intruder.Findings, control: intruder.Findings) -> Result:
    """Build the row of a serving program: each attempt ends the process that makes it."""
    row = reach(role, found, control)
    ended = sum(one["said"] == f"the process ended with {-SIGSYS}" for one in found.values())
    figure = f"{ended} of {len(found)} attempts ended the process that made them; {row.figure}"
    passed = row.verdict == "pass" and ended >= ENDED[role] * len(found)
    bar = f"{ENDED[role]:.0%} ended, 0 reached"
    return judged(f"G8.reach.locked.{role.name.lower()}", passed, figure=figure, bar=bar, command=COMMAND)


def reach_control(control: intruder.Findings) -> Result:
    """Build the control's row: outside a sandbox most attacks succeed, and some of every kind."""
    reached = {name for name, row in control.items() if row["outcome"] == "reached"}
    kinds = {name.partition(".")[0] for name in control}
    without = sorted(kinds - {name.partition(".")[0] for name in reached})
    figure = f"{len(reached)} of {len(control)} reach outside a sandbox"
    figure += f"; none of {', '.join(without)}" if without else ""
    passed = not without and len(reached) >= MOSTLY * len(control) > 0
    return judged("G8.reach.control", passed, figure=figure, bar="three quarters, some of every kind", command=COMMAND)


def greed(runtime: GvisorRuntime) -> list[Result]:
    """Measure what sandboxes take, and check that the host is unaffected."""
    all_taken = [exhaustion.take(kind, runtime) for kind in exhaustion.KINDS]
    harmful = [taken.kind for taken in all_taken if not taken.harmless]
    said = ", ".join(f"{taken.kind} {taken.said}" for taken in all_taken)
    figure = f"{len(harmful)} of {len(all_taken)} were felt outside" + "".join(f"; {kind}" for kind in harmful)
    bar = "0: programs of the host start beside it, nothing grows, nothing is left"
    takes = [taken for taken in all_taken if taken.said != "took 0"]
    return [
        judged("G8.greed", not harmful, figure=figure, bar=bar, command=COMMAND),
        judged(
            "G8.greed.control",
            len(takes) == len(all_taken),
            figure=said,
            bar="each takes until it is stopped",
            command=COMMAND,
        ),
    ]


def wire(runtime: GvisorRuntime | None, frames: int) -> list[Result]:
    """Check the host's response to guests that violate the wire protocol, and to memory that changes while it is
    read."""
    ended = [hostile_guest.one_way(way, runtime) for way in hostile_guest.ENDED]
    unseen = [seen.way for seen in ended if not seen.at_fault]
    borne = [hostile_guest.one_way(way, runtime) for way in hostile_guest.BORNE]
    least = hostile_guest.LEAST_TURNS
    slow = [f"{one.way}: {one.turns} turns {one.reason}" for one in borne if one.turns < least or one.reason]
    changed = hostile_guest.read_while_it_changes(frames, runtime)
    done = f"{len(ended) - len(unseen)} of {len(ended)} breaches ended their sandbox, {len(borne) - len(slow)} of"
    figure = f"{done} {len(borne)} floods borne" + "".join(f"; {one}" for one in (*unseen, *slow))
    counted = changed.whole + changed.refused
    return [
        judged("G8.wire", not unseen and not slow, figure=figure, bar="all ended, all borne", command=COMMAND),
        judged(
            "G8.wire.changed",
            counted == frames,
            figure=f"{counted} of {frames} frames gave a message or the protocol's error",
            bar="all",
            command=COMMAND,
        ),
        judged(
            "G8.wire.control",
            changed.fooled > 0,
            figure=f"{changed.fooled} times a reader that looks twice would have been fooled",
            bar="at least 1",
            command=COMMAND,
        ),
    ]
