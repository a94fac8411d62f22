"""Networks from which a tenant's credentials are taken. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

MAX_NETWORK_CHARS = 49
"""Longest text of a network: an IPv6 address with IPv4 digits, a slash and a prefix."""

Network = IPv4Network | IPv6Network
Address = IPv4Address | IPv6Address


def read_network(text: str) -> Network:
    """Read a network in CIDR notation; an address alone is a network of one.

    Raises:
        ValueError: it is none, or has bits set behind its prefix.
    """
    if len(text) > MAX_NETWORK_CHARS or "%" in text:
        raise ValueError("not a network")
    network = ip_network(text)
    if isinstance(network, IPv6Network) and (mapped := network.network_address.ipv4_mapped) is not None:
        if network.prefixlen < 96:
            raise ValueError("half of it is IPv4")
        return IPv4Network((mapped, network.prefixlen - 96))
    return network


def admits(networks: Sequence[str], address: str) -> bool:
    """Return whether a call from this address is within the networks, as ``read_network`` takes them; without networks
    every one is. A caller without an address, on a local socket, is within none: what cannot be evaluated denies."""
    return not networks or _within(tuple(networks), address)


@lru_cache(maxsize=4_096)
def _within(networks: tuple[str, ...], address: str) -> bool:
    """Return whether an address is within networks. A connection's requests ask for one pair again and again, and each
    look into a network takes a microsecond or two."""
    place = _place(address)
    if place is None:
        return False
    for text in networks:  # noqa: SIM110 - a generator costs a decision as much as a look into a network
        if place in _network(text):
            return True
    return False


@lru_cache(maxsize=4_096)
def _place(address: str) -> Address | None:
    """Return the address that a caller's text is of, an IPv4 one where IPv6 only carries it; None for none. A
    connection's requests all come from one."""
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return None
    return found.ipv4_mapped or found if isinstance(found, IPv6Address) else found


_network = lru_cache(maxsize=4_096)(read_network)
"""Networks by their text: reading one takes ten times as long as looking into it."""
