"""G3, content non-interference: a strict tenant's answers are bit-equal alone and beside any co-batch.

``G3.dense`` and ``G3.experts`` count answers (tokens, reason, log-probabilities) that differ between a run alone in a
large engine and runs beside fuzzed loads (``co_batches``) with cancels, preemptions, penalties, late masks, several
outputs, and chunks of any size, in engines whose blocks are spilled to memory or disk and return (``spilled``).
Controls: these loads without the class differ, and so do answers when blocks return with other bytes.

Not covered: another processor, other kernels or another number of threads, which change the bits; the time of an answer
(G6, G7). Compiled kernels compute every row alike for all tenants, so the plain backend is tested.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from appliance.common.figures import counted
from appliance.selftest.co_batches import MODELS, CoBatch, content, engine_of, reckless, requests_of, small_engine
from appliance.selftest.result import Result, judged
from appliance.selftest.spilled import StoreChannel, spill_store, untouched
from engine.core.engine import Engine
from isolation.ipc.engine import Submit

COMMAND = "athanor selftest --only G3"
SHORT, FULL, CONTROL = 50, 2_000, 5
"""Co-batches of all models together in the short and the full form, and those without the class."""

ROUNDS = 5
"""Co-batches in one engine, with unchanged requests of the tenant, before both are drawn again."""

VICTIMS = 4
OTHERS = 12
"""Largest number of other tenants' requests in one co-batch."""

TENANT = 1
OTHER_IDS = 1_000


@dataclass(slots=True)
class Counted:
    """Counts over the co-batches."""

    batches: int = 0
    answers: int = 0
    mismatches: int = 0
    preempted: int = 0
    from_memory: int = 0
    """Blocks that returned from the memory tier."""
    from_disk: int = 0


def run(full: bool) -> list[Result]:
    """Run the rows of G3."""
    batches = FULL if full else SHORT
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with reckless():
            claims = {name: co_batches(name, batches // len(MODELS), strict=True) for name in MODELS}
            control = co_batches("dense", CONTROL, strict=False)
            swapped = co_batches("dense", CONTROL, strict=True, change=reverse)
    finally:
        torch.set_num_threads(before)
    rows = [
        judged(
            f"G3.{name}",
            seen.mismatches == 0 and min(seen.preempted, seen.from_memory, seen.from_disk) > 0,
            figure=f"{seen.mismatches} of {counted(seen.answers, 'answer')} differ, in {seen.batches} co-batches with "
            f"{counted(seen.preempted, 'preemption')}, {counted(seen.from_memory, 'block')} back from memory, "
            f"{seen.from_disk} from disk",
            bar=f"0 in {FULL // len(MODELS)} co-batches of each kind of model; some preempted, some blocks restored",
            command=COMMAND,
        )
        for name, seen in claims.items()
    ]
    figure = f"{control.mismatches} of {counted(control.answers, 'answer')} differ without the class"
    wrong = (
        f"{swapped.mismatches} of {counted(swapped.answers, 'answer')} differ where blocks come back with other bytes"
    )
    return [
        *rows,
        judged("G3.control", control.mismatches > 0, figure=figure, bar="at least 1", command=COMMAND),
        judged("G3.spill.control", swapped.mismatches > 0, figure=wrong, bar="at least 1", command=COMMAND),
    ]


def reverse(content: bytes) -> bytes:
    """Return other bytes of equal length."""
    return content[::-1]


def co_batches(model: str, batches: int, *, strict: bool, change: Callable[[bytes], bytes] = untouched) -> Counted:
    """Run co-batches of one model; the tenant's requests are deterministic if ``strict``. ``change`` alters blocks on
    their return."""
    draw = np.random.default_rng(3)
    seen = Counted()
    while seen.batches < batches:
        wanted = requests_of(draw, 0, VICTIMS, tenant=TENANT, longest=40, deterministic=strict)
        alone = engine_of(model, prefix_caching=False)
        expected: dict[int, object] = {}
        for one in wanted:
            load = CoBatch(alone, draw)
            load.run([one])
            expected |= {number: content(answer) for number, answer in load.answers.items()}
        on_disk = bool(draw.integers(2))
        with spill_store(disk=on_disk) as store:
            crowded = small_engine(model, draw, StoreChannel(store, draw, b"epoch", change))
            for _ in range(min(ROUNDS, batches - seen.batches)):
                _one_load(crowded, draw, wanted, expected, seen)
            assert crowded.spill is not None
            if on_disk:
                seen.from_disk += crowded.spill.counts.restored
            else:
                seen.from_memory += crowded.spill.counts.restored
    return seen


def _one_load(
    crowded: Engine, draw: np.random.Generator, wanted: list[Submit], expected: dict[int, object], seen: Counted
) -> None:
    """Run one co-batch: the tenant's requests beside freshly drawn ones of others."""
    others = requests_of(
        draw,
        OTHER_IDS,
        int(draw.integers(OTHERS)),
        tenant=int(draw.integers(2, 5)),
        longest=70,
        deterministic=bool(draw.integers(2)),
        retain=bool(draw.integers(2)),
    )
    load = CoBatch(crowded, draw)
    preempted = crowded.scheduler.num_preempted
    load.run([*wanted, *others], [one.request for one in others])
    seen.batches += 1
    seen.answers += len(expected)
    seen.mismatches += sum(content(load.answers[number]) != one for number, one in expected.items())
    seen.preempted += crowded.scheduler.num_preempted - preempted
