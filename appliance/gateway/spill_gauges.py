"""What the supervisor tells of KV outside of engines, as metrics: gauges as they are, sums as what they grew by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from appliance.control import SpillState
from appliance.telemetry import names

TIERS = ("memory", "disk")
OUTCOMES = ("kept", "restored", "absent", "rejected_length", "rejected_seal", "evicted", "failed")
"""What may become of a block; the label's values, all of them."""

KNOWN = frozenset({*OUTCOMES, *(f"{tier}_{what}" for tier in TIERS for what in ("bytes", "objects"))})


@dataclass(slots=True)
class SpillGauges:
    """The last state, and what was counted of it already."""

    state: dict[str, int] = field(default_factory=dict)
    """Empty: nothing spills."""
    _counted: dict[str, int] = field(default_factory=dict)

    def take(self, message: SpillState) -> None:
        """Take the supervisor's word.

        Raises:
            ValueError: it is not what a supervisor of this release says.
        """
        if message.figures.keys() != KNOWN or min(message.figures.values()) < 0:
            raise ValueError("figures of spill that no supervisor of this release gives")
        self.state = dict(message.figures)

    def tell(self, gauge: Callable[..., None], count: Callable[..., None]) -> None:
        """Set the gauges and add to the counter."""
        if not self.state:
            return
        for tier in TIERS:
            gauge(names.SPILL_BYTES, self.state[f"{tier}_bytes"], tier=tier)
            gauge(names.SPILL_OBJECTS, self.state[f"{tier}_objects"], tier=tier)
        for outcome in OUTCOMES:
            now, before = self.state[outcome], self._counted.get(outcome, 0)
            # Less than before: another supervisor has begun to count.
            more = now - before if now >= before else now
            self._counted[outcome] = now
            # Zero too, so that a series is there before the first block of its kind is.
            count(names.SPILL_BLOCKS, more, outcome=outcome)
