"""Weighted fair service between namespaces by virtual token counters, one line of accounts for each priority.

Each account's *service* grows with what is computed for it, divided by its weight (``account`` says what costs what).
Whenever there is a choice, the lowest priority number goes first, and of its line the account with the least service
(Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, arXiv 2401.00588).

An account is *backlogged* while it has a waiting request. One that becomes backlogged must not cash in the time it did
not use: its service is lifted to the least service of the backlogged accounts of its line or, when there is none, to
the line's level: the most that any account had when it left the backlog. It must not escape its debt either: accounts
ahead of that are remembered while idle.

The bound. For two accounts f, g of one line that are both backlogged from t1 to t2, the services W that they get in
that time, by weight, differ by at most ``2 U``. In the paper, U = max(w_p L_input, w_q M), for prompts of at most
L_input tokens and M tokens of KV memory. Here a token's price grows with its context, prompts are computed in chunks,
an account may be passed, and requests may be preempted, so U is what the running requests can really still cost::

    U = max over admissions of (pledges of the account's running requests, the new one included) / weight
        + max over passed accounts of the cost of the request that did not fit / weight

Proof. Let s be the services. (1) The least service m of the backlog never falls while there is one: who joins it is
lifted to m, and services only grow. When the backlog was empty, who joins starts at the level at least, and no account
left the backlog above the level. (2) An account f is admitted only when s_f <= m + p, where p is the cost of a passed
request (only accounts up to that are let by), since a chunk of a prompt goes to the account with the least service too
and the step is over when its tokens are spent. (3) After its last admission at t0, f is charged only for
prompts and outputs of requests running then, which were pledged: each has a limit, pays for each token once, and a
preempted one needs another admission. So at any t, s_f(t) <= m(t0) + p + pledges / weight <= m(t) + U, for every
backlogged f: all services of the backlog lie within U. (4) W_f - W_g is the difference of two such gaps, at t2
and at t1, thus at most 2 U. Chunking does not matter: an account has one prompt in the making at a time, and all
of it is pledged. Preemption for a poorer
account or for memory takes pledges away and gives none. A change of weight is covered by taking U again.

U is kept as the running maximum of what was really admitted, so it is as tight as the workload allows, and ``spread``
shows what it is held against. ``check`` compares the two; the scheduler calls it every few hundred steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from engine.request import Request
from engine.scheduler.account import Account

MAX_IDLE_ACCOUNTS = 4_096
"""Idle accounts of a line remembered for their debt. Beyond it those with the least debt are forgotten."""

MAX_STALE_TICKETS = 64
"""Entries of accounts that no longer only wait, above which the queue is made anew."""

ROUNDING = 1e-6
"""Part of a service by which sums in floating point may be off."""

Turn = tuple[float, int, int, int, Account]
"""Order of accounts: least service, fewest live requests (who has just been lifted is level with a flood, and goes
first), oldest head; then a ticket, so that no account is compared."""


class Line:
    """The accounts of one priority."""

    def __init__(self, priority: int, hold_price: float) -> None:
        self.priority = priority
        self.hold_price = hold_price
        self.below: tuple[Line, ...] = ()
        """Lines that give way to this one."""
        self.active: dict[bytes, Account] = {}
        """Accounts with live requests."""
        self.running: dict[Account, None] = {}
        """Accounts with running requests."""
        self.total_weight = 0
        """Weights of all active accounts together."""
        self.bound = 0.0
        """U: the most that services of the backlog may differ by, without what was passed."""
        self.allowance = 0.0
        """The part of U that comes from passed requests."""
        self._idle: dict[bytes, tuple[float, float]] = {}
        self._level = 0.0
        self._cold: list[Turn] = []
        self._last_ticket = 0

    def enter(self, request: Request, weight: int) -> None:
        """Queue a new request in its namespace's account, opening the account when it was idle."""
        account = self.active.get(request.namespace)
        if account is None:
            service, typical = self._idle.pop(request.namespace, (0.0, 0.0))
            account = Account(
                self, request.namespace, service=service, typical_output=typical, hold_price=self.hold_price
            )
            self.active[request.namespace] = account
            self.total_weight += account.weight
        account.set_weight(weight)
        account.num_live += 1
        request.account = account
        self.queue(request)

    def queue(self, request: Request) -> None:
        """Put a request, new or preempted, into its account's queue."""
        account = request.account
        if account.parked:
            account.push(request)
            return
        joins = not account.waiting
        if joins:
            account.service = max(account.service, self.least())
        account.push(request)
        if joins and not account.num_running:
            self._give_ticket(account)

    def unqueue(self, request: Request) -> None:
        """Take a request out of its account's queue."""
        account = request.account
        parked = bool(account.parked)
        account.remove(request)
        if not account.waiting and not parked:
            self._level = max(self._level, account.service)
            account.ticket = 0

    def park(self, account: Account) -> None:
        """Take the account's queue out of the backlog: it is not owed what its own cap keeps from it."""
        account.parked, account.waiting = account.waiting, []
        self._level = max(self._level, account.service)
        account.ticket = 0

    def unpark(self, account: Account) -> None:
        """Put the queue back; as one that comes from idleness, it is lifted to the backlog."""
        account.service = max(account.service, self.least())
        account.waiting, account.parked = account.parked, []
        if not account.num_running:
            self._give_ticket(account)

    def begin_running(self, account: Account) -> None:
        """One more request of the account runs."""
        account.num_running += 1
        account.ticket = 0
        self.running[account] = None

    def end_running(self, account: Account) -> None:
        """One request of the account runs no longer; it is not back in the queue yet."""
        account.num_running -= 1
        if not account.num_running:
            del self.running[account]
            if account.waiting:
                self._give_ticket(account)

    def leave(self, request: Request) -> None:
        """A request is finished, and neither queued nor running; its account may become idle."""
        account = request.account
        account.num_live -= 1
        if account.num_live == 0:
            del self.active[account.key]
            self.total_weight -= account.weight
            self._idle[account.key] = (account.service, account.typical_output)
            if len(self._idle) > MAX_IDLE_ACCOUNTS:
                keep = sorted(self._idle.items(), key=lambda item: item[1])[MAX_IDLE_ACCOUNTS // 2 :]
                self._idle = dict(keep)

    def charge_step(self) -> None:
        """Charge one output token, with the blocks it holds, to every request that decodes."""
        for account in self.running:
            account.service += account.step_charge

    def widen(self, account: Account) -> None:
        """An account was admitted, or its weight changed: what may come on top of its service, for the bound."""
        self.bound = max(self.bound, account.pledged / account.weight)

    def least(self) -> float:
        """The least service of the backlog; the line's level when there is none."""
        services = [account.service for account in self.running if account.waiting]
        cold = self.first_cold()
        if cold is not None:
            services.append(cold[0])
        return min(services, default=self._level)

    def spread(self) -> float:
        """By how much the services of the backlog differ now; linear in the accounts."""
        services = [account.service for account in self.active.values() if account.waiting]
        return max(services) - min(services) if services else 0.0

    def check(self) -> bool:
        """Whether the bound holds."""
        spread = self.spread()
        return spread <= (self.bound + self.allowance) * (1 + ROUNDING) + ROUNDING * self._level

    def hot_turns(self, *, admit: bool) -> list[Turn]:
        """Accounts with running requests that have a prompt to go on with or, with ``admit``, a waiting request."""
        return [
            turn_of(account)
            for account in self.running
            if account.prefilling is not None or (admit and account.waiting)
        ]

    def first_cold(self) -> Turn | None:
        """Of the accounts that only wait, the one to serve next; it stays in its queue."""
        cold = self._cold
        while cold and cold[0][3] != cold[0][4].ticket:
            heappop(cold)
        return cold[0] if cold else None

    def set_aside(self) -> Turn:
        """Take the entry that ``first_cold`` gave out of its queue for a while."""
        return heappop(self._cold)

    def put_back(self, turns: list[Turn]) -> None:
        """Return entries that were set aside; those of accounts that no longer only wait are dropped."""
        for turn in turns:
            if turn[3] == turn[4].ticket:
                heappush(self._cold, turn)

    def _give_ticket(self, account: Account) -> None:
        self._last_ticket += 1
        account.ticket = self._last_ticket
        heappush(self._cold, (account.service, account.num_live, account.waiting[0].order, account.ticket, account))
        if len(self._cold) > 2 * len(self.active) + MAX_STALE_TICKETS:
            self._cold = [turn for turn in self._cold if turn[3] == turn[4].ticket]
            heapify(self._cold)


class Turns:
    """Whose turn it is in one line, through one step."""

    def __init__(self, line: Line, *, admit: bool) -> None:
        self._line = line
        self._hot = line.hot_turns(admit=admit)
        heapify(self._hot)
        self._aside: list[Turn] = []

    def next(self, *, admit: bool) -> Account | None:
        """Take the next account in the order of ``Turn``. Accounts that only wait count with ``admit``."""
        cold = self._line.first_cold() if admit else None
        if cold is not None and (not self._hot or cold < self._hot[0]):
            self._aside.append(self._line.set_aside())
            return cold[4]
        return heappop(self._hot)[4] if self._hot else None

    def again(self, account: Account) -> None:
        """Give an account that was served, and has a running request, another turn."""
        heappush(self._hot, turn_of(account))

    def close(self) -> None:
        """The step is full."""
        self._line.put_back(self._aside)


class Accounts:
    """The lines of all priorities, the first to be served first."""

    def __init__(self, num_priorities: int, *, hold_price: float) -> None:
        self.lines = [Line(priority, hold_price) for priority in range(num_priorities)]
        for line in self.lines:
            line.below = tuple(self.lines[line.priority + 1 :])

    def __iter__(self) -> Iterator[Account]:
        for line in self.lines:
            yield from line.active.values()

    def charge_step(self) -> None:
        """Charge every request that decodes for one step."""
        for line in self.lines:
            line.charge_step()

    def check(self) -> int:
        """How many lines break the bound: none, unless there is a defect."""
        return sum(not line.check() for line in self.lines)


def turn_of(account: Account) -> Turn:
    """The account's place in the order now."""
    head = account.prefilling if account.prefilling is not None else account.waiting[0]
    return (account.service, account.num_live, head.order, 0, account)
