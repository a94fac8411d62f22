"""G5: nobody can push what a tenant keeps in the KV pool below its reservation, or below what it wants if that is less.

Two attacks of the literature beside a victim that talks in eight conversations, counted in a real scheduler: a *flood*
of long prompts with one token of output, and *fill and squeeze* (arXiv 2602.07878: long outputs fill the pool, then
prompts force preemption). Before each answer the victim's residents are held against those of the same run without an
attacker. The control takes the quotas away. And *prime and probe*: can who fills the rest of the pool tell, by his own
cache hits, whether a tenant with a partition was active? The control gives the tenant no partition.
"""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass

from bench.guarantees.g1_public import flood
from bench.guarantees.result import Result, judged
from bench.guarantees.simulation import BLOCK, Machine, Prompts, Size, area, quota

VICTIM, ATTACKER = 1, 2
RESERVED = 25
"""Percent of the pool."""
CONVERSATIONS = 8
PREFIX = 192
"""Tokens of each conversation's beginning: 8 of them are 96 of the 128 reserved blocks, with the last turns."""
TURN = 32
ANSWER = 17
"""Tokens of an answer: what is computed of it ends with a block, so that the victim itself gives nothing back."""
MOST_LIVE = 48
COMMAND = "athanor selftest"


@dataclass(slots=True)
class Kept:
    """What a run of the victim gave, turn by turn."""

    residents: list[int]
    """Its blocks when an answer had ended."""
    lowest: list[int]
    """The least of them at any step of that turn."""
    hits: float
    """Part of its prompts that was found, once all conversations had begun."""


def run(full: bool) -> list[Result]:
    """Flood, fill and squeeze, prime and probe; the full form has 400 turns for 80 and 200 trials for 40."""
    turns, trials = (400, 200) if full else (80, 40)
    alone = _victim("nobody", turns, protected=True)
    rows = []
    for attack in ("flood", "fill and squeeze"):
        rows += _judge(attack, alone, _victim(attack, turns, protected=True), protected=True)
    rows += _judge("flood", alone, _victim("flood", turns, protected=False), protected=False)
    return [*rows, _probe(trials, partition=True), _probe(trials, partition=False), *flood(full)]


def _victim(attack: str, turns: int, *, protected: bool) -> Kept:
    machine = Machine(Size(), [quota(VICTIM, RESERVED)] if protected else [])
    prompts = Prompts()
    beginnings = [prompts.make(PREFIX) for _ in range(CONVERSATIONS)]
    kept = Kept([], [], 0.0)
    found = known = 0
    for turn in range(turns):
        attacker = Attacker(machine, prompts, attack)
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


class Attacker:
    """Keeps ``MOST_LIVE`` requests in the engine."""

    def __init__(self, machine: Machine, prompts: Prompts, attack: str) -> None:
        self._machine = machine
        self._prompts = prompts
        self._attack = attack

    def act(self) -> None:
        """Fill up what has ended."""
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
    # What it had when its last answer ended is what it wants to keep.
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
    """How well the attacker's own hits tell whether the victim was active."""
    rng = random.Random(5)
    counts: dict[bool, list[float]] = {False: [], True: []}
    for trial in range(2 * trials):
        active = trial % 2 == 1
        machine = Machine(Size(), [quota(VICTIM, RESERVED, RESERVED, lends=False)] if partition else [])
        prompts = Prompts()
        primed = [prompts.make(10 * BLOCK + 1) for _ in range(Size().blocks // 10 + 4)]
        for prompt in primed:
            machine.finish(machine.ask(ATTACKER, prompt, 1))
        if active:
            for _ in range(rng.randint(4, 10)):
                machine.finish(machine.ask(VICTIM, prompts.make(PREFIX), TURN))
        counts[active].append(float(_hits(machine, primed, rng)))
    auc = area(counts[True], counts[False])
    figure = f"AUC {auc:.2f} over {trials} trials each way"
    if partition:
        return judged("G5.prime and probe", abs(auc - 0.5) <= 0.05, figure=figure, bar="0.45 to 0.55", command=COMMAND)
    return judged("G5.prime and probe.control", auc >= 0.95, figure=figure, bar="0.95 or more", command=COMMAND)


def _hits(machine: Machine, primed: list[array[int]], rng: random.Random) -> int:
    """Tokens that the attacker finds of what he left. He looks, newest first, and stops at the first that is gone: what
    a probe computes anew evicts what he has yet to look at."""
    found = 0
    for prompt in reversed(primed):
        machine.now += rng.random() * 1e-3
        cached = machine.finish(machine.ask(ATTACKER, prompt, 1)).cached
        found += cached
        if cached < len(prompt) - 1:
            break
    return found
