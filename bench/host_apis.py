"""What a streamed token costs the whole host by one API beside another, in turns of one run: ``bench/host.py --api``.

Every round has a turn of each API in the same processes, in an order that changes from round to round, so that what
changes slowly is in all of them. Compared is processor time of gateway, sandboxes and supervisor, user and system: on a
machine with other work the clock on the wall says little. Each turn is divided by the turn of chat of its own round.
Bar: Responses and Messages cost at most ``MOST`` times chat. It is met or missed where the whole interval of confidence
of the median says so, and else not resolved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from bench.intervals import interval

BASE = "chat"
"""The API that the others are divided by."""

MOST = 1.3
"""Bar: times the cost of chat."""

Turn = Callable[[str], dict[str, Any]]
"""Runs one turn of an API; gives ``us_per_token`` by room, ``tokens_per_chunk`` and ``failures``."""


@dataclass(frozen=True)
class ApiCost:
    """What the turns of one API gave, in the order of the rounds."""

    api: str
    whole: list[float]
    """Microseconds of processor time a token, of all rooms."""
    gateway: list[float]
    ratios: list[float]
    """``whole`` by that of chat in the same round; empty without chat."""
    tokens_per_chunk: list[float]
    failures: int

    @property
    def verdict(self) -> str:
        """Whether the bar is met; empty for chat itself, or without it."""
        if self.api == BASE or not self.ratios:
            return ""
        low, high = interval(self.ratios)
        return "met" if high <= MOST else "missed" if low > MOST else "not resolved"


def orders(apis: Sequence[str], rounds: int) -> list[tuple[str, ...]]:
    """The order of the turns in each round: each API comes equally often at each place, and behind each other one."""
    found = []
    for number in range(rounds):
        start = number // 2 % len(apis)
        order = (*apis[start:], *apis[:start])
        found.append(order[::-1] if number % 2 else order)
    return found


def compare(apis: Sequence[str], rounds: int, turn: Turn) -> list[ApiCost]:
    """Run all turns and put them together."""
    seen: dict[str, list[dict[str, Any]]] = {api: [] for api in apis}
    for order in orders(apis, rounds):
        for api in order:
            seen[api].append(turn(api))
    whole = {api: [sum(one["us_per_token"].values()) for one in turns] for api, turns in seen.items()}
    base = whole.get(BASE)
    return [
        ApiCost(
            api,
            whole[api],
            [one["us_per_token"]["gateway"] for one in turns],
            [] if base is None else [mine / its for mine, its in zip(whole[api], base, strict=True)],
            [one["tokens_per_chunk"] for one in turns],
            sum(one["failures"] for one in turns),
        )
        for api, turns in seen.items()
    ]


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile; of one value that value."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, median(values), high


def table(costs: Sequence[ApiCost], streams: int, pace: str) -> list[str]:
    """The lines of one comparison: median and quartiles of each figure."""
    lines = [
        f"{streams} streams, {pace}, {len(costs[0].whole)} rounds; median (quartiles)",
        "via        CPU us a token: all              gateway               times chat            tok/chunk  failed",
    ]
    for one in costs:
        ratio = _words(one.ratios) if one.ratios else "-"
        lines.append(
            f"{one.api:10s} {_words(one.whole):28s} {_words(one.gateway):21s} {ratio:21s}"
            f" {median(one.tokens_per_chunk):9.2f} {one.failures:7d}  {one.verdict}".rstrip()
        )
    return lines


def _words(values: Sequence[float]) -> str:
    low, middle, high = spread(values)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"
