"""The load: clients of every tenant that ask without end, and judge each answer by what may happen at that moment."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from bench.soak.answers import BREACHES, CUT, LEFT, RIGHT, Answer, compare
from bench.soak.clients import Grpc
from bench.soak.questions import BAD, Asker, draw_manner, names_for
from bench.soak.served import TENANTS, Served

LANES = 2
"""Clients of each tenant that ask at once."""

ALWAYS = frozenset({RIGHT, LEFT})
LIMITED = frozenset({"rate_limited"})
"""What the tenant with a low limit of concurrency may hear at any time."""

SLOW = frozenset({"grammar_too_complex"})
"""What whoever brings a grammar may hear: it is compiled within 0.8 s by the clock, and the machine may be busy
(`engine.text.grammar_keeper.COMPILE_WALL_S`)."""

BAD_SHARE = 0.12
"""Of all requests, those that are refused."""

BACK_OFF_S = 0.05
"""After an error, as a client would."""

MAX_KEPT = 40
REST_S = 40.0
"""Longest until the last request has ended once no new one is made."""

References = Mapping[str, str]
"""The right answer to each question."""


@dataclass(slots=True)
class Phases:
    """What may be answered when: a request may meet whatever any moment of its life allows."""

    _past: list[tuple[float, float, frozenset[str]]] = field(default_factory=list)
    _open: tuple[float, frozenset[str]] | None = None

    def begin(self, now: float, may: frozenset[str]) -> None:
        """From now on these words are excused."""
        assert self._open is None, "phases do not nest"
        self._open = (now, may)

    def end(self, now: float) -> None:
        """They no longer are."""
        assert self._open is not None, "no phase is open"
        self._past.append((self._open[0], now, self._open[1]))
        self._open = None

    def excused(self, began: float, ended: float) -> frozenset[str]:
        """What a request of this life may have met."""
        found = ALWAYS
        if self._open is not None and ended >= self._open[0]:
            found |= self._open[1]
        for start, stop, may in reversed(self._past):
            if stop < began:
                break
            if start <= ended:
                found |= may
        return found


@dataclass(slots=True)
class Heard:
    """What all clients heard."""

    kinds: Counter[str] = field(default_factory=Counter)
    breaches: list[str] = field(default_factory=list)

    def add(self, what: str, answer: Answer, excused: frozenset[str]) -> None:
        """Count an answer; one that nothing excuses is a breach."""
        self.kinds[answer.kind] += 1
        if (answer.kind in BREACHES or answer.kind not in excused) and len(self.breaches) < MAX_KEPT:
            self.breaches.append(f"{what}: {answer.kind} {answer.text[:400]}".strip())


class Load:
    """Starts and rests; made once a run."""

    def __init__(self, served: Served, references: References, phases: Phases, seed: int) -> None:
        self.heard = Heard()
        self._served, self._references, self._phases = served, references, phases
        self._seed = seed
        self._starts = 0
        self._going = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to ask."""
        self._going.set()
        self._starts += 1
        for tenant in TENANTS:
            for lane in range(LANES):
                draw = random.Random(f"{self._seed}/{self._starts}/{tenant}/{lane}")
                self._tasks.append(asyncio.create_task(self._lane(tenant, draw)))

    async def rest(self) -> None:
        """Ask no more, and wait until the last answer has come.

        Raises:
            TimeoutError: a request does not end.
        """
        self._going.clear()
        tasks, self._tasks = self._tasks, []
        async with asyncio.timeout(REST_S * self._served.patience):
            await asyncio.gather(*tasks)

    async def _lane(self, tenant: str, draw: random.Random) -> None:
        channel = Grpc(self._served.grpc, self._served.keys, tenant)
        asker = Asker(self._served, tenant, channel, draw)
        try:
            while self._going.is_set():
                if not await self._one(asker, draw):
                    await asyncio.sleep(BACK_OFF_S)
        finally:
            await channel.close()

    async def _one(self, asker: Asker, draw: random.Random) -> bool:
        """One request; whether it was answered."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        if draw.random() < BAD_SHARE:
            bad = draw.choice(BAD)
            expected, what = frozenset({bad.reason}), f"a request that is {bad.reason}"
            if bad.reason == "invalid_grammar":
                expected |= SLOW
            answer = await asker.ask_badly(bad)
            if answer.kind == RIGHT:
                answer = Answer("accepted", what)
        else:
            name = draw.choice(names_for(asker.tenant))
            expected, what = SLOW if name == "structured" else frozenset[str](), name
            answer = compare(await asker.ask(name, draw_manner(draw)), self._references[name])
        if asker.tenant == "gamma":
            expected |= LIMITED
        self.heard.add(f"{asker.tenant}: {what}", answer, expected | self._phases.excused(began, loop.time()))
        return answer.kind in (RIGHT, LEFT, *expected) and answer.kind != CUT


async def take_references(served: Served, seed: int) -> dict[str, str]:
    """The right answers: each question once by each tenant, at rest; all must agree.

    Raises:
        AssertionError: they do not, or one is refused.
    """
    found: dict[str, str] = {}
    for tenant in TENANTS:
        channel = Grpc(served.grpc, served.keys, tenant)
        asker = Asker(served, tenant, channel, random.Random(f"{seed}/references/{tenant}"))
        for name in names_for(tenant):
            answer = await asker.ask(name)
            assert answer.kind == RIGHT, f"{tenant} {name}: {answer}"
            agrees = compare(answer, found.setdefault(name, answer.text))
            assert agrees.kind == RIGHT, f"{tenant} {name}: {agrees}"
        await channel.close()
    return found
