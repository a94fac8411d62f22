"""One namespace at one priority: its queue, and the service it was given.

What is charged. A prompt token that has to be computed costs ``INPUT_COST``, in the step that computes it. An output
token costs ``OUTPUT_COST`` and, for every block of KV that its request holds at that step, the *hold price*::

    hold price = OUTPUT_COST * rows of the engine / blocks of the pool

Whoever holds a block for a step keeps it from everybody else for that step. Priced so, all blocks together cost in a
step what a full batch of output tokens does: a request with an average share of memory pays for its memory as much as
for its token, and one that decodes behind a long context pays by the length of that context. Charging by steps of
decoding, and not by seconds, makes the charge part of a token's price: nobody is charged while he waits for others
(a half-computed prompt holds blocks too, and would sink ever deeper), and what one request can still cost is known
when it is admitted, which the bound in ``fairness`` needs. All charges are divided by the account's weight.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from engine.request import Request

if TYPE_CHECKING:
    from engine.scheduler.fairness import Line

INPUT_COST = 1.0
"""Service charged for a prompt token that was not in the cache."""

OUTPUT_COST = 2.0
"""Service charged for an output token: a decode slot costs about two prefill tokens (weights of the paper)."""

LEARNING_RATE = 1 / 16
"""Weight of the newest output in the account's typical length: about the last sixteen outputs count."""


class Account:
    """The queue, the counters and the service of one namespace at one priority."""

    __slots__ = (
        "hold_price", "key", "line", "num_blocks", "num_decoding", "num_decoding_blocks", "num_live", "num_running",
        "parked", "passed", "pledged", "prefilling", "service", "step_charge", "ticket", "typical_output", "waiting",
        "weight",
    )  # fmt: skip

    def __init__(self, line: Line, key: bytes, *, service: float, typical_output: float, hold_price: float) -> None:
        self.line = line
        self.key = key
        self.service = service
        self.hold_price = hold_price
        self.weight = 1
        self.waiting: list[Request] = []
        """Oldest first; a preempted request comes back to its place by age."""
        self.parked: list[Request] = []
        """The queue while its account of blocks is at its cap; ``waiting`` is empty then."""
        self.passed = 0
        """How often others of the account were admitted before the oldest that waits."""
        self.prefilling: Request | None = None
        """The running request whose prompt is not computed yet; requests of an account prefill one by one."""
        self.num_live = 0
        """Requests waiting or running."""
        self.num_running = 0
        self.num_blocks = 0
        """Blocks in the tables of its running requests, and those that they have rights to."""
        self.num_decoding = 0
        self.num_decoding_blocks = 0
        self.step_charge = 0.0
        """Service added by one step of the requests that decode."""
        self.pledged = 0.0
        """Most that its running requests can still be charged, weight not counted."""
        self.typical_output = typical_output
        """Tokens of its usual output, learned; 0 while nothing is known."""
        self.ticket = 0
        """Number of its entry in the line's queue of accounts that only wait; 0 when it has none."""

    def set_weight(self, weight: int) -> None:
        """The share asked for by the newest request holds for the account."""
        if weight != self.weight:
            self.line.total_weight += weight - self.weight
            self.weight = weight
            self._reprice()
            self.line.widen(self)

    def cost_of(self, request: Request) -> float:
        """Service that the request's known tokens stand for."""
        return request.num_tokens * INPUT_COST / self.weight

    def charge_input(self, tokens: int) -> None:
        """Charge prompt tokens that are computed."""
        self.service += tokens * INPUT_COST / self.weight

    def charge_chunk(self, request: Request, end: int) -> None:
        """Charge the request's prompt from what is computed up to ``end``, unless it was charged before."""
        start = max(request.num_prefilled, request.num_charged)
        stop = min(end, request.num_prompt)
        if stop > start:
            self.charge_input(stop - start)
            request.num_charged = stop

    def charge_first_token(self, request: Request) -> None:
        """Charge the token that the last part of a prompt gives; later ones are in ``step_charge``."""
        self.service += (OUTPUT_COST + self.hold_price * (len(request.blocks) + request.rights)) / self.weight

    def pledge_of(self, request: Request, num_cached: int, blocks: float) -> float:
        """Most that a request can still be charged, weight not counted: the prompt behind its ``num_cached`` tokens,
        and the output up to its limit, each token with the ``blocks`` of the mean length on the way there."""
        prompt = max(0, request.num_prompt - max(num_cached, request.num_charged))
        tokens = request.limit - request.num_tokens
        return prompt * INPUT_COST + tokens * (OUTPUT_COST + self.hold_price * blocks)

    def begin_decoding(self, request: Request) -> None:
        """The request's blocks and tokens are charged in every step from now on."""
        self.num_decoding += 1
        self.num_decoding_blocks += len(request.blocks) + request.rights
        self._reprice()

    def end_decoding(self, request: Request) -> None:
        """The request, which still has its blocks, decodes no longer."""
        self.num_decoding -= 1
        self.num_decoding_blocks -= len(request.blocks) + request.rights
        self._reprice()

    def add_decoding_blocks(self, count: int) -> None:
        """A decoding request got so many blocks; below 0: gave them back."""
        self.num_blocks += count
        self.num_decoding_blocks += count
        self._reprice()

    def learn(self, num_output: int) -> None:
        """An output came to its end."""
        known = self.typical_output
        self.typical_output = known + LEARNING_RATE * (num_output - known) if known else float(num_output)

    def push(self, request: Request) -> None:
        """Queue a request at its place by age."""
        waiting = self.parked or self.waiting
        if not waiting or waiting[-1].order < request.order:
            waiting.append(request)
        else:
            place = bisect_left(waiting, request.order, key=_order)
            waiting.insert(place, request)
            if place == 0:
                self.passed = 0

    def remove(self, request: Request) -> None:
        """Take a request out of the queue."""
        waiting = self.parked or self.waiting
        place = bisect_left(waiting, request.order, key=_order)
        assert waiting[place] is request, "a request is not where it waits"
        del waiting[place]
        if place == 0:
            self.passed = 0

    def _reprice(self) -> None:
        tokens = OUTPUT_COST * self.num_decoding
        self.step_charge = (tokens + self.hold_price * self.num_decoding_blocks) / self.weight


def _order(request: Request) -> int:
    return request.order
