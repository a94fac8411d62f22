"""A fleet under a store that does what it likes, seen by one that sees everything: a key server, two
members, and a copy of one of them.

The store has every message that was ever written, and gives any of them to its recipient at any time, as often as it
likes, or never. Hosts' clocks begin anywhere and go up to 1.5 % wrong. Members and server restart. After every step
the model compares what hosts hold with what they promise.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from appliance.supervisor.fleet_keys.leases import DRIFT_S, LEASE_S, KeyAnswer, KeyClient, KeyQuestion, KeyServer

ACCOUNTS = ("*", "alpha")
HOSTS = ("b", "c", "d")
NAMES = {"b": "b", "c": "c", "d": "b"}
"""Names in the list: ``d`` is another machine with the keys of ``b``."""

RATES = {"a": 1.015, "b": 0.985, "c": 1.0, "d": 1.01}
"""Seconds of a host's clock in one true second; ``a`` is the server, whose leases thus end early."""

MOST_S = LEASE_S / min(RATES.values())
"""The longest true time for which a key may be held after its question."""

WAITS_S = (0.5, 5.0, 12.0, 31.0, 120.0, 280.0, 305.0, 320.0)

STEPS = (*("ask", "serve", "give") * 2, *("pass_on",) * 6, *("wait",) * 4, "shred", "order")
RARE = ("reboot", "restart", "drop", "repeat")


class Violation(AssertionError):
    """A promise does not hold."""


