"""Runs the largest steps once, so that the first request meets no page fault, no lazy import and no first packing.

The largest shapes are run twice: under gVisor a page costs a fault on its first and on its second touch. Smaller steps
are run once, so that whatever a library does by the number of rows (choose a kernel, write one, start its threads) has
been seen before lock-down. The fake requests have no blocks, so they use the null block; at the end all KV memory is
written once more, which makes the null block zero again.
"""

from __future__ import annotations

from array import array

from engine.core.engine import Engine
from engine.core.scheduler.plan import Admission, Chunk, RowMask, StepPlan
from isolation.ipc.sampling import EXAMPLE

ROUNDS = 2
"""Times that every step is run."""

SMALL = (1, 2, 4, 16)
"""Rows of the smaller steps: libraries multiply one row, a few and many in different ways."""

_ALL = RowMask(b"\xff" * 4, accepting=True)
"""Allows the first 32 ids."""


def warm_up(engine: Engine) -> None:
    """Run a full prefill and a full decode step at the backend's own limits; only while no request is live."""
    assert not engine.has_live_requests, "warm-up overwrites rows"
    runner = engine.runner
    limits = runner.limits
    length = min(limits.max_num_batched_tokens, limits.max_context - 1)
    num_rows = limits.max_num_seqs
    small = sorted({*SMALL, *runner.capabilities.warm_rows})
    # The largest come first: what the heap has for them holds all others, and smaller ones before would leave holes.
    runner.prove()
    for number in range(ROUNDS):
        runner.execute(_prefill(length))
        runner.execute(_admissions(num_rows))
        runner.execute(StepPlan(decode_rows=list(range(num_rows))))
        runner.execute(StepPlan(decode_rows=list(range(num_rows)), masks=dict.fromkeys(range(num_rows), _ALL)))
        for rows in (rows for rows in small if number == 0 and rows < num_rows):
            runner.execute(_admissions(rows))
            runner.execute(StepPlan(decode_rows=list(range(rows))))
        runner.touch()


def _prefill(length: int) -> StepPlan:
    """One prompt in two chunks: the second attends to gathered blocks."""
    half = length // 2
    chunks = [Chunk(0, 0, length - half, half == 0)]
    if half:
        chunks.append(Chunk(0, length - half, half, True))
    return StepPlan(admissions=[_admission(0, length)], prefills=chunks)


def _admissions(num_rows: int) -> StepPlan:
    rows = range(num_rows)
    return StepPlan(admissions=[_admission(row, 1) for row in rows], prefills=[Chunk(row, 0, 1, True) for row in rows])


def _admission(row: int, length: int) -> Admission:
    return Admission(
        row=row, token_ids=array("I", [0] * length), num_prompt=length, sampling=EXAMPLE, logprobs=1, blocks=()
    )
