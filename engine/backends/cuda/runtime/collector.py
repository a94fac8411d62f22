"""Waits for what a plan started, and takes its tokens, log-probabilities and scores."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.backends.common.masks import MaskedLogits
from engine.backends.common.sampler import Sampler
from engine.backends.common.sliced_sampling import Chooser
from engine.backends.cuda.runtime.ahead import Part
from engine.backends.cuda.runtime.host_rows import HostRows, Ints
from engine.backends.cuda.runtime.launches import Launcher
from engine.backends.cuda.runtime.loop import FOREIGN, NOTHING
from engine.backends.cuda.runtime.prefill import Prefilled
from engine.backends.cuda.runtime.sampling_state import entries
from engine.core.backend import Samples
from engine.core.scheduler.limits import SchedulerLimits
from engine.core.scheduler.plan import FAILED, Admission, StepPlan
from isolation.ipc.logprob import PromptLogprobs, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Started:
    """A plan that was started."""

    plan: StepPlan
    rows: Ints
    """Rows of its decoding requests, without those that were computed as prompts are."""
    places: Ints | None
    """Places of ``rows`` among the plan's; None: they are all of them."""
    parts: list[Part]
    """Steps of the device, and which of the rows each has."""
    prefilled: list[Prefilled]
    """What was computed as prompts are: the plan's chunks, and its deterministic rows."""
    owes: bool = False
    """Whether the first of these is of chunks of which nothing is waited for: no prompt ends with one, and none is
    scored. Whether they were computed is told with the next plan that has something of their rows."""


