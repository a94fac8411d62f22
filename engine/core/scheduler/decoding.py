"""The requests that decode, so kept that a step touches only those to which something happens.

A decoding request gets one token a step as a rule (a structured one decodes for one step and is then paused), so all
that will happen to it is known when it begins: it needs its next block at the steps of one remainder modulo the block
size (its *phase*), and it reaches its limit at one step (its *end*). The rows, ids and append functions of all requests
are lists that change only when the set does; stop ids are counted, so that one look at a step's tokens tells whether
any of them could end anything.

A request that got another number of tokens is placed anew (``move``). Where rows may get several, each has blocks for
``ahead`` further tokens, and those that were placed are looked at one by one before the next step (``placed``); so are
requests whose last block is empty, because a step gave them no token: their phase alone would give them another one.

``step`` counts the steps; it is advanced by ``advance`` after each step's tokens were taken.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection

from engine.core.request import Request, Status
from engine.core.scheduler.plan import FAILED


class Decoding:
    """Requests with exactly one token to compute, in the order they began to decode."""

    def __init__(self, block_size: int, max_row_tokens: int = 1) -> None:
        self.step = 0
        self.ahead = max_row_tokens - 1
        """Tokens beyond the next one for which a row has blocks."""
        self.placed: dict[Request, None] = {}
        """Requests placed since blocks were last given, of which the phase does not tell whether they need one."""
        self._block_size = block_size
        self._members: dict[Request, None] = {}
        self._phases: list[dict[Request, None]] = [{} for _ in range(block_size)]
        self._ends: dict[int, dict[Request, None]] = {}
        self._watched: dict[int, int] = {FAILED: 1}
        self._stale = False
        self.structured: dict[Request, None] = {}
        """Those that need a mask for each token."""
        self.requests: list[Request] = []
        """Parallel to the next three; as they were at the last ``refresh``."""
        self.rows: list[int] = []
        """Never changed in place: a plan may keep it."""
        self.ids = array("Q")
        self.appends: list[Callable[[int], None]] = []

    def __len__(self) -> int:
        return len(self._members)

    def add(self, request: Request, *, at_once: bool = False) -> None:
        """A request decodes from the next step on, or ``at_once``, from the one that is not planned yet; all its
        tokens but the last are computed."""
        first = self.step if at_once else self.step + 1
        request.status = Status.DECODING
        self._members[request] = None
        if request.spec.structured:
            self.structured[request] = None
        self._place(request, first)
        watched = self._watched
        for token_id in request.spec.stop_ids:
            watched[token_id] = watched.get(token_id, 0) + 1
        self._stale = True

    def remove(self, request: Request) -> None:
        """A request decodes no longer; its status is the caller's to change."""
        del self._members[request]
        self.placed.pop(request, None)
        self.structured.pop(request, None)
        del self._phases[request.phase][request]
        self._drop_end(request)
        watched = self._watched
        for token_id in request.spec.stop_ids:
            watched[token_id] -= 1
            if not watched[token_id]:
                del watched[token_id]
        self._stale = True

    def move(self, request: Request) -> None:
        """A request got another number of tokens than one in the step that is being taken."""
        del self._phases[request.phase][request]
        self._drop_end(request)
        self._place(request, self.step + 1)

    def refresh(self) -> None:
        """Bring the four lists up to date."""
        if self._stale:
            self._stale = False
            self.requests = list(self._members)
            self.rows = [request.row for request in self.requests]
            self.ids = array("Q", [request.spec.request_id for request in self.requests])
            self.appends = [request.token_ids.append for request in self.requests]

    def needing_blocks(self) -> Collection[Request]:
        """Requests that need a block in this step: what is computed of them fills theirs."""
        needing = self._phases[self.step % self._block_size]
        return needing if not self.placed else needing | self.placed

    def filling_blocks(self) -> Collection[Request]:
        """Requests whose last block is full when this step's token is computed."""
        return self._phases[(self.step + 1 - self.ahead) % self._block_size]

    def ending(self) -> Collection[Request]:
        """Requests whose limit this step's token reaches."""
        return self._ends.get(self.step, ())

    def may_stop(self, token_ids: list[int]) -> bool:
        """Whether some of these ids stop a request, or stand for a failure."""
        return not self._watched.keys().isdisjoint(token_ids)

    def advance(self) -> None:
        """A step is over."""
        self.step += 1

    def _place(self, request: Request, first: int) -> None:
        """Work out when a request that decodes from step ``first`` on needs a block, and when it ends."""
        request.phase = (first + request.kv.capacity - request.num_computed - self.ahead) % self._block_size
        if self.ahead or request.kv.capacity - request.num_computed >= self._block_size:
            self.placed[request] = None
        self._phases[request.phase][request] = None
        request.end_step = first - 1 + request.limit - request.num_tokens
        self._ends.setdefault(request.end_step, {})[request] = None

    def _drop_end(self, request: Request) -> None:
        ends = self._ends[request.end_step]
        del ends[request]
        if not ends:
            del self._ends[request.end_step]
