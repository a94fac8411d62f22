"""Which card an engine gets: a table of cards and of what is held of them. Pure.

Each engine computes on one card. It gets the one with the most memory left among those that its model may use, if what
it may hold fits there beside what other engines and other programs hold.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from appliance.common.card_plan import MOST_SHARE, CardPlan, card_share, card_weights, least_bytes, plan_card
from appliance.common.config import ModelConfig
from appliance.common.errors import StartError
from appliance.common.figures import size
from appliance.common.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class CardUse:
    """Share of a card that an engine may hold."""

    engine: str
    """Name of its sandbox."""
    card: int
    percent: int
    """Percent of the card's memory; 0 where kv_bytes decides and that memory is not known."""


@dataclass(frozen=True, slots=True)
class Card:
    """A card as it is planned with."""

    index: int
    """The N of /dev/nvidiaN."""
    name: str
    """As the driver calls it; may be empty."""
    total: int = 0
    """Bytes; 0 where it is not known."""
    others: int = 0
    """Bytes that programs other than our engines hold."""
    out: str = ""
    """Why no engine gets it, as a sentence; empty where one may."""


@dataclass(frozen=True, slots=True)
class ModelOnCard:
    """What is known of a model that is to be placed."""

    config: ModelConfig
    shape: ModelShape | None
    stored: int
    """Bytes of its weight files."""


@dataclass(frozen=True, slots=True)
class Placed:
    """An engine on its card."""

    use: CardUse
    plan: CardPlan | None
    """None where the card's memory or the model's shape is not known; what the configuration says then holds."""


@dataclass(frozen=True, slots=True)
class CardTable:
    """Cards and what engines hold of them; ``place`` gives a new table."""

    cards: tuple[Card, ...]
    uses: tuple[CardUse, ...] = ()

    def without(self, engines: Iterable[str]) -> CardTable:
        """The table once these engines have ended."""
        gone = frozenset(engines)
        return replace(self, uses=tuple(one for one in self.uses if one.engine not in gone))

    def place(
        self, engine: str, model: ModelOnCard, candidates: tuple[int, ...], *, silent: bool = False
    ) -> tuple[CardTable, Placed]:
        """Give an engine its card.

        Args:
            engine: name of its sandbox; what one of that name holds counts as given back.
            model: what it computes.
            candidates: indices of the cards that the model may use.
            silent: give it one that tells no memory beside others that do, where no other has room: its engine waits
                for it, and other models are served.

        Raises:
            StartError: it fits on none; the message has the numbers of each.
        """
        table, refusals = self.without((engine,)), list[str]()
        usable = [card for card in self.cards if card.index in candidates]
        told = any(card.total for card in usable)
        for card in sorted(usable, key=table._order):
            if told and not (card.total or card.out or silent):
                refusals.append(f"card {card.index} tells no memory, as one that is lost")
                continue
            placed, refusal = table._try(engine, model, card)
            if placed is not None:
                return replace(table, uses=(*table.uses, placed.use)), placed
            refusals.append(refusal)
        name, reasons = model.config.name, "; ".join(refusals) or "there is none"
        if all(card.out for card in usable):
            raise StartError(f"no GPU can be given to an engine of {name}: {reasons}")
        raise StartError(
            f"no GPU has room for an engine of {name}: {reasons}; "
            "give the models of one card a smaller gpu_share or kv_bytes, or serve fewer models, or add a card"
        )

    def _held(self, card: Card) -> int:
        """Percent that engines may hold."""
        return sum(one.percent for one in self.uses if one.card == card.index)

    def _free(self, card: Card) -> int:
        """Bytes that neither engines nor others hold."""
        return card.total - card.total * self._held(card) // 100 - card.others

    def _order(self, card: Card) -> tuple[bool, bool, int, int, int, int]:
        """Sort key: the most free memory first, then the fewest engines; behind all come cards that tell no memory, and
        those that no engine gets."""
        engines = sum(one.card == card.index for one in self.uses)
        return bool(card.out), not card.total, -self._free(card), self._held(card), engines, card.index

    def _try(self, engine: str, model: ModelOnCard, card: Card) -> tuple[Placed | None, str]:
        """The engine on this card, or None and why it does not fit."""
        if card.out:
            return None, card.out
        config, share = model.config, card_share(model.config)
        weights = card_weights(config, model.shape, model.stored)
        least = least_bytes(config, weights)
        percent = share or (-(-least * 100 // card.total) if card.total else 0)
        left = MOST_SHARE - self._held(card)
        if percent > left:
            asked = f"{percent} %" + (f" ({size(card.total * percent // 100)})" if card.total else "")
            return None, f"{self._said(card)}, {max(0, left)} % are left and {asked} are asked for"
        plan = None
        if card.total:
            free = self._free(card)
            if model.shape is not None:
                plan = plan_card(config, model.shape, model.stored, card.total, free)
                percent = share or max(percent, -(-plan.allowed * 100 // card.total))
            lacking = plan.lacking if plan is not None else max(0, least - min(free, card.total * percent // 100))
            if lacking or least > free:
                needed = f"{size(weights)} of weights need {size(least)} with context and reserve, and KV beside"
                return None, f"{self._said(card)}, {size(max(0, free))} are free, {percent} % may be held; {needed}"
        return Placed(CardUse(engine, card.index, percent), plan), ""

    def _said(self, card: Card) -> str:
        name = f" ({card.name})" if card.name else ""
        memory = f" of {size(card.total)}" if card.total else ""
        held = [f"{one.engine} may hold {one.percent} %" for one in self.uses if one.card == card.index]
        if card.others:
            held.append(f"other programs hold {size(card.others)}")
        return f"card {card.index}{name}{memory}: {', '.join(held) or 'nothing is held'}"
