"""Gives engines whose card was lost another one, where there is one with room.

An engine is planned anew before a boot, with its own budget of memory on the card that it gets; one that finds room on
none stays down, and each further boot asks again. An engine that was moved stays where it is: a card that comes back
moves nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import structlog

from appliance.common.audit.entry import Entry, entry
from appliance.common.errors import ApplianceError, StartError
from appliance.supervisor.boot import BootPlan
from appliance.supervisor.cards.trials import CardTrials

log = structlog.get_logger()

Replan = Callable[[BootPlan, Mapping[int, str]], BootPlan | None]
"""Plans the same sandbox anew, without the cards that get no engine; None: its model is served no more. Blocks; raises
``StartError`` where there is no room."""


@dataclass(frozen=True, slots=True)
class Unplaced:
    """An engine without a card."""

    model: str
    why: str


class CardPlacement:
    """The cards that engines may have. All methods run in one event loop."""

    def __init__(
        self,
        replan: Replan = lambda plan, _out: plan,
        record: Callable[[Entry], None] = lambda _entry: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replan, self._record, self._clock = replan, record, clock
        self._trials = CardTrials()
        self._known: dict[int, str] = {}
        """Cards that got no engine at the last look, as it was told."""
        self._events: dict[int, str] = {}
        """What was recorded last, by card: a loss that NVML tells in other words than the driver is the same loss."""
        self.turn = asyncio.Lock()
        """Held while an engine is placed: the next one has to see what it got."""
        self.moved: Counter[str] = Counter()
        """Engines that got another card since the supervisor's start, by model."""
        self._unplaced: dict[str, Unplaced] = {}

    @property
    def out(self) -> dict[int, str]:
        """Why each card that gets no engine gets none; also for other threads."""
        return self._trials.out(self._clock())

    def unplaced(self, sandboxes: Iterable[str]) -> dict[str, str]:
        """Return why engines have no card now, by model, of the sandboxes that are still kept."""
        kept = frozenset(sandboxes)
        self._unplaced = {name: one for name, one in self._unplaced.items() if name in kept}
        return {one.model: one.why for one in self._unplaced.values()}

    def look(self, gone: Mapping[int, str], answering: Iterable[int]) -> None:
        """Take a sample of the cards: ``gone`` has why nothing computes on a card, by card."""
        self._trials.look(gone, answering, self._clock())
        out = self.out
        for card in sorted(out.keys() | self._known.keys()):
            if (why := out.get(card, "")) == self._known.get(card, ""):
                continue
            (log.error if card in gone else log.warning if why else log.info)(why or f"card {card} gets engines again")
            event = "lost" if card in gone else "back" if why else "trusted"
            if event != self._events.get(card):
                self._events[card] = event
                self._note(event, card, cause=why)
        self._known = out

    def unknown(self) -> None:
        """Note that cards cannot be read for now."""
        self._trials.unknown(self._clock())

    async def place(self, plan: BootPlan, take: Callable[[BootPlan], None]) -> None:
        """Have ``take`` called with a new plan, if the plan's card gets no engine, or got none at the last call.

        Raises:
            StartError: no other card has room; the message has the numbers of each.
        """
        # Without a turn: an engine on a card that is well waits for none that is placed.
        if plan.card is None or (plan.card.card not in self.out and plan.name not in self._unplaced):
            return
        async with self.turn:
            out, old = self.out, plan.card.card
            try:
                found = await asyncio.to_thread(self._replan, plan, out)
                if found is not None and found.card is None:
                    raise StartError(f"{out.get(old, 'it had a GPU')}, and no other is there")
            except ApplianceError as error:
                if plan.name not in self._unplaced:
                    self._note("refused", old, plan, cause=error.message)
                self._unplaced[plan.name] = Unplaced(plan.model, error.message)
                raise StartError(error.message) from error
            self._unplaced.pop(plan.name, None)
            if found is None or found.card is None:
                return
            take(found)
            if found.card.card != old:
                self.moved[plan.model] += 1
                log.warning("an engine gets another GPU", sandbox=plan.name, before=old, card=found.card.card)
                self._note("moved", old, plan, to=str(found.card.card), cause=out.get(old, ""))

    def _note(self, event: str, card: int, plan: BootPlan | None = None, to: str = "", cause: str = "") -> None:
        """Record what happened to a card, or to an engine because of it."""
        model, tenant = ("", "") if plan is None else (plan.model, plan.tenant)
        self._record(entry("card", event=event, card=card, model=model, tenant=tenant, to=to, cause=cause))
