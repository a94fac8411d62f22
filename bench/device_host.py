"""Processor time of the host for a decode step of the device backend: everything but the device's own work.

The real scheduler, loop and runner; steps of the device cost nothing and give one id to everybody. So a figure is what
Python does for a step: planning, changes for the device, the launch without the driver's part, commit, the frame for
the ring. On a GPU the driver's part of a launch comes on top: one replay, a copy each way, an event. ``mixed``: every
fourth row with log-probabilities, every fourth with penalties. ``churn``: outputs of 100 to 400 tokens, so rows come
and go, prompts included. ``cut``: prompts longer than a step has tokens; ``joined``: the same, and rows join them in
one pass (``engine.backends.cuda.runtime.mixing``).

Copies go through a real arena, whose fences are over at once. ``--cold``: between two steps other memory is written,
more than the processor's caches hold, as happens on a machine where a step of the device takes some ten milliseconds
and others work: what a step costs there.

Processor time of the thread, the mean of 16 steps (in which each row needs one block): the least such mean of all
rounds, cases in turns, and the median of all. What others do on the machine only adds, to the least least of all.
Run: ``python bench/device_host.py [--steps 2000] [--rounds 3] [--cold]``.
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

import numpy as np
import torch
from torch import Tensor

from engine.backends.cuda.runtime.copying import ArenaCopies
from engine.backends.cuda.runtime.device_memory import Resources
from engine.backends.cuda.runtime.loop import NOTHING, RING_STEPS, DeviceLoop
from engine.backends.cuda.runtime.loop_state import LoopState, StepRows
from engine.backends.cuda.runtime.mixing import ALWAYS, NEVER
from engine.backends.cuda.runtime.model import ChunkTokens
from engine.backends.cuda.runtime.operations import Beside, Chunks, Sampled, SamplingColumns
from engine.backends.cuda.runtime.runner import DeviceRunner, sizes_of
from engine.backends.cuda.runtime.simulated_ops import PlainOperations
from engine.backends.cuda.runtime.storage import DeviceStorage
from engine.core.engine import Engine
from engine.core.fairness.tenancy import Fairness
from engine.core.kv.block_pool import BlockPool
from engine.core.kv.layout import KvLayout, LayerLayout
from engine.core.kv.prefix_cache import PrefixCache
from engine.core.scheduler.limits import SchedulerLimits
from engine.core.scheduler.scheduler import Scheduler
from isolation.ipc.codec import encode
from isolation.ipc.engine import Submit
from isolation.ipc.messages import MAX_TOP_LOGPROBS
from isolation.ipc.sampling import Sampling

BLOCK_SIZE = 16
PROMPT = 64
VOCAB = 1_024
"""Small, so that what stands for the device's own memory is small; nothing on the host grows with it."""
ANSWER = 7
WARM_STEPS = 100
CACHED_BYTES = 64 << 20
"""More than the caches of a processor's core and its neighbours hold."""
BAR_MS = 0.3
"""Of a decode step at 200 rows (issue 4)."""
STREAM_STEPS_PER_S = 85
"""Decode steps a second of a large model at 200 streams: the rate at which a quarter of a core is 2.9 ms a step."""


@dataclass(frozen=True, slots=True)
class Case:
    """How many rows decode, and what they are like."""

    name: str
    rows: int
    mixed: bool = False
    churn: bool = False
    prompt: int = PROMPT
    one_pass: bool = False


CASES = (
    Case("1 row", 1),
    Case("64 rows", 64),
    Case("200 rows", 200),
    Case("256 rows", 256),
    Case("200 rows, mixed", 200, mixed=True),
    Case("200 rows, churn", 200, churn=True),
    Case("64 rows, cut", 64, churn=True, prompt=1_500),
    Case("64 rows, joined", 64, churn=True, prompt=1_500, one_pass=True),
)


