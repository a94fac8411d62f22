"""Which cards get no engine because they were lost: from a loss to the end of a trial. Pure: time is an argument.

A card that comes back may be lost again, and each loss ends the requests on it. So it has to answer for a while before
an engine gets it, each time longer, and after several losses in a day it waits for the operator, whose word is a start
of the supervisor: at night nobody can say that a card is good, and one that was reset once mostly is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from appliance.common.figures import counted

FIRST_TRIAL_S = 60.0
"""Seconds for which a card has to answer after its first loss; twice as long after each further one. A reset takes some
ten, and an engine needs as long to come up."""

MOST_LOSSES = 5
"""Losses within ``MEMORY_S`` after which a card gets no engine any more: the trials before add up to 15 minutes. So a
card ends an engine, and has it placed anew, five times a day at the most, however often it comes and goes."""

MEMORY_S = 86_400.0
"""Seconds after which a loss is forgotten, unless it was the last of too many."""


@dataclass(slots=True)
class _Losses:
    """Losses of one card."""

    why: str = ""
    """Why nothing computes on it now; empty while it answers."""
    times: list[float] = field(default_factory=list)
    """When it was lost; ``MOST_LOSSES`` at the most."""
    answers_since: float | None = None
    """Since when it has answered without a gap; None while it does not, or while nothing is known."""


class CardTrials:
    """Losses of all cards."""

    def __init__(self) -> None:
        self._cards: dict[int, _Losses] = {}

    def look(self, gone: Mapping[int, str], answering: Iterable[int], now: float) -> None:
        """Take a sample at ``now`` (monotonic seconds): ``gone`` has why nothing computes on a card, by card."""
        for card, why in gone.items():
            losses = self._cards.setdefault(card, _Losses())
            if not losses.why and len(losses.times) < MOST_LOSSES:
                losses.times = [*(one for one in losses.times if now - one < MEMORY_S), now]
            losses.why, losses.answers_since = why, None
        for card in answering:
            if (known := self._cards.get(card)) is None or card in gone:
                continue
            known.why = ""
            if known.answers_since is None:
                known.answers_since = now
            elif not self._left_s(known, now) and now - known.times[-1] >= MEMORY_S:
                del self._cards[card]

    def unknown(self, now: float) -> None:
        """Note that nothing is known of any card for now: trials that are not over begin anew."""
        for losses in self._cards.values():
            if self._left_s(losses, now):
                losses.answers_since = None

    def out(self, now: float) -> dict[int, str]:
        """Return why each card that gets no engine gets none."""
        found = {}
        for card, losses in tuple(self._cards.items()):  # Other threads ask as well.
            times = counted(len(losses.times), "time")
            if losses.why:
                found[card] = losses.why
            elif len(losses.times) >= MOST_LOSSES:
                found[card] = f"card {card} was lost {times} in a day: it gets no engine before the appliance restarts"
            elif self._left_s(losses, now):
                trial = f"{_trial_s(losses) / 60:g} min"
                found[card] = (
                    f"card {card} was lost {times} in a day: it gets an engine once it has answered for {trial}"
                )
        return found

    @staticmethod
    def _left_s(losses: _Losses, now: float) -> float:
        """Seconds that are left of a trial; endless after too many losses."""
        if len(losses.times) >= MOST_LOSSES:
            return float("inf")
        answered = 0.0 if losses.answers_since is None else now - losses.answers_since
        return max(0.0, _trial_s(losses) - answered)


def _trial_s(losses: _Losses) -> float:
    return FIRST_TRIAL_S * 2.0 ** (len(losses.times) - 1)