class StepCollector:
    """Waits for steps that were started, takes their tokens and log-probabilities, and scores prompts."""

    def __init__(self, launcher: Launcher, host: HostRows, limits: SchedulerLimits) -> None:
        self._launcher = launcher
        self._host = host
        self._sampler = Sampler(limits.max_num_seqs, limits.vocab_size)
        self._chooser = Chooser(self._sampler, MaskedLogits(limits.eos_ids), limits.vocab_size)
        self._owed: Prefilled | None = None
        self._unsound: set[int] = set()
        """Rows of chunks that were not computed, and of which no plan was told yet."""

    def admit(self, admission: Admission) -> None:
        """A request takes a row; of those whose prompts are scored the numbers are kept."""
        self._settle()
        self._unsound.discard(admission.row)
        if admission.prompt_logprobs >= 0:
            self._sampler.admit(admission)

    def forget(self, rows: list[int]) -> None:
        """Overwrite the ids that are kept of these rows."""
        self._sampler.forget(rows)

    def collect(self, step: Started) -> Samples:
        """Wait for the step's tokens and log-probabilities, and note how far rows are."""
        plan, rows, host = step.plan, step.rows, self._host
        ended = {chunk.row: place for place, chunk in enumerate(one for one in plan.prefills if one.last)}
        tokens: Ints = np.empty(len(plan.decode_rows) + len(ended), dtype=np.int64)
        logprobs: list[TokenLogprobs] = []
        for launch, there in step.parts:
            (found,) = np.nonzero(there)
            own = rows if len(found) == len(rows) else rows[found]
            places = found if step.places is None else step.places[found]
            lanes = launch.lane_of[own]
            tokens[places] = self._launcher.tokens(launch)[lanes]
            if launch.reports:
                logprobs += self._entries(places, own, tokens, self._launcher.reports(launch)[lanes])
        unsound = self._told(plan)
        if step.owes:
            self._owe(step.prefilled[0])
        if len(step.prefilled) > step.owes:
            place_of = {row: len(plan.decode_rows) + place for row, place in ended.items()}
            if step.places is not None:
                place_of |= {row: place for place, row in enumerate(plan.decode_rows)}
            for prefilled in step.prefilled[step.owes :]:
                unsound += self._take_prefilled(prefilled, place_of, tokens, logprobs)
        foreign = frozenset(unsound)
        if len(tokens) and tokens.min() < FAILED:
            assert NOTHING not in tokens, "a row that decodes was not computed"
            foreign = foreign.union(plan.sample_rows[place] for place in np.flatnonzero(tokens == FOREIGN))
            tokens[tokens == FOREIGN] = FAILED
        samples = Samples(tokens.tolist(), logprobs, foreign=foreign)
        if len(rows):
            host.last[rows] = tokens[: len(rows)] if step.places is None else tokens[step.places]
            host.position[rows] += 1
        scored: dict[int, PromptLogprobs] = {}
        for prefilled in step.prefilled:
            scored |= self._score(prefilled, samples.foreign)
        # In the plan's order, whichever way they were computed: that is how the scheduler tells requests apart.
        samples.prompts.extend(scored[chunk.row] for chunk in plan.prefills if chunk.row in scored)
        if len(step.parts) + len(step.prefilled) > 1:
            logprobs.sort(key=lambda entry: entry.index)
        return samples

    def _owe(self, prefilled: Prefilled) -> None:
        """Its chunks are taken to be computed, until it is known."""
        self._owed = prefilled
        for chunk in prefilled.chunks:
            self._host.position[chunk.row] = chunk.start + chunk.length

    def _settle(self) -> None:
        """Take what is owed: a step later it is there."""
        if self._owed is not None:
            told, self._owed = zip(self._owed.chunks, self._owed.verdicts.numpy(), strict=True), None
            self._unsound.update(chunk.row for chunk, one in told if one == FOREIGN)

    def _told(self, plan: StepPlan) -> list[int]:
        """Rows of this plan of which an earlier chunk was not computed."""
        self._settle()
        if not self._unsound:
            return []
        found = [row for row in (*plan.decode_rows, *(one.row for one in plan.prefills)) if row in self._unsound]
        self._unsound.difference_update(found)
        return found

    def _take_prefilled(
        self, prefilled: Prefilled, place_of: dict[int, int], tokens: Ints, logprobs: list[TokenLogprobs]
    ) -> list[int]:
        """Note the tokens of prompts that ended, and how far all are; gives the rows of chunks that were not computed.
        Log-probabilities are added to the others."""
        chunks, verdicts = prefilled.chunks, prefilled.verdicts.numpy()
        ended = [chunk.row for chunk in chunks if chunk.last]
        places = np.array([place_of[row] for row in ended], dtype=np.int64)
        tokens[places] = verdicts[: len(ended)]
        unsound = [chunk.row for chunk, one in zip(chunks, verdicts[len(ended) :], strict=True) if one == FOREIGN]
        if prefilled.reports is not None:
            rows = np.array(ended, dtype=np.int64)
            logprobs += self._entries(places, rows, tokens, prefilled.reports.numpy())
        for chunk in chunks:
            self._host.position[chunk.row] = chunk.start + chunk.length
        for row, token in zip(ended, tokens[places].tolist(), strict=True):
            self._host.last[row] = max(token, FAILED)
        return unsound

    def _entries(self, places: Ints, rows: Ints, tokens: Ints, words: NDArray[np.int32]) -> list[TokenLogprobs]:
        """Log-probabilities of these places' tokens, where their rows asked and there is a token."""
        asked = self._host.asked[rows]
        told = (asked >= 0) & (tokens[places] >= 0)
        return entries(places[told], words[told], asked[told])

    def _score(self, prefilled: Prefilled, foreign: frozenset[int]) -> dict[int, PromptLogprobs]:
        """Log-probabilities of prompts by row, of chunks that were computed."""
        chunks = prefilled.chunks
        place, found = sum(chunk.last for chunk in chunks), {}
        for chunk in chunks:
            if chunk.num_scored and chunk.row not in foreign:
                lines = prefilled.logits[place : place + chunk.num_scored]
                tokens = self._host.known[chunk.row][chunk.score_from : chunk.score_from + chunk.num_scored]
                found[chunk.row] = self._chooser.score(lines, chunk.row, chunk.score_from, tokens)
            place += chunk.num_scored
        return found
