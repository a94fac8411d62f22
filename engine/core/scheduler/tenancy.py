"""What the mechanics of the scheduler know of tenants: four questions, asked while a step is planned and taken back.

The mechanics compute what can run: rows, blocks, chunks, the forecast. A *tenancy* chooses among tenants: whose turn it
is (``next_accounts``), whether a request may start (``may_admit``), which requests give way to it (``victims``), and
what a change in what requests have costs (``charge``). ``engine.core.fairness`` is the tenancy of an appliance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from engine.core.request import Account, Request


class Change(Enum):
    """Change in what a request has. Counts of its account have changed before, its queue changes afterwards."""

    ENTERED = 0
    """A new request needs an account (``Request.account``)."""
    QUEUED = 1
    UNQUEUED = 2
    ADMITTED = 3
    """It has a row and blocks; ``amount``: mean number of blocks on its way to its limit."""
    CHUNK = 4
    """Its prompt is computed up to ``amount`` tokens in this step."""
    TOKEN = 5
    """It got one output token, not counted by ``STEP``."""
    DECODING = 6
    """The number of decoding requests of its account, or of their blocks, is another."""
    VACATED = 7
    """It gives up its row, and its blocks."""
    LEFT = 8
    """It has ended."""
    STEP = 9
    """Every decoding request got one output token; without a request."""
    QUOTAS = 10
    """Other quotas of KV are in force; without a request."""


@dataclass(slots=True)
class StepBudget:
    """The step that is planned: what is left of it, and how the last account's turn went."""

    tokens: int
    """Tokens that may still be put into the step."""
    scores: int
    """Tokens of prompts that may still be scored."""
    now_ns: int
    crowded: bool
    """Whether memory has just run out, so that only accounts below their share may have any."""
    num_prefilling: int
    """Accounts with a prompt to go on with."""
    light: bool = False
    """Whether the account whose turn it is has few requests where another has many."""
    served: bool = False
    """Whether that account got tokens of the step."""
    refused: Request | None = None
    """Its request that was not admitted."""


@dataclass(slots=True)
class Need:
    """What a request lacks, in a row and in blocks."""

    step: int
    """Number of the step that is planned: what is planned in it cannot be preempted any more."""
    row: bool
    """Whether no row is free."""
    wanted: int
    """Blocks that the request needs and that are not held for it."""
    new: int
    """Part of ``wanted`` that its account does not have in the cache."""
    short: int
    """Part of ``wanted`` that is not available to its account."""
    secure: bool = False
    """Whether nothing is short, and the forecast finds memory for all running requests and this one to their ends."""


class Tenancy(Protocol):
    """Decides between tenants."""

    num_defects: int
    """Times that the tenancy broke its own promise."""

    def next_accounts(self, step: StepBudget) -> Iterator[Account]:
        """Accounts in the order of their turns. Each is served before the next is asked for, which depends on how that
        went; an account has a prompt to go on with, or a waiting request that may be tried."""

    def may_admit(self, request: Request, need: Need) -> bool:
        """Whether a request may start, when it gets what it lacks."""

    def victims(self, request: Request, need: Need) -> list[Request] | None:
        """Running requests to preempt so that this one gets what it lacks; None when it has to wait. For a request
        that decodes at least one, which may be itself."""

    def charge(self, change: Change) -> Callable[..., None]:
        """What to call at each such change, with the request and the amount that it has. Asked once for each."""

    def check(self) -> None:
        """Compare what was decided with what the tenancy promises; counts in ``num_defects``."""

    def check_integrity(self) -> None:
        """Assert that what the tenancy keeps agrees with the requests; linear in them."""
