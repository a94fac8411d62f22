"""Watches the NVIDIA cards that models use, from the host, and ends engines that have lost theirs or take too much of
one.

Nothing is read, and no program runs, while no engine has a card. What is read comes from a program of its own
(``reader``), which may hang or crash with the driver: its silence is told to the gateway, and a second one is never
started while the first lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from appliance.common.cards import LOST, MAX_CARDS, OK, CardStatus, ModelMemory
from appliance.common.control import Control, SandboxDown
from appliance.common.control_cards import GPU_LOST, CardState
from appliance.supervisor.cards.judge import CardVerdict, EngineOnCards, Judge, status
from appliance.supervisor.cards.placement import CardPlacement
from appliance.supervisor.cards.samples import MAX_LINE_BYTES, CardSample, parse
from appliance.supervisor.keeper import Keeper
from isolation.errors import ProcessError
from isolation.gpu.gpu_facts import MANAGEMENT, Places, look_at_gpus
from isolation.host.process import Child, start
from isolation.host.reaper import descendants

log = structlog.get_logger()

READER = Path(__file__).with_name("reader.py")

MAX_UNPLACED, MAX_WHY_CHARS = 16, 500
"""Most models without a card that are told with the reason, and characters of it: a small part of a datagram."""

MAX_OUT_CHARS = 200
"""Characters of the reason why a card gets no engine."""

MAX_MODELS_OF_CARD = 10
"""Most models that are told of one card, those that hold the most: less than half of a datagram for ``MAX_CARDS``."""


@dataclass(frozen=True, slots=True)
class WatchPace:
    """Seconds between and for what the watch does."""

    period_s: float = 5.0
    """Between two samples: the usual interval of a scrape. One takes a few milliseconds of the driver's time."""
    first_s: float = 30.0
    """For the first sample: a card without persistence is initialised by it."""
    silent_s: float = 10.0
    """Beyond a period, after which NVML counts as hung."""
    retry_s: float = 15.0
    """Before another reader starts after one that has ended."""
    end_s: float = 2.0
    """For the end of a killed reader when the supervisor stops; one that hangs in the driver is left behind."""


class CardWatch:
    """The watch. ``run`` lasts until it is cancelled; all methods run in one event loop."""

    def __init__(
        self,
        engines: Callable[[], Sequence[EngineOnCards]],
        act: Callable[[CardVerdict], None],
        publish: Callable[[Control, tuple[int, ...]], bool],
        places: Places | None = None,
        pace: WatchPace | None = None,
        placement: CardPlacement | None = None,
    ) -> None:
        """``engines``: those that have cards, there or being booted, without the children of their processes; ``act``
        ends one; ``placement`` is told which cards are lost."""
        self._engines, self._act, self._publish = engines, act, publish
        self._places, self._pace = places, pace or WatchPace()
        self._placement = placement or CardPlacement()
        self._judge = Judge()
        self._child: Child | None = None
        self._told: tuple[CardStatus, ...] = ()
        self._uuids: dict[int, str] = {}
        """By card, as it was last told: a lost one does not tell it any more."""

    @property
    def lost(self) -> frozenset[int]:
        """Cards on which nothing can compute now."""
        return frozenset(self._judge.gone)

    def explaining(self, publish: Callable[[Control, tuple[int, ...]], bool]) -> Callable[..., bool]:
        """``publish`` that names a lost card as the cause of its engines' ends and of starts that fail."""

        def told(message: Control, fds: tuple[int, ...]) -> bool:
            if isinstance(message, SandboxDown) and message.role == "engine" and message.reason == "ended":
                message = self._explained(message)
            return publish(message, fds)

        return told

    async def run(self) -> None:
        """Watch until cancelled."""
        try:
            while True:
                wanted = self._wanted()
                if wanted:
                    try:
                        problem = await self._watch(wanted)
                    except OSError as error:
                        problem = f"cannot watch: {error.strerror or error}"
                        await self._end_reader(problem)
                    if problem:
                        self._tell_problem(problem)
                        log.warning("the GPUs cannot be watched", problem=problem)
                        await asyncio.sleep(self._pace.retry_s)
                elif self._told:
                    self._tell((), "")
                if not wanted:
                    await asyncio.sleep(self._pace.period_s)
        finally:
            await self._give_up()

    def _wanted(self) -> tuple[int, ...]:
        """Cards of the engines, and those that get none since they were lost: only a look tells that one is back."""
        theirs = {card for engine in self._engines() for card in engine.cards}
        others = sorted(self._placement.out.keys() - theirs) if theirs else []
        return tuple(sorted([*sorted(theirs), *others][:MAX_CARDS]))

    async def _watch(self, wanted: tuple[int, ...]) -> str:
        """Read these cards as long as they are wanted; returns why that ends, empty where others are to be read."""
        facts = await asyncio.to_thread(look_at_gpus, self._places)
        library = facts.library(MANAGEMENT)
        if not facts.driver or library is None:
            return f"there is no {MANAGEMENT}.{facts.driver}" if facts.driver else "no NVIDIA driver is loaded"
        argv = [sys.executable, "-I", str(READER), str(library.path), str(self._pace.period_s), *map(str, wanted)]
        ours, theirs = os.pipe()
        try:
            self._child = start(argv, stdio=theirs)
        except ProcessError as error:
            os.close(ours)
            return str(error)
        finally:
            os.close(theirs)
        lines = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        protocol = asyncio.StreamReaderProtocol(lines)
        with os.fdopen(ours, "rb", buffering=0) as pipe:
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, pipe)
            try:
                problem = await self._follow(lines, wanted)
            finally:
                transport.close()
        await self._end_reader(problem)
        return problem

    async def _follow(self, lines: asyncio.StreamReader, wanted: tuple[int, ...]) -> str:
        """Take samples until other cards are wanted, or none comes."""
        patience_s, last = self._pace.first_s, ""
        while self._wanted() == wanted:
            try:
                async with asyncio.timeout(patience_s):
                    line = (await lines.readline()).decode(errors="replace").strip()
            except TimeoutError:
                return f"NVML has not answered for {patience_s:g} s"
            except ValueError:  # Longer than the limit.
                return "NVML's reader prints what is no sample"
            if not line:
                return last or "NVML's reader ended without a word"
            try:
                samples = parse(line)
            except ValueError:
                last = line[:200] if line.isprintable() else "NVML's reader prints what is no sample"
                continue
            patience_s = self._pace.period_s + self._pace.silent_s
            await self._take(samples)
        return ""

    async def _take(self, samples: tuple[CardSample, ...]) -> None:
        engines = await asyncio.to_thread(with_children, self._engines())
        self._uuids |= {one.index: one.uuid for one in samples if one.uuid}
        samples = tuple(replace(one, uuid=self._uuids.get(one.index, "")) for one in samples)
        verdicts = self._judge.look(samples, engines)
        # First: an engine that ends is placed anew at once.
        self._placement.look(self._judge.gone, {one.index for one in samples if one.state == OK})
        for verdict in verdicts:
            log.error("an engine ends because of its GPU", sandbox=verdict.engine.sandbox, cause=verdict.cause)
            self._act(verdict)
        out = self._placement.out
        found = [status(sample, engines, out.get(sample.index, "")) for sample in samples]
        self._tell(tuple(replace(one, state=LOST) if one.index in self.lost else one for one in found), "")

    def _tell_problem(self, problem: str) -> None:
        """Tell what keeps the cards from being read; of those that were lost this stays known."""
        self._placement.unknown()
        known = (one for one in self._told if one.state != OK or one.out)
        self._tell(tuple(replace(one, figures={}, models=(), unknown_bytes=0) for one in known), problem)

    def _tell(self, cards: tuple[CardStatus, ...], problem: str) -> None:
        self._told = cards
        unplaced = self._placement.unplaced({engine.sandbox for engine in self._engines()})
        self._publish(card_state(cards, problem, self._placement.moved, unplaced), ())

    def _explained(self, message: SandboxDown) -> SandboxDown:
        out = self._placement.out
        for engine in self._engines():
            if (engine.model, engine.tenant) == (message.model, message.tenant):
                for why in (out[card] for card in engine.cards if card in out):
                    cause = message.cause if why in message.cause else f"{why}; {message.cause}"
                    return replace(message, reason=GPU_LOST, cause=cause)
        return message

    async def _end_reader(self, problem: str) -> None:
        """Kill the reader, and wait for its end however long that takes: one that hangs in the driver has the next one
        hang as well."""
        child = self._child
        if child is None:
            return
        child.kill()
        waited_s = 0.0
        while child.poll() is None:
            await asyncio.sleep(0.01)
            waited_s += 0.01
            if waited_s >= self._pace.period_s:
                waited_s = 0.0
                self._tell_problem(f"{problem or 'NVML hangs'}; its reader does not end")
        self._child = None

    async def _give_up(self) -> None:
        """End the reader, unless it hangs in the driver."""
        if self._child is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pace.end_s):
                    await self._end_reader("")


