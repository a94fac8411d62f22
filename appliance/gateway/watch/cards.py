"""GPUs as the supervisor told of them last: levels for the metrics, values for status and alerts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from appliance.common.cards import (
    ABSENT,
    FIGURES,
    LOST,
    MAX_CARDS,
    OK,
    RESET,
    STATES,
    THROTTLES,
    XID_KINDS,
    CardStatus,
    ModelMemory,
)
from appliance.common.control_cards import CardState
from appliance.gateway.telemetry import names
from appliance.gateway.telemetry.metrics import Level
from appliance.gateway.watch.increases import Increases

GAUGES = {
    "memory_total_bytes": (names.GPU_MEMORY_SIZE, 1.0),
    "memory_used_bytes": (names.GPU_MEMORY_USED, 1.0),
    "busy_percent": (names.GPU_BUSY, 1.0),
    "power_mw": (names.GPU_POWER, 0.001),
    "power_limit_mw": (names.GPU_POWER_LIMIT, 0.001),
    "temperature_c": (names.GPU_TEMPERATURE, 1.0),
    "ecc_uncorrected": (names.GPU_ECC, 1.0),
    "remapped_uncorrected": (names.GPU_REMAPPED_ROWS, 1.0),
}
"""Gauge of each figure that has one, and what the figure is multiplied by."""


class WatchedCards:
    """Last state of the GPUs."""

    def __init__(self) -> None:
        self.cards: tuple[CardStatus, ...] = ()
        """Those that models use, by index; empty while no model has one, and before the supervisor has told."""
        self.problem = ""
        """Why nothing is known of them now; empty while they are read, and where none is."""
        self.unplaced: dict[str, str] = {}
        """Why an engine has no card now, by model."""
        self._moved: dict[str, int] = {}
        self._counted = Increases(ours=False)

    def take(self, message: CardState) -> None:
        """Take a state that the supervisor sent.

        Raises:
            ValueError: no supervisor of this release sends it.
        """
        indices = message.states.keys()
        if len(indices) > MAX_CARDS or any(not index.isdecimal() for index in indices):
            raise ValueError("cards that no supervisor of this release watches")
        if any(one not in STATES for one in message.states.values()):
            raise ValueError("a state of a card that no supervisor of this release gives")
        cards = [_card(message, index) for index in indices]
        self.cards = tuple(sorted(cards, key=lambda one: one.index))
        self.problem = message.problem
        self.unplaced, self._moved = dict(message.unplaced), dict(message.moved)

    def levels(self, count: Callable[..., None]) -> Iterator[Level]:
        """Yield the levels, and add to the counter."""
        if self.cards or self.problem:
            yield Level(names.GPU_WATCHED, int(not self.problem), {})
        for card in self.cards:
            which = {"gpu": str(card.index), "gpu_uuid": card.uuid}
            yield Level(names.GPU_LOST, int(card.state in (LOST, RESET, ABSENT)), which)
            yield Level(names.GPU_OUT, int(bool(card.out)), which)
            if card.state != OK:
                continue
            for figure, (gauge, factor) in GAUGES.items():
                if figure in card.figures:
                    yield Level(gauge, card.figures[figure] * factor, which)
            yield Level(names.GPU_FAILING, int(bool(card.failing)), which)
            for reason in THROTTLES if "clock_reasons" in card.figures else ():
                yield Level(names.GPU_THROTTLED, int(reason in card.throttled), {**which, "reason": reason})
            for one in card.models:
                yield Level(names.GPU_MODEL_MEMORY, one.held, {**which, "model": one.model})
                if one.share:
                    yield Level(names.GPU_MODEL_SHARE, one.share, {**which, "model": one.model})
            for kind in XID_KINDS if card.xids else ():
                more = self._counted.since((str(card.index), kind), card.xids.get(kind, 0))
                count(names.GPU_XIDS, more, **which, kind=kind)
        for model in sorted({model for card in self.cards for model in card.engines} | self.unplaced.keys()):
            yield Level(names.GPU_UNPLACED, int(model in self.unplaced), {"model": model})
            count(names.GPU_MOVES, self._counted.since((model,), self._moved.get(model, 0)), model=model)


def _card(message: CardState, index: str) -> CardStatus:
    """One card of the message.

    Raises:
        ValueError: no supervisor of this release sends it.
    """
    figures, xids, models = message.figures.get(index, {}), message.xids.get(index, {}), message.models.get(index, {})
    if not figures.keys() <= set(FIGURES) or not xids.keys() <= set(XID_KINDS):
        raise ValueError("figures of a card that no supervisor of this release gives")
    numbers = [*figures.values(), *xids.values(), *(number for pair in models.values() for number in pair)]
    if any(number < 0 for number in numbers) or any(len(pair) != 2 for pair in models.values()):
        raise ValueError("numbers of a card that no supervisor of this release gives")
    return CardStatus(
        index=int(index),
        uuid=message.uuids.get(index, ""),
        state=message.states[index],
        figures=dict(figures),
        xids=dict(xids),
        last_xid=message.last_xids.get(index, 0),
        models=tuple(ModelMemory(model=name, held=held, share=share) for name, (held, share) in models.items()),
        unknown_bytes=message.unknown.get(index, 0),
        engines=tuple(message.engines.get(index, ())),
        out=message.out.get(index, ""),
    )
