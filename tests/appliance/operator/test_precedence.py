"""Precedence of the gateway's loop: who has it, and when it is given back."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from appliance.operator.precedence import FLOODED_SHARE, FREE_SHARE, MOST_SHARE, NICENESS, precedes

CHILD = """
import errno, json, os, sys, threading
from appliance.operator.precedence import Precedence
refusal = int(sys.argv[1])
def refuse(*_):
    raise OSError(refusal, os.strerror(refusal))
if refusal:
    os.sched_setscheduler = refuse
Precedence().take()
found = {"own": os.getpriority(os.PRIO_PROCESS, 0)}
def look():
    found["thread"] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
thread = threading.Thread(target=look)
thread.start()
thread.join()
inwards, outwards = os.pipe()
if not os.fork():
    os.write(outwards, str(os.getpriority(os.PRIO_PROCESS, 0)).encode())
    os._exit(0)
found["process"] = int(os.read(inwards, 16))
print(json.dumps(found))
"""


def nice_values(refusal: int) -> dict[str, int]:
    """Nice values of a thread that takes precedence, and of what it makes; ``refusal``: error number of the call that
    keeps those from inheriting it, 0 for none."""
    command = [sys.executable, "-c", CHILD, str(refusal)]
    return dict(json.loads(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout))


def may() -> bool:
    """Whether this user may take the nice value."""
    code = f"import os; os.setpriority(0, 0, {NICENESS})"
    return subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL, check=False).returncode == 0


def test_what_the_loop_makes_does_not_inherit_its_precedence() -> None:
    """Neither a thread nor a process; where this user may not take it, nobody has it."""
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    own, made = (NICENESS, 0) if may() else (usual, usual)
    assert nice_values(0) == {"own": own, "thread": made, "process": made}


@pytest.mark.parametrize("refusal", [1, 22])
def test_without_a_way_to_keep_it_from_children_nobody_has_it(refusal: int) -> None:
    """A filter of system calls may refuse that call alone (EPERM; a unit's ``RestrictRealtime=`` does), and a kernel
    may not know it (EINVAL; gVisor does not): then the loop begins all the same, as a thread like all others."""
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    assert nice_values(refusal) == {"own": usual, "thread": usual, "process": usual}


@pytest.mark.parametrize(
    ("before", "ran", "waited", "after"),
    [
        (True, MOST_SHARE, 0.0, True),
        (True, MOST_SHARE - 0.1, 0.11, False),
        (False, FREE_SHARE, 0.0, False),
        (False, FREE_SHARE - 0.01, 0.0, True),
        (False, 0.1, 0.4, True),
        (False, 0.1, FLOODED_SHARE - 0.1, False),
    ],
)
def test_precedence_is_given_back_and_taken_again(before: bool, ran: float, waited: float, after: bool) -> None:
    """A loop that wants the processor most of the time loses it. It has it again once it runs for less, also where it
    waits at each of its turns beside what computes; not while it waits all the time."""
    assert precedes(before, ran, ran + waited) is after


FLOODED = """
import asyncio, json, os, sys, time
from appliance.operator import precedence as module
if sys.argv[1] == "one":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
module.PERIOD_S = 0.2
precedence, found = module.Precedence(), []
async def flood():
    following = asyncio.create_task(precedence.follow())
    for works in (True, False):
        until = time.monotonic() + 20
        while time.monotonic() < until and precedence.held is works:
            begin = time.monotonic()
            while works and time.monotonic() - begin < 0.05:
                pass
            await asyncio.sleep(0 if works else 0.05)
            if following.done():
                break
        found.append(os.getpriority(os.PRIO_PROCESS, 0))
    following.cancel()
precedence.take()
asyncio.run(flood())
print(json.dumps(found))
"""


@pytest.mark.parametrize("processors", ["one", "all"])
def test_a_loop_that_computes_without_end_leaves_a_part_of_the_only_processor(processors: str) -> None:
    """There it has the ordinary nice value, whatever else the machine computes, until it rests. The control are several
    processors, where others are left."""
    if processors == "all" and len(os.sched_getaffinity(0)) < 2:
        pytest.skip("there is one processor")
    if not may():
        pytest.skip("this user may not take the nice value")
    command = [sys.executable, "-c", FLOODED, processors]
    found = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)
    flooded = os.getpriority(os.PRIO_PROCESS, 0) if processors == "one" else NICENESS
    assert found == [flooded, NICENESS]
