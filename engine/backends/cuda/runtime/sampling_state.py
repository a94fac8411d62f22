"""What some rows ask of the choice of their tokens beyond numbers, as memory on the device.

*Counts* of the ids that occurred, for penalties: the host writes those of the known tokens when a row is admitted, and
each step counts what it chooses. *Biases* of some ids: the host writes them when a row is admitted. *Masks* of
structured rows: the host writes one before each step that such a row takes part in. *Reports* of log-probabilities:
steps write them into a ring, as their tokens. Each row has a line of its own of the first three; the last line is that
of the padding row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.backends.common.sampler import LOWEST_LOGPROB
from engine.backends.cuda.runtime.copying import CachedCopies, Copies
from engine.backends.cuda.runtime.operations import Sampled
from engine.core.scheduler.plan import Admission, RowMask
from isolation.ipc.logit_bias import MAX_LOGIT_BIASES
from isolation.ipc.logprob import TokenLogprobs
from isolation.ipc.messages import MAX_TOP_LOGPROBS

Ints = NDArray[np.int64]

WORD_BITS = 32

REPORT_WORDS = 1 + 2 * MAX_TOP_LOGPROBS
"""Words of a line of a report: bits of the token's log-probability, ids of alternatives, bits of theirs."""


class ChoiceMemory:
    """Counts, biases and masks of ``lines`` rows, the last of them the padding row, of ``vocab`` ids."""

    def __init__(
        self, lines: int, vocab: int, eos_ids: frozenset[int], device: torch.device, copies: Copies | None = None
    ) -> None:
        """``copies``: None for torch's own."""
        self._upload = (copies or CachedCopies(device)).upload
        self._vocab = vocab
        self._eos_ids = np.array(sorted(one for one in eos_ids if one < vocab), dtype=np.int64)
        self._used: set[int] = set()
        self.counts = torch.zeros(lines, vocab, dtype=torch.int32, device=device)
        self.masks = torch.zeros(lines, -(-vocab // WORD_BITS), dtype=torch.int32, device=device)
        self.bias_ids = torch.zeros(lines, MAX_LOGIT_BIASES, dtype=torch.int32, device=device)
        self.biases = torch.zeros(lines, MAX_LOGIT_BIASES, device=device)
        self._all = (self.counts, self.masks, self.bias_ids, self.biases)

    def admit(self, admissions: Iterable[Admission]) -> None:
        """Rows with penalties begin: count their known tokens."""
        for admission in admissions:
            known = np.array(admission.token_ids, dtype=np.int64)
            ids, counts = np.unique(known[admission.num_prompt :], return_counts=True)
            prompt = np.unique(known)
            seen = np.ones(len(prompt), dtype=np.int64)
            seen[np.searchsorted(prompt, ids)] += counts
            sent = self._upload(np.stack((prompt, seen)))
            self.counts[admission.row].zero_().index_copy_(0, sent[0], sent[1].int())
            self._used.add(admission.row)

    def bias(self, admissions: Iterable[Admission]) -> None:
        """Rows with biases begin: write their lines."""
        for admission in admissions:
            bias = admission.logit_bias
            assert bias is not None, "a row without biases has no line of them"
            ids, values = np.array(bias.ids, dtype=np.int32), np.array(bias.values, dtype=np.float32)
            self.bias_ids[admission.row, : len(bias)].copy_(self._upload(ids))
            self.biases[admission.row, : len(bias)].copy_(self._upload(values))
            self._used.add(admission.row)

    def put(self, masks: Mapping[int, RowMask]) -> None:
        """Masks for the next token of these rows."""
        rows = self._upload(np.array(list(masks), dtype=np.int64))
        words = self._upload(packed(list(masks.values()), self.masks.shape[1], self._eos_ids))
        self.masks.index_copy_(0, rows, words)
        self._used.update(masks)

    def forget(self, rows: Iterable[int]) -> None:
        """Overwrite the lines of these rows."""
        used = self._used.intersection(rows)
        if used:
            self._used -= used
            lines = self._upload(np.array(sorted(used), dtype=np.int64))
            for memory in self._all:
                memory.index_fill_(0, lines, 0)

    def clean(self) -> None:
        """Overwrite the padding row's lines, where steps count for lanes without a row."""
        for memory in self._all:
            memory[-1].zero_()

    def touch(self) -> None:
        """Write every page once more."""
        for memory in self._all:
            memory.zero_()


def packed(masks: list[RowMask], width: int, eos_ids: Ints) -> NDArray[np.int32]:
    """The words of masks, ``(masks, width)``. What a mask does not tell of is forbidden, and ids that end a text are
    allowed exactly where the output may end, as ``engine.backends.common.masks`` has it."""
    lines = np.zeros((len(masks), width * 4), dtype=np.uint8)
    for line, mask in zip(lines, masks, strict=True):
        told = np.frombuffer(mask.words, dtype=np.uint8)[: len(line)]
        line[: len(told)] = told
    accepting = np.array([mask.accepting for mask in masks], dtype=np.uint8)[:, None]
    bits = (1 << (eos_ids % 8)).astype(np.uint8)
    for place, bit in zip((eos_ids // 8).tolist(), bits, strict=True):
        lines[:, place] = (lines[:, place] & ~bit) | (accepting[:, 0] * bit)
    words: NDArray[np.int32] = lines.view("<i4")
    return words


def report_words(sampled: Sampled) -> Tensor:
    """A report as words, int32 ``(M, REPORT_WORDS)``."""
    own, tops = sampled.logprobs.view(torch.int32), sampled.top_logprobs.view(torch.int32)
    return torch.cat((own.unsqueeze(1), sampled.top_ids, tops), 1)


def entries(places: Ints, words: NDArray[np.int32], asked: Ints) -> list[TokenLogprobs]:
    """What reports say, one a line of ``words``: ``places`` are those of the tokens in their step, ``asked`` the
    numbers of alternatives that were asked for."""
    lines = np.ascontiguousarray(words)
    own = lines[:, 0].view(np.float32).tolist()
    ids = lines[:, 1 : 1 + MAX_TOP_LOGPROBS]
    counts = np.minimum((ids >= 0).sum(1), asked).tolist()
    tops = lines[:, 1 + MAX_TOP_LOGPROBS :].view(np.float32)
    return [
        TokenLogprobs(place, max(one, LOWEST_LOGPROB), tuple(line[:count].tolist()), tuple(top[:count].tolist()))
        for place, one, line, top, count in zip(places.tolist(), own, ids, tops, counts, strict=True)
    ]