@dataclass
class Fleet:
    """The hosts, and all that was ever written."""

    client: Callable[..., KeyClient] = KeyClient
    server_of: Callable[..., KeyServer] = KeyServer
    now: float = 1_000.0
    lives: int = 0
    drawn: int = 0
    questions: list[tuple[str, KeyQuestion]] = field(default_factory=list)
    answers: list[tuple[str, KeyAnswer]] = field(default_factory=list)
    asked: dict[bytes, float] = field(default_factory=dict)
    """True time of each question, by its challenge."""
    got: dict[tuple[str, str], float] = field(default_factory=dict)
    """True time of the question whose answer a host took last, by host and account."""
    dead: dict[str, int] = field(default_factory=dict)
    """Generation of each account below which all were said to be held by nobody."""
    replaced: dict[str, float] = field(default_factory=dict)
    """True time at which each account's last generation but one ended."""
    highest: dict[tuple[str, str], int] = field(default_factory=dict)
    owner: dict[bytes, str] = field(default_factory=dict)
    """Account of each key that was ever seen."""

    def __post_init__(self) -> None:
        self.members = {host: self._member() for host in HOSTS}
        self.server = self._boot()

    def step(self, kind: str, draw: random.Random) -> None:
        """Do one thing, and compare."""
        host = draw.choice(HOSTS)
        getattr(self, kind)(host, draw)
        self.compare()

    def ask(self, host: str, _draw: random.Random | None = None) -> None:
        """A member writes what is due."""
        question = self.members[host].question(self.clock(host))
        if question is not None:
            self.asked[question.challenge] = self.now
            self.questions.append((NAMES[host], question))

    def serve(self, _host: str, draw: random.Random) -> None:
        """The store gives the server any question of all times, the last ones more often."""
        if self.questions:
            self._serve(*self.questions[-1 - min(int(draw.expovariate(0.5)), len(self.questions) - 1)])

    def _serve(self, name: str, question: KeyQuestion) -> None:
        before = {account: self.server.key(account) for account in ACCOUNTS}
        answer = self.server.answer(name, question, ACCOUNTS, self.clock("a"))
        for account in ACCOUNTS:
            if self.server.key(account) != before[account]:
                self.replaced[account] = self.now
        if answer is not None:
            self.answers.append((name, answer))

    def give(self, host: str, draw: random.Random) -> None:
        """The store gives a member any answer that was ever written to it."""
        mine = [answer for name, answer in self.answers if name == NAMES[host]]
        if mine:
            self._give(host, mine[-1 - min(int(draw.expovariate(0.5)), len(mine) - 1)])

    def _give(self, host: str, answer: KeyAnswer) -> None:
        if self.members[host].take(answer, self.clock(host)):
            for account in ACCOUNTS:
                self.got[host, account] = self.asked[answer.challenge]

    def pass_on(self, host: str, _draw: random.Random | None = None) -> None:
        """The store does what a store should, for one member."""
        before = len(self.questions)
        self.ask(host)
        if len(self.questions) > before:
            self._serve(*self.questions[-1])
            if self.answers:
                self._give(host, self.answers[-1][1])

    def wait(self, _host: str, draw: random.Random) -> None:
        """Time goes by."""
        self.now += draw.choice(WAITS_S)

    def shred(self, _host: str, draw: random.Random) -> None:
        """A shred is ordered on the server."""
        account = draw.choice(ACCOUNTS)
        self.server.shred(account)
        self.replaced[account] = self.now

    def order(self, host: str, draw: random.Random) -> None:
        """A shred is ordered on a member."""
        self.members[host].shred(draw.choice(ACCOUNTS))

    def restart(self, host: str, _draw: random.Random | None = None) -> None:
        """A member's process is another one."""
        self.members[host] = self._member()
        self.highest = {key: value for key, value in self.highest.items() if key[0] != host}

    def reboot(self, _host: str, _draw: random.Random | None = None) -> None:
        """The server's process is another one, in the next of its counted lives."""
        self.server = self._boot()

    def drop(self, _host: str, _draw: random.Random | None = None) -> None:
        """The store loses all that it has."""
        self.questions.clear()
        self.answers.clear()

    def repeat(self, host: str, draw: random.Random) -> None:
        """The store gives the server and a member everything again, in any order."""
        for _ in range(6):
            self.serve(host, draw)
            self.give(host, draw)

    def clock(self, host: str) -> float:
        """A host's own clock now."""
        return self.at(host, self.now)

    @staticmethod
    def at(host: str, true: float) -> float:
        """A host's own clock at a true time."""
        return true * RATES[host] + 7_777.0 * ord(host)

    def held(self) -> list[tuple[str, str, int, bytes]]:
        """Host, account, generation and key of all that members hold."""
        found = []
        for host, member in self.members.items():
            for account in ACCOUNTS:
                held = member.key(account, self.clock(host))
                if held is not None:
                    found.append((host, account, held.generation, held.key))
        return found

    def compare(self) -> None:
        """Demand every promise.

        Raises:
            Violation: one does not hold.
        """
        self._note_claims()
        for host, account, generation, key in self.held():
            if generation < self.dead.get(account, 0):
                raise Violation(f"{host} holds a generation of {account} that was said to be gone")
            if generation < self.highest.get((host, account), 0):
                raise Violation(f"an older generation of {account} came back to {host}")
            self.highest[host, account] = generation
            if self.owner.setdefault(key, account) != account:
                raise Violation(f"{host} has a key of another account for {account}")
            if self.now - self.got[host, account] > MOST_S:
                raise Violation(f"{host} holds a key of {account} beyond its lease")
        for account in ACCOUNTS:
            since = max(self.replaced.get(account, 0.0), self.booted)
            current = self.server.key(account)
            assert current is not None, "there is room for two accounts"
            over = (self.now - since) * RATES["a"] >= LEASE_S + DRIFT_S + 1e-6
            if over and self.server.settled(account, self.clock("a")) != current[0]:
                raise Violation(f"a shred of {account} is not complete though all leases have ended")

    def _note_claims(self) -> None:
        for account in ACCOUNTS:
            claimed = [self.server.settled(account, self.clock("a"))]
            claimed += [
                held.generation
                for host, member in self.members.items()
                if member.settled(account) and (held := member.key(account, self.clock(host))) is not None
            ]
            self.dead[account] = max(self.dead.get(account, 0), *claimed)

    def _member(self) -> KeyClient:
        member = self.client(self._random(), self._random)
        member.want(ACCOUNTS)
        return member

    def _boot(self) -> KeyServer:
        self.lives += 1
        self.booted = self.now
        return self.server_of(self.lives, self._random, self.clock("a"))

    def _random(self) -> bytes:
        self.drawn += 1
        return self.drawn.to_bytes(32, "big")


def search(sequences: int, steps: int, client: Callable[..., KeyClient], server: Callable[..., KeyServer]) -> int:
    """Go through random sequences; gives how often a member got a key.

    Raises:
        Violation: a promise does not hold; the message has the number of the sequence.
    """
    given = 0
    for number in range(sequences):
        draw, fleet = random.Random(number), Fleet(client, server)
        for _ in range(steps):
            kind = draw.choice(RARE) if draw.random() < 0.04 else draw.choice(STEPS)
            try:
                fleet.step(kind, draw)
            except Violation as error:
                raise Violation(f"sequence {number}: {error}") from None
            given += len(fleet.held())
    return given
