"""Which host gets a request: the rules of the routers of ``deploy/fleet``, and those of an endpoint picker.

A ring has 160 points a host, as nginx's ``hash ... consistent`` has; a host that is gone is passed over, so its
sessions alone move. A picker (Gateway API inference extension) takes the host with the highest score, equal ones by
lot: the sum of how far it is from the longest queue and of its free KV, each between 0 and 1, and three times whether
it served the session last. It reads each host's gauges every 50 ms, and knows nothing of what it has sent meanwhile.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b

import numpy as np

POINTS = 160
"""Points of a host on the ring."""

BALANCE = 1.25
"""Share of the mean load up to which a host takes its own sessions where loads are bounded (HAProxy's
``hash-balance-factor`` 125, Envoy's likewise)."""

SCRAPE_S = 0.05
"""Seconds between two readings of a host's gauges."""

SESSION_WEIGHT = 3.0
"""Weight of the host that served the session last, beside 1 each for queue and KV."""


def hashed(text: str) -> int:
    """Return a place on the ring."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


class Ring:
    """Consistent hashing over some hosts."""

    def __init__(self, hosts: Sequence[int]) -> None:
        points = sorted((hashed(f"host {host} point {point}"), host) for host in hosts for point in range(POINTS))
        self._places = [place for place, _ in points]
        self._hosts = [host for _, host in points]

    def walk(self, key: str) -> Iterator[int]:
        """Give the hosts from the place of a key on, some more than once."""
        first = bisect_right(self._places, hashed(key))
        for step in range(len(self._hosts)):
            yield self._hosts[(first + step) % len(self._hosts)]

    def host(self, key: str, gone: frozenset[int] | set[int] = frozenset()) -> int:
        """Return the host of a key, without those that are gone.

        Raises:
            LookupError: all are gone.
        """
        for host in self.walk(key):
            if host not in gone:
                return host
        raise LookupError("every host of the ring is gone")

    def bounded(self, key: str, load: Callable[[int], float], most: float, gone: set[int]) -> int:
        """Return the first host from the key on that is there and whose load is at most so much; the least loaded
        where there is none.

        Raises:
            LookupError: all are gone.
        """
        seen: dict[int, None] = {}
        for host in self.walk(key):
            if host in gone:
                continue
            if load(host) <= most:
                return host
            seen[host] = None
        if not seen:
            raise LookupError("every host of the ring is gone")
        return min(seen, key=load)


class Picker:
    """An endpoint picker's view of the hosts."""

    def __init__(self, count: int, gauges: Callable[[int], tuple[float, float]], rng: random.Random) -> None:
        """``gauges``: queued requests and used share of KV of a host, now."""
        self._gauges, self._rng = gauges, rng
        self._queued, self._used = np.zeros(count), np.zeros(count)
        self._there = np.ones(count, dtype=bool)
        self._next, self._turn = 0.0, 0
        self._last: dict[int, int] = {}

    def lose(self, host: int) -> None:
        """Leave a host out from now on."""
        self._there[host] = False

    def remember(self, session: int, host: int) -> None:
        """Take note that a host served a session."""
        self._last[session] = host

    def pick(self, session: int, now: float, *, fresh: bool = False) -> int:
        """Return the host with the best score, by the gauges as they were last read, or as they are."""
        if fresh:
            for host in range(len(self._queued)):
                self._queued[host], self._used[host] = self._gauges(host)
        else:
            self._read(now)
        span = self._queued.max() - self._queued.min()
        score = (1 - self._used) + ((self._queued.max() - self._queued) / span if span else 1.0)
        if (last := self._last.get(session)) is not None:
            score[last] += SESSION_WEIGHT
        score[~self._there] = -1
        best = np.flatnonzero(score == score.max())
        self._last[session] = host = int(best[self._rng.randrange(len(best))])
        return host

    def _read(self, now: float) -> None:
        """Read what is due: hosts are read one after the other, each once in ``SCRAPE_S``."""
        count = len(self._queued)
        step = SCRAPE_S / count
        for _ in range(count):
            if self._next > now:
                return
            self._queued[self._turn], self._used[self._turn] = self._gauges(self._turn)
            self._turn = (self._turn + 1) % count
            self._next += step
        self._next = now + step
