"""Requests that wait for a limit of their tenant: a line for each of its two decisions, first come, first served
within a turn: each end user of the tenant has one request in a turn, so that many requests of one do not hold another
up.

A request that the policy makes wait (``policy.decision.Effect.WAIT``) joins the line of its tenant and of the decision
that it waits for. The first in a line is decided on again at the time that the policy told, and whenever a request of
the tenant ends; all in a line are when a policy comes into force. Each tenant has one timer, for that time or for the
first request that may wait no longer, whichever comes first. Nothing polls, and no tenant's line waits for another's.

A request in the line of admissions holds its prompt and nothing else; one in the line of tokens is admitted, and holds
the prompt's token ids. Neither holds anything in a sandbox.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NoReturn

from appliance.common.errors import ApplianceError, DeadlineExceededError, UnavailableError
from appliance.gateway.request.denials import denial
from appliance.gateway.sandboxes.link import RETRY_AFTER_S
from policy.decision import Decision

LEAST_TIMER_S = 0.001
"""Shortest time of a timer in seconds, the event loop's resolution: one that fires a little early is set anew."""

Attempt = Callable[[bool, int], Decision]
"""Decides on a waiting request, beside so many others that wait. Where the decision allows it and the first argument is
true, what it asked for is taken. Raises ``ApplianceError`` where the policy denies it."""


class Gate(Enum):
    """Decision that a request waits for."""

    ADMISSION = auto()
    TOKENS = auto()


@dataclass(frozen=True, slots=True)
class Patience:
    """Time in monotonic seconds until which a request may wait."""

    until: float
    deadline: bool
    """Whether it is the request's own deadline."""


@dataclass(slots=True, eq=False)
class _Waiter:
    attempt: Attempt
    patience: Patience
    decision: Decision
    """Decision that made it wait, or made the one before it wait."""
    passed: asyncio.Future[None]
    user: str
    """Pseudonym of the end user for whom it is; empty: not named."""
    turn: int
    """Number of its turn: the end user's requests in one line have different ones."""


@dataclass(slots=True)
class _Tenant:
    """Lines of one tenant."""

    lines: dict[Gate, deque[_Waiter]] = field(default_factory=lambda: {gate: deque() for gate in Gate})
    timer: asyncio.TimerHandle | None = None
    turns: dict[Gate, int] = field(default_factory=lambda: dict.fromkeys(Gate, 0))
    """Number of the turn that the last request to pass had."""

    def turn_of(self, gate: Gate, user: str) -> int:
        """Return the turn of a request that joins a line: the one after the last of its end user there."""
        return 1 + max((one.turn for one in self.lines[gate] if one.user == user), default=self.turns[gate])

    def join(self, gate: Gate, waiter: _Waiter) -> None:
        """Put a request behind all in a line that have its turn or an earlier one."""
        line = self.lines[gate]
        behind = next((at for at in range(len(line), 0, -1) if line[at - 1].turn <= waiter.turn), 0)
        line.insert(behind, waiter)

    def __len__(self) -> int:
        return sum(map(len, self.lines.values()))

    def __iter__(self) -> Iterator[_Waiter]:
        for line in self.lines.values():
            yield from line

    def remove(self, waiter: _Waiter) -> None:
        """Take a request out of its line, if it is in one."""
        for line in self.lines.values():
            if waiter in line:
                line.remove(waiter)


