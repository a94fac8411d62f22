"""No descriptor is left: the limit of a running process is lowered to what it has open."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Iterator

from bench.soak.answers import AWAY
from bench.soak.ground import Act, Fault, Ground
from bench.soak.served import until_pid


@contextlib.contextmanager
def exhausted(pid: int, spare: int) -> Iterator[None]:
    """Leave a process this many further descriptors for the time of a block."""
    numbers = [int(name) for name in os.listdir(f"/proc/{pid}/fd")]
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (max(numbers) + 1 + spare, before[1]))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def _exhausted(role: str, spare: int, *, victim: str = "") -> Act:
    async def act(ground: Ground) -> None:
        doomed = await until_pid(ground.served, victim) if victim else 0
        with exhausted(await until_pid(ground.served, role), spare):
            await ground.last(0.5, 1.0)
            if doomed:
                os.kill(doomed, signal.SIGKILL)
            await ground.last(2.0, 4.0)

    return act


FAULTS = (
    Fault("fds-gateway", "the gateway has no descriptor left", _exhausted("gateway", 0), AWAY),
    Fault("fds-supervisor", "the supervisor has no descriptor left", _exhausted("supervisor", 0)),
    Fault("fds-boot", "the supervisor has two left, and the engine dies",
          _exhausted("supervisor", 2, victim="engine"), AWAY),
    Fault("fds-handover", "the gateway has one left when an engine comes",
          _exhausted("gateway", 1, victim="engine"), AWAY),
)  # fmt: skip
