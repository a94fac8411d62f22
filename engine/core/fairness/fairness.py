"""Weighted fair service between namespaces by virtual token counters, one class of accounts for each priority.

Each account's *service* grows with what is computed for it, divided by its weight (``prices`` says what costs what).
Whenever there is a choice, the lowest priority number goes first, and of its class the account with the least service
(Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, arXiv 2401.00588).

An account is *backlogged* while it has a waiting request. One that becomes backlogged must not cash in the time it did
not use: its service is lifted to the least service of the backlogged accounts of its class or, when there is none, to
the level of the class: the most that any account had when it left the backlog. It must not escape its debt either:
accounts ahead of that are remembered while idle.

The bound. For two accounts f, g of one class that are both backlogged from t1 to t2, the services W that they get in
that time, by weight, differ by at most ``2 U``. In the paper, U = max(w_p L_input, w_q M), for prompts of at most
L_input tokens and M tokens of KV memory. Here a token's price grows with its context, prompts are computed in chunks,
an account may be passed, and requests may be preempted, so U is what the running requests can really still cost::

    U = max over admissions of (pledges of the account's running requests, the new one included) / weight
        + max over passed accounts of the cost of the request that did not fit / weight

Proof. Let s be the services. (1) The least service m of the backlog never falls while there is one: an account that
joins is lifted to m, and services only grow. When the backlog was empty, one that joins starts at the level at least,
and no account left the backlog above the level. (2) An account f is admitted only when s_f <= m + p, where p is the
cost of a passed request (only accounts up to that are let by), since a chunk of a prompt goes to the account with the
least service too and the step is over when its tokens are spent. (3) After its last admission at t0, f is charged only
for prompts and outputs of requests running then, which were pledged: each has a limit, pays for each token once, and a
preempted one needs another admission. So at any t, s_f(t) <= m(t0) + p + pledges / weight <= m(t) + U, for every
backlogged f: all services of the backlog lie within U. (4) W_f - W_g is the difference of two such gaps, at t2 and at
t1, thus at most 2 U. Chunking does not matter: an account has one prompt in the making at a time, and all of it is
pledged. Preemption for a poorer account or for memory takes pledges away and gives none. A change of weight is covered
by taking U again.

U is kept as the running maximum of what was really admitted, so it is as tight as the workload allows, and ``spread``
shows what it is held against. ``check`` compares the two; the scheduler calls it every few hundred steps.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from engine.core.fairness.prices import Prices
from engine.core.request import Account, Request

MAX_IDLE_ACCOUNTS = 4_096
"""Idle accounts of a priority remembered for their debt. Beyond it those with the least debt are forgotten."""

MAX_STALE_TICKETS = 64
"""Entries of accounts that no longer only wait, above which the queue is made anew."""

ROUNDING = 1e-6
"""Part of a service by which sums in floating point may be off."""

Turn = tuple[float, int, int, int, Account]
"""Order of accounts: least service, fewest live requests (an account that has just been lifted is level with a flood,
and goes first), oldest head; then a ticket, so that no account is compared."""


class PriorityClass:
    """The accounts of one priority."""

    def __init__(self, priority: int, prices: Prices) -> None:
        self.priority = priority
        self.prices = prices
        self.below: tuple[PriorityClass, ...] = ()
        """Classes that give way to this one."""
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

    def enter(self, request: Request) -> None:
        """Give a new request its namespace's account, which is opened when it was idle."""
        key, weight = request.spec.namespace, request.spec.weight
        account = self.active.get(key)
        if account is None:
            service, typical = self._idle.pop(key, (0.0, 0.0))
            account = self.active[key] = Account(self.priority, key, typical, service=service)
            self.total_weight += account.weight
        request.account = account
        if weight != account.weight:
            # The share asked for by the newest request holds for the account.
            self.total_weight += weight - account.weight
            account.weight = weight
            self.prices.reprice(request)
            self.widen(account)

    def join_backlog(self, request: Request) -> None:
        """A request, new or preempted, comes into its account's empty queue: the account is lifted to the backlog."""
        account = request.account
        account.service = max(account.service, self.least())
        if not account.num_running:
            self.give_ticket(account, request)

    def leave_backlog(self, account: Account) -> None:
        """The account's queue is empty from now on, or suspended."""
        self._level = max(self._level, account.service)
        account.ticket = 0

    def suspend(self, account: Account) -> None:
        """Take the account's queue out of the backlog: it is not owed what its own cap keeps from it."""
        account.suspended, account.waiting = account.waiting, []
        self.leave_backlog(account)

    def restore(self, account: Account) -> None:
        """Put the queue back; as one that comes from idleness, it is lifted to the backlog."""
        account.service = max(account.service, self.least())
        account.waiting, account.suspended = account.suspended, []
        if not account.num_running:
            self.give_ticket(account, account.waiting[0])

    def end_running(self, account: Account) -> None:
        """The account's last running request runs no longer; it is not back in the queue yet."""
        del self.running[account]
        if account.waiting:
            self.give_ticket(account, account.waiting[0])

    def make_idle(self, account: Account) -> None:
        """The account's last request is finished."""
        del self.active[account.key]
        self.total_weight -= account.weight
        self._idle[account.key] = (account.service, account.typical_output)
        if len(self._idle) > MAX_IDLE_ACCOUNTS:
            keep = sorted(self._idle.items(), key=lambda item: item[1])[MAX_IDLE_ACCOUNTS // 2 :]
            self._idle = dict(keep)

    def widen(self, account: Account) -> None:
        """An account was admitted, or its weight changed: what may come on top of its service, for the bound."""
        self.bound = max(self.bound, account.pledged / account.weight)

    def least(self) -> float:
        """The least service of the backlog; the level of the class when there is none."""
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
        """The account to serve next of those that only wait; it stays in its queue."""
        cold = self._cold
        while cold and cold[0][3] != cold[0][4].ticket:
            heappop(cold)
        return cold[0] if cold else None

    def take_cold(self) -> Turn:
        """Take the entry that ``first_cold`` gave out of its queue until the end of the step."""
        return heappop(self._cold)

    def put_back(self, turns: list[Turn]) -> None:
        """Return entries that were taken; those of accounts that no longer only wait are dropped."""
        for turn in turns:
            if turn[3] == turn[4].ticket:
                heappush(self._cold, turn)

    def give_ticket(self, account: Account, head: Request) -> None:
        """Queue an account that only waits, with the oldest request of its queue."""
        self._last_ticket += 1
        account.ticket = self._last_ticket
        heappush(self._cold, (account.service, account.num_live, head.spec.order, account.ticket, account))
        if len(self._cold) > 2 * len(self.active) + MAX_STALE_TICKETS:
            self._cold = [turn for turn in self._cold if turn[3] == turn[4].ticket]
            heapify(self._cold)


def turn_of(account: Account) -> Turn:
    """The account's place in the order now."""
    head = account.prefilling if account.prefilling is not None else account.waiting[0]
    return (account.service, account.num_live, head.spec.order, 0, account)
