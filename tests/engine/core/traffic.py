"""Traffic on a simulated clock: real and adversarial arrivals through a scheduler without a model.

A step costs a fixed time and a time for each of its tokens, as on any machine whose steps read all weights once; the
two numbers of ``CLOCK`` are those of a small model on one core. Token ids mean nothing here, so each output simply
runs to the length that the trace gives.
"""

from __future__ import annotations

import csv
import itertools
import random
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from engine.core.scheduler.plan import StepPlan
from engine.core.scheduler.scheduler import Scheduler
from isolation.ipc.engine import Submit
from tests.engine.support import GREEDY, namespace


@dataclass(frozen=True, slots=True)
class Clock:
    """Seconds that a step takes: ``base`` and ``token`` for each token computed."""

    base: float = 0.001
    token: float = 0.00001


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace."""

    at: float
    """Seconds."""
    tenant: int
    prompt: int
    output: int
    weight: int = 1
    grant: int = 0
    """Output tokens granted when that is more than will come; 0: exactly those."""


@dataclass(frozen=True, slots=True)
class Closed:
    """A client that keeps so many requests going, one begun as soon as another ends."""

    tenant: int
    concurrency: int
    prompt: int
    output: int


@dataclass(slots=True)
class Seen:
    """What happened to one request, in seconds of the simulated clock."""

    arrival: Arrival
    first: float | None = None
    end: float | None = None


@dataclass(slots=True)
class Run:
    """What a simulation gave."""

    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0
    """Tokens computed, prompts and outputs, again after preemptions."""
    outputs: int = 0
    seen: dict[int, Seen] = field(default_factory=dict)

    def ttfts(self, tenant: int) -> list[float]:
        """Seconds to the first token of this tenant's requests, sorted."""
        return sorted(
            one.first - one.arrival.at
            for one in self.seen.values()
            if one.arrival.tenant == tenant and one.first is not None
        )


def submit_of(number: int, arrival: Arrival) -> Submit:
    """The arrival as a submission; an output that ends before its grant ends by a stop id (see ``simulate``)."""
    return Submit(
        number,
        namespace(arrival.tenant),
        array("I", [number % 900]) * arrival.prompt,
        arrival.grant or arrival.output,
        GREEDY,
        stop_ids=(STOP,),
        ignore_eos=True,
        weight=arrival.weight,
    )


STOP = 999


def simulate(
    scheduler: Scheduler,
    arrivals: Iterable[Arrival],
    *,
    max_steps: int,
    clock: Clock | None = None,
    closed: Iterable[Closed] = (),
    watch: Callable[[StepPlan], None] | None = None,
) -> Run:
    """Feed arrivals as their time comes (those that find the queue full wait outside), until all have ended or
    ``max_steps`` are over."""
    clock = clock or Clock()
    run = Run()
    coming: Iterator[Arrival] = iter(arrivals)
    numbers = itertools.count(1)
    left: dict[int, int] = {}
    pending = next(coming, None)
    now = 0.0

    def enter(arrival: Arrival) -> None:
        number = next(numbers)
        run.seen[number] = Seen(arrival)
        left[number] = arrival.output
        scheduler.add(submit_of(number, arrival), now_ns=int(now * 1e9))

    for client in closed:
        for _ in range(client.concurrency):
            enter(Arrival(now, client.tenant, client.prompt, client.output))
    again = {client.tenant for client in closed}
    while run.steps < max_steps:
        while pending is not None and pending.at <= now and scheduler.num_waiting < scheduler.limits.max_waiting:
            enter(pending)
            pending = next(coming, None)
        plan = scheduler.schedule(now_ns=int(now * 1e9))
        if plan is None:
            if pending is None:
                break
            now = max(now, pending.at)
            continue
        if watch is not None:
            watch(plan)
        run.steps += 1
        run.tokens += plan.num_tokens
        now += clock.base + clock.token * plan.num_tokens
        held = scheduler._running
        sampled = [held.at(row).spec.request_id for row in plan.sample_rows]
        result = scheduler.commit(plan, [STOP if left[number] == 1 else 1 for number in sampled])
        for number in result.requests:
            left[number] -= 1
            run.outputs += 1
            one = run.seen[number]
            if one.first is None:
                one.first = now
            if not left[number]:
                one.end = now
                if one.arrival.tenant in again:
                    enter(Arrival(now, one.arrival.tenant, one.arrival.prompt, one.arrival.output))
    run.seconds = now
    return run


def azure(path: Path, *, tenants: int, limit: int, speed: float = 1.0, longest: int = 4_096) -> list[Arrival]:
    """The Azure conversation trace, its requests dealt out to tenants, time compressed by ``speed``."""
    arrivals = []
    with path.open(newline="") as file:
        for row in itertools.islice(csv.DictReader(file), limit):
            at = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
            prompt = min(int(row["ContextTokens"]), longest)
            arrivals.append((at, max(1, prompt), max(1, int(row["GeneratedTokens"]))))
    began = arrivals[0][0]
    return [
        Arrival((at - began) / speed, 1 + number % tenants, prompt, output)
        for number, (at, prompt, output) in enumerate(arrivals)
    ]


def bursts(*, tenants: int, count: int, seed: int = 0, first_tenant: int = 1) -> list[Arrival]:
    """Arrivals shaped like Azure's code trace (which is not at hand): bursts of up to 67 requests with long pauses,
    prompts of about 2,000 tokens and short outputs."""
    rng = random.Random(seed)
    arrivals: list[Arrival] = []
    at = 0.0
    while len(arrivals) < count:
        at += rng.expovariate(1 / 20)
        tenant = first_tenant + rng.randrange(tenants)
        for _ in range(rng.randint(1, 67)):
            at += rng.expovariate(100)
            prompt = min(7_400, max(1, int(rng.lognormvariate(7.2, 0.9))))
            output = min(250, max(1, int(rng.lognormvariate(2.6, 1.1))))
            arrivals.append(Arrival(at, tenant, prompt, output))
    return arrivals[:count]


def backlog(shapes: dict[int, list[tuple[int, int]]], weights: dict[int, int], *, seed: int = 0) -> Iterator[Arrival]:
    """Endless requests at time 0, tenants in turn, each drawn from its tenant's (prompt, output) shapes."""
    rng = random.Random(seed)
    while True:
        for tenant, choices in shapes.items():
            prompt, output = rng.choice(choices)
            yield Arrival(0.0, tenant, prompt, output, weights.get(tenant, 1))
