"""Masks of structured requests: which tokens a row may choose, applied to its logits before anything else.

A mask comes from the text sandbox by way of the host, for one position of one request. It is packed bits over the
tokenizer's ids. Ids beyond it (padding rows of the logits) are not allowed, and the ids that end a text in this model
are allowed exactly where the grammar lets the output end, whatever the bits say.

The masked row goes through the sampler as any other: greedy takes the allowed maximum, and a row whose allowed ids
have no finite logit, or that may choose none, fails alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.core.scheduler.plan import RowMask

_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_HIGHEST = np.where(_BITS, np.inf, -np.inf).astype(np.float32)
"""By a mask's byte: the highest score of each of its eight ids."""


class MaskedLogits:
    """Applies the masks of a step."""

    def __init__(self, eos_ids: frozenset[int]) -> None:
        self._eos_ids = sorted(eos_ids)

    def apply(self, logits: Tensor, rows: list[int], masks: Mapping[int, RowMask]) -> Tensor:
        """A float32 copy of the logits ``(M, vocab_size)`` in which forbidden ids of masked rows have minus infinity.

        Args:
            logits: any float dtype; not changed.
            rows: the row of each line.
            masks: by row; rows without one are left alone.
        """
        masked = logits.to(torch.float32, copy=True)
        size = masked.shape[1]
        for line, row in enumerate(rows):
            mask = masks.get(row)
            if mask is not None:
                highest = torch.from_numpy(self._highest(mask, size)).to(masked.device)
                torch.minimum(masked[line], highest, out=masked[line])
        return masked

    def _highest(self, mask: RowMask, size: int) -> NDArray[np.float32]:
        """For each id the highest score that it may have: any, or minus infinity.

        Looked up byte by byte, and applied as a minimum: to choose by a condition costs eight times as much where the
        bits of a mask are mixed.
        """
        highest = np.full(size, -np.inf, dtype=np.float32)
        known = _HIGHEST.take(np.frombuffer(mask.words, dtype=np.uint8), axis=0, mode="clip").reshape(-1)[:size]
        highest[: len(known)] = known
        for token_id in self._eos_ids:
            if token_id < size:
                highest[token_id] = np.inf if mask.accepting else -np.inf
        return highest
