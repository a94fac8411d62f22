"""G4, no residue: a block is zeroed before it changes owner, and the content of free memory affects no answer.

* ``G4.zero``: under mixed traffic of four tenants with cancels and preemptions, every block that changes owner is
    zeroed in the step that assigns it, and every byte of it is checked afterwards.
* ``G4.poison``: NaN in every free block before each step, in every block that is about to be zeroed, in the buffers
  that blocks are gathered into and in everything that ``torch.empty`` gives: tokens and log-probabilities are the same
  bits.

Controls: some of those blocks held bytes before they were zeroed; and this poison in an engine that does not zero, or
in the blocks of a live request, changes answers.

Not covered: memory of an accelerator, and bytes that a stray write leaves in a block of a live request.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from appliance.common.figures import counted
from appliance.operator import kernels
from appliance.selftest.result import Result, judged
from appliance.selftest.small_engine import MakeEngine, run_traffic, small_engine
from engine.core.backend import Samples
from engine.core.engine import Engine
from engine.core.kv.contents import TRANSIENT
from engine.core.offline import Answer
from engine.core.scheduler.plan import StepPlan

COMMAND = "athanor selftest --only G4"
SEED = 4
SHORT, FULL = 16, 500
"""Requests of one run in the short and the full form."""

MOST_INT = 0x7FC0
"""Poison value of integers: bfloat16's NaN, and no valid id or index here."""


class ZeroWatch:
    """Counts blocks that change owner, and checks their bytes once they count as zeroed."""

    def __init__(self, engine: Engine) -> None:
        self.changes = 0
        self.residue = 0
        """Blocks that were not zero when they got another owner."""
        self.had_bytes = 0
        """Blocks that were not zero before they were zeroed."""
        self._engine = engine
        self._pool = engine.scheduler._pool
        self._owners = [self._pool.owner(block) for block in range(self._pool.num_blocks + 1)]
        self._execute = engine.runner.execute
        self._zero = engine.runner.storage.zero
        engine.runner.storage.zero = self._watched_zero
        engine.runner.execute = self._watched_execute

    def _watched_zero(self, blocks: list[int]) -> None:
        self.had_bytes += sum(map(self._is_dirty, blocks))
        self._zero(blocks)
        self.residue += sum(map(self._is_dirty, blocks))

    def _watched_execute(self, plan: StepPlan) -> Samples:
        zeroed = set(plan.zero_blocks)
        for block, before in enumerate(self._owners):
            owner = self._pool.owner(block)
            if owner not in (before, TRANSIENT) or block in zeroed:
                self.changes += 1
                self.residue += block not in zeroed and self._is_dirty(block)
            self._owners[block] = owner
        return self._execute(plan)

    def _is_dirty(self, block: int) -> bool:
        # Compare bytes, not numbers: minus zero is residue, too.
        tensors = self._engine.runner.storage.tensors
        return any(bool(tensor[block].contiguous().view(torch.uint8).any()) for tensor in tensors)


def poison_free_blocks(engine: Engine) -> None:
    """Write NaN into all memory that no live or cached block owns, before every step from now on."""
    execute, storage, pool = engine.runner.execute, engine.runner.storage, engine.scheduler._pool

    def poisoned(plan: StepPlan) -> Samples:
        blocks = [*pool._free, *plan.zero_blocks]
        for tensor in storage.tensors:
            tensor[blocks] = torch.nan
        storage._gathered_keys.fill_(torch.nan)
        storage._gathered_values.fill_(torch.nan)
        with poisoned_empty():
            return execute(plan)

    engine.runner.execute = poisoned


def poison_held_blocks(engine: Engine) -> None:
    """Write NaN into the first block of every live request, before every step (control)."""
    execute, storage, running = engine.runner.execute, engine.runner.storage, engine.scheduler._live.running

    def poisoned(plan: StepPlan) -> Samples:
        blocks = [request.kv.blocks[0] for request in running.requests if request.kv.blocks]
        for tensor in storage.tensors:
            tensor[blocks] = torch.nan
        return execute(plan)

    engine.runner.execute = poisoned


