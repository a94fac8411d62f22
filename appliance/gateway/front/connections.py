"""Counts of HTTP connections, or gRPC calls, by address and by tenant, so that neither can take all there are.

An address is known when a connection is accepted, a tenant with its first credential. Single-threaded, as the event
loop is.
"""

from __future__ import annotations

import ipaddress
import sys
from collections import Counter

_ALL = ("all", "")


class Connections:
    """Counts of one front end. ``most`` is the limit of each address and tenant, ``total`` that of all together."""

    def __init__(self, most: int, total: int = sys.maxsize) -> None:
        self._most = most
        self._total = total
        self._held: Counter[tuple[str, str]] = Counter()

    def enter(self, kind: str, name: str) -> bool:
        """Count one more; False, and not counted, when ``name`` has as many as it may."""
        key = (kind, name)
        if self._held[key] >= (self._total if key == _ALL else self._most):
            return False
        self._held[key] += 1
        return True

    def leave(self, kind: str, name: str) -> None:
        """Count one less."""
        self._held[kind, name] -= 1
        if not self._held[kind, name]:
            del self._held[kind, name]

    def admit(self, address: str) -> Slot | None:
        """Return the slot of a connection just accepted; None when its address, or all, have as many as they may."""
        slot = Slot(self)
        if slot.enter(*_ALL) and slot.enter("address", network_of(address)):
            return slot
        slot.release()
        return None


class Slot:
    """Everything that one connection is counted as; released as a whole."""

    __slots__ = ("_counts", "_held")

    def __init__(self, counts: Connections) -> None:
        self._counts = counts
        self._held: dict[str, str] = {}

    def enter(self, kind: str, name: str) -> bool:
        """Count the connection as ``name``'s, and no longer as another's of this kind; False when that is full."""
        if self._held.get(kind) == name:
            return True
        before = self._held.pop(kind, None)
        if before is not None:
            self._counts.leave(kind, before)
        entered = self._counts.enter(kind, name)
        if entered:
            self._held[kind] = name
        return entered

    def release(self) -> None:
        """Count the connection out everywhere. Idempotent."""
        for kind, name in self._held.items():
            self._counts.leave(kind, name)
        self._held.clear()


def network_of(address: str) -> str:
    """Return the name by which an address is counted: an IPv4 address itself, an IPv6 one by its /64, since a single
    customer has 2**64 of these."""
    if ":" not in address:
        return address
    parsed = ipaddress.IPv6Address(address.partition("%")[0])
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((parsed, 64), strict=False))
