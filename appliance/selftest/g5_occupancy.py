"""G5: no tenant can push another's resident KV below its reservation, or below its demand if that is less.

Two attacks from the literature run beside a victim with eight conversations, in a real scheduler: a *flood* of long
prompts with one token of output, and *fill and squeeze* (arXiv 2602.07878: long outputs fill the pool, then prompts
force preemption). Before each answer the victim's residents are compared with those of a run without an attacker. The
control removes the quotas. *Prime and probe* tests whether an attacker that fills the rest of the pool can tell, by its
own cache hits, that a tenant with a partition was active. The control gives the tenant no partition.
"""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass

from appliance.common.figures import counted
from appliance.selftest.g1_public import flood
from appliance.selftest.result import Result, judged
from appliance.selftest.simulation import BLOCK, Prompts, SimulatedEngine, Size, area, quota

VICTIM, ATTACKER = 1, 2
RESERVED = 25
"""Percent of the pool."""
CONVERSATIONS = 8
PREFIX = 192
"""Tokens of each conversation's prefix: 8 of them are 96 of the 128 reserved blocks, with the last turns."""
TURN = 32
ANSWER = 17
"""Tokens of an answer: its computed part ends with a block, so that the victim itself releases nothing."""
MOST_LIVE = 48
COMMAND = "athanor selftest"
FULL_COUNTS, SHORT_COUNTS = (400, 200), (80, 40)
"""Turns of a victim, and trials of each kind."""


@dataclass(slots=True)
class Kept:
    """Results of a run of the victim, turn by turn."""

    residents: list[int]
    """Its blocks when an answer had ended."""
    lowest: list[int]
    """Its smallest number of blocks at any step of that turn."""
    hits: float
    """Fraction of its prompt tokens found in the cache, once all conversations had begun."""


def run(full: bool) -> list[Result]:
    """Run flood, fill and squeeze, prime and probe."""
    turns, trials = FULL_COUNTS if full else SHORT_COUNTS
    alone = _victim("nobody", turns, protected=True)
    rows = []
    for attack in ("flood", "fill and squeeze"):
        rows += _judge(attack, alone, _victim(attack, turns, protected=True), protected=True)
    rows += _judge("flood", alone, _victim("flood", turns, protected=False), protected=False)
    return [*rows, _probe(trials, partition=True), _probe(trials, partition=False), *flood(full)]


def _victim(attack: str, turns: int, *, protected: bool) -> Kept:
    machine = SimulatedEngine(Size(), [quota(VICTIM, RESERVED)] if protected else [])
    prompts = Prompts()
    beginnings = [prompts.make(PREFIX) for _ in range(CONVERSATIONS)]
    kept = Kept([], [], 0.0)
    found = known = 0
    for turn in range(turns):
        attacker = PoolAttacker(machine, prompts, attack)
        number = machine.ask(VICTIM, prompts.make(PREFIX + TURN, beginnings[turn % CONVERSATIONS]), ANSWER)
        assert number is not None, "the victim was refused"
        lowest = machine.account(VICTIM).resident
        while not machine.seen[number].ended:
            attacker.act()
            machine.step()
            lowest = min(lowest, machine.account(VICTIM).resident)
        for _ in range(8):
            attacker.act()
            machine.step()
            lowest = min(lowest, machine.account(VICTIM).resident)
        kept.residents.append(machine.account(VICTIM).resident)
        kept.lowest.append(lowest)
        if turn >= CONVERSATIONS:
            found, known = found + machine.seen[number].cached, known + PREFIX
    kept.hits = found / known
    return kept


class PoolAttacker:
    """Keeps ``MOST_LIVE`` requests in the engine."""

    def __init__(self, machine: SimulatedEngine, prompts: Prompts, attack: str) -> None:
        self._machine = machine
        self._prompts = prompts
        self._attack = attack

    def act(self) -> None:
        """Replace requests that have ended."""
        if self._attack == "nobody":
            return
        while self._machine.live(ATTACKER) < MOST_LIVE:
            if self._attack == "flood":
                self._machine.ask(ATTACKER, self._prompts.make(640), 1)
            elif self._machine.live(ATTACKER) < MOST_LIVE // 2:
                self._machine.ask(ATTACKER, self._prompts.make(32), 800)
            else:
                self._machine.ask(ATTACKER, self._prompts.make(960), 64)


def _judge(attack: str, alone: Kept, beside: Kept, *, protected: bool) -> list[Result]:
    reserved = Size().blocks * RESERVED // 100
    # Its demand is what it held when its last answer ended.
    wanted = [0, *(min(reserved, resident) for resident in alone.residents[:-1])]
    kept = sum(low >= want for low, want in zip(beside.lowest, wanted, strict=True)) / len(wanted)
    change = 100 * abs(alone.hits - beside.hits)
    figure = f"{100 * kept:.1f} % of turns at or above the reservation; hit rate {change:.1f} points apart"
    if protected:
        passed = kept == 1 and change <= 1
        return [judged(f"G5.{attack}", passed, figure=figure, bar="100 %; at most 1 point", command=COMMAND)]
    passed = kept < 1 and change > 20
    return [judged("G5.control", passed, figure=figure, bar="below 100 %; above 20 points", command=COMMAND)]


def _probe(trials: int, *, partition: bool) -> Result:
    """Measure how well the attacker's own cache hits tell whether the victim was active."""
    rng = random.Random(5)
    counts: dict[bool, list[float]] = {False: [], True: []}
    for trial in range(2 * trials):
        active = trial % 2 == 1
        machine = SimulatedEngine(Size(), [quota(VICTIM, RESERVED, RESERVED, lends=False)] if partition else [])
        prompts = Prompts()
        primed = [prompts.make(10 * BLOCK + 1) for _ in range(Size().blocks // 10 + 4)]
        for prompt in primed:
            machine.finish(machine.ask(ATTACKER, prompt, 1))
        if active:
            for _ in range(rng.randint(4, 10)):
                machine.finish(machine.ask(VICTIM, prompts.make(PREFIX), TURN))
        counts[active].append(float(_hits(machine, primed, rng)))
    auc = area(counts[True], counts[False])
    figure = f"AUC {auc:.2f} over {counted(trials, 'trial')} each way"
    if partition:
        return judged("G5.prime and probe", abs(auc - 0.5) <= 0.05, figure=figure, bar="0.45 to 0.55", command=COMMAND)
    return judged("G5.prime and probe.control", auc >= 0.95, figure=figure, bar="0.95 or more", command=COMMAND)


def _hits(machine: SimulatedEngine, primed: list[array[int]], rng: random.Random) -> int:
    """Return the tokens that the attacker finds of its own. It probes newest first and stops at the first miss, because
    a recomputed probe evicts those still to be checked."""
    found = 0
    for prompt in reversed(primed):
        machine.now += rng.random() * 1e-3
        cached = machine.finish(machine.ask(ATTACKER, prompt, 1)).cached
        found += cached
        if cached < len(prompt) - 1:
            break
    return found
