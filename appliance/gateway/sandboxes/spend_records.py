"""Spend as the supervisor records it: what tenants have spent, and what running requests may cost.

A reservation is confirmed once it is on disk; a request of a tenant with a limit of spend waits for that before it
enters an engine. One that comes after a quiet moment is told at once; those that follow closely are gathered and told
together, since what costs processor time is the message, the write and the confirmation, not the one more row. When
the supervisor comes anew, everything that it has not confirmed is told again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from appliance.common.aligned_sleep import aligned_sleep
from appliance.common.control import (
    MAX_RESERVATIONS,
    SPEND_CONFIRM_S,
    Control,
    ReserveSpend,
    SpendQuery,
    SpendReserved,
    Spent,
    Welcome,
)
from appliance.common.errors import ControlError, UnavailableError
from appliance.gateway.sandboxes.link import RETRY_AFTER_S
from policy.model import PolicySet

TENANTS_PER_QUERY = 500
"""Tenants of one question: the answer must fit one datagram."""

MAX_WAITING = 4_096
"""Requests that wait for their reservations; further ones are refused at once. A supervisor that comes anew is told of
all of them, and its link has to keep them."""

GATHER_S = 0.02
"""Shortest time between two messages with reservations where the first had several, in seconds, and so the longest that
one waits for others: about a step of an engine that is busy. A message alone takes 0.6 to 1.2 ms of processor time on
both sides (it wakes two processes and a thread, and is forced to disk), a further reservation in it some 50 us."""

ALONE_S = 0.004
"""Shortest time after a message with one reservation: a client whose short requests follow each other waits no more."""

ANSWER_S = 1.0
"""Seconds after which a question is asked again: the supervisor may have been restarted."""


LOOK_S = 60.0
"""Seconds between two questions about tenants of which reservations of an earlier gateway are held."""


class SpendRecords:
    """Asks for spend and has reservations recorded."""

    def __init__(
        self,
        tell: Callable[[Control], None],
        changed: Callable[[Spent], None],
        again: Callable[[Spent], None] = lambda _message: None,
        held: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """Args:
        tell: sends to the supervisor.
        changed: called with what it tells of tenants' spend for the first time.
        again: called with what it tells of tenants that are known.
        held: gives the tenants of which reservations of an earlier gateway are held.
        """
        self._tell = tell
        self._changed = changed
        self._again = again
        self._held = held
        self._known: set[str] = set()
        """Tenants whose spend the supervisor has told."""
        self._arrived = asyncio.Event()
        self._waiting: dict[str, tuple[str, int, asyncio.Future[None]]] = {}
        """Tenant and cost of each request that waits, and what ends its waiting."""
        self._gathered: list[str] = []
        """Requests whose reservations are to be told; some may wait no more."""
        self._timer: asyncio.TimerHandle | None = None
        """Runs for a while after each message, and then tells what was gathered meanwhile."""

    async def fetch(self, tenants: Sequence[str], timeout_s: float = 30.0) -> None:
        """Return once the supervisor has told the spend of these tenants, now or before.

        Raises:
            ControlError: it did not in time.
        """
        deadline = time.monotonic() + timeout_s
        while missing := [tenant for tenant in tenants if tenant not in self._known]:
            self._arrived.clear()
            self._tell(SpendQuery(missing[:TENANTS_PER_QUERY]))
            try:
                async with asyncio.timeout(max(0.0, min(ANSWER_S, deadline - time.monotonic()))):
                    await self._arrived.wait()
            except TimeoutError:
                if time.monotonic() >= deadline:
                    raise ControlError("the supervisor did not tell in time what tenants have spent") from None

    async def run(self, flush: Callable[[], object]) -> None:
        """Ask again, until cancelled, about tenants of which reservations of an earlier gateway are held: their
        requests may have ended since. ``flush`` sends what was used, so that the answer has it."""
        turn = 0
        while True:
            await aligned_sleep(LOOK_S)
            if held := self._held():
                flush()
                begin = turn % len(held)
                self._tell(SpendQuery([*held[begin:], *held[:begin]][:TENANTS_PER_QUERY]))
                turn += TENANTS_PER_QUERY

    async def reserve(self, request: str, tenant: str, cost: int) -> None:
        """Return once the largest cost of a request is recorded.

        Raises:
            UnavailableError: it was not recorded in time.
        """
        if len(self._waiting) >= MAX_WAITING:
            raise _unrecorded()
        confirmed = asyncio.get_running_loop().create_future()
        self._waiting[request] = tenant, cost, confirmed
        self._gathered.append(request)
        if self._timer is None:
            self._tell_gathered()
        try:
            async with asyncio.timeout(SPEND_CONFIRM_S):
                await confirmed
        except TimeoutError:
            raise _unrecorded() from None
        finally:
            del self._waiting[request]

    def attached(self, _welcome: Welcome) -> None:
        """Tell a supervisor that came anew what waits. It is asked nothing: of the tenants that this gateway
        knows its account is complete, and the book lags behind it."""
        self._gathered.clear()
        self._tell_reservations(list(self._waiting))

    def take_spent(self, message: Spent) -> None:
        """Take the spend of tenants, apart for those that were not known."""
        known = [name for name in message.asked if name in self._known]
        news = {name: amounts for name, amounts in message.spent.items() if name not in self._known}
        self._changed(replace(message, spent=news))
        if known:
            self._again(replace(message, asked=known))
        self._known.update(message.asked)
        self._arrived.set()

    def take_reserved(self, message: SpendReserved) -> None:
        """Take confirmations; those of requests that wait no more change nothing."""
        for request in message.requests:
            waiting = self._waiting.get(request)
            if waiting is not None and not waiting[2].done():
                waiting[2].set_result(None)

    def _tell_gathered(self) -> None:
        """Tell what was gathered, and gather again; where nothing was, the next reservation is told at once."""
        self._timer = None
        requests, self._gathered = self._gathered, []
        if requests:
            pause_s = GATHER_S if len(requests) > 1 else ALONE_S
            self._timer = asyncio.get_running_loop().call_later(pause_s, self._tell_gathered)
            self._tell_reservations(requests)

    def _tell_reservations(self, requests: Sequence[str]) -> None:
        for start in range(0, len(requests), MAX_RESERVATIONS):
            costs: dict[str, dict[str, int]] = {}
            for request in requests[start : start + MAX_RESERVATIONS]:
                if (waiting := self._waiting.get(request)) is not None:
                    costs.setdefault(waiting[0], {})[request] = waiting[1]
            if costs:
                self._tell(ReserveSpend(costs))


def _unrecorded() -> UnavailableError:
    return UnavailableError(
        "the cost of this request cannot be recorded now, and this tenant's spend is limited",
        retry_after_s=RETRY_AFTER_S,
    )


def spending(policy: PolicySet) -> list[str]:
    """Return the tenants whose spend is limited."""
    return [name for name, tenant in policy.tenants.items() if tenant.limits.bounds_spend]


def unaccountable(policy: PolicySet, *, audited: bool) -> list[str]:
    """Return a line for a tenant whose limit of spend cannot be kept because no account is."""
    if audited or not (names := spending(policy)):
        return []
    return [
        f"tenant {names[0]!r} has a limit of spend, and no audit log is kept, so what it spends would be forgotten; "
        "name a folder in the configuration (audit.directory), or leave the limit out"
    ]
