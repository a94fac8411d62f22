"""How much a peer may make the gateway do without asking anything of it: units at a rate; pure.

A frame of HTTP/2 costs its sender a few bytes and the gateway some microseconds. Pings, settings, priorities, resets
and window updates are needed in proportion to what is served; a flood of them is an attack (CVE-2019-9512 to 9518,
CVE-2023-44487). A TLS handshake costs the gateway a millisecond (``handshakes.py``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

MOST_ADDRESSES = 4_096
"""Addresses whose allowances are remembered; the one asked for least recently is forgotten, and begins anew."""


@dataclass(frozen=True, slots=True)
class Rate:
    """``burst`` units at once, ``per_s`` more each second."""

    burst: float
    per_s: float


class Allowance:
    """Units that are spent, and that come back with time and with what is served."""

    __slots__ = ("_left", "_rate", "_then")

    def __init__(self, rate: Rate, now: float) -> None:
        self._rate = rate
        self._left = rate.burst
        self._then = now

    def spend(self, units: float, now: float) -> bool:
        """Spend units; False, and none spent, when there are not as many."""
        self._refill(now)
        if self._left < units:
            return False
        self._left -= units
        return True

    def owe(self, units: float, now: float) -> None:
        """Spend units of something that is done already, also more than there are: the rest is owed."""
        self._refill(now)
        self._left -= units

    def seconds_until(self, units: float, now: float) -> float:
        """Return after how many seconds there will be so many units, if none are spent; 0 where there are now."""
        self._refill(now)
        return max(0.0, units - self._left) / self._rate.per_s

    def _refill(self, now: float) -> None:
        rate = self._rate
        self._left = min(rate.burst, self._left + (now - self._then) * rate.per_s)
        self._then = now

    def earn(self, units: float) -> None:
        """Give units for something served."""
        self._left = min(self._rate.burst, self._left + units)


class StrangersAllowances:
    """One allowance for each network of strangers, all its connections together: reconnecting gains nothing."""

    def __init__(self, rate: Rate, clock: Callable[[], float]) -> None:
        self._rate = rate
        self._clock = clock
        self._known: OrderedDict[str, Allowance] = OrderedDict()

    def of(self, network: str) -> Allowance:
        """Return the allowance of a network, as ``connections.network_of`` names it."""
        found = self._known.get(network)
        if found is None:
            found = self._known[network] = Allowance(self._rate, self._clock())
            if len(self._known) > MOST_ADDRESSES:
                self._known.popitem(last=False)
        self._known.move_to_end(network)
        return found
