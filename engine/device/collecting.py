"""Waits for steps that were started, and says what they gave."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.chooser import Chooser
from engine.device.choices import entries
from engine.device.host_rows import HostRows, Ints
from engine.device.launches import Launch, Launcher
from engine.device.loop import FOREIGN, NOTHING
from engine.device.prefill import Prefilled
from engine.masks import MaskedLogits
from engine.sampler import Sampler, Samples
from engine.scheduler.limits import SchedulerLimits
from engine.scheduler.plan import FAILED, Admission, Chunk, StepPlan
from isolation.ipc.messages import TokenLogprobs

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Started:
    """A plan that was started."""

    plan: StepPlan
    rows: Ints
    """Of its decoding requests."""
    parts: list[tuple[Launch, Flags]]
    """Steps of the device, and which of the rows each has."""
    prefilled: Prefilled | None


class Collector:
    """Takes tokens and log-probabilities from where the device left them, and scores prompts."""

    def __init__(self, launcher: Launcher, host: HostRows, limits: SchedulerLimits) -> None:
        self._launcher = launcher
        self._host = host
        self._sampler = Sampler(limits.max_num_seqs, limits.vocab_size)
        self._chooser = Chooser(self._sampler, MaskedLogits(limits.eos_ids), limits.vocab_size)

    def admit(self, admission: Admission) -> None:
        """A request takes a row; of those whose prompts are scored the numbers are kept."""
        if admission.prompt_logprobs >= 0:
            self._sampler.admit(admission)

    def forget(self, rows: list[int]) -> None:
        """Overwrite the ids that are kept of these rows."""
        self._sampler.forget(rows)

    def collect(self, step: Started) -> Samples:
        """Wait for the step's tokens and log-probabilities, and note how far rows are."""
        plan, rows, host = step.plan, step.rows, self._host
        tokens: Ints = np.empty(len(rows), dtype=np.int64)
        logprobs: list[TokenLogprobs] = []
        for launch, there in step.parts:
            (places,) = np.nonzero(there)
            own = rows if len(places) == len(rows) else rows[places]
            lanes = launch.lane_of[own]
            tokens[places] = self._launcher.tokens(launch)[lanes]
            if launch.reports:
                logprobs += self._entries(places, own, tokens, self._launcher.reports(launch)[lanes])
        unsound: list[int] = []
        if step.prefilled is not None:
            tokens, unsound = self._take_prefilled(step.plan, step.prefilled, tokens, logprobs)
        foreign = frozenset(unsound)
        if len(tokens) and tokens.min() < FAILED:
            assert NOTHING not in tokens, "a row that decodes was not computed"
            foreign = foreign.union(plan.sample_rows[place] for place in np.flatnonzero(tokens == FOREIGN))
            tokens[tokens == FOREIGN] = FAILED
        samples = Samples(tokens.tolist(), logprobs, foreign=foreign)
        host.last[rows] = tokens[: len(rows)]
        host.position[rows] += 1
        if step.prefilled is not None:
            logprobs.sort(key=lambda entry: entry.index)
            self._score(plan.prefills, step.prefilled, samples)
            self._note_prefilled(plan, tokens[len(rows) :])
        elif len(step.parts) > 1:
            logprobs.sort(key=lambda entry: entry.index)
        return samples

    def _take_prefilled(
        self, plan: StepPlan, prefilled: Prefilled, tokens: Ints, logprobs: list[TokenLogprobs]
    ) -> tuple[Ints, list[int]]:
        """The tokens with those of prompts that ended, and the rows of chunks that were not computed. Log-probabilities
        are added to the others."""
        verdicts = prefilled.verdicts.numpy()
        first, ending = len(tokens), len(verdicts) - len(plan.prefills)
        tokens = np.concatenate((tokens, verdicts[:ending]))
        unsound = [chunk.row for chunk, one in zip(plan.prefills, verdicts[ending:], strict=True) if one == FOREIGN]
        if prefilled.reports is not None:
            rows = np.array([chunk.row for chunk in plan.prefills if chunk.last], dtype=np.int64)
            logprobs += self._entries(np.arange(first, len(tokens)), rows, tokens, prefilled.reports.numpy())
        return tokens, unsound

    def _note_prefilled(self, plan: StepPlan, tokens: Ints) -> None:
        """How far prompts are, and the tokens of those that ended."""
        found = iter(tokens.tolist())
        for chunk in plan.prefills:
            self._host.position[chunk.row] = chunk.start + chunk.length
            if chunk.last:
                self._host.last[chunk.row] = next(found)

    def _entries(self, places: Ints, rows: Ints, tokens: Ints, words: NDArray[np.int32]) -> list[TokenLogprobs]:
        """Log-probabilities of these places' tokens, where their rows asked and there is a token."""
        asked = self._host.asked[rows]
        told = (asked >= 0) & (tokens[places] >= 0)
        return entries(places[told], words[told], asked[told])

    def _score(self, chunks: list[Chunk], prefilled: Prefilled, samples: Samples) -> None:
        """Log-probabilities of prompts, of chunks that were computed."""
        place = sum(chunk.last for chunk in chunks)
        for chunk in chunks:
            if chunk.num_scored and chunk.row not in samples.foreign:
                lines = prefilled.logits[place : place + chunk.num_scored]
                tokens = self._host.known[chunk.row][chunk.score_from : chunk.score_from + chunk.num_scored]
                samples.prompts.append(self._chooser.score(lines, chunk.row, chunk.score_from, tokens))
            place += chunk.num_scored
