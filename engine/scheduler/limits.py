"""Bounds of a step and of a request, and the check of a submission against them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.errors import RequestRejectedError
from engine.kv.layout import FULL, KvGroup
from isolation.ipc.messages import MAX_CHOICES, NAMESPACE_KEY_BYTES, FailureCode, Priority, Sampling, Submit

NUM_PRIORITIES = len(Priority)
"""Lines that are served one before the other."""


SCORED_ROWS = 64
"""Tokens of prompts whose log-probabilities one step computes: so many lines of logits more than there are rows, and
never a line for every token of a long prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Bounds of a step and of a request, already consistent with each other."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting: int
    max_context: int
    """Tokens of prompt and output; no more than the pool holds."""
    block_size: int
    """Tokens of the smallest block."""
    vocab_size: int
    eos_ids: frozenset[int] = frozenset()
    """Ids at which an output ends unless the request passes over them."""
    prefix_caching: bool = True
    groups: tuple[KvGroup, ...] = ()
    """The block tables of a request, as in ``KvLayout``; none: one, in which everything is kept."""

    @property
    def tables(self) -> tuple[KvGroup, ...]:
        """What each block table is for."""
        return self.groups or (KvGroup(FULL, self.block_size),)

    @property
    def max_logit_lines(self) -> int:
        """Lines of logits of one step."""
        return min(self.max_num_seqs + SCORED_ROWS, self.max_num_batched_tokens)


def check_submit(submit: Submit, limits: SchedulerLimits) -> None:
    """Check a request that the host wants to run.

    Raises:
        RequestRejectedError: ``INVALID`` or ``TOO_LONG``.
    """
    if not submit.token_ids:
        raise RequestRejectedError(FailureCode.INVALID, "the prompt is empty")
    if max(submit.token_ids) >= limits.vocab_size:
        raise RequestRejectedError(FailureCode.INVALID, "a token id is outside the vocabulary")
    if submit.max_tokens < 1:
        raise RequestRejectedError(FailureCode.INVALID, "max_tokens is below 1")
    if len(submit.namespace) != NAMESPACE_KEY_BYTES:
        raise RequestRejectedError(FailureCode.INVALID, "the namespace key has another width")
    if not 1 <= submit.choices <= MAX_CHOICES:
        raise RequestRejectedError(FailureCode.INVALID, "the number of choices is out of range")
    if submit.weight < 1:
        raise RequestRejectedError(FailureCode.INVALID, "the weight is below 1")
    if not 0 <= submit.priority < NUM_PRIORITIES:
        raise RequestRejectedError(FailureCode.INVALID, "there is no such priority")
    if len(submit.token_ids) >= limits.max_context:
        raise RequestRejectedError(FailureCode.TOO_LONG, "the prompt leaves no room for an output token")
    if not _is_sane(submit.sampling):
        raise RequestRejectedError(FailureCode.INVALID, "a sampling number is out of range")


def _is_sane(sampling: Sampling) -> bool:
    """Whether the numbers cannot break the arithmetic of the sampler; NaN fails every comparison."""
    return (
        0 <= sampling.temperature < math.inf
        and sampling.top_k >= 0
        and 0 < sampling.top_p <= 1
        and 0 <= sampling.min_p <= 1
        and 0 < sampling.repetition_penalty < math.inf
        and abs(sampling.presence_penalty) < math.inf
        and abs(sampling.frequency_penalty) < math.inf
        and 0 <= sampling.seed < 1 << 64
    )
