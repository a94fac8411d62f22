"""What service costs, and what a request can still cost.

What is charged. A prompt token that has to be computed costs ``INPUT_COST``, in the step that computes it. An output
token costs ``OUTPUT_COST`` and, for every block of KV that its request holds at that step, the *hold price*::

    hold price = OUTPUT_COST * rows of the engine / blocks of the pool

A request that holds a block for a step keeps it from all others for that step. Priced so, all blocks together cost in a
step what a full batch of output tokens does: a request with an average share of memory pays for its memory as much as
for its token, and one that decodes behind a long context pays by the length of that context. Charging by steps of
decoding, and not by seconds, makes the charge part of a token's price: no request is charged while it waits for others
(a half-computed prompt holds blocks too, and would sink ever deeper), and what one request can still cost is known
when it is admitted, which the bound in ``fairness`` needs. All charges are divided by the account's weight.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.request import Account, Request

INPUT_COST = 1.0
"""Service charged for a prompt token that was not in the cache."""

OUTPUT_COST = 2.0
"""Service charged for an output token: a decode slot costs about two prefill tokens (weights of the paper)."""


@dataclass(slots=True)
class Prices:
    """Prices of an engine."""

    hold: float
    """Service charged for a block that is held while an output token is computed."""

    def reprice(self, request: Request) -> None:
        """Bring the account's ``step_charge`` up to date: its weight, or what its decoding requests have, is
        another."""
        account = request.account
        tokens = OUTPUT_COST * account.num_decoding
        account.step_charge = (tokens + self.hold * account.num_decoding_blocks) / account.weight

    def charge_token(self, request: Request) -> None:
        """Charge one output token, with the blocks that its request holds; ``step_charge`` does so for all at once."""
        account = request.account
        account.service += (OUTPUT_COST + self.hold * request.kv.num_blocks) / account.weight

    def pledge(self, request: Request, blocks: float) -> float:
        """Most that a request can still be charged, weight not counted: the prompt behind what is computed of it, and
        the output up to its limit, each token with the ``blocks`` of the mean length on the way there."""
        prompt = max(0, request.spec.num_prompt - max(request.num_prefilled, request.num_charged))
        tokens = request.limit - request.num_tokens
        return prompt * INPUT_COST + tokens * (OUTPUT_COST + self.hold * blocks)


def cost_of(request: Request) -> float:
    """Service that the request's known tokens stand for."""
    return request.num_tokens * INPUT_COST / request.account.weight


def charge_input(account: Account, tokens: int) -> None:
    """Charge prompt tokens that are computed."""
    account.service += tokens * INPUT_COST / account.weight


def charge_chunk(request: Request, end: int) -> None:
    """Charge the request's prompt from what is computed up to ``end``, unless it was charged before."""
    start = max(request.num_prefilled, request.num_charged)
    stop = min(end, request.spec.num_prompt)
    if stop > start:
        charge_input(request.account, stop - start)
        request.num_charged = stop
