"""What a caller asked for: constant through a request's life, and without its token ids."""

from __future__ import annotations

from typing import NamedTuple

from isolation.ipc.engine import Submit
from isolation.ipc.logit_bias import LogitBias
from isolation.ipc.sampling import Sampling

SILENT_ID = (1 << 64) - 1
"""Id of the engine's own request, of which there is one at a time; the host may not use it."""

NEVER_NS = 1 << 63
"""Deadline of a request that has none."""


class Specification(NamedTuple):
    """One output of a ``Submit``, with what the engine adds on arrival. A tuple: one is made for every request."""

    request_id: int
    namespace: bytes
    """Key of the tenant that is charged for the service."""
    kv_key: bytes
    """Key of its blocks: it names their account, keys their ids unless ``user`` does, and seals them when they are
    spilled."""
    public: bytes
    """Key of the public prefix that the prompt may begin with, or nothing."""
    num_prompt: int
    sampling: Sampling
    logprobs: int
    prompt_logprobs: int
    structured: bool
    """Whether each output token is chosen under a mask."""
    retain: bool
    """Whether blocks may be found after the request has ended."""
    deterministic: bool
    weight: int
    priority: int
    stop_ids: frozenset[int]
    order: int
    """Rank of arrival, never reused: lower is older."""
    arrival_ns: int
    deadline_ns: int
    """Time at which the request fails unless it has ended, on the clock of ``arrival_ns``."""
    adapter: int = 0
    """Number of the adapter that computes it; 0: the model alone."""
    logit_bias: LogitBias | None = None
    """Numbers added to the scores of some ids."""
    origin: bytes = b""
    """Digest of that adapter, which is part of its blocks' ids; nothing for the model alone."""
    user: bytes = b""
    """Key of its block ids in place of ``kv_key``, where they are one end user's; nothing where they are not."""

    @classmethod
    def of(
        cls,
        submit: Submit,
        *,
        order: int = 0,
        stop_ids: frozenset[int] = frozenset(),
        arrival_ns: int = 0,
        adapter: int = 0,
    ) -> Specification:
        """The specification of a submission for a single output; ``adapter`` is its adapter's number."""
        deadline_ns = arrival_ns + submit.deadline_us * 1_000 if submit.deadline_us else NEVER_NS
        return cls(
            submit.request,
            submit.namespace,
            kv_key_of(submit),
            submit.public,
            len(submit.token_ids),
            submit.sampling,
            submit.logprobs,
            submit.prompt_logprobs,
            submit.structured,
            submit.retain,
            submit.deterministic,
            submit.weight,
            submit.priority,
            stop_ids,
            order,
            arrival_ns,
            deadline_ns,
            adapter=adapter,
            logit_bias=submit.logit_bias,
            origin=submit.adapter,
            user=submit.user,
        )

    @property
    def silent(self) -> bool:
        """Whether the engine itself made the request, so that no output mentions it."""
        return self.request_id == SILENT_ID


def kv_key_of(submit: Submit) -> bytes:
    """Key of a submission's blocks: the sharing group's, or the namespace's where there is no group."""
    return submit.group or submit.namespace
