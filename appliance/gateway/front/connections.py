"""Who holds how many connections, or calls: counts by address and by tenant, so that neither can take all there are.

An address is known when a connection is accepted, a tenant with its first credential. Single-threaded, as the event
loop is.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable


class Connections:
    """Counts of one front end. ``most`` is the limit of each address and of each tenant."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: Counter[tuple[str, str]] = Counter()

    def enter(self, kind: str, name: str) -> bool:
        """Count one more; False, and not counted, when ``name`` has as many as it may."""
        key = (kind, name)
        if self._held[key] >= self._most:
            return False
        self._held[key] += 1
        return True

    def leave(self, kind: str, name: str) -> None:
        """Count one less."""
        self._held[kind, name] -= 1
        if not self._held[kind, name]:
            del self._held[kind, name]


class Places:
    """The connections of one listener: ``each`` of an address or a tenant at most, ``strangers`` of all without a
    credential, ``total`` of all together.

    A connection without a credential is a stranger's. Where strangers hold all that they may, the next one is accepted
    and the oldest of the address that holds most is closed: an address that floods the door closes its own connections.

    A connection of a trusted proxy carries requests of many clients. It counts to ``total`` alone, neither to its
    address nor to a tenant, and is never closed for a stranger.
    """

    def __init__(
        self, each: int, total: int, strangers: int, on_known: Callable[[str], None] = lambda network: None
    ) -> None:
        """``on_known`` is called with the network of each connection that brings its first credential."""
        self._on_known = on_known
        self._counts = Connections(each)
        self._total = total
        self._most_strangers = strangers
        self._held = 0
        self._strangers: dict[str, dict[Slot, None]] = {}
        """Network -> its slots without a credential, the oldest first."""
        self._stranger_count = 0
        self.evicted = 0
        """Connections closed so far to make room for others."""

    @property
    def held(self) -> int:
        """Connections open now."""
        return self._held

    @property
    def strangers(self) -> int:
        """Those of them without a credential."""
        return self._stranger_count

    def admit(self, address: str, *, proxy: bool = False) -> Slot | None:
        """Return the slot of a connection just accepted; None when its address has as many as it may, or tenants and
        proxies hold all there are. ``proxy``: the address is a trusted proxy's."""
        slot = Slot(self, address, proxy=proxy)
        if not proxy and not self._enter(slot):
            return None
        self._held += 1
        return slot if self._has_room(slot) else None

    def assign(self, slot: Slot, address: str) -> bool:
        """Count a proxy's connection as this address's, which alone uses it; False when that has as many as it may, or
        tenants and proxies hold all there are."""
        assert slot.proxy, "a connection is assigned once, and only a proxy's"
        slot.address, slot.network = address, network_of(address)
        if not self._enter(slot):
            return False
        slot.proxy = False
        return self._has_room(slot)

    def _enter(self, slot: Slot) -> bool:
        """Count a stranger's connection; False, and not counted, when its address has as many as it may."""
        if not self._counts.enter("address", slot.network):
            return False
        self._strangers.setdefault(slot.network, {})[slot] = None
        self._stranger_count += 1
        return True

    def _has_room(self, slot: Slot) -> bool:
        """Close a stranger's connection where there is one too many; False when that is this slot's own."""
        if self._held <= self._total and self._stranger_count <= self._most_strangers:
            return True
        victim = self._oldest_of_most() if self._strangers else slot
        victim.evict()
        if victim is slot:
            return False
        self.evicted += 1
        return True

    def _oldest_of_most(self) -> Slot:
        slots = max(self._strangers.values(), key=len)
        return next(iter(slots))

    def claim(self, slot: Slot, tenant: str) -> bool:
        """Count a slot's connection as this tenant's, no longer as another's or a stranger's; False when the tenant has
        as many as it may. A proxy's stays the proxy's."""
        if slot.proxy or slot.tenant == tenant:
            return True
        if not self._counts.enter("tenant", tenant):
            return False
        if not slot.tenant:
            self._on_known(slot.network)
        self._leave_tenant(slot)
        self._known(slot)
        slot.tenant = tenant
        return True

    def release(self, slot: Slot) -> None:
        """Count a slot's connection out everywhere."""
        self._known(slot)
        self._leave_tenant(slot)
        if not slot.proxy:
            self._counts.leave("address", slot.network)
        self._held -= 1

    def _leave_tenant(self, slot: Slot) -> None:
        if slot.tenant:
            self._counts.leave("tenant", slot.tenant)
            slot.tenant = ""

    def _known(self, slot: Slot) -> None:
        """The connection is no stranger's, or no more."""
        slots = self._strangers.get(slot.network, {})
        if slot in slots:
            del slots[slot]
            self._stranger_count -= 1
            if not slots:
                del self._strangers[slot.network]


class Slot:
    """The place of one connection; released as a whole."""

    __slots__ = ("_places", "_released", "address", "network", "on_evicted", "proxy", "tenant")

    def __init__(self, places: Places, address: str, *, proxy: bool = False) -> None:
        self._places = places
        self._released = False
        self.address = address
        """Address of the peer, or of the client for which a proxy opened the connection."""
        self.network = network_of(address)
        """What its address is counted as."""
        self.proxy = proxy
        """Whether it is a trusted proxy's, for requests of many clients."""
        self.tenant = ""
        """Whose it is; empty for a stranger's."""
        self.on_evicted: Callable[[], None] | None = None
        """Closes the connection at once, for the sake of others."""

    @property
    def owner(self) -> str:
        """Whose requests come over the connection, as far as is known: a tenant, or a network of strangers or of a
        proxy. A tenant's name is given a slash before it, which no network's has."""
        return f"/{self.tenant}" if self.tenant else self.network

    def assign(self, address: str) -> bool:
        """Count a proxy's connection as this address's; False when it may not be kept."""
        return self._places.assign(self, address)

    def claim(self, tenant: str) -> bool:
        """Count the connection as this tenant's; False when the tenant has as many as it may, or the connection was
        counted out before, because it is being closed: nobody would count it out again."""
        return not self._released and self._places.claim(self, tenant)

    def release(self) -> None:
        """Count the connection out everywhere, and forget how it is closed. Idempotent."""
        self.on_evicted = None
        if not self._released:
            self._released = True
            self._places.release(self)

    def evict(self) -> None:
        """Close the connection and count it out."""
        on_evicted = self.on_evicted
        self.release()
        if on_evicted is not None:
            on_evicted()


def network_of(address: str) -> str:
    """Return the name by which an address is counted: an IPv4 address itself, an IPv6 one by its /64, since a single
    customer has 2**64 of these."""
    if ":" not in address:
        return address
    parsed = ipaddress.IPv6Address(address.partition("%")[0])
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((parsed, 64), strict=False))
