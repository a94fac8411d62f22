"""One request inside the engine: its tokens, its KV blocks and how far it has come.

Life: WAITING -> RUNNING -> FINISHED, and RUNNING -> WAITING when it is preempted. A preempted request keeps its
tokens and gives its blocks back; later it computes them again, or finds them in the prefix cache.

Lengths, as half-open ranges of positions::

    0 ........ num_prompt ........ num_tokens            tokens known
    0 ... num_computed                                   KV present
          num_computed ... num_tokens                    to compute before the next token can be sampled
    0 ................................... limit          where the output ends at the latest

A request *decodes* when exactly one token is left to compute, else it *prefills*.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from isolation.ipc.messages import Submit

if TYPE_CHECKING:
    from engine.scheduler.fairness import Account

NO_ROW = -1
"""Row of a request that does not run."""


class Status(IntEnum):
    """Where a request is in its life."""

    WAITING = 0
    RUNNING = 1
    FINISHED = 2


class Request:
    """State of one request; mutable, owned by the scheduler.

    Plain slots and ints: the scheduler touches every running request in every step.
    """

    __slots__ = (
        "account",
        "arrival_ns",
        "block_ids",
        "blocks",
        "capacity",
        "limit",
        "namespace",
        "num_computed",
        "num_prompt",
        "num_registered",
        "order",
        "request_id",
        "retain",
        "row",
        "started",
        "status",
        "stop_ids",
        "submit",
        "token_ids",
    )

    def __init__(self, submit: Submit, *, order: int, limit: int, stop_ids: frozenset[int], arrival_ns: int) -> None:
        self.submit = submit
        self.request_id = submit.request
        self.namespace = submit.namespace
        self.retain = submit.retain
        self.token_ids = submit.token_ids[:]
        self.num_prompt = len(submit.token_ids)
        self.limit = limit
        """Tokens of prompt and output at which the output ends."""
        self.stop_ids = stop_ids
        self.order = order
        """Rank of arrival, never reused: lower is older."""
        self.arrival_ns = arrival_ns
        self.status = Status.WAITING
        self.started = False
        self.row = NO_ROW
        """Place in the runner's state while running."""
        self.num_computed = 0
        self.blocks: list[int] = []
        self.capacity = 0
        """Tokens that ``blocks`` hold."""
        self.block_ids: list[bytes] = []
        """Content ids of the first full blocks, as far as they were needed."""
        self.account: Account
        """The namespace's account in fair service; set when the request is queued."""
        self.num_registered = 0
        """Leading blocks that are findable or were offered to the pool."""

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and output so far."""
        return len(self.token_ids)

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose KV is missing; 1 while decoding."""
        return len(self.token_ids) - self.num_computed
