"""Blocks of cut prompts leave a GPU engine only when the pass that computes them is over.

A pass of a cut prompt that decoding rows join is not waited for. Where its request is aborted at once, the next plan
may evict the prompt's blocks, or copy them out in advance, while the device still computes them.
"""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass

import numpy as np
import pytest

from appliance.operator.calls.spill_host import SpillHost
from engine.backends.cuda.runtime.mixing import ALWAYS
from engine.backends.cuda.runtime.storage import DeviceStorage
from isolation.ipc.engine import Submit
from isolation.ipc.messages import Role
from tests.engine.backends.cuda.runtime.early_side import EarlySide, ViewedQueue
from tests.engine.backends.cuda.runtime.test_device_memory import bench
from tests.engine.backends.cuda.runtime.toy import VOCAB, Schedule
from tests.engine.support import GREEDY, namespace
from tests.isolation.ipc.wire import connect

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCKS, BUDGET = 14, 8
"""Of the pool, so few that blocks leave all the time; and tokens of a step, so few that each prompt is cut."""

PROMPTS = 16
"""Prompts that are aborted, one after another, beside one request that decodes all the time."""


@dataclass(frozen=True, slots=True)
class Left:
    """What left the engine."""

    sent: int
    incomplete: int
    """Blocks that were sent with a token that was not computed yet."""
    overtook: int
    mixed: int


def abort_cut_prompts(seed: int) -> Left:
    """Abort prompts behind their first chunks, on a device whose copies begin as early as they may."""
    draw, queue = random.Random(seed), ViewedQueue(random.Random(seed))
    side, wire = EarlySide(draw, queue), connect(Role.SPILL)
    host = SpillHost(wire.host, seed, forgets=0.0)
    made = bench(Schedule(BLOCKS, BUDGET), seed, side=side, spill=wire.guest, mixing=ALWAYS, queue=queue)
    engine = made.engine
    queue.memory = made.runner.storage.memory
    engine.add(Submit(1, namespace(1), array("I", (1, 2, 3)), 40, GREEDY, ignore_eos=True))
    for _ in range(3):
        engine.step()
    for number in range(2, 2 + PROMPTS):
        prompt = array("I", [draw.randrange(VOCAB) for _ in range(20)])
        engine.add(Submit(number, namespace(2), prompt, 4, GREEDY, ignore_eos=True))
        engine.step()
        engine.abort(number)
        engine.step()
        host.serve()
    while engine.has_work:
        engine.step()
        host.serve()
    assert engine.spill is not None
    incomplete = sum(not np.frombuffer(content).all() for content in host._blocks.values())
    wire.close()
    return Left(engine.spill.counts.sent, incomplete, side.overtook, made.runner.num_mixed)


@pytest.mark.parametrize("seeds", [1, pytest.param(20, marks=pytest.mark.full)])
def test_a_cut_prompts_block_leaves_when_it_is_computed(seeds: int) -> None:
    """Blocks of aborted prompts leave complete, although nobody has waited for the passes that compute them."""
    for seed in range(seeds):
        left = abort_cut_prompts(seed)
        assert left.sent > PROMPTS // 2 and left.mixed > PROMPTS // 2, left
        assert (left.incomplete, left.overtook) == (0, 0), left


def test_without_a_mark_behind_the_pass_blocks_leave_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: where no mark follows the pass, blocks are sent before their tokens are computed."""
    monkeypatch.setattr(DeviceStorage, "mark_pass", lambda _: None)
    left = []
    for seed in range(3):
        left.append(abort_cut_prompts(seed))
        if left[-1].incomplete and left[-1].overtook:
            return
    pytest.fail(f"no block left too early: {left}")
