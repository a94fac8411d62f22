"""A host backend on several ranks: rank 0 schedules, samples and tells each call; the others make the same one.

A call travels as one text (``call_text``): tokens that rank 0 chose in the last step, the kind of the call, and its
ints. Every rank keeps rows, block tables and stamps of its own, checks whose blocks a step names by itself, and holds
KV of its own heads and layers. With one stage all ranks have the same logits, of which only rank 0 samples; with
several, the last one gives them to rank 0 (``engine.backends.common.pipelined``).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from enum import IntEnum
from functools import partial
from typing import NoReturn

import torch

from engine.backends.common.batch import BatchBuilder
from engine.backends.common.host_runner import Forward, HostRunner, run_owned
from engine.backends.common.plan_wire import flatten, unflatten
from engine.backends.common.sampler import greedy
from engine.backends.common.storage import KvStorage
from engine.core.backend import Capabilities, Samples
from engine.core.scheduler.limits import SchedulerLimits
from engine.core.scheduler.plan import FAILED, StepPlan
from engine.errors import RankError
from engine.model.layers.stage_pipe import bytes_of
from engine.sandbox.rank_place import RankPlace
from isolation.ipc.wiping import wipe

_HEAD_INTS = 2
"""Ints before the rows of a call: its kind, and the number of rows whose tokens are told."""


class RankCall(IntEnum):
    """What rank 0 tells the others to do."""

    EXECUTE = 1
    FORGET = 2
    PROVE = 3
    TOUCH = 4
    LOCK_DOWN = 5
    """Warm-up is over."""
    MEET = 6
    """Wait until all others have come so far."""
    EXECUTE_BEST = 7
    """As ``EXECUTE``, of rows that all take the maximum of their logits: the last stage gives that alone."""


def call_text(call: RankCall, rows: list[int], token_ids: list[int], ints: array[int] | None = None) -> bytearray:
    """A call as it travels: rows whose tokens are told, the tokens, and what the call is about."""
    text = array("q", (call, len(rows), *rows, *token_ids))
    if ints is not None:
        text.extend(ints)
    data = bytearray(text.tobytes())
    wipe(text)
    return data


class LeadingRunner:
    """The backend of rank 0, around that of its own part."""

    def __init__(self, own: HostRunner, place: RankPlace) -> None:
        self.own = own
        self.limits = own.limits
        self.storage = own.storage
        self._place = place
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
        return f"{self._place.link.size} ranks of {self.own.description}"

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
        self._place.meet()

    def _tell(self, call: RankCall, ints: array[int] | None = None) -> None:
        text = call_text(call, self._rows, self._chosen, ints)
        self._rows, self._chosen = [], []
        self._place.tell(text)
        wipe(text)


class FollowingRunner:
    """The backend of another rank: what it computes is of use to all, and it samples nothing."""

    def __init__(self, forward: Forward, storage: KvStorage, limits: SchedulerLimits, place: RankPlace) -> None:
        self.writes_code = forward.writes_code
        """See ``Capabilities``."""
        self._forward = forward
        self._storage = storage
        self._place = place
        self._batches = BatchBuilder(limits, storage)
        self._plan = StepPlan()

    @classmethod
    def of(cls, runner: HostRunner, place: RankPlace) -> FollowingRunner:
        """Take over this part of a model without its sampler."""
        return cls(runner.forward, runner.storage, runner.limits, place)

    def follow(self, lock_down: Callable[[], None]) -> NoReturn:
        """Do what rank 0 tells, for good.

        Raises:
            RankError: another rank is gone, or what it tells is no call.
        """
        while True:
            heard = self._place.hear()
            text = array("q")
            text.frombytes(heard)
            wipe(heard)
            with torch.inference_mode():
                self._do(text, lock_down)
            wipe(text)

    def _do(self, text: array[int], lock_down: Callable[[], None]) -> None:
        if len(text) < _HEAD_INTS or not 0 <= 2 * text[1] <= len(text) - _HEAD_INTS:
            raise RankError("what rank 0 told is no call; ranks are out of step")
        call, count = text[0], text[1]
        begin = _HEAD_INTS + count
        if count:
            self._batches.intake.last[text[_HEAD_INTS:begin].tolist()] = text[begin : begin + count].tolist()
        ints = text[begin + count :]
        if call in (RankCall.EXECUTE, RankCall.EXECUTE_BEST):
            self._execute(ints, best=call == RankCall.EXECUTE_BEST)
        elif call == RankCall.FORGET:
            self._batches.intake.forget(ints.tolist())
        elif call == RankCall.PROVE:
            self._prove()
        elif call == RankCall.TOUCH:
            self._storage.touch()
            self._forward.touch()
        elif call == RankCall.LOCK_DOWN:
            lock_down()
        elif call == RankCall.MEET:
            self._place.meet()
        else:
            raise RankError(f"rank 0 told {call}, which is no call; ranks are out of step")
        wipe(ints)

    def _prove(self) -> None:
        exact = self._forward.is_exact()
        if self._place.answers and self._place.queue is not None:
            self._place.queue.send_text(bytes((exact,)))

    def _execute(self, ints: array[int], *, best: bool) -> None:
        plan = self._plan = unflatten(ints, self._plan.decode_rows)
        self._batches.intake.take(plan)
        for admission in plan.admissions:
            wipe(admission.token_ids)
        if plan.decode_rows or plan.prefills:
            run = partial(self._compute, best=best)
            run_owned(self._batches, plan, run, checked=self._forward.checks_owners)

    def _compute(self, plan: StepPlan, *, best: bool) -> Samples:
        """Compute; rank 0 tells the tokens with a later call."""
        logits = self._forward(plan, self._batches).logits
        if self._place.answers and self._place.queue is not None and len(plan.logit_lines):
            self._place.queue.send(bytes_of(greedy(logits) if best else logits.contiguous()))
        count = len(plan.sample_rows)
        self._batches.advance(plan, [0] * count)
        return Samples([FAILED] * count)