def watch_cards(
    keepers: Callable[[], Sequence[Keeper]],
    publish: Callable[[Control, tuple[int, ...]], bool],
    places: Places | None = None,
    pace: WatchPace | None = None,
    placement: CardPlacement | None = None,
) -> CardWatch:
    """The watch over the engines of these keepers."""

    def engines() -> list[EngineOnCards]:
        return [engine for keeper in keepers() if (engine := keeper.on_cards) is not None]

    def act(verdict: CardVerdict) -> None:
        for keeper in keepers():
            if keeper.plan.name == verdict.engine.sandbox:
                keeper.lose_card(verdict)

    return CardWatch(engines, act, publish, places, pace, placement)


def with_children(engines: Sequence[EngineOnCards]) -> list[EngineOnCards]:
    """Return the engines with all their processes: of a sandbox the driver sees the one that opens its devices, which
    is gVisor's kernel; the program's code runs in that one's children. Blocks for a look into /proc."""
    return [
        replace(engine, pids=frozenset(pid for one in engine.pids for pid in (one, *descendants(one))))
        for engine in engines
    ]


def card_state(
    cards: Sequence[CardStatus], problem: str, moved: Mapping[str, int], unplaced: Mapping[str, str]
) -> CardState:
    """The message that tells of these cards, of engines that were moved, and of those that have none."""
    by = {str(card.index): card for card in cards}
    told = dict(list(unplaced.items())[:MAX_UNPLACED])
    return CardState(
        problem=problem[:MAX_WHY_CHARS],
        uuids={index: card.uuid for index, card in by.items()},
        states={index: card.state for index, card in by.items()},
        figures={index: card.figures for index, card in by.items()},
        xids={index: card.xids for index, card in by.items()},
        last_xids={index: card.last_xid for index, card in by.items()},
        models={index: {one.model: [one.held, one.share] for one in _largest(card)} for index, card in by.items()},
        unknown={index: card.unknown_bytes for index, card in by.items()},
        engines={index: list(card.engines[:MAX_MODELS_OF_CARD]) for index, card in by.items()},
        out={index: card.out[:MAX_OUT_CHARS] for index, card in by.items()},
        moved=dict(moved),
        unplaced={model: why[:MAX_WHY_CHARS] for model, why in told.items()},
    )


def _largest(card: CardStatus) -> list[ModelMemory]:
    return sorted(card.models, key=lambda one: -one.held)[:MAX_MODELS_OF_CARD]
