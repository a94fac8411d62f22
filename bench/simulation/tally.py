"""Figures of one simulated run, counted as it goes; only what happens inside the window counts for distributions."""

from __future__ import annotations

import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

GAP_S = 1e-4
"""Width of a bin of gaps between tokens."""


@dataclass(slots=True)
class TenantFigures:
    """What one tenant asked for and got, of the requests that came inside the window."""

    refused: int = 0
    requests: int = 0
    ttfts: array[float] = field(default_factory=lambda: array("d"))


class Tally:
    """Counts of a run; ``begin`` and ``end`` are the window, in simulated seconds."""

    def __init__(self, begin: float, end: float, hosts: int) -> None:
        self.begin, self.until = begin, end
        self.gaps: Counter[int] = Counter()
        self.ttfts: list[tuple[float, float]] = []
        """When each first token came, and how long it took."""
        self.hand_overs: list[float] = []
        """Seconds from the first token, of a prefill host, to the second, of a decode host."""
        self.tenants: defaultdict[int, TenantFigures] = defaultdict(TenantFigures)
        self.prompt_tokens = 0
        """Prompt tokens of the requests that began inside the window."""
        self.cached_tokens = 0
        self.repeats = [0, 0]
        """The same of requests that are not the first of their session."""
        self.output_tokens = 0
        self.hits: list[tuple[float, int, int]] = []
        """When each request began, its cached tokens and its prompt."""
        self._busy = array("d", bytes(8 * hosts))

    def within(self, now: float) -> bool:
        """Return whether a moment is inside the window."""
        return self.begin <= now < self.until

    def gap(self, now: float, seconds: float, count: int) -> None:
        """Count gaps between two tokens of a stream."""
        if self.begin <= now < self.until:
            self.gaps[int(seconds / GAP_S)] += count
            self.output_tokens += count

    def hand_over(self, now: float, seconds: float) -> None:
        """Note the gap in which a request changed hosts; it counts as any other gap besides."""
        if self.begin <= now < self.until:
            self.hand_overs.append(seconds)

    def busy(self, host: int, begin: float, seconds: float) -> None:
        """Count the part of a step's time that lies inside the window."""
        inside = min(begin + seconds, self.until) - max(begin, self.begin)
        if inside > 0:
            self._busy[host] += inside

    def first(self, now: float, came: float, tenant: int) -> None:
        """Count a first token."""
        self.ttfts.append((now, now - came))
        if self.begin <= now < self.until:
            self.tenants[tenant].ttfts.append(now - came)
            self.output_tokens += 1

    def began(self, now: float, prompt: int, cached: int, turn: int) -> None:
        """Count what the cache had of a prompt."""
        self.hits.append((now, cached, prompt))
        if self.begin <= now < self.until:
            self.prompt_tokens += prompt
            self.cached_tokens += cached
            if turn:
                self.repeats[0] += cached
                self.repeats[1] += prompt

    def utilisation(self, hosts: Iterable[int]) -> list[float]:
        """Return the share of the window in which each of these hosts computed, sorted."""
        return sorted(self._busy[host] / (self.until - self.begin) for host in hosts)

    def gap_quantile(self, part: float) -> float:
        """Return the gap below which this part of all lies, in seconds, to a bin's upper edge."""
        left = math.ceil(self.gaps.total() * part)
        for place in sorted(self.gaps):
            left -= self.gaps[place]
            if left <= 0:
                return (place + 1) * GAP_S
        return math.nan


def quantile(values: Iterable[float], part: float) -> float:
    """Return the value below which this part of all lies; not a number where there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(len(ordered) * part) - 1))] if ordered else math.nan


def jain(values: Iterable[float]) -> float:
    """Return Jain's index: 1 where all are equal, 1/n where one has everything."""
    taken = list(values)
    squares = sum(value * value for value in taken)
    return sum(taken) ** 2 / (len(taken) * squares) if squares else math.nan
