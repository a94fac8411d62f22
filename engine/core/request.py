"""Progress of one request inside the engine, and the account in whose queue it waits.

Life: WAITING -> PREFILLING -> DECODING -> FINISHED, and back to WAITING from the two in the middle when it is
preempted. A preempted request keeps its tokens and gives its blocks back; later it computes them again, or finds them
in the prefix cache.

Lengths, as half-open ranges of positions::

    0 ........ num_prompt ........ num_tokens            tokens known
    0 ... num_computed                                   KV present
          num_computed ... num_tokens                    to compute before the next token can be sampled
    0 ................................... limit          where the output ends at the latest

A structured request chooses each token under a mask that comes from outside. Until the next mask is there the request
*lacks its mask*: it is PAUSED if it was decoding, with row and blocks, and takes no part in steps; if it waits, it is
not admitted.

A request *decodes* when exactly one token is left to compute, else it *prefills*. While it decodes nothing of it is
touched but its tokens: how much is computed follows from their number, and the steps at which it needs a block or
reaches its limit are known when it begins (``engine.core.scheduler.decoding``).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from dataclasses import dataclass, field
from enum import IntEnum

from engine.core.kv.hold import KvHold
from engine.core.scheduler.plan import RowMask
from engine.core.specification import Specification
from engine.core.token_ids import TokenIds
from isolation.ipc.engine import Submit

NO_ROW = -1
"""Row of a request that does not run."""

LEARNING_RATE = 1 / 16
"""Weight of the newest output in the account's typical length: about the last sixteen outputs count."""

UNKNOWN_OUTPUT = 256
"""Tokens expected of an output before its namespace has shown any."""

CAUTION = 1.25
"""Outputs are expected to be longer than usual by this factor. Measured on the Azure conversation trace with a pool
for 20 of its requests: 52 preemptions for 1,000 requests at 1, 8 at 1.25 and 3 at 1.5, which is slower again."""

OVERDUE_PART = 2
"""An output that is longer than usual is expected to go on for this part of the usual length."""


class Status(IntEnum):
    """Stage in the life of a request."""

    WAITING = 0
    PREFILLING = 1
    DECODING = 2
    FINISHED = 3
    PAUSED = 4
    """Between two tokens of a structured request."""
    FOLLOWING = 5
    """Waits for the prompt of a sibling, in no queue yet."""


