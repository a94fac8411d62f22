"""What follows from a sample of the cards: which engines end, and what is told. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from appliance.common.cards import ABSENT, FALLEN_XID, LOST, OK, RESET, CardStatus, ModelMemory, allowed_bytes
from appliance.common.control_cards import GPU_LOST, GPU_MEMORY
from appliance.common.figures import size
from appliance.supervisor.cards.samples import CardSample

ABOVE_SAMPLES = 2
"""Samples in a row in which an engine has to be above its share: one may have been taken while it was replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOnCards:
    """An engine whose sandbox has cards."""

    sandbox: str
    model: str
    tenant: str
    generation: int
    cards: tuple[int, ...]
    share: int
    """Percent of each card's memory that it may hold; 0: none is configured."""
    pids: frozenset[int] = frozenset()
    """Its processes on this machine; empty while it is not there."""
    boots: bool = False
    """Whether it is being booted, which on a card that is lost may take minutes to fail."""


@dataclass(frozen=True, slots=True)
class CardVerdict:
    """An engine that has to end."""

    engine: EngineOnCards
    reason: str
    """``GPU_LOST`` or ``GPU_MEMORY``."""
    card: int
    cause: str


class Judge:
    """Looks at one sample after the other."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        """Cards that have answered once."""
        self._above: dict[tuple[str, int, int], int] = {}
        """Samples in a row, by sandbox, generation and card."""
        self._fallen: dict[int, int] = {}
        """Events of a card falling off the bus that were told before, by card."""
        self.gone: dict[int, str] = {}
        """Why engines cannot compute on a card, by card."""

    def look(self, cards: Sequence[CardSample], engines: Sequence[EngineOnCards]) -> list[CardVerdict]:
        """Take a sample; returns the engines that have to end."""
        self._seen |= {card.index for card in cards if card.state == OK}
        self.gone = {card.index: why for card in cards if (why := self._why_gone(card))}
        self._fallen |= {card.index: card.fallen for card in cards}
        above: dict[tuple[str, int, int], int] = {}
        found = []
        for engine in engines:
            for card in cards:
                if card.index not in engine.cards or not (engine.pids or engine.boots):
                    continue
                if card.index in self.gone:
                    found.append(CardVerdict(engine, GPU_LOST, card.index, self.gone[card.index]))
                    break
                if (cause := _above(card, engine)) is not None:
                    place = engine.sandbox, engine.generation, card.index
                    above[place] = self._above.get(place, 0) + 1
                    if above[place] >= ABOVE_SAMPLES:
                        found.append(CardVerdict(engine, GPU_MEMORY, card.index, cause))
                        break
        self._above = above
        return found

    def _why_gone(self, card: CardSample) -> str:
        if card.state == LOST:
            return f"card {card.index} is lost: it has fallen off the bus"
        if card.fallen > self._fallen.get(card.index, 0):
            # The driver's word comes before NVML's, which may answer once more.
            return f"card {card.index} is lost: it has fallen off the bus (Xid {FALLEN_XID})"
        if card.state == RESET:
            return f"card {card.index} is lost: it computes nothing before a reset"
        if card.state == ABSENT and card.index in self._seen:
            return f"card {card.index} is lost: the driver does not list it any more"
        return ""


def held_bytes(card: CardSample, engine: EngineOnCards) -> int | None:
    """Memory of a card that an engine holds; None where it is not known, as of an engine whose processes the driver
    knows under other numbers."""
    if card.processes is None:
        return None
    known = [count for pid, count in card.processes.items() if pid in engine.pids]
    return sum(known) if known else None


def _above(card: CardSample, engine: EngineOnCards) -> str | None:
    held, total = held_bytes(card, engine), card.figures.get("memory_total_bytes", 0)
    if held is None or not engine.share or not total or held <= allowed_bytes(total, engine.share):
        return None
    return (
        f"it holds {size(held)} of card {card.index}, more than {size(allowed_bytes(total, engine.share))}: "
        f"gpu_share is {engine.share} % of {size(total)}"
    )


def status(card: CardSample, engines: Sequence[EngineOnCards], out: str = "") -> CardStatus:
    """What is told of a card; ``out``: why it gets no engine, empty where it may have some."""
    models: dict[str, ModelMemory] = {}
    ours = 0
    total = card.figures.get("memory_total_bytes", 0)
    for engine in engines:
        held = held_bytes(card, engine) if card.index in engine.cards else None
        if held is None:
            continue
        ours += held
        share = total * engine.share // 100
        before = models.get(engine.model, ModelMemory(model=engine.model, held=0, share=0))
        models[engine.model] = replace(before, held=before.held + held, share=before.share + share)
    return CardStatus(
        index=card.index,
        uuid=card.uuid,
        state=card.state,
        figures=card.figures,
        xids=card.xids or {},
        last_xid=card.last_xid,
        models=tuple(models.values()),
        unknown_bytes=max(0, sum((card.processes or {}).values()) - ours),
        engines=tuple(sorted({engine.model for engine in engines if card.index in engine.cards})),
        out=out,
    )
