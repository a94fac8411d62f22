"""G1 and G5 with public prefixes: a published prefix leads to no private block, is always resident, and its presence
discloses nothing about its users.

Pairs share one public prefix: one request continues with its own ids, another asks for that continuation as another
tenant, in another class, without the prefix, or after the prefix was withdrawn. An *attach* is a cached block that is
neither public nor the requester's own; the control repeats the request as the owner. Then the attacks of
``g5_occupancy`` are directed at the prefix itself: a flood, and prompts that squeeze. A probe tests whether a tenant
can tell from its own cache hits on the prefix that another has just used it. The control puts both into a sharing group
instead.
"""

from __future__ import annotations

import random
from array import array
from typing import Any

from appliance.common.figures import counted
from appliance.selftest.result import Result, judged
from appliance.selftest.simulation import BLOCK, Prompts, RequestTimes, SimulatedEngine, Size, area, key
from appliance.selftest.spread import spread
from engine.core.public_prefixes import Publisher
from engine.core.scheduler.plan import StepResult
from engine.core.specification import SILENT_ID
from isolation.ipc.public import PublicPrefix

COMMAND = "athanor selftest"
PAIRS = (3_000, 1_000_000)
TURNS = (60, 400)
TRIALS = (40, 200)
PUBLIC, OTHER = b"p" * 32, b"q" * 32
PREFIX_BLOCKS = 6
MOST_LIVE = 40
IDLE_STEPS = 60
"""Steps of the attack before the victim returns: blocks kept only by recent use are gone by then."""
ALICE, BOB, GROUP, ATTACKER = 1, 2, 3, 4
KINDS = ("same ids", "deterministic", "without the prefix", "keeps nothing", "another prefix", "cut inside of a block")


class PublishingEngine(SimulatedEngine):
    """A simulated engine that publishes prefixes."""

    def __init__(self, size: Size | None = None) -> None:
        super().__init__(size)
        cache = self.scheduler._live._cache
        self.cache = cache
        self.publisher = Publisher(self.scheduler, self.pool, cache, exact=lambda: True)
        self.seen[SILENT_ID] = RequestTimes(0, 0, 0.0)

    def publish(self, *prefixes: PublicPrefix) -> None:
        """Apply a table of prefixes and wait until all that fit are resident."""
        self.publisher.set(prefixes)
        while self.publisher.has_work or self.scheduler.is_live(SILENT_ID):
            self.step()

    def step(self) -> list[int]:
        """Run one step with the engine's work around it."""
        self.publisher.before_schedule(0)
        ended = super().step()
        self.publisher.after_commit(StepResult())
        return ended


def run(full: bool) -> list[Result]:
    """Run 3,000 pairs and 40 trials each way, or a million and 200; the rows of G5 are ``flood``'s."""
    parts = spread(_attach, PAIRS[full], 11)
    attached, controls, pairs = (sum(column) for column in zip(*parts, strict=True))
    return [
        judged(
            "G1.public",
            attached == 0,
            figure=f"{counted(attached, 'attach', 'attaches')} in {counted(pairs, 'pair')}",
            bar="0",
            command=COMMAND,
        ),
        judged(
            "G1.public.control",
            controls == pairs,
            figure=f"{controls} of {pairs} found by their owner",
            bar="all",
            command=COMMAND,
        ),
        _probe(TRIALS[full], published=True),
        _probe(TRIALS[full], published=False),
    ]


def flood(full: bool) -> list[Result]:
    """Run 60 turns of a tenant that uses the prefix beside an attacker, or 400; and repeat without a published prefix,
    where the attacker must be seen to evict."""
    kept, hits, turns = _flood(TURNS[full], published=True)
    _, gone, _ = _flood(TURNS[False], published=False)
    figure = f"whole in {kept} and found in {hits} of {counted(turns, 'turn')} under flood and squeeze"
    return [
        judged("G5.public", kept == hits == turns, figure=figure, bar="all", command=COMMAND),
        judged(
            "G5.public.control",
            gone < TURNS[False] // 2,
            bar="less than half",
            command=COMMAND,
            figure=f"found in {gone} of {TURNS[False]} turns unpublished",
        ),
    ]


