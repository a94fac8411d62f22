"""Weighted fair service between namespaces by virtual token counters.

Each namespace has an account whose *service* grows with the tokens computed for it, divided by its weight. Whenever
there is a choice, the account with the least service goes first. So two backlogged namespaces of equal weight drift
apart by no more than one step's work, however many requests either of them queues (Sheng et al., "Fairness in Serving
Large Language Models", OSDI 2024, arXiv 2401.00588).

A namespace that was idle must not cash in the time it did not use: when it comes back, its service is lifted to the
least service of the active accounts. It must not escape its debt either: accounts ahead of that level are remembered
while idle.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Collection, Iterator

from engine.request import Request

INPUT_COST = 1.0
"""Service charged for a prompt token that was not in the cache."""

OUTPUT_COST = 2.0
"""Service charged for an output token: a decode slot costs about two prefill tokens (weights of the paper)."""

MAX_IDLE_ACCOUNTS = 4_096
"""Idle accounts remembered for their debt. Beyond it those with the least debt are forgotten."""


class Account:
    """One namespace's queue and counter."""

    __slots__ = ("charge_output", "key", "num_live", "num_running", "prefilling", "service", "waiting", "weight")

    def __init__(self, key: bytes, service: float) -> None:
        self.key = key
        self.service = service
        self.weight = 1
        self.charge_output = OUTPUT_COST
        """Service added by one output token."""
        self.waiting: deque[Request] = deque()
        """Oldest first."""
        self.prefilling: Request | None = None
        """The running request whose prompt is not computed yet; requests of an account prefill one by one."""
        self.num_running = 0
        self.num_live = 0
        """Requests waiting or running."""

    def set_weight(self, weight: int) -> None:
        """The share asked for by the newest request holds for the account."""
        self.weight = weight
        self.charge_output = OUTPUT_COST / weight

    def cost_of(self, request: Request) -> float:
        """Service that the request's known tokens stand for."""
        return request.num_tokens * INPUT_COST / self.weight

    def charge_input(self, tokens: int) -> None:
        """Charge prompt tokens that have to be computed."""
        self.service += tokens * INPUT_COST / self.weight

    def push(self, request: Request) -> None:
        """Queue a request at its place by age; a preempted one comes back before younger ones."""
        if not self.waiting or self.waiting[-1].order < request.order:
            self.waiting.append(request)
        elif request.order < self.waiting[0].order:
            self.waiting.appendleft(request)
        else:
            insort(self.waiting, request, key=_order)


class Accounts:
    """All accounts with live requests, and the debts of idle ones."""

    __slots__ = ("_active", "_idle", "_level")

    def __init__(self) -> None:
        self._active: dict[bytes, Account] = {}
        self._idle: dict[bytes, float] = {}
        self._level = 0.0
        """Service of the account that was last to become idle when all were."""

    def __iter__(self) -> Iterator[Account]:
        return iter(self._active.values())

    @property
    def total_weight(self) -> int:
        """Weights of all active accounts together."""
        return sum(account.weight for account in self._active.values())

    def enter(self, request: Request, weight: int) -> None:
        """Queue a new request in its namespace's account, opening or lifting the account when it was idle."""
        account = self._active.get(request.namespace)
        if account is None:
            debt = self._idle.pop(request.namespace, 0.0)
            account = Account(request.namespace, max(debt, self._floor()))
            self._active[request.namespace] = account
        account.set_weight(weight)
        account.num_live += 1
        request.account = account
        account.push(request)

    def leave(self, request: Request) -> None:
        """A request is finished; its account may become idle. The request is in no queue any more."""
        account = request.account
        account.num_live -= 1
        if account.num_live == 0:
            del self._active[account.key]
            self._idle[account.key] = account.service
            if not self._active:
                self._level = max(self._level, account.service)
            if len(self._idle) > MAX_IDLE_ACCOUNTS:
                self._forget_small_debts()

    def least_served(self, *, waiting: bool, without: Collection[Account] = ()) -> Account | None:
        """The account to serve next: least service, then the oldest head.

        Only accounts that have a prompt to go on with count, and those with a waiting request too when ``waiting``,
        unless they are among ``without``.
        """
        best: Account | None = None
        for account in self._active.values():
            if account.prefilling is None and not (waiting and account.waiting and account not in without):
                continue
            if best is None or (account.service, _head(account)) < (best.service, _head(best)):
                best = account
        return best

    def _floor(self) -> float:
        if self._active:
            return min(account.service for account in self._active.values())
        return self._level

    def _forget_small_debts(self) -> None:
        keep = sorted(self._idle.items(), key=lambda item: item[1])[MAX_IDLE_ACCOUNTS // 2 :]
        self._idle = dict(keep)


def _order(request: Request) -> int:
    return request.order


def _head(account: Account) -> int:
    return account.prefilling.order if account.prefilling is not None else account.waiting[0].order
