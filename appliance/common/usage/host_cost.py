"""What the machine cost by model: hours in which the appliance ran, times the price of an hour. Pure.

Models share the cost by the tokens that were computed for them: prompt tokens without those from the cache, and output
tokens. So a model that alone was used bears all of it, idle hours included, and what nothing was computed with bears
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from appliance.common.usage.report import Sum

MILLION = 1_000_000


@dataclass(frozen=True, slots=True)
class ModelCost:
    """Part of the machine's cost that one model bears."""

    model: str
    requests: int
    input: int
    cached: int
    output: int
    share: float
    """Part of the whole cost, 0 to 1."""
    cost: float
    """Units of the currency."""

    @property
    def per_million(self) -> float | None:
        """Units of the currency for a million output tokens; None without output."""
        return self.cost * MILLION / self.output if self.output else None


@dataclass(frozen=True, slots=True)
class HostCost:
    """Cost of the machine for a time."""

    hours: float
    """Hours in which the appliance ran."""
    price_per_hour: float
    currency: str
    models: tuple[ModelCost, ...]
    """The one with the largest share first."""

    @property
    def cost(self) -> float:
        """Units of the currency for all hours; more than the models bear where nothing was computed."""
        return self.hours * self.price_per_hour


def host_cost(hours: float, price_per_hour: float, currency: str, by_model: Sequence[Sum]) -> HostCost:
    """Share the cost of so many hours among models; ``by_model`` are the sums of the same time by model."""
    computed = [one.input - one.cached + one.output for one in by_model]
    whole = sum(computed)
    shares = [part / whole if whole else 0.0 for part in computed]
    models = [
        ModelCost(one.keys[0], one.requests, one.input, one.cached, one.output, share, hours * price_per_hour * share)
        for one, share in zip(by_model, shares, strict=True)
    ]
    return HostCost(hours, price_per_hour, currency, tuple(sorted(models, key=lambda one: (-one.share, one.model))))
