"""How much each model is used, so that the least used one sleeps where not all fit. Pure; times are monotonic seconds
of the caller.

Each use counts one, and half as much after ``HALF_LIFE`` later uses of any model: counts fade with traffic and not with
time, so a night without requests changes nothing. Models that sleep keep their counts, so one that is woken is known by
what it was before. Where requests are independent of each other, keeping the most used models is the best that can be
done without knowledge of what comes; the fading follows a change of what is asked for.

Source: aging counters of admission policies for caches (Einziger, Friedman and Manes, TinyLFU, 2017).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

HALF_LIFE = 160.0
"""Counted uses of all models after which one counts half. Chosen by ``bench/residency_policies.py``: twice as many find
what is asked for no better where that stays the same, and follow too slowly where it changes every 150 requests."""

LEAST_GAP_S = 1.0
"""Uses of one model that follow each other sooner count as one: a wake serves all of them. So neither a burst nor a
tenant that asks without pause makes its model dear."""


@dataclass(slots=True)
class _Count:
    value: float
    """Count at the time of ``at``."""
    at: int
    """Uses of all models before."""
    used_at: float


@dataclass(slots=True)
class ModelUses:
    """Fading counts of the uses of models, one entry a model."""

    half_life: float = HALF_LIFE
    _total: int = 0
    _counts: dict[str, _Count] = field(default_factory=dict)

    def note(self, model: str, now: float) -> None:
        """Count a use, unless the last one of this model was just before."""
        known = self._counts.get(model)
        if known is not None and now - known.used_at < LEAST_GAP_S:
            return
        self._total += 1
        self._counts[model] = _Count(self.of(model) + 1.0, self._total, now)

    def of(self, model: str) -> float:
        """Return a model's count; 0 for one that was never used."""
        known = self._counts.get(model)
        return 0.0 if known is None else known.value * 0.5 ** ((self._total - known.at) / self.half_life)

    def keep(self, models: Collection[str]) -> None:
        """Forget all but these models."""
        for name in [one for one in self._counts if one not in models]:
            del self._counts[name]