def _attach(pairs: int, seed: int) -> tuple[int, int, int]:
    """Count attaches behind a public prefix, pairs in which the owner found its own blocks, and pairs."""
    rng = random.Random(seed)
    machine = PublishingEngine()
    beginning = array("I", [rng.randrange(40) for _ in range(PREFIX_BLOCKS * BLOCK)])
    machine.publish(PublicPrefix(PUBLIC, beginning), PublicPrefix(OTHER, beginning[::-1]))
    attached = controls = 0
    for number in range(pairs):
        kind = KINDS[number % len(KINDS)]
        own = array("I", [rng.randrange(50) for _ in range(BLOCK * rng.randint(1, 4))])
        prompt = beginning + own + array("I", [number % 1_000])
        # Fresh tenants each time: blocks left by another pair must not count.
        owner, asker = 10 + 2 * number, 11 + 2 * number
        machine.finish(machine.ask(owner, prompt, 1, public=PUBLIC))
        found, public = _ask_as_other(machine, kind, asker, owner, prompt)
        attached += found > public
        again = machine.finish(machine.ask(owner, prompt, 1, public=PUBLIC)).cached
        controls += again == (len(prompt) - 1) // BLOCK * BLOCK
    return attached, controls, pairs


def _ask_as_other(machine: PublishingEngine, kind: str, asker: int, owner: int, prompt: array[int]) -> tuple[int, int]:
    """Return the tokens that the other request finds, and how many of them are public."""
    public = PREFIX_BLOCKS * BLOCK
    if kind == "deterministic":
        number = machine.ask(owner, prompt, 1, public=PUBLIC, deterministic=True)
    elif kind == "without the prefix":
        number, public = machine.ask(asker, prompt, 1), 0
    elif kind == "keeps nothing":
        number = machine.ask(asker, prompt, 1, public=PUBLIC, retain=False)
    elif kind == "another prefix":
        number, public = machine.ask(asker, prompt, 1, public=OTHER), 0
    elif kind == "cut inside of a block":
        number, public = machine.ask(asker, prompt[: public - 2], 1, public=PUBLIC), public - BLOCK
    else:
        number = machine.ask(asker, prompt, 1, public=PUBLIC)
    return machine.finish(number).cached, public


def _flood(turns: int, *, published: bool) -> tuple[int, int, int]:
    """Count turns in which the prefix was whole at every step, turns in which it was found, and turns."""
    machine, prompts = PublishingEngine(), Prompts()
    beginning = prompts.make(PREFIX_BLOCKS * BLOCK)
    blocks: list[int] = []
    if published:
        machine.publish(PublicPrefix(PUBLIC, beginning))
        blocks = list(machine.cache.public.by_key[PUBLIC].blocks)
    kept = hits = 0
    for turn in range(turns):
        number: int | None = None
        whole, steps = True, 0
        while number is None or not machine.seen[number].ended:
            while machine.live(ATTACKER) < MOST_LIVE:
                length, output = (640, 1) if turn % 2 else (32, 400)
                machine.ask(ATTACKER, prompts.make(length), output)
            if steps == IDLE_STEPS:
                prompt = prompts.make(len(beginning) + BLOCK, beginning)
                number = machine.ask(BOB, prompt, 2, public=PUBLIC, retain=not published)
                assert number is not None, "the victim was refused"
            machine.step()
            steps += 1
            whole &= all(machine.pool.owner(block) == PUBLIC and machine.pool.refs(block) for block in blocks)
        kept += whole
        hits += machine.seen[number].cached == len(beginning)
    return kept, hits, turns


def _probe(trials: int, *, published: bool) -> Result:
    """Measure how well a tenant's cache hits on a prefix tell whether another has used it."""
    counts: dict[bool, list[float]] = {False: [], True: []}
    for trial in range(2 * trials):
        active = trial % 2 == 1
        machine, prompts = PublishingEngine(), Prompts()
        beginning = prompts.make(PREFIX_BLOCKS * BLOCK)
        fields: dict[str, Any] = {"public": PUBLIC} if published else {"group": key(GROUP)}
        if published:
            machine.publish(PublicPrefix(PUBLIC, beginning))
        if active:
            machine.finish(machine.ask(ALICE, prompts.make(len(beginning) + BLOCK, beginning), 2, **fields))
        probe = prompts.make(len(beginning) + BLOCK, beginning)
        counts[active].append(float(machine.finish(machine.ask(ATTACKER, probe, 1, **fields)).cached))
    auc = area(counts[True], counts[False])
    auc = max(auc, 1 - auc)
    figure = f"AUC {auc:.2f} over {counted(trials, 'trial')} each way"
    if published:
        return judged("G1.public.probe", auc <= 0.53, figure=figure, bar="0.53 or less", command=COMMAND)
    return judged("G1.public.probe.control", auc >= 0.95, figure=figure, bar="0.95 or more", command=COMMAND)
