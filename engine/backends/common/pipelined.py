"""Rank 0 of a pipeline: several parts of the batch are on their way at once, each in another stage.

A step of the scheduler names all rows. Of those that are not on their way already, a part is sent into the pipeline:
rank 0 computes its own layers of it and passes it on, while the next stage computes the part before. Then it takes the
results of the oldest part, samples, and answers those rows; all others get no token in this step (``Samples.counts``)
and are planned again. So each row has a token every so many steps as there are stages, and every stage computes all the
time where there are rows enough. Stages do what they are told in one order: what a later plan does to a row or a block
reaches each stage behind what was computed before. Results of a row that has ended meanwhile are passed over.

A part is as large as an even division of the rows, so that parts stay alike while requests come and go. With one row
rank 0 waits for its result at once: nothing else can be computed.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from engine.backends.common.host_runner import HostRunner
from engine.backends.common.intake import Ints
from engine.backends.common.plan_wire import flatten
from engine.backends.common.ranked import RankCall, call_text
from engine.core.backend import Capabilities, Samples
from engine.core.scheduler.plan import FAILED, NO_ROWS, Chunk, RowMask, StepPlan
from engine.errors import RankError
from engine.model.layers.stage_pipe import bytes_of
from engine.sandbox.rank_place import RankPlace
from isolation.ipc.logprob import PromptLogprobs, TokenLogprobs
from isolation.ipc.wiping import wipe

_SPARE_BYTES = 64
"""More than the length that goes before a text."""

GONE = -1
"""In place of a row that has ended while it was on its way."""


@dataclass(slots=True)
class SentPart:
    """What was sent into the pipeline in one step, until its results are taken."""

    rows: list[int]
    """Rows that get a token; ``GONE`` where one has ended."""
    scored: list[Chunk]
    """Chunks whose prompts are scored."""
    positions: Ints
    """Positions of the tokens to be chosen or scored."""
    masks: Mapping[int, RowMask]
    best: bool
    """Whether the last stage gives maxima in place of logits."""
    result: Tensor | None = None
    """What the last stage gave, once it was taken."""


@dataclass(slots=True)
class Answers:
    """Tokens of a step, by row."""

    tokens: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompts: list[PromptLogprobs] = field(default_factory=list)


class PipelinedRunner:
    """The backend of rank 0 where there are several stages, around that of its own layers."""

    def __init__(self, own: HostRunner, place: RankPlace) -> None:
        assert place.queue is not None, "a pipeline has several stages"
        self.own = own
        self.limits = own.limits
        self.storage = own.storage
        self._place = place
        self._queue = place.queue
        self._parts: list[SentPart] = []
        """On their way, the oldest first."""
        self._chosen: dict[int, int] = {}
        """Tokens by row that the other ranks of the first stage have not been told yet."""
        self._turns = np.zeros(own.limits.max_num_seqs, dtype=np.int64)
        """Step in which each row was sent last: the row that has waited longest goes first."""
        self._turn = 0
        self._row_bytes = own.model.config.hidden_size * own.model.dtype.itemsize
        self._capabilities = replace(own.capabilities, spill=False, adapters=False)

    @property
    def capabilities(self) -> Capabilities:
        """Those of one rank, without what needs the KV of all ranks in one place."""
        return self._capabilities

    @property
    def description(self) -> str:
        """What computes, for people."""
        place, layers = self._place, self.own.model.parallel.stages
        cut = "+".join(str(stop - start) for start, stop in layers)
        return f"{place.link.size} ranks in {place.stages} stages ({cut} layers) of {self.own.description}"

    def execute(self, plan: StepPlan) -> Samples:
        """Run one step: send a part of the rows, and answer rows whose results have come."""
        self.own.take(plan)
        self._leave([admission.row for admission in plan.admissions])
        part, waiting = self._next(plan)
        with torch.inference_mode():
            foreign = self._send(part) if part.num_tokens or _renews(part) else NO_ROWS
            answers, sent = Answers(), bool(part.logit_lines)
            if any(chunk.num_scored for chunk in plan.prefills):
                self._take(answers, 0)
            elif len(self._parts) >= self._place.stages:
                self._take(answers, self._place.stages - 1)
            elif not sent or not (waiting or plan.prefills):
                # Nothing else can be sent before a result has come; and where prompts alone are, rows do not wait.
                self._take(answers, len(self._parts) - 1)
        return _samples(plan, answers, foreign)

    def forget(self, rows: list[int]) -> None:
        """Overwrite the tokens of these rows on all ranks."""
        self._leave(rows)
        self._tell(RankCall.FORGET, array("q", rows))
        self.own.forget(rows)
        self._pass_over()

    def adopt(self, blocks: list[int], stamps: list[int]) -> None:
        """Refuse: blocks leave and come back where one rank holds all of them."""
        raise RankError(f"{len(blocks)} blocks came back to an engine of several ranks, of which none can leave")

    def prove(self) -> None:
        """Try the deterministic class; the last stage sees the logits."""
        self._drain()
        self._tell(RankCall.PROVE)
        self.own.prove()
        exact = bool(self._queue.receive_text()[0])
        self._capabilities = replace(self._capabilities, deterministic=exact)

    def touch(self) -> None:
        """Write every page of the large buffers of all ranks once more."""
        self._drain()
        self._tell(RankCall.TOUCH)
        self.own.touch()

    def lock_down(self) -> None:
        """Have the other ranks locked down; returns when all are."""
        self._drain()
        self._tell(RankCall.LOCK_DOWN)
        self._tell(RankCall.MEET)
        self._place.meet()

    def _leave(self, rows: list[int]) -> None:
        """Pass over what comes for these rows: their requests have ended."""
        for row in rows:
            self._chosen.pop(row, None)
            for part in self._parts:
                part.rows = [GONE if one == row else one for one in part.rows]

    def _pass_over(self) -> None:
        """Take the oldest parts whose rows have all ended. There may be no further step that takes them, and a last
        stage that waits for room for its results would neither forget nor do anything else that it is told."""
        while self._parts and all(row == GONE for row in self._parts[0].rows):
            self._receive(1)
            self._parts.pop(0)

    def _next(self, plan: StepPlan) -> tuple[StepPlan, int]:
        """What of a plan is sent now, and the number of rows that are left for the next step."""
        rows = plan.decode_rows
        coming = {row for part in self._parts for row in part.rows}
        fresh = [row for row in rows if row not in coming]
        most = -(-len(rows) // self._place.stages)
        if len(fresh) > most:
            turns = self._turns
            fresh.sort(key=lambda row: int(turns[row]))
            waiting, fresh = len(fresh) - most, fresh[:most]
        else:
            waiting = 0
        self._turn += 1
        self._turns[fresh] = self._turn
        part = replace(plan, decode_rows=fresh)
        part.masks = {row: plan.masks[row] for row in part.sample_rows if row in plan.masks} if plan.masks else {}
        return part, waiting

    def _send(self, part: StepPlan) -> frozenset[int]:
        """Have all stages compute a part. Gives rows of which nothing is computed, since a block is not theirs."""
        own, batches = self.own, self.own.batches
        foreign = batches.foreign(part) if part.num_tokens else NO_ROWS
        rest = part
        if foreign:
            rest = part.computing({*part.decode_rows, *(chunk.row for chunk in part.prefills)} - foreign)
        best = own.takes_maximum(rest.sample_rows, rest.masks) and not any(one.num_scored for one in rest.prefills)
        flat = flatten(part)
        self._tell(RankCall.EXECUTE_BEST if best else RankCall.EXECUTE, flat)
        wipe(flat)
        if not rest.num_tokens:
            return foreign
        if not self._queue.has_room(self._row_bytes * rest.num_tokens) or batches.intake.exact:
            self._receive()
        positions = own.forward(rest, batches).next_positions
        if rest.logit_lines:
            scored = [chunk for chunk in rest.prefills if chunk.num_scored]
            self._parts.append(SentPart(list(rest.sample_rows), scored, positions, rest.masks, best))
        batches.advance(rest, [0] * len(rest.sample_rows))
        return foreign

    def _receive(self, count: int | None = None) -> None:
        """Take the results of the oldest ``count`` parts from the last stage, or of all."""
        model = self.own.model
        for part in self._parts[:count]:
            if part.result is not None:
                continue
            lines = len(part.positions)
            shape, dtype = ((lines,), torch.int64) if part.best else ((lines, model.config.vocab_size), model.dtype)
            part.result = torch.empty(shape, dtype=dtype)
            self._queue.receive(bytes_of(part.result))

    def _take(self, answers: Answers, left: int) -> None:
        """Sample from the oldest parts until so many are on their way."""
        while len(self._parts) > max(left, 0):
            self._receive(1)
            self._sample(self._parts.pop(0), answers)

    def _drain(self) -> None:
        """Take what is on its way and pass it over; only while no request is live."""
        self._receive()
        self._parts.clear()
        self._chosen.clear()

    def _sample(self, part: SentPart, answers: Answers) -> None:
        result, own = part.result, self.own
        assert result is not None, "results of a part that has not come back"
        count = len(part.rows)
        places = [place for place, row in enumerate(part.rows) if row != GONE]
        rows = [part.rows[place] for place in places]
        if part.best:
            token_ids = result[places].tolist()
        elif rows:
            lines = result[:count] if len(places) == count else result[places]
            samples = own.choose(lines, rows, part.positions[places], part.masks)
            token_ids = samples.token_ids
            answers.logprobs.update((rows[entry.index], entry) for entry in samples.logprobs)
        else:
            token_ids = []
        for chunk in part.scored:
            answers.prompts.append(own.score(result[count : count + chunk.num_scored], chunk))
            count += chunk.num_scored
        chosen = dict(zip(rows, token_ids, strict=True))
        own.batches.intake.last[rows] = token_ids
        self._chosen |= chosen
        answers.tokens |= chosen

    def _tell(self, call: RankCall, ints: array[int] | None = None) -> None:
        text = call_text(call, list(self._chosen), list(self._chosen.values()), ints)
        self._chosen = {}
        if not self._queue.has_room(len(text) + _SPARE_BYTES):
            self._receive()
        self._place.tell(text)
        wipe(text)


def _renews(plan: StepPlan) -> bool:
    """Whether a plan changes rows or blocks."""
    return bool(plan.admissions or plan.grown_rows or plan.zero_blocks)


def _samples(plan: StepPlan, answers: Answers, foreign: frozenset[int]) -> Samples:
    """Answers in the order of the plan: one token, or none, for each of its ``sample_rows``."""
    samples = Samples([], prompts=answers.prompts, foreign=foreign)
    counts = []
    for row in plan.sample_rows:
        token_id = FAILED if row in foreign else answers.tokens.get(row)
        counts.append(int(token_id is not None))
        if token_id is None:
            continue
        if row in answers.logprobs:
            samples.logprobs.append(replace(answers.logprobs[row], index=len(samples.token_ids)))
        samples.token_ids.append(token_id)
    if not all(counts):
        samples.counts = counts
    return samples
