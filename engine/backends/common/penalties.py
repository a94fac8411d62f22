"""Repetition, presence and frequency penalties, over sparse counts.

A penalty concerns only ids that occurred in the request, so each penalised row keeps the list of these ids with the
number of times each was put out: a few thousand entries instead of one a vocabulary entry, and rows without
penalties cost nothing.

Repetition (CTRL, arXiv 1909.05858): scores of ids in prompt or output are divided by the penalty when positive, else
multiplied. Presence and frequency: subtracted once, and once an occurrence, for ids in the output.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.core.scheduler.plan import Admission
from isolation.ipc.sampling import Sampling

WIDEST = 1e15
"""Repetition penalties are cut to this and to its inverse: beyond it all scores would be equal in float32."""

LARGEST = float(torch.finfo(torch.float32).max)
"""Where a penalised score ends, so that none becomes infinite."""

ROOM = 64
"""Ids for which room is added when a row's lists are full."""


def has_penalties(sampling: Sampling) -> bool:
    """Whether what occurred has an influence on what is chosen."""
    return (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (1, 0, 0)


class Penalties:
    """The penalised rows of a batch."""

    def __init__(self) -> None:
        self._rows: dict[int, _PenalisedRow] = {}

    def admit(self, admission: Admission) -> bool:
        """Take over a row's penalties; says whether there are any."""
        sampling = admission.sampling
        self.forget((admission.row,))
        penalised = has_penalties(sampling)
        if penalised:
            self._rows[admission.row] = _PenalisedRow(admission.token_ids, admission.num_prompt, sampling)
        return penalised

    def forget(self, rows: Iterable[int]) -> None:
        """Overwrite what is kept of these rows and drop it."""
        for row in rows if self._rows else ():
            state = self._rows.pop(row, None)
            if state is not None:
                state.wipe()

    def apply(self, raw: Tensor, rows: list[int]) -> Tensor:
        """Penalised copy of the float32 scores ``(M, V)``, or the scores themselves when no row has penalties."""
        found = [(place, self._rows[row]) for place, row in enumerate(rows) if row in self._rows]
        if not found:
            return raw
        sizes = [len(state) for _, state in found]
        ids = _to(np.concatenate([state.ids for _, state in found]), raw)
        counts = _to(np.concatenate([state.counts for _, state in found]), raw)
        places = _to(np.repeat(np.array([place for place, _ in found]), sizes), raw)
        numbers = np.array([state.numbers for _, state in found], dtype=np.float32)
        repetition, presence, frequency = (_to(np.repeat(column, sizes), raw) for column in numbers.T)
        scores = raw.clone()
        values = scores[places, ids]
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= frequency * counts + presence * (counts > 0)
        values.clamp_(max=LARGEST)
        scores[places, ids] = values
        return scores

    def count(self, rows: list[int], token_ids: list[int]) -> None:
        """Note the tokens just chosen; negative ids are failures and are passed over."""
        if not self._rows:
            return
        for row, token_id in zip(rows, token_ids, strict=True):
            if token_id >= 0 and row in self._rows:
                self._rows[row].add(token_id)


class _PenalisedRow:
    """Ids that occurred in one request, with their number of occurrences in the output."""

    def __init__(self, token_ids: array[int], num_prompt: int, sampling: Sampling) -> None:
        output = Counter(token_ids[num_prompt:])
        known = list(dict.fromkeys(token_ids))
        self._index = {token_id: place for place, token_id in enumerate(known)}
        self._ids = np.array(known, dtype=np.int64)
        self._counts = np.array([output[token_id] for token_id in known], dtype=np.float32)
        self.numbers = (
            min(max(sampling.repetition_penalty, 1 / WIDEST), WIDEST),
            sampling.presence_penalty,
            sampling.frequency_penalty,
        )

    def __len__(self) -> int:
        return len(self._index)

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._ids[: len(self._index)]

    @property
    def counts(self) -> NDArray[np.float32]:
        return self._counts[: len(self._index)]

    def wipe(self) -> None:
        self._ids.fill(0)
        self._counts.fill(0)

    def add(self, token_id: int) -> None:
        place = self._index.get(token_id)
        if place is None:
            place = len(self._index)
            if place == len(self._ids):
                outgrown = self._ids
                self._ids = np.concatenate((outgrown, np.zeros(ROOM, dtype=np.int64)))
                outgrown.fill(0)
                self._counts = np.concatenate((self._counts, np.zeros(ROOM, dtype=np.float32)))
            self._index[token_id] = place
            self._ids[place] = token_id
            self._counts[place] = 0
        self._counts[place] += 1


def _to(values: NDArray[np.generic], like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)
