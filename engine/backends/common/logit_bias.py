"""Biases of requests: numbers that are added to the scores of some ids, before penalties and temperature.

Each biased row keeps its own short list, so other rows cost nothing, and a step without any looks at one dictionary.
Scores of other rows are copied as they are: their bits stay.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.core.scheduler.plan import Admission


class LogitBiases:
    """The biased rows of a batch."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}

    def admit(self, admission: Admission) -> bool:
        """Take over a row's biases; says whether there are any."""
        self.forget((admission.row,))
        bias = admission.logit_bias
        if bias is None:
            return False
        self._rows[admission.row] = np.array(bias.ids, dtype=np.int64), np.array(bias.values, dtype=np.float32)
        return True

    def forget(self, rows: Iterable[int]) -> None:
        """Overwrite what is kept of these rows and drop it."""
        for row in rows if self._rows else ():
            for column in self._rows.pop(row, ()):
                column.fill(0)

    def apply(self, raw: Tensor, rows: list[int]) -> Tensor:
        """Biased copy of the float32 scores ``(M, V)``, or the scores themselves when no row has biases."""
        found = [(place, self._rows[row]) for place, row in enumerate(rows) if row in self._rows] if self._rows else []
        if not found:
            return raw
        scores = raw.clone()
        for place, (ids, values) in found:
            # No id stands twice, so each score is one sum of two numbers.
            scores[place].index_add_(0, torch.from_numpy(ids).to(raw.device), torch.from_numpy(values).to(raw.device))
        return scores
