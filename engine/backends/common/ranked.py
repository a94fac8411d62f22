"""A host backend on several ranks: rank 0 schedules, samples and tells each call; the others make the same one.

A call travels as one text: tokens that rank 0 chose in the last step, the kind of the call, and its ints. Every rank
keeps rows, block tables and stamps of its own, checks whose blocks a step names by itself, and holds KV of its own
heads. Only rank 0 has logits to sample from that are used; all ranks have the same.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from enum import IntEnum
from typing import NoReturn

import torch

from engine.backends.common.batch import BatchBuilder
from engine.backends.common.host_runner import Forward, HostRunner, run_owned
from engine.backends.common.plan_wire import flatten, unflatten
from engine.backends.common.storage import KvStorage
from engine.core.backend import Capabilities, Samples
from engine.core.scheduler.limits import SchedulerLimits
from engine.core.scheduler.plan import FAILED, StepPlan
from engine.errors import RankError
from engine.sandbox.rank_link import RankLink
from isolation.ipc.wiping import wipe


class RankCall(IntEnum):
    """What rank 0 tells the others to do."""

    EXECUTE = 1
    FORGET = 2
    PROVE = 3
    TOUCH = 4
    LOCK_DOWN = 5
    """Warm-up is over."""
    MEET = 6
    """Nothing; rank 0 goes on when all others have come so far."""


class LeadingRunner:
    """The backend of rank 0, around that of its own part."""

    def __init__(self, own: HostRunner, link: RankLink) -> None:
        self.own = own
        self.limits = own.limits
        self.storage = own.storage
        self._link = link
        self._rows: list[int] = []
        self._chosen: list[int] = []
        """Rows and tokens of the last step that others have not been told yet."""

    @property
    def capabilities(self) -> Capabilities:
        """Those of one rank, without what needs the KV of all ranks in one place."""
        return replace(self.own.capabilities, spill=False, adapters=False)

    @property
    def description(self) -> str:
        """What computes, for people."""
        return f"{self._link.size} ranks of {self.own.description}"

    def execute(self, plan: StepPlan) -> Samples:
        """Run one step on all ranks; gives a token for each of the plan's ``sample_rows``."""
        flat = flatten(plan)
        self._tell(RankCall.EXECUTE, flat)
        wipe(flat)
        samples = self.own.execute(plan)
        self._rows, self._chosen = plan.sample_rows, samples.token_ids
        return samples

    def forget(self, rows: list[int]) -> None:
        """Overwrite the tokens of these rows on all ranks."""
        gone = frozenset(rows)
        self._chosen = [0 if row in gone else token for row, token in zip(self._rows, self._chosen, strict=True)]
        self._tell(RankCall.FORGET, array("q", rows))
        self.own.forget(rows)

    def adopt(self, blocks: list[int], stamps: list[int]) -> None:
        """Refuse: blocks leave and come back where one rank holds all of them."""
        raise RankError(f"{len(blocks)} blocks came back to an engine of several ranks, of which none can leave")

    def prove(self) -> None:
        """Try the deterministic class; every rank computes, and all see the same logits."""
        self._tell(RankCall.PROVE)
        self.own.prove()

    def touch(self) -> None:
        """Write every page of the large buffers of all ranks once more."""
        self._tell(RankCall.TOUCH)
        self.own.touch()

    def lock_down(self) -> None:
        """Have the other ranks locked down; returns when all are."""
        self._tell(RankCall.LOCK_DOWN)
        self._tell(RankCall.MEET)

    def _tell(self, call: RankCall, ints: array[int] | None = None) -> None:
        text = array("q", (call, len(self._chosen), *self._chosen))
        if ints is not None:
            text.extend(ints)
        self._rows, self._chosen = [], []
        data = bytearray(text.tobytes())
        wipe(text)
        self._link.tell(data)
        wipe(data)


class FollowingRunner:
    """The backend of another rank: what it computes is of use to all, and it samples nothing."""

    def __init__(self, forward: Forward, storage: KvStorage, limits: SchedulerLimits) -> None:
        self.writes_code = forward.writes_code
        """See ``Capabilities``."""
        self._forward = forward
        self._storage = storage
        self._batches = BatchBuilder(limits, storage)
        self._plan = StepPlan()
        self._computed: StepPlan | None = None
        """What the last plan has computed, until its tokens are known."""

    @classmethod
    def of(cls, runner: HostRunner) -> FollowingRunner:
        """Take over this part of a model without its sampler."""
        return cls(runner.forward, runner.storage, runner.limits)

    def follow(self, link: RankLink, lock_down: Callable[[], None]) -> NoReturn:
        """Do what rank 0 tells, for good.

        Raises:
            RankError: another rank is gone, or what it tells is no call.
        """
        while True:
            heard = link.hear()
            text = array("q")
            text.frombytes(heard)
            wipe(heard)
            with torch.inference_mode():
                self._do(text, lock_down)
            wipe(text)

    def _do(self, text: array[int], lock_down: Callable[[], None]) -> None:
        if len(text) < 2 or not 0 <= text[1] <= len(text) - 2:
            raise RankError("what rank 0 told is no call; ranks are out of step")
        call, count = text[0], text[1]
        self._settle(text[2 : 2 + count].tolist())
        ints = text[2 + count :]
        if call == RankCall.EXECUTE:
            self._execute(ints)
        elif call == RankCall.FORGET:
            self._batches.intake.forget(ints.tolist())
        elif call == RankCall.PROVE:
            self._forward.is_exact()
        elif call == RankCall.TOUCH:
            self._storage.touch()
            self._forward.touch()
        elif call == RankCall.LOCK_DOWN:
            lock_down()
        elif call != RankCall.MEET:
            raise RankError(f"rank 0 told {call}, which is no call; ranks are out of step")
        wipe(ints)

    def _execute(self, ints: array[int]) -> None:
        plan = self._plan = unflatten(ints, self._plan.decode_rows)
        self._batches.intake.take(plan)
        for admission in plan.admissions:
            wipe(admission.token_ids)
        if plan.decode_rows or plan.prefills:
            run_owned(self._batches, plan, self._compute, checked=self._forward.checks_owners)

    def _compute(self, plan: StepPlan) -> Samples:
        self._forward(plan, self._batches)
        self._computed = plan
        return Samples([FAILED] * len(plan.sample_rows))

    def _settle(self, token_ids: list[int]) -> None:
        """Note the tokens of the last step; nothing was computed of rows whose blocks are not theirs."""
        if self._computed is None:
            return
        rows = self._plan.sample_rows
        if len(rows) != len(token_ids):
            raise RankError(f"rank 0 told {len(token_ids)} tokens of {len(rows)} rows; ranks are out of step")
        chosen = dict(zip(rows, token_ids, strict=True))
        computed, self._computed = self._computed, None
        self._batches.advance(computed, [chosen[row] for row in computed.sample_rows])
