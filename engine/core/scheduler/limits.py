"""Bounds of a step and of a request, and the check of a submission against them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.core.kv.layout import FULL, KvGroup
from engine.errors import RequestRejectedError
from isolation.ipc.engine import Submit
from isolation.ipc.messages import MAX_CHOICES, NAMESPACE_KEY_BYTES, FailureCode, Priority
from isolation.ipc.sampling import out_of_bounds

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
    max_row_tokens: int = 1
    """Most tokens that one step gives a decoding row; more than one is for backends that speculate. Rows get blocks so
    many tokens ahead, but none behind their limit (``Admission.limit``)."""
    eos_ids: frozenset[int] = frozenset()
    """Ids at which an output ends unless the request passes over them."""
    prefix_caching: bool = True
    groups: tuple[KvGroup, ...] = ()
    """The block tables of a request, as in ``KvLayout``; none: one, in which everything is kept."""

    adapters: Mapping[bytes, int] = field(default_factory=dict)
    """Number of each adapter that the backend has, by digest."""

    @property
    def tables(self) -> tuple[KvGroup, ...]:
        """What each block table is for."""
        return self.groups or (KvGroup(FULL, self.block_size),)

    @property
    def lasting_block_size(self) -> int:
        """Tokens in a block of the table that grows for good."""
        first = self.tables[0]
        return first.block_size if first.reach == FULL else self.block_size

    @property
    def max_logit_lines(self) -> int:
        """Lines of logits of one step."""
        return min(self.max_num_seqs + SCORED_ROWS, self.max_num_batched_tokens)


def check_submit(submit: Submit, limits: SchedulerLimits) -> None:
    """Check a request that the host submits.

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
    if submit.adapter and submit.adapter not in limits.adapters:
        raise RequestRejectedError(FailureCode.NO_ADAPTER, "there is no such adapter")
    bias = submit.logit_bias
    if bias is not None and max(bias.ids) >= limits.vocab_size:
        raise RequestRejectedError(FailureCode.INVALID, "an id of the logit bias is outside the vocabulary")
    fault = out_of_bounds(submit.sampling)
    if fault:
        raise RequestRejectedError(FailureCode.INVALID, f"a sampling number is out of range: {fault}")
