"""No descriptor is left: the limit of a running process is lowered to what it has open."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import resource
import signal
import time
from collections.abc import Awaitable, Callable, Iterator

from bench.soak.answers import AWAY
from bench.soak.faults.deaths import GONE_S
from bench.soak.ground import Act, Fault, Ground
from bench.soak.served import until_gone, until_pid

SILENCE_S = 1.0
"""Without an answer: none comes as long as no descriptor does."""

LOOKS, LOOK_S = 5, 0.01
"""At a process's descriptors, to tell those that stay."""

STRANGERS = 64
"""More than the clients have connections."""

QUESTION = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"
"""Keeps its connection."""

Ask = Callable[[Ground], Awaitable[None]]


@contextlib.contextmanager
def exhausted(pid: int, spare: int | None) -> Iterator[None]:
    """Leave a process this many further descriptors for the time of a block; None: not even those that it frees.

    The limit is one of numbers, and a new descriptor gets the lowest that is free (getrlimit(2)): it is set behind so
    many of those that are free now, which lie between the others. One that was open for a moment only is free.
    """
    used = _open(pid)
    for _ in range(LOOKS):
        time.sleep(LOOK_S)
        used &= _open(pid)
    free = itertools.filterfalse(used.__contains__, itertools.count())
    limit = 0 if spare is None else next(itertools.islice(free, spare, None))
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def _open(pid: int) -> set[int]:
    return {int(name) for name in os.listdir(f"/proc/{pid}/fd")}


def _exhausted(role: str, spare: int, ask: Ask) -> Act:
    """None is left, and a stranger who wants one is not answered."""

    async def act(ground: Ground) -> str:
        with exhausted(await until_pid(ground.served, role), spare):
            await ground.last(2.0, 4.0)
            try:
                await ask(ground)
            except (OSError, TimeoutError, ValueError):
                return "a new connection is not answered"
            return ""

    return act


async def _ask_gateway(ground: Ground) -> None:
    """Strangers who come and stay: whenever a client leaves, a descriptor is free for the next who asks."""
    writers: list[asyncio.StreamWriter] = []
    try:
        for _ in range(STRANGERS):
            reader, writer = await asyncio.open_connection("127.0.0.1", ground.served.http_port)
            writers.append(writer)
            writer.write(QUESTION)
            async with asyncio.timeout(SILENCE_S):
                if not await reader.read(1):
                    raise ConnectionError("closed without a word")
    finally:
        for writer in writers:
            writer.close()


async def _ask_supervisor(ground: Ground) -> None:
    async with asyncio.timeout(SILENCE_S):
        await ground.tell_operator({"do": "nothing"})


def _exhausted_and_dead(role: str, spare: int | None) -> Act:
    """Too few are left for the engine that is to come."""

    async def act(ground: Ground) -> str:
        doomed = await until_pid(ground.served, "engine")
        with exhausted(await until_pid(ground.served, role), spare):
            await ground.last(0.5, 1.0)
            os.kill(doomed, signal.SIGKILL)
            await ground.last(2.0, 4.0)
            await until_gone(doomed, GONE_S)
            try:
                await ground.served.sandbox_pid("engine")
            except LookupError:
                return "no engine came"
            return ""

    return act


FAULTS = (
    Fault("fds-gateway", "the gateway has no descriptor left", _exhausted("gateway", 0, _ask_gateway), AWAY),
    Fault("fds-supervisor", "the supervisor has no descriptor left", _exhausted("supervisor", 0, _ask_supervisor)),
    Fault("fds-boot", "the supervisor has two left, and the engine dies", _exhausted_and_dead("supervisor", 2), AWAY),
    # The gateway holds descriptors for this: one that may open none at all loses them on their way.
    Fault("fds-handover", "the gateway may open none when an engine comes", _exhausted_and_dead("gateway", None), AWAY),
)
