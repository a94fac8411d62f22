"""A run: start, references, controls, then fault after fault under load, each followed by a look at everything."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

from bench.soak import census, clock, controls, memory
from bench.soak.collector import Collector
from bench.soak.errors import BreachError, UnavailableError
from bench.soak.faults.catalogue import KINDS, is_gentle, sequence
from bench.soak.ground import Fault, Ground
from bench.soak.invariants import Inspector
from bench.soak.load import Load, Phases, take_references
from bench.soak.log_watch import LogWatch
from bench.soak.report import Soak, Turn
from bench.soak.room import Room
from bench.soak.served import Served, served

CALM_S = 1.5
"""Load before a fault and after the recovery from it, during which nothing is excused."""

ROUGH_SHARE = 0.6
"""Of the time, that in which faults may end processes, once there was one of each kind; after it lives are long enough
for memory to be judged."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Wish:
    """What the command line asks for."""

    seed: int
    minutes: float
    faults: tuple[Fault, ...] = ()
    """In place of the shuffled deck."""
    turn: int = 0
    """Number of the first turn, so that one turn of another run can be repeated."""
    most_turns: int = 1_000_000
    log: BinaryIO | None = None
    """Where the appliance's log goes at the end."""


def soak(wish: Wish, room: Room, say: Say) -> Soak:
    """Run it all.

    Raises:
        ApplianceError: the appliance does not start, or does not answer before anything is done to it.
    """
    try:
        ahead: Callable[[float], None] | None = clock.prepare(room)
    except UnavailableError as error:
        say(f"no clock: {error}")
        ahead = None
    found = Soak(wish.seed, wish.minutes)
    collector = Collector()
    with asyncio.Runner() as runner:
        runner.run(collector.open())
        try:
            with served(room, f"http://127.0.0.1:{collector.port}") as appliance:
                say(f"ready after {appliance.target.started_s:.1f} s in {appliance.target.sandbox}")
                try:
                    runner.run(_Conductor(wish, appliance, collector, ahead, found, say).conduct())
                finally:
                    if wish.log is not None:
                        with wish.log:
                            wish.log.write(appliance.log.read_bytes())
        finally:
            runner.run(collector.close())
    found.final += left_after(appliance)
    return found


def left_after(appliance: Served) -> list[str]:
    """What is there of an appliance that was stopped."""
    found = [f"left after the stop: stray {one}" for one in census.strays(appliance)]
    found += [f"left after the stop: {path}" for path in census.group_parents(appliance)]
    found += [f"left after the stop: {path}" for path in (appliance.run_dir, appliance.target.state) if path.exists()]
    return found


class _Conductor:
    """Conducts one run on one appliance."""

    def __init__(
        self,
        wish: Wish,
        appliance: Served,
        collector: Collector,
        ahead: Callable[[float], None] | None,
        found: Soak,
        say: Say,
    ) -> None:
        self._wish, self._served, self._collector, self._ahead = wish, appliance, collector, ahead
        self._found, self._say = found, say
        self._phases = Phases()
        self._last = wish.turn + wish.most_turns

    async def conduct(self) -> None:
        """References, controls, faults."""
        references = await take_references(self._served, self._wish.seed)
        log = LogWatch(self._served.log)
        inspector = Inspector(self._served, references, self._wish.seed, log)
        load = Load(self._served, references, self._phases, self._wish.seed)
        await self._warm(load)
        await inspector.note_rest()
        self._found.final += [f"at rest: {breach}" for breach in await inspector.inspect()]
        self._found.controls += await controls.run_all(inspector, self._wish.seed)
        self._say(f"controls: {sum(one.seen for one in self._found.controls)} of {len(self._found.controls)} seen")
        try:
            await self._turns(sequence(self._wish.seed, self._wish.faults), inspector, load)
        finally:
            self._found.kinds = load.heard.kinds
            self._found.problems = log.problems
            self._found.samples = inspector.samples
            self._found.growths = memory.growth(inspector.samples)

    async def _warm(self, load: Load) -> None:
        """What is made on demand (pools, grammars, caches) is made before anything is counted."""
        load.start()
        await asyncio.sleep(2 * CALM_S)
        await load.rest()

    async def _turns(self, faults: Iterator[Fault], inspector: Inspector, load: Load) -> None:
        began, number = time.monotonic(), self._wish.turn
        least = number if self._wish.faults else number + len(KINDS)
        while number < self._last:
            done = (time.monotonic() - began) / (self._wish.minutes * 60)
            if done >= 1 and number >= least:
                return
            fault = next(faults)
            if done > ROUGH_SHARE and number >= least and not self._wish.faults and not is_gentle(fault):
                continue
            turn = Turn(number, fault.name)
            self._found.turns.append(turn)
            await self._one(turn, fault, inspector, load)
            verdict = turn.absent or "; ".join(turn.breaches) or f"ready after {turn.ready_s:.1f} s; {turn.bit}"
            self._say(f"{number:4} {fault.name:20} {verdict[:300]}")
            number += 1
            if turn.ready_s is None and not turn.absent:
                self._say("it does not come back; the run ends here")
                return

    async def _one(self, turn: Turn, fault: Fault, inspector: Inspector, load: Load) -> None:
        draw = random.Random(f"{self._wish.seed}/{turn.number}/{fault.name}")
        ground = Ground(self._served, self._collector, draw, self._ahead)
        turn.absent = fault.needs(ground)
        if turn.absent:
            return
        loop = asyncio.get_running_loop()
        heard = len(load.heard.breaches)
        load.start()
        await asyncio.sleep(CALM_S)
        began = loop.time()
        self._phases.begin(began, fault.may)
        try:
            turn.bit = await fault.act(ground)
            if not turn.bit:
                turn.breaches.append(f"nothing shows that {fault.name} did any harm")
        except (BreachError, LookupError, OSError, TimeoutError, ValueError) as error:
            turn.breaches.append(f"{fault.name}: {type(error).__name__}: {error}")
        turn.lasted_s = loop.time() - began
        turn.ready_s = await inspector.recovered()
        if turn.ready_s is None:
            turn.breaches.append("it is not ready again")
        await asyncio.sleep(CALM_S / 3)
        self._phases.end(loop.time())
        await asyncio.sleep(CALM_S)
        try:
            await load.rest()
        except TimeoutError:
            turn.breaches.append("a request does not end")
        turn.breaches += await inspector.inspect()
        turn.breaches += load.heard.breaches[heard:]
