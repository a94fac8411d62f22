"""Precedence of the gateway's loop, and that nothing which it makes inherits it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from appliance.operator.child import GATEWAY_NICENESS

CHILD = """
import errno, json, os, sys, threading
from appliance.operator import child
refusal = int(sys.argv[1])
def refuse(*_):
    raise OSError(refusal, os.strerror(refusal))
if refusal:
    os.sched_setscheduler = refuse
child.take_precedence()
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
    code = f"import os; os.setpriority(0, 0, {GATEWAY_NICENESS})"
    return subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL, check=False).returncode == 0


def test_what_the_loop_makes_does_not_inherit_its_precedence() -> None:
    """Neither a thread nor a process; where this user may not take it, nobody has it."""
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    own, made = (GATEWAY_NICENESS, 0) if may() else (usual, usual)
    assert nice_values(0) == {"own": own, "thread": made, "process": made}


@pytest.mark.parametrize("refusal", [1, 22])
def test_without_a_way_to_keep_it_from_children_nobody_has_it(refusal: int) -> None:
    """A filter of system calls may refuse that call alone (EPERM; a unit's ``RestrictRealtime=`` does), and a kernel
    may not know it (EINVAL; gVisor does not): then the loop begins all the same, as a thread like all others."""
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    assert nice_values(refusal) == {"own": usual, "thread": usual, "process": usual}
