"""SIGSTOP: a process that is there and does nothing, for a while or until somebody ends it."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from bench.soak.answers import AWAY
from bench.soak.ground import Act, Fault, Ground
from bench.soak.served import until_gone, until_pid

STOPPED = "T"

NOTICED_S = 45.0
"""Within which a hung sandbox must have been ended: the step's or the prompt's time-out, and what ending takes."""


def _ended_by_others(role: str) -> Act:
    async def act(ground: Ground) -> str:
        pid = await until_pid(ground.served, role)
        os.kill(pid, signal.SIGSTOP)
        try:
            await until_gone(pid, NOTICED_S * ground.served.patience)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        return "it was ended"

    return act


def _state(pid: int) -> str:
    """One letter (proc_pid_stat(5))."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _asleep(role: str, least_s: float, most_s: float) -> Act:
    async def act(ground: Ground) -> str:
        pid = await until_pid(ground.served, role)
        os.kill(pid, signal.SIGSTOP)
        try:
            await ground.last(least_s, most_s)
            stopped = _state(pid) == STOPPED
        finally:
            os.kill(pid, signal.SIGCONT)
        return "it stood still to the end" if stopped else ""

    return act


FAULTS = (
    Fault("hang-engine", "the engine stops and is ended for it", _ended_by_others("engine"), AWAY),
    Fault("hang-text", "the text sandbox stops and is ended for it", _ended_by_others("text"), AWAY),
    Fault("nap-engine", "the engine stops for less than a step may take", _asleep("engine", 1.0, 3.0)),
    Fault("nap-supervisor", "the supervisor stops for some seconds", _asleep("supervisor", 2.0, 6.0)),
    Fault("nap-gateway", "the gateway stops for longer than a step may take", _asleep("gateway", 6.0, 9.0)),
)