@contextmanager
def poisoned_empty() -> Iterator[None]:
    """Make ``torch.empty`` and its variants return memory full of NaN, or of an invalid integer."""

    makers = [(torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")]
    patches = [patch.object(owner, name, _filling(getattr(owner, name))) for owner, name in makers]
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in patches:
            one.stop()


def _filling(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a tensor constructor so that its memory is poisoned."""

    def call(*args: Any, **named: Any) -> Tensor:
        tensor = make(*args, **named)
        if tensor.dtype == torch.bool:
            return tensor.fill_(value=True)
        poison = torch.nan if tensor.is_floating_point() else MOST_INT % (torch.iinfo(tensor.dtype).max + 1)
        return tensor.fill_(poison)

    return call


def bits(answers: dict[int, Answer]) -> dict[int, object]:
    """Return everything that was answered, to the bit."""
    return {
        number: (
            answer.token_ids,
            answer.finish,
            answer.failure,
            [(one.logprob, one.top_ids, one.top_logprobs) for one in answer.logprobs],
        )
        for number, answer in answers.items()
    }


def check_zero(make: MakeEngine, requests: int, longest: int = 60) -> ZeroWatch:
    """Run the traffic and check every zeroed block."""
    engine = make()
    watch = ZeroWatch(engine)
    run_traffic(engine, requests, seed=SEED, longest=longest)
    return watch


def differing(
    make: MakeEngine,
    harm: Callable[[Engine], None],
    requests: int,
    *,
    sound: MakeEngine | None = None,
    zero: bool = True,
    longest: int = 60,
) -> tuple[int, int]:
    """Return the number of answers that differ between an engine and a damaged one, and of all answers.

    Args:
        make: makes the damaged engine.
        harm: damages it.
        requests: number of requests in the traffic.
        sound: makes the other engine; ``make`` by default.
        zero: whether the damaged engine zeroes blocks.
        longest: tokens of the longest prompt.
    """
    harmed = make()
    harm(harmed)
    if not zero:
        harmed.runner.storage.zero = lambda _: None
    expected = bits(run_traffic((sound or make)(), requests, seed=SEED, longest=longest))
    got = bits(run_traffic(harmed, requests, seed=SEED, longest=longest))
    return sum(value != got.get(number) for number, value in expected.items()), len(expected)


def run(full: bool) -> list[Result]:
    """Run the rows of G4: on the plain backend and, in the full form, on compiled kernels."""
    requests = FULL if full else SHORT
    # On one thread: products this small take longer on several, and many times longer where another program computes.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = _rows("plain", small_engine, requests)
    finally:
        torch.set_num_threads(before)
    if not full:
        return rows
    if kernels.find_compiler() is None:
        return [*rows, Result("G4.poison.compiled", "absent", "no C compiler on PATH", "0 answers differ", COMMAND)]
    with tempfile.TemporaryDirectory() as folder:
        kernels.build(Path(folder))
        return [*rows, *_rows("compiled", partial(small_engine, folder), requests)]


def _rows(path: str, make: MakeEngine, requests: int) -> list[Result]:
    watch = check_zero(make, requests)
    changed, answers = differing(make, poison_free_blocks, requests)
    # Kernels read only written slots, so unzeroed blocks show nothing there: held ones are poisoned instead.
    plain = path == "plain"
    harm = poison_free_blocks if plain else poison_held_blocks
    seen, _ = differing(make, harm, min(requests, SHORT), zero=not plain)
    return [
        judged(
            f"G4.zero.{path}",
            watch.changes > 0 and not watch.residue,
            figure=f"{watch.residue} of {counted(watch.changes, 'block')} not zero at a change of owner",
            bar="0",
            command=COMMAND,
        ),
        judged(
            f"G4.zero.{path}.control",
            watch.had_bytes > 0,
            figure=f"{watch.had_bytes} of them held bytes before",
            bar="> 0",
            command=COMMAND,
        ),
        judged(
            f"G4.poison.{path}",
            changed == 0,
            figure=f"{changed} of {counted(answers, 'answer')} differ by a bit under NaN in free memory",
            bar="0",
            command=COMMAND,
        ),
        judged(
            f"G4.poison.{path}.control",
            seen > 0,
            figure=f"{counted(seen, 'answer')} differ " + ("without zeroing" if plain else "under NaN in held blocks"),
            bar="> 0",
            command=COMMAND,
        ),
    ]
