"""A step's rows are sampled and scored a few at a time."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
import torch

from engine.backends.common import sliced_sampling
from engine.backends.common.masks import MaskedLogits
from engine.backends.common.sampler import Sampler
from engine.core.scheduler.plan import Admission, RowMask
from isolation.ipc.sampling import Sampling

VOCAB = 50


def test_a_few_rows_at_a_time_choose_what_all_at_once_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens, log-probabilities and scores of prompts are the same whatever number of lines is looked at together."""
    rows = list(range(7))
    logits = torch.randn(7, VOCAB, generator=torch.Generator().manual_seed(3)) * 3
    masks = {row: RowMask(b"\xf7" * 4, accepting=row == 3) for row in (1, 3)}
    results = []
    for at_once in (1, 3 * VOCAB, 1 << 18):
        monkeypatch.setattr(sliced_sampling, "SCORES_AT_ONCE", at_once)
        sampler = Sampler(8, VOCAB)
        for row in rows:
            sampling = Sampling(temperature=row / 4, seed=row, repetition_penalty=1.2)
            sampler.admit(Admission(row, array("I", [4, 7]), 2, sampling, row % 3 - 1, (1,), prompt_logprobs=2))
        few = sliced_sampling.Chooser(sampler, MaskedLogits(frozenset([2])), VOCAB)
        results.append((few.choose(logits, rows, np.arange(7), masks), few.score(logits, 0, 5, np.arange(7))))
    assert results[0] == results[1] == results[2]
    assert [entry.index for entry in results[0][0].logprobs] == [1, 2, 4, 5]
    assert len(results[0][1].logprobs) == 7


def test_a_row_is_looked_at_however_long_it_is() -> None:
    """A vocabulary beyond the bound is taken one line at a time; a small one many lines."""
    assert sliced_sampling.lines_at_once(1 << 20) == 1
    assert sliced_sampling.lines_at_once(512) == sliced_sampling.SCORES_AT_ONCE // 512 > 1
