"""How hosts of a fleet lend each other what they do not use of a tenant's limits. Pure: times are arguments.

Each host has its part of each limit and decides by it alone, so nothing shared is needed to keep a limit. A host
whose part of a rate or of a budget runs short asks; another host that has some to spare takes it from its own part,
for good, and says so in an answer to that very question. What is lent is thus in one place at a time: in the lender's
part, in an answer, or in the asker's part. Whatever is lost on the way is lost to the tenant, and on no bill.

* A question has the number of the asker's life and a count. A host answers each once, and takes each answer once, only
  while the question is its latest and not older than ``FRESH_S``, by its own monotonic clock. No host reads another's.
* A host lends no more than what it has above half of its part of a rate, or half of what is left of its part of a
  budget: who asks cannot take a part away, only what is not used.
* One question is out at a time, so what is on its way to a host is one lease at most: as much of each as was asked
  for.

Messages come from a store that may lose, delay, repeat and mix up what it has. They are sealed by a proof under the
fleet's key (``message``), so it can make none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

REQUESTS, TOKENS, INPUT, OUTPUT, SPEND = KINDS = ("requests", "tokens", "input", "output", "spend")
"""Kinds of amounts: four rates, and the budgets of day and month, which are lent together."""

FRESH_S = 2.0
"""Seconds for which an answer is taken, from when its question was asked."""

MAX_AMOUNTS = 64
"""Amounts that one question asks for."""

MAX_LIVES = 64
"""Lives of one host whose last question is remembered; a question of an earlier one that is repeated is answered once
more, and lends to nobody what is then lost."""


@dataclass(frozen=True, slots=True)
class LimitAmount:
    """What can be lent: a tenant's rate or budget, by kind, in its units."""

    tenant: str
    kind: str
    amount: int


@dataclass(frozen=True, slots=True)
class LoanQuestion:
    """What one host asks of all others together."""

    life: str
    """Random number of the asker's process."""
    count: int
    amounts: tuple[LimitAmount, ...]


@dataclass(frozen=True, slots=True)
class LoanAnswer:
    """What one host lends another."""

    life: str
    count: int
    amounts: tuple[LimitAmount, ...]
    day: int
    """Day, by number, of whose budgets it lends."""


@dataclass(frozen=True, slots=True)
class Message:
    """All that one host says at one time."""

    sender: str
    question: LoanQuestion | None
    answers: Mapping[str, LoanAnswer]
    """By the host that asked."""


class Parts(Protocol):
    """A host's own parts of all limits."""

    @property
    def day(self) -> int:
        """Day of the budgets now, by number."""
        ...

    def short(self) -> list[LimitAmount]:
        """Return what runs short, with the amount that is wanted."""
        ...

    def lend(self, wanted: LimitAmount) -> int:
        """Take at most the amount that is wanted out of the own part; returns how much that is."""
        ...

    def take(self, loan: LimitAmount) -> None:
        """Put what was lent into the own part."""
        ...


@dataclass(slots=True)
class Lender:
    """One host. ``read`` and ``write`` are called in turn, as often as the owner likes."""

    name: str
    peers: tuple[str, ...]
    life: str
    parts: Parts
    borrowed: Callable[[str, LimitAmount], None] = lambda _peer, _thing: None
    """Told what was taken, with the host that lent it."""
    _question: LoanQuestion | None = None
    _asked_at: float = 0.0
    _count: int = 0
    _heard: set[str] = field(default_factory=set)
    """Hosts that have answered the latest question."""
    _answers: dict[str, LoanAnswer] = field(default_factory=dict)
    _seen: dict[str, dict[str, int]] = field(default_factory=dict)
    """Latest count of each life, by host."""

    def read(self, messages: Iterable[Message], now: float) -> list[tuple[str, LimitAmount]]:
        """Take answers, and answer questions; returns what is lent now, with the host that gets it. What must be on
        disk first is to be recorded before ``write``, or taken back by ``withhold``."""
        lent: list[tuple[str, LimitAmount]] = []
        for message in messages:
            if message.sender not in self.peers:
                continue
            answer = message.answers.get(self.name)
            if answer is not None:
                self._take(message.sender, answer, now)
            if message.question is not None and self._is_new(message.sender, message.question):
                amounts = self._lend(message.question)
                asked = message.question
                self._answers[message.sender] = LoanAnswer(asked.life, asked.count, amounts, self.parts.day)
                lent += [(message.sender, loan) for loan in amounts]
        return lent

    def withhold(self, peer: str, loan: LimitAmount) -> None:
        """Leave something out of an answer that was not told yet: the own part has it again, a budget on its day."""
        answer = self._answers[peer]
        amounts = tuple(one for one in answer.amounts if one != loan)
        self._answers[peer] = LoanAnswer(answer.life, answer.count, amounts, answer.day)
        if loan.kind != SPEND or answer.day == self.parts.day:
            self.parts.take(loan)

    def write(self, now: float) -> Message:
        """Return what this host says now; asks anew where something runs short and no question is out."""
        if self._question is not None and (self._heard >= {*self.peers} or now - self._asked_at > FRESH_S):
            self._question = None
        if self._question is None and (short := self.parts.short()[:MAX_AMOUNTS]):
            self._count += 1
            self._question, self._asked_at = LoanQuestion(self.life, self._count, tuple(short)), now
            self._heard.clear()
        return Message(self.name, self._question, dict(self._answers))

    def _take(self, peer: str, answer: LoanAnswer, now: float) -> None:
        question = self._question
        if question is None or (answer.life, answer.count) != (question.life, question.count) or peer in self._heard:
            return
        if now - self._asked_at > FRESH_S:
            return
        self._heard.add(peer)
        most = {(one.tenant, one.kind): self._each(one.amount) for one in question.amounts}
        for loan in answer.amounts:
            # Honest hosts lend no more; each loan is taken once.
            amount = min(loan.amount, most.pop((loan.tenant, loan.kind), 0))
            if amount > 0 and (loan.kind != SPEND or answer.day == self.parts.day):
                taken = LimitAmount(loan.tenant, loan.kind, amount)
                self.parts.take(taken)
                self.borrowed(peer, taken)

    def _lend(self, question: LoanQuestion) -> tuple[LimitAmount, ...]:
        """Take what is asked for out of the own parts, each loan once."""
        lent: dict[tuple[str, str], LimitAmount] = {}
        for one in question.amounts[:MAX_AMOUNTS]:
            wanted = LimitAmount(one.tenant, one.kind, self._each(one.amount))
            if (one.tenant, one.kind) not in lent and (amount := self.parts.lend(wanted)) > 0:
                lent[one.tenant, one.kind] = LimitAmount(one.tenant, one.kind, amount)
        return tuple(lent.values())

    def _each(self, amount: int) -> int:
        """Return what one host lends of an amount that is asked of all."""
        return -(-amount // len(self.peers))

    def _is_new(self, peer: str, question: LoanQuestion) -> bool:
        lives = self._seen.setdefault(peer, {})
        if question.count <= lives.get(question.life, 0):
            return False
        lives.pop(question.life, None)
        lives[question.life] = question.count
        if len(lives) > MAX_LIVES:
            del lives[next(iter(lives))]
        return True
