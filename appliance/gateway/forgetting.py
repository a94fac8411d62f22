"""Wiping of the gateway's memory, so that nothing of a request stays there; for policies with ``retention: none``.

Memory that is freed is overwritten by the C library (the launcher's and the unit's environment ask for that). Four
things stay: the buffer into which the event loop reads from all sockets, which holds the last bodies until others have
come; objects in cycles, which nobody frees until the collector looks; small pieces that the C library keeps for each
thread, which makes small objects cheaper; and what a request that runs still needs. So the buffer is filled with zeros,
garbage is collected and the kept pieces are taken and overwritten, every few seconds, whether anybody called or not.
(The thread that parses large bodies does the last of these itself.)
"""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import time
from collections.abc import Callable

from appliance.common.aligned_sleep import aligned_sleep
from isolation.ipc.errors import SweepError
from isolation.ipc.sweeping import check_overwriting, overwrite_cached
from policy.model import PolicySet, Retention

PERIOD_S = 2.0
"""Between two rounds: whatever ends is gone from here 5 s later, with room for a loop that is late."""

BUFFER_BYTES = 256_000
"""Bytes of uvloop's receive buffer, one for all streams of a loop (its UV_STREAM_RECV_BUF_SZ)."""

PIPE_BYTES = 1 << 18
"""Bytes of the pipe: the buffer is filled by one read."""

SHARE = 0.01
"""Part of the time that looking at old objects may take: some 10,000 containers are looked at in a millisecond, and
there are some hundred for each request that runs."""

_ZEROS = bytes(BUFFER_BYTES)


class Washer:
    """Fills the event loop's receive buffer with zeros, through a pipe of this process to itself."""

    def __init__(self) -> None:
        self._write = -1
        self._transport: asyncio.ReadTransport | None = None

    async def open(self) -> None:
        """Open the pipe.

        Raises:
            OSError: the system has no room for it.
        """
        read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        file = os.fdopen(read, "rb", buffering=0)
        try:
            fcntl.fcntl(self._write, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
            loop = asyncio.get_running_loop()
            self._transport, _ = await loop.connect_read_pipe(asyncio.Protocol, file)
        except BaseException:
            file.close()
            os.close(self._write)
            raise

    def wash(self) -> int:
        """Write zeros that the loop reads into all of its buffer; returns how many bytes it will read."""
        try:
            return os.write(self._write, _ZEROS)
        except BlockingIOError:
            return 0  # The last ones are still there: a loop that reads nothing has other troubles.

    def close(self) -> None:
        """Close the pipe. Idempotent."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None
            os.close(self._write)


class Collector:
    """Collects the young at each round, and everything where that costs little.

    What was in use at one round and is let go in a cycle after it is old by then: the interpreter by itself looks at
    such objects only once they are a quarter of those that were there at the start, tens of thousands, which takes
    minutes and some 10 MiB.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, spent: Callable[[], float] = time.thread_time
    ) -> None:
        """``spent`` gives the seconds of processor time that this thread took: on a busy machine a look lasts many
        times as long as it works, and old objects would stay for minutes."""
        self._clock = clock
        self._spent = spent
        self._again = 0.0

    def collect(self) -> int:
        """Run the garbage collector; returns the generation up to which it looked at objects."""
        if self._clock() < self._again:
            gc.collect(1)
            return 1
        began = self._spent()
        gc.collect()
        self._again = self._clock() + (self._spent() - began) / SHARE
        return 2


def wiping_problem(*, wanted: bool) -> str:
    """Return why freed memory of this process is not overwritten; empty where it is. ``wanted`` is what the
    configuration says."""
    if not wanted:
        return "wipe_memory is off"
    try:
        check_overwriting()
    except SweepError as error:
        return str(error)
    return ""


def unforgettable(policy: PolicySet, problem: str) -> list[str]:
    """Return what is wrong with a policy where freed memory is not overwritten (``problem`` says why): nothing may stay
    of some tenants, and it would."""
    if not problem:
        return []
    names = sorted(name for name, tenant in policy.tenants.items() if tenant.retention is Retention.NONE)
    return [
        f"tenant {name!r} has retention none, which cannot be kept: {problem}; start the gateway by its unit or with "
        "athanor serve, with wipe_memory on, or give the tenant retention standard"
        for name in names
    ]


async def keep_forgetting(wanted: Callable[[], bool]) -> None:
    """Overwrite what remains of requests every ``PERIOD_S`` while ``wanted`` says so; ends by cancellation."""
    washer, collector = Washer(), Collector()
    await washer.open()
    try:
        while True:
            if wanted():
                collector.collect()
                washer.wash()
                overwrite_cached()
            await aligned_sleep(PERIOD_S)
    finally:
        washer.close()