class Lines:
    """Waiting requests of all tenants. All methods run in one event loop."""

    def __init__(self, clock: Callable[[], float], most: Callable[[str], int]) -> None:
        """``most`` gives the requests of a tenant that may wait at once."""
        self._clock = clock
        self._most = most
        self._tenants: dict[str, _Tenant] = {}
        self._draining = False

    def __len__(self) -> int:
        return sum(map(len, self._tenants.values()))

    def of(self, tenant: str) -> int:
        """Return the tenant's waiting requests."""
        return len(self._tenants.get(tenant, ()))

    def decide(self, tenant: str, gate: Gate, attempt: Attempt) -> Decision:
        """Decide on a request that arrives: it passes only if none of its tenant waits for the same decision. A
        decision that allows has taken what the request asked for.

        Raises:
            ApplianceError: the policy denies it, or no more of its tenant may wait.
        """
        known = self._tenants.get(tenant)
        if known is None:
            return attempt(True, 0)
        self._pump(tenant, known)
        line, queued = known.lines[gate], len(known)
        decision = attempt(not line, queued)
        if not line or not decision.allowed:
            return decision
        if queued >= self._most(tenant):
            raise denial(line[0].decision)
        return line[0].decision

    async def wait(
        self, tenant: str, gate: Gate, attempt: Attempt, decision: Decision, patience: Patience, user: str = ""
    ) -> None:
        """Wait until ``attempt`` has passed, taking turns with other end users than ``user``. Cancelling the wait takes
        the request out of its line at once.

        Raises:
            ApplianceError: the policy denies it meanwhile, it has waited for too long, or the appliance shuts down.
        """
        if self._draining:
            _shut()
        known = self._tenants.setdefault(tenant, _Tenant())
        passed = asyncio.get_running_loop().create_future()
        waiter = _Waiter(attempt, patience, decision, passed, user, known.turn_of(gate, user))
        known.join(gate, waiter)
        self._arm(tenant, known)
        try:
            await waiter.passed
        finally:
            if waiter.passed.done() and not waiter.passed.cancelled():
                waiter.passed.exception()  # seen, also where the request was withdrawn in the same turn
            else:
                known.remove(waiter)
                self._pump(tenant, known)
                self._arm(tenant, known)

    def wake(self, tenant: str) -> None:
        """Decide again: a request of the tenant has ended."""
        known = self._tenants.get(tenant)
        if known is not None:
            self._pump(tenant, known)
            self._arm(tenant, known)

    def reconsider(self) -> None:
        """Decide on every waiting request again: another policy is in force."""
        for tenant, known in list(self._tenants.items()):
            for waiter in tuple(known):
                try:
                    waiter.attempt(False, 0)
                except ApplianceError as error:
                    known.remove(waiter)
                    _end(waiter, error)
            self.wake(tenant)

    def drain(self) -> None:
        """End every wait, and all that would begin."""
        self._draining = True
        for tenant, known in list(self._tenants.items()):
            for waiter in tuple(known):
                known.remove(waiter)
                _end(waiter, _shutting_down())
            self._arm(tenant, known)

    def _pump(self, tenant: str, known: _Tenant) -> None:
        """Let pass what may, from the front of each line."""
        for gate, line in known.lines.items():
            while line:
                first = line[0]
                if first.passed.done():  # it has just left
                    line.popleft()
                    continue
                try:
                    decision = first.attempt(True, 0)
                except ApplianceError as error:
                    line.popleft()
                    _end(first, error)
                    continue
                if not decision.allowed:
                    first.decision = decision
                    break
                line.popleft()
                known.turns[gate] = first.turn
                first.passed.set_result(None)

    def _arm(self, tenant: str, known: _Tenant) -> None:
        """Set the tenant's timer to the next time at which something is due; without waiting requests there is none."""
        if known.timer is not None:
            known.timer.cancel()
            known.timer = None
        if not len(known):
            self._tenants.pop(tenant, None)
            return
        now = self._clock()
        due = min(waiter.patience.until for waiter in known)
        for line in known.lines.values():
            if line and line[0].decision.retry_after_s is not None:
                due = min(due, now + line[0].decision.retry_after_s)
        delay = max(LEAST_TIMER_S, due - now)
        known.timer = asyncio.get_running_loop().call_later(delay, self._due, tenant, known)

    def _due(self, tenant: str, known: _Tenant) -> None:
        known.timer = None
        self._pump(tenant, known)
        now = self._clock()
        for line in known.lines.values():
            for waiter in tuple(line):
                if waiter.patience.until <= now:
                    error = self._too_late(line, waiter)
                    line.remove(waiter)
                    _end(waiter, error)
        self._pump(tenant, known)
        self._arm(tenant, known)

    @staticmethod
    def _too_late(line: deque[_Waiter], waiter: _Waiter) -> ApplianceError:
        """Return the error of a request that may wait no longer: its deadline, or what the policy denies it for."""
        if waiter.patience.deadline:
            return DeadlineExceededError("the request's deadline passed while it waited for a limit of its tenant")
        try:
            decision = waiter.attempt(False, 0)
        except ApplianceError as error:
            return error
        # Where its own need is met, the first in the line keeps it waiting.
        return denial(line[0].decision if decision.allowed else decision)


def _end(waiter: _Waiter, error: ApplianceError) -> None:
    if not waiter.passed.done():
        waiter.passed.set_exception(error)


def _shutting_down() -> UnavailableError:
    return UnavailableError("the appliance is shutting down", retry_after_s=RETRY_AFTER_S)


def _shut() -> NoReturn:
    raise _shutting_down()
