"""Plays planned requests against a server: closed or open loop, with a warm-up, and watches itself while it does."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from appliance.operator.bench import cputime
from appliance.operator.bench.client import Client
from appliance.operator.bench.sample import Sample, now
from appliance.operator.bench.workload import Load, Planned

WATCH_S = 0.01
"""Seconds between two looks at how late this process's own loop is."""

MAX_IN_FLIGHT = 1_000
"""Requests of an open loop that wait for answers at once; one more is counted as failed, since it was not sent."""

CLIENT_FULL = "client full"


@dataclass(slots=True)
class Run:
    """Result of one load."""

    load: Load
    samples: list[Sample] = field(default_factory=list)
    began: float = 0.0
    steady_end: float = 0.0
    """Time until which the load was as asked for: in a closed loop the last request's start, else the last arrival."""
    ended: float = 0.0
    client_cpu_s: float = 0.0
    server_cpu_s: dict[str, float] = field(default_factory=dict)
    """Processor seconds by label; empty when no process was named."""
    lateness_s: list[float] = field(default_factory=list)
    """How late this process's own timers were."""


async def play(
    client: Client,
    load: Load,
    plans: Sequence[Planned],
    warm: Sequence[Planned],
    pid: int | None = None,
    began: Callable[[Run], None] = lambda run: None,
) -> Run:
    """Warm up, then send what is planned and wait for every answer; ``began`` is given the run after the warm-up."""
    await _warm(client, warm, load.streams or 4)
    rendered = [client.render(one) for one in plans]
    run = Run(load)
    before = cputime.cpu_by_label(pid) if pid is not None else {}
    own = _own_cpu_s()
    watcher = asyncio.create_task(_watch(run.lateness_s))
    began(run)
    run.began = now()
    try:
        if load.kind == "closed":
            await _closed(client, plans, rendered, run)
        else:
            await _open(client, plans, rendered, run)
    finally:
        watcher.cancel()
    run.ended = now()
    run.client_cpu_s = _own_cpu_s() - own
    if pid is not None:
        run.server_cpu_s = cputime.spent(before, cputime.cpu_by_label(pid))
    client.close()
    return run


async def _warm(client: Client, warm: Sequence[Planned], streams: int) -> None:
    queue = iter(warm)

    async def stream() -> None:
        for one in queue:
            await client.send(one, client.render(one), 0.0)

    await asyncio.gather(*(stream() for _ in range(streams)))


async def _closed(client: Client, plans: Sequence[Planned], rendered: Sequence[bytes], run: Run) -> None:
    queue = iter(range(len(plans)))

    async def stream() -> None:
        for index in queue:
            run.steady_end = due = now()
            run.samples.append(await client.send(plans[index], rendered[index], due))

    await asyncio.gather(*(stream() for _ in range(run.load.streams)))


async def _open(client: Client, plans: Sequence[Planned], rendered: Sequence[bytes], run: Run) -> None:
    waiting: set[asyncio.Task[None]] = set()

    async def one(index: int, due: float) -> None:
        run.samples.append(await client.send(plans[index], rendered[index], due))

    for index, planned in enumerate(plans):
        due = run.began + planned.at_s
        delay = due - now()
        if delay > 0:
            await asyncio.sleep(delay)
        if len(waiting) >= MAX_IN_FLIGHT:
            moment = now()
            sample = Sample(planned.tenant, planned.output_tokens, due, moment, moment, failure=CLIENT_FULL)
            run.samples.append(sample)
            await asyncio.sleep(0)
            continue
        task = asyncio.create_task(one(index, due))
        waiting.add(task)
        task.add_done_callback(waiting.discard)
    run.steady_end = now()
    while waiting:
        await asyncio.wait(set(waiting))


async def _watch(lateness_s: list[float]) -> None:
    while True:
        due = now() + WATCH_S
        await asyncio.sleep(WATCH_S)
        lateness_s.append(now() - due)


def _own_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