class FreeSteps:
    """Steps that are over at once: every lane of the bucket gets the answer."""

    def __init__(self, loop: DeviceLoop) -> None:
        self._lines = loop.ring.numpy()
        self._turn = 0

    def run(self, bucket: int) -> None:
        """One step."""
        line = self._lines[self._turn % RING_STEPS]
        line[:bucket] = ANSWER
        line[bucket:] = NOTHING
        self._turn += 1


class PassedFence:
    """A mark that the device has always passed."""

    def record(self) -> None:
        """Nothing."""

    def over(self) -> bool:
        """Always."""
        return True

    def wait(self) -> None:
        """Not at all."""


class ReadableArena(ArenaCopies):
    """An arena in front of a device whose rings the host can read."""

    def mirror(self, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor

    def fences(self, count: int) -> list[PassedFence]:  # type: ignore[override]
        """None: nothing is copied back."""
        return []


class FreeModel:
    """Prompts that are computed at once."""

    def prefill(self, tokens: ChunkTokens, chunks: Chunks, wanted: Tensor, beside: Beside | None = None) -> Tensor:
        """Logits of no meaning."""
        return torch.zeros(len(wanted), 1)


class FreeOperations(PlainOperations):
    """Choices that are made at once, and blocks that are clean; what is moved is a few bytes."""

    steps: FreeSteps

    def begin_step(self, state: LoopState, bucket: int) -> StepRows:
        """Lanes of no meaning."""
        zeros = torch.zeros(bucket, dtype=torch.int64)
        return StepRows(zeros, zeros, zeros, (zeros,), (), zeros, zeros, zeros)

    def end_step(self, state: LoopState, begun: StepRows, sampled: Sampled) -> None:
        """The answer for all of them."""
        self.steps.run(len(begun.rows))

    def sample(self, logits: Tensor, rows: Tensor, positions: Tensor, columns: SamplingColumns) -> Sampled:
        """The answer for everybody."""
        tops = torch.zeros(len(rows), MAX_TOP_LOGPROBS)
        return Sampled(torch.full_like(rows, ANSWER), tops[:, 0], tops.int(), tops)

    def zero(self, memory: Tensor, blocks: Tensor) -> None:
        """Nothing."""


def make_engine(case: Case) -> tuple[Engine, DeviceRunner]:
    """An engine whose device costs nothing, and its runner."""
    limits = SchedulerLimits(
        max_num_seqs=case.rows,
        max_num_batched_tokens=max(512, 2 * case.rows),
        max_waiting=1_000,
        max_context=8_192,
        block_size=BLOCK_SIZE,
        vocab_size=VOCAB,
        eos_ids=frozenset({2}),
    )
    like = LayerLayout(heads=1, key_dim=1, value_dim=1)
    blocks = case.rows * (8_192 // BLOCK_SIZE)
    layout = KvLayout(layers=(like,), block_size=BLOCK_SIZE, dtype="float32", num_blocks=blocks)
    operations = FreeOperations()
    storage = DeviceStorage(layout, case.rows, operations, torch.float32, torch.device("cpu"))
    sizes = sizes_of(limits)
    memory = torch.empty(sizes.total, dtype=torch.uint8)
    copies = ReadableArena(torch.device("cpu"), sizes, memory, PassedFence)
    resources = Resources(copies, None)
    mixing = ALWAYS if case.one_pass else NEVER
    runner = DeviceRunner(FreeModel(), storage, limits, operations, resources=resources, mixing=mixing)  # type: ignore[arg-type]
    operations.steps = runner._launcher._replayer = FreeSteps(runner._loop)
    pool = BlockPool(blocks)
    cache = PrefixCache(pool, root=bytes(16), block_size=BLOCK_SIZE, caching=True)
    return Engine(Scheduler(limits, pool, cache, Fairness(limits, pool, raise_defects=True)), runner), runner


def submits(case: Case) -> Callable[[], Submit]:
    """Makes requests, no two prompts alike."""
    draw = random.Random(1)
    numbers = itertools.count(1)

    def make() -> Submit:
        number = next(numbers)
        prompt = array("I", [draw.randrange(10, VOCAB) for _ in range(case.prompt)])
        length = draw.randint(100, 400) if case.churn else 8_000
        penalised = case.mixed and number % 4 == 1
        sampling = Sampling(temperature=0.8, top_p=0.9, seed=number, repetition_penalty=1.1 if penalised else 1.0)
        logprobs = 2 if case.mixed and number % 4 == 3 else -1
        namespace = (number % 8).to_bytes(32, "little")
        return Submit(number, namespace, prompt, length, sampling, logprobs=logprobs)

    return make


def timed(owner: object, name: str, spent: dict[str, int], label: str) -> None:
    """Add the thread's time in a method of this object to ``spent[label]``."""
    method = getattr(owner, name)

    def measured(*args: object, **kwargs: object) -> object:
        began = time.thread_time_ns()
        try:
            return method(*args, **kwargs)
        finally:
            spent[label] = spent.get(label, 0) + time.thread_time_ns() - began

    setattr(owner, name, measured)


def measure(case: Case, steps: int, *, split: bool, cold: bool) -> tuple[list[float], dict[str, float]]:
    """Microseconds of a step, a mean for each 16, and with ``split`` the mean of each part (they are measured apart,
    since looking costs)."""
    engine, runner = make_engine(case)
    make = submits(case)
    for _ in range(case.rows):
        engine.add(make())
    for _ in range(WARM_STEPS + case.rows * case.prompt // 256):
        engine.step()
    spent: dict[str, int] = {}
    if split:
        parts = (
            (engine.scheduler, "schedule", "plan"),
            (engine.scheduler, "commit", "commit"),
            (runner, "execute", "runner"),
            (runner._launcher, "launch", "of it launch"),
            (runner._collector, "collect", "of it collect"),
            (runner, "_prepare", "of it prepare"),
        )
        for owner, name, label in parts:
            timed(owner, name, spent, label)
    gc.collect()
    gc.freeze()
    times = []
    others = np.zeros(CACHED_BYTES // 8)
    for _ in range(steps):
        while engine.scheduler.num_running + engine.scheduler.num_waiting < case.rows:
            engine.add(make())
        if cold:
            others += 1
        began = time.thread_time_ns()
        output = engine.step()
        middle = time.thread_time_ns()
        if output is not None:
            encode(output)
        ended = time.thread_time_ns()
        spent["frame"] = spent.get("frame", 0) + ended - middle
        times.append(ended - began)
    gc.unfreeze()
    means = [statistics.mean(times[at : at + BLOCK_SIZE]) / 1e3 for at in range(0, steps - BLOCK_SIZE + 1, BLOCK_SIZE)]
    return means, {label: total / steps / 1e3 for label, total in spent.items()}


def main() -> None:
    """Print one line a case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[case.name for case in CASES])
    parser.add_argument("--cold", action="store_true", help="caches hold nothing of ours when a step begins")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {case.name: [] for case in CASES}
    cases = [case for case in CASES if case.name in arguments.only]
    for _ in range(arguments.rounds):
        for case in cases:
            found[case.name] += measure(case, arguments.steps, split=False, cold=arguments.cold)[0]
    for case in cases:
        _, parts = measure(case, arguments.steps, split=True, cold=arguments.cold)
        shown = ", ".join(f"{label} {value:.0f}" for label, value in sorted(parts.items()))
        means = found[case.name]
        print(f"{case.name:18} {min(means):6.0f} us a step at least, {statistics.median(means):.0f} in the median;")
        print(f"{'':18} means: {shown}")
    if not found["200 rows"]:
        return
    wanted = min(found["200 rows"]) / 1e3
    cores = wanted / 1e3 * STREAM_STEPS_PER_S
    print(f"200 rows: {wanted:.3f} ms a step (bar {BAR_MS}); {cores:.3f} core at {STREAM_STEPS_PER_S} steps a second")


if __name__ == "__main__":
    main()
