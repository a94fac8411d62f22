"""Chooses and scores the tokens of a step, a bounded number of scores at a time.

A sampler holds some copies of its scores for a moment, and an engine keeps the memory that it once took. With 150,000
ids and 128 rows that moment would be two gigabytes; rows are independent, so nothing is lost by taking few at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.backends.common.masks import MaskedLogits
from engine.backends.common.sampler import Sampler
from engine.core.backend import Samples
from engine.core.scheduler.plan import RowMask
from isolation.ipc.logprob import PromptLogprobs

SCORES_AT_ONCE = 1 << 18
"""Scores that are looked at together, at least a row: one row of 150,000 ids, 8 of 32,000. What a call costs by itself
is a few percent of that."""


class Chooser:
    """Masks, samples and scores lines of logits."""

    def __init__(self, sampler: Sampler, masked: MaskedLogits, vocab_size: int) -> None:
        self._sampler = sampler
        self._masked = masked
        self._lines = lines_at_once(vocab_size)

    def choose(
        self, logits: Tensor, rows: list[int], positions: NDArray[np.int64], masks: Mapping[int, RowMask]
    ) -> Samples:
        """A token for each row; see ``Sampler.sample``. ``masks`` go by row."""
        chosen = Samples([])
        for start in range(0, len(rows), self._lines):
            stop = start + self._lines
            some, part = logits[start:stop], rows[start:stop]
            if masks:
                some = self._masked.apply(some, part, masks)
            samples = self._sampler.sample(some, part, positions[start:stop])
            chosen.token_ids += samples.token_ids
            chosen.logprobs += [replace(entry, index=entry.index + start) for entry in samples.logprobs]
        return chosen

    def score(self, logits: Tensor, row: int, start: int, token_ids: NDArray[np.int64]) -> PromptLogprobs:
        """Log-probabilities of given tokens; see ``Sampler.score``."""
        step = self._lines
        parts = [
            self._sampler.score(logits[at : at + step], row, start + at, token_ids[at : at + step])
            for at in range(0, len(token_ids), step)
        ]
        whole = parts[0]
        for part in parts[1:]:
            whole.logprobs.extend(part.logprobs)
            whole.top_ids.extend(part.top_ids)
            whole.top_logprobs.extend(part.top_logprobs)
        return whole


def lines_at_once(vocab_size: int) -> int:
    """Lines of logits that are looked at together."""
    return max(1, SCORES_AT_ONCE // vocab_size)