@dataclass(slots=True, eq=False)
class Request:
    """Progress of one request, with its specification and its share of the pool; mutable, owned by the scheduler."""

    spec: Specification
    token_ids: array[int]
    """Prompt and output so far."""
    limit: int
    """Tokens of prompt and output at which the output ends."""
    kv: KvHold
    lacks_mask: bool
    """Whether the mask for the next token is missing."""
    num_scored: int
    """Leading tokens of the prompt whose log-probabilities were sent, or are not wanted; the first has none."""
    account: Account = field(init=False)
    """Account in whose queue the request waits, and that it is charged to; set when it is queued."""
    status: Status = Status.WAITING
    row: int = NO_ROW
    """Place in the backend's state while the request runs."""
    mask: RowMask | None = None
    """Mask of the next token, unless the request lacks it."""
    started: bool = False
    """Whether the request has had a row before."""
    num_prefilled: int = 0
    """Tokens whose KV is present, until the request decodes."""
    num_charged: int = 0
    """Tokens of the prompt that were charged, or found in the cache; no token is charged twice."""
    phase: int = 0
    """Remainder, modulo the block size, of the steps at which the request needs a block while it decodes."""
    end_step: int = 0
    """Step whose token is the last that the limit allows, while the request decodes."""
    forecast: tuple[int, int] = (0, 0)
    """Entry in ``engine.core.scheduler.forecast`` while the request runs."""
    pledge: float = 0.0
    """Most that the request can still be charged, as it was when it got its row."""
    planned_at: int = -1
    """Step in which a part of its prompt was last planned."""
    preempted_at: int = -1
    """Step at which the request was last preempted."""

    @classmethod
    def of(
        cls, submit: Submit, *, order: int, limit: int, stop_ids: frozenset[int], arrival_ns: int, adapter: int = 0
    ) -> Request:
        """Make the request of a submission for a single output."""
        spec = Specification.of(submit, order=order, stop_ids=stop_ids, arrival_ns=arrival_ns, adapter=adapter)
        return cls(
            spec,
            submit.token_ids[:] if spec.retain else TokenIds.copy_of(submit.token_ids),
            limit,
            KvHold.of(spec),
            lacks_mask=spec.structured,
            num_scored=1 if spec.prompt_logprobs >= 0 else spec.num_prompt,
        )

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and output so far."""
        return len(self.token_ids)

    @property
    def num_computed(self) -> int:
        """Tokens whose KV is present."""
        return len(self.token_ids) - 1 if self.status is Status.DECODING else self.num_prefilled

    @property
    def num_output(self) -> int:
        """Tokens of the output so far."""
        return len(self.token_ids) - self.spec.num_prompt

    @property
    def expected(self) -> int:
        """Tokens that the output is expected to go on for, up to its limit: to the account's usual length, then half of
        that again and again."""
        known = len(self.token_ids)
        usual = int(self.account.typical_output * CAUTION) or UNKNOWN_OUTPUT
        return min(max(usual - known + self.spec.num_prompt, usual // OVERDUE_PART, 1), max(1, self.limit - known))

    def scored_by(self, end: int) -> int:
        """Positions of the prompt whose log-probabilities are due when all tokens before ``end`` are computed."""
        return max(0, min(end + 1, self.spec.num_prompt) - self.num_scored)


def age(request: Request) -> int:
    """Rank of arrival: lower is older."""
    return request.spec.order


@dataclass(slots=True, eq=False)
class Account:
    """Queue of one namespace at one priority, counts of what its requests have, and the numbers that a tenancy keeps
    of it; one that treats all alike leaves these as they are."""

    priority: int
    key: bytes
    typical_output: float = 0.0
    """Tokens of its usual output, learned; 0 while nothing is known."""
    waiting: list[Request] = field(default_factory=list)
    """Oldest first; a preempted request comes back to its place by age."""
    suspended: list[Request] = field(default_factory=list)
    """The queue while it may not be served; ``waiting`` is empty then."""
    passed: int = 0
    """How often others of the account were admitted before the oldest that waits."""
    prefilling: Request | None = None
    """The running request whose prompt is not computed yet; requests of an account prefill one by one."""
    num_live: int = 0
    """Requests waiting or running."""
    num_running: int = 0
    num_blocks: int = 0
    """Blocks in the tables of its running requests, and those that they have rights to."""
    num_decoding: int = 0
    num_decoding_blocks: int = 0
    service: float = 0.0
    """What was charged, by weight."""
    weight: int = 1
    step_charge: float = 0.0
    """Service added by one step of the requests that decode."""
    pledged: float = 0.0
    """Most that its running requests can still be charged, weight not counted."""
    ticket: int = 0
    """Number of its entry in the queue of accounts that only wait; 0 when it has none."""

    def learn(self, num_output: int) -> None:
        """Take the length of an output that has ended into the usual length."""
        known = self.typical_output
        self.typical_output = known + LEARNING_RATE * (num_output - known) if known else float(num_output)

    def push(self, request: Request) -> None:
        """Queue a request at its place by age."""
        queue = self.suspended or self.waiting
        if not queue or queue[-1].spec.order < request.spec.order:
            queue.append(request)
        else:
            place = bisect_left(queue, request.spec.order, key=age)
            queue.insert(place, request)
            if place == 0:
                self.passed = 0

    def remove(self, request: Request) -> None:
        """Take a request out of the queue."""
        queue = self.suspended or self.waiting
        place = 0 if queue[0] is request else bisect_left(queue, request.spec.order, key=age)
        assert queue[place] is request, "a request is not where it waits"
        del queue[place]
        if place == 0:
            self.passed = 0
