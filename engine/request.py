"""One request inside the engine: its tokens, its KV blocks and how far it has come.

Life: WAITING -> PREFILLING -> DECODING -> FINISHED, and back to WAITING from the two in the middle when it is
preempted. A preempted request keeps its tokens and gives its blocks back; later it computes them again, or finds them
in the prefix cache.

Lengths, as half-open ranges of positions::

    0 ........ num_prompt ........ num_tokens            tokens known
    0 ... num_computed                                   KV present
          num_computed ... num_tokens                    to compute before the next token can be sampled
    0 ................................... limit          where the output ends at the latest

A structured request chooses each token under a mask that comes from outside. Until the next one is there it is *held*:
where it decodes it is PAUSED, with row and blocks, and takes no part in steps; where it waits it is not admitted.

A request *decodes* when exactly one token is left to compute, else it *prefills*. While it decodes nothing of it is
touched but its tokens: how much is computed follows from their number, and the steps at which it needs a block or
reaches its limit are known when it begins (``engine.scheduler.decoding``).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING

from engine.forgetting import TokenIds
from isolation.ipc.messages import Submit

if TYPE_CHECKING:
    from engine.kv.public import Resident
    from engine.kv.quota import KvAccount
    from engine.scheduler.account import Account
    from engine.scheduler.plan import RowMask
    from engine.scheduler.siblings import Family

NO_ROW = -1
"""Row of a request that does not run."""

SILENT_ID = (1 << 64) - 1
"""Id of the engine's own request, of which there is one at a time; the host may not use it."""

NEVER_NS = 1 << 63
"""Deadline of a request that has none."""


class Status(IntEnum):
    """Where a request is in its life."""

    WAITING = 0
    PREFILLING = 1
    DECODING = 2
    FINISHED = 3
    PAUSED = 4
    """Between two tokens of a structured request."""
    FOLLOWING = 5
    """Waits for the prompt of a sibling, in no queue yet."""


class Request:
    """State of one request; mutable, owned by the scheduler."""

    __slots__ = (
        "account",
        "arrival_ns",
        "block_ids",
        "blocks",
        "capacity",
        "deadline_ns",
        "deterministic",
        "end_step",
        "family",
        "forecast",
        "held",
        "kv",
        "kv_key",
        "limit",
        "local",
        "mask",
        "namespace",
        "num_charged",
        "num_prefilled",
        "num_prompt",
        "num_public",
        "num_registered",
        "num_scored",
        "num_shared",
        "order",
        "phase",
        "planned_at",
        "pledge",
        "preempted_at",
        "public",
        "request_id",
        "retain",
        "rights",
        "row",
        "started",
        "status",
        "stop_ids",
        "submit",
        "token_ids",
    )

    def __init__(  # noqa: PLR0915 - a flat record: a statement a field
        self, submit: Submit, *, order: int, limit: int, stop_ids: frozenset[int], arrival_ns: int
    ) -> None:
        self.submit = submit
        self.held = submit.structured
        """Whether the mask for its next token is missing."""
        self.mask: RowMask | None = None
        """What the next token is chosen under, while it is not held."""
        self.request_id = submit.request
        self.namespace = submit.namespace
        """Whose request it is: its account of service."""
        self.kv_key = submit.group or submit.namespace
        """Whose its blocks are: the namespace's, or its sharing group's."""
        self.kv: KvAccount
        """The account of its blocks; set while it is live."""
        self.retain = submit.retain
        self.deterministic = submit.deterministic
        self.token_ids = submit.token_ids[:] if submit.retain else TokenIds.copy_of(submit.token_ids)
        self.num_prompt = len(submit.token_ids)
        self.limit = limit
        """Tokens of prompt and output at which the output ends."""
        self.stop_ids = stop_ids
        self.order = order
        """Rank of arrival, never reused: lower is older."""
        self.arrival_ns = arrival_ns
        self.deadline_ns = arrival_ns + submit.deadline_us * 1_000 if submit.deadline_us else NEVER_NS
        """When the request fails unless it has ended, on the clock of ``arrival_ns``."""
        self.status = Status.WAITING
        self.started = False
        self.row = NO_ROW
        """Place in the runner's state while running."""
        self.num_prefilled = 0
        """Tokens whose KV is present, until the request decodes."""
        self.num_charged = 0
        """Tokens of the prompt that were charged, or found in the cache: nobody pays twice after a preemption."""
        self.blocks: list[int] = []
        """Table of the layers that keep everything; empty when the model has none."""
        self.local: list[list[int]] = []
        """Tables of the layers that keep a window or a chunk, one a reach; the null block where nothing is kept."""
        self.rights = 0
        """Blocks that ``local`` may hold: while it decodes, those that it does."""
        self.capacity = 0
        """Tokens that ``blocks`` hold."""
        self.block_ids: list[bytes] = []
        """Content ids of the first full blocks, as far as they were needed."""
        self.public: Resident | None = None
        """The public prefix that its chain begins with, in so many leading blocks."""
        self.num_public = 0
        self.account: Account
        """The account that the request is charged to; set when it is queued."""
        self.num_scored = 1 if submit.prompt_logprobs >= 0 else self.num_prompt
        """Leading tokens of the prompt whose log-probabilities were told, or are not wanted; the first has none."""
        self.num_registered = 0
        """Leading blocks that are findable or were offered to the pool."""
        self.num_shared = 0
        """Leading blocks that were found in the cache when the request got its row."""
        self.phase = 0
        """Remainder, modulo the block size, of the steps at which it needs a block while it decodes."""
        self.end_step = 0
        """Step whose token is the last that the limit allows, while it decodes."""
        self.forecast: tuple[int, int] = (0, 0)
        """What ``engine.scheduler.forecast`` expects of it while it runs."""
        self.pledge = 0.0
        """Most that it can still be charged, as it was when it got its row."""
        self.planned_at = -1
        """Step in which a part of its prompt was last planned."""
        self.family: Family | None = None
        """The other outputs of its prompt, if there are any."""
        self.preempted_at = -1
        """Step at which it was last preempted."""

    def begin(self, public: Resident | None, ids: Sequence[bytes]) -> None:
        """Begin the chain of block ids with those of a public prefix, or of none; only while it holds no blocks."""
        assert not self.blocks, "a request with blocks has its chain"
        self.public, self.num_public, self.block_ids = public, len(ids), list(ids)

    @property
    def silent(self) -> bool:
        """Whether the engine itself asked for it: nobody is told of its start, token or end."""
        return self.request_id == SILENT_ID

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and output so far."""
        return len(self.token_ids)

    @property
    def num_blocks(self) -> int:
        """Blocks that nobody else can have for it."""
        return len(self.blocks) + self.rights

    @property
    def num_computed(self) -> int:
        """Tokens whose KV is present."""
        return len(self.token_ids) - 1 if self.status is Status.DECODING else self.num_prefilled

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose KV is missing; 1 while decoding."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_output(self) -> int:
        """Tokens of the output so far."""
        return len(self.token_ids) - self.num_prompt

    @property
    def cache_key(self) -> bytes:
        """The key of its block ids: that of its blocks' namespace, or one that only its family has."""
        key = self.family.key if self.family is not None else None
        return self.kv_key if key is None else key

    def scored_by(self, end: int) -> int:
        """How many positions of the prompt get their log-probabilities when all tokens before ``end`` are computed."""
        return max(0, min(end + 1, self.num_prompt) - self.num_scored)
