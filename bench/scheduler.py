"""What a step costs besides the model: schedule, bookkeeping, commit, and the frame to the host.

A null model answers at once, so that a step is all overhead. Times are processor time of the thread, in microseconds a
step; a column says how many objects a step leaves behind. The tables of the runner (block tables, slots, groups) are
numpy and torch work of ``engine.backends.common.batch`` and are not in these figures.
Run: ``python bench/scheduler.py [--steps 2000]``.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import random
import statistics
import sys
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine.core.backend import Samples
from engine.core.engine import Engine
from engine.core.fairness.tenancy import Fairness
from engine.core.kv.block_pool import BlockPool
from engine.core.kv.prefix_cache import PrefixCache, block_id
from engine.core.scheduler.limits import SchedulerLimits
from engine.core.scheduler.plan import StepPlan
from engine.core.scheduler.scheduler import Scheduler
from isolation.ipc.codec import encode
from isolation.ipc.engine import Submit
from isolation.ipc.sampling import Sampling

BLOCK_SIZE = 16
GREEDY = Sampling(temperature=0.0)
WARM_STEPS = 50


class NullRunner:
    """A model that answers the same token to everybody, at once."""

    def execute(self, plan: StepPlan) -> Samples:
        """One token for each row that samples."""
        return Samples([7] * len(plan.sample_rows))

    def forget(self, rows: list[int]) -> None:
        """Nothing is kept."""


@dataclass(frozen=True)
class Case:
    """One situation: how many run and wait, how long their texts are, and how large the pool is."""

    name: str
    running: int
    waiting: int = 0
    tenants: int = 1
    prompt: int = 64
    output: int = 100_000
    """More than is measured: nobody ends, unless the case is about ends."""
    blocks: int = 120_000
    bar_us: float = 1_000.0


CASES = (
    Case("64 running", 64, bar_us=300),
    Case("64 running, 64 tenants", 64, tenants=64, bar_us=300),
    Case("256 running", 256),
    Case("256 running, 256 tenants", 256, tenants=256),
    Case("256 running, short outputs", 256, waiting=256, tenants=8, output=32),
    Case("256 + 2,000 waiting, 1 tenant", 256, waiting=2_000, bar_us=5_000),
    Case("256 + 2,000 waiting, 2,256 tenants", 256, waiting=2_000, tenants=2_256, bar_us=5_000),
    Case("the same, short outputs", 256, waiting=2_000, tenants=2_256, output=32, bar_us=5_000),
    Case("1 tenant, short outputs", 256, waiting=2_000, output=32, bar_us=5_000),
    Case("2,000 waiting, too few blocks", 256, waiting=2_000, tenants=16, output=400, blocks=1_600, bar_us=5_000),
)


def make_engine(case: Case) -> Engine:
    """An engine without a model, its rows as many as the case runs."""
    limits = SchedulerLimits(
        max_num_seqs=case.running,
        max_num_batched_tokens=max(512, 2 * case.running),
        max_waiting=case.waiting + 3 * case.running,
        max_context=min(65_536, case.blocks * BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        vocab_size=32_000,
        eos_ids=frozenset({2}),
    )
    pool = BlockPool(case.blocks)
    cache = PrefixCache(pool, root=bytes(16), block_size=BLOCK_SIZE)
    return Engine(Scheduler(limits, pool, cache, Fairness(limits, pool)), NullRunner())


def submits(case: Case) -> Callable[[], Submit]:
    """Makes requests of all tenants in turn, no two prompts alike."""
    rng = random.Random(1)
    numbers = itertools.count(1)

    def make() -> Submit:
        number = next(numbers)
        namespace = (number % case.tenants).to_bytes(32, "little")
        prompt = array("I", [rng.randrange(10, 32_000) for _ in range(case.prompt)])
        length = case.output if case.output > 10_000 else rng.randint(1, 2 * case.output)
        return Submit(number, namespace, prompt, length, GREEDY)

    return make


@dataclass
class Figures:
    """What a case gave, times in microseconds."""

    p50: float
    p99: float
    worst: float
    left_behind: float
    """Memory blocks of the interpreter that a step allocated and did not give back, on average."""
    preempted: int


def measure(case: Case, steps: int) -> Figures:
    """Fill the engine, keep it full, time its steps."""
    engine = make_engine(case)
    scheduler = engine.scheduler
    make = submits(case)
    wanted = case.running + case.waiting
    times: list[float] = []
    for _ in range(wanted):
        engine.add(make())
    # Prompts of all rows have to be computed before the state is steady.
    for _ in range(WARM_STEPS + case.running * case.prompt // 256):
        engine.step()
    gc.collect()
    gc.freeze()
    before = sys.getallocatedblocks()
    refilled = 0
    for _ in range(steps):
        while scheduler.num_running + scheduler.num_waiting < wanted:
            engine.add(make())
            refilled += 1
        began = time.thread_time_ns()
        output = engine.step()
        if output is not None:
            encode(output)
        times.append((time.thread_time_ns() - began) / 1_000)
    del output
    left = (sys.getallocatedblocks() - before - len(times)) / steps
    times.sort()
    preempted = getattr(scheduler, "num_preempted", 0)
    gc.unfreeze()
    return Figures(statistics.median(times), times[int(len(times) * 0.99)], times[-1], left, preempted)


def hash_us(rounds: int = 15, count: int = 10_000) -> float:
    """Microseconds of processor time for the id of one block, the least of some rounds."""
    key, parent, tokens = bytes(32), bytes(16), array("I", range(BLOCK_SIZE))
    times = []
    for _ in range(rounds):
        began = time.process_time_ns()
        for _ in range(count):
            parent = block_id(key, parent, tokens)
        times.append((time.process_time_ns() - began) / count / 1_000)
    return min(times)


def main() -> None:
    """Print one line a case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2_000)
    arguments = parser.parse_args()
    print(f"{'case':36} {'p50 us':>8} {'p99 us':>8} {'worst':>8} {'bar us':>7} {'left':>6} {'preempted':>9}")
    print(f"{'keyed hash of a block':36} {hash_us():8.2f} {'':8} {'':8} {3:7}")
    for case in CASES:
        figures = measure(case, arguments.steps)
        print(
            f"{case.name:36} {figures.p50:8.0f} {figures.p99:8.0f} {figures.worst:8.0f} {case.bar_us:7.0f} "
            f"{figures.left_behind:6.1f} {figures.preempted:9}"
        )


if __name__ == "__main__":
    main()
