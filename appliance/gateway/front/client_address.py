"""Addresses of clients behind proxies that the operator trusts; pure.

A proxy hides its clients: all their connections come from one address. A trusted one says whose a request is, in a
header (``X-Forwarded-For``, or ``Forwarded`` of RFC 7239), or whose a connection is, in front of its first byte
(version 2 of the PROXY protocol). The same words of any other peer are its own invention and change nothing.
"""

from __future__ import annotations

import ipaddress
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

X_FORWARDED_FOR = "x-forwarded-for"
FORWARDED = "forwarded"
PROXY_PROTOCOL = "proxy-protocol"

MAX_LIST_CHARS = 4_096
"""Characters that are read of a list of addresses, from its right end: a hundred hops."""

_COMMA_OR_QUOTE = re.compile(r'[,"]')
_WORD = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_PAIR = re.compile(rf'({_WORD})=({_WORD}|"[^"\\]*")')
_ELEMENT = re.compile(rf"{_PAIR.pattern}(?:[ \t]*;[ \t]*{_PAIR.pattern})*;?")
"""One element of ``Forwarded`` (RFC 7239, section 4). A backslash is in no address, and refused anywhere."""

_NODE = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([0-9.]+))(?::(?:[0-9]{1,5}|_[A-Za-z0-9._-]+))?|([0-9A-Fa-f:.]+)")
"""An address, with brackets and a port or without (RFC 7239, section 6). Neither ``unknown`` nor a name that hides an
address is one, nor one with a zone, which only the machine understands that wrote it."""

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True)
class TrustedProxies:
    """Peers whose word about their clients counts, and how they give it. By default nobody is trusted."""

    networks: tuple[Network, ...] = ()
    source: str = X_FORWARDED_FOR
    """``X_FORWARDED_FOR``, ``FORWARDED`` or ``PROXY_PROTOCOL``; the others are ignored. A proxy that writes one header
    may pass on the other as its client wrote it."""

    @classmethod
    def of(cls, networks: Iterable[str], source: str) -> TrustedProxies:
        """Return the proxies in these networks (CIDR).

        Raises:
            ValueError: one is no network, or has bits set behind its prefix.
        """
        return cls(tuple(map(ipaddress.ip_network, networks)), source)

    @property
    def header(self) -> str:
        """Lower-case name of the header that names a request's client; empty where connections are announced."""
        return "" if self.source == PROXY_PROTOCOL else self.source

    def trusts(self, peer: str) -> bool:
        """Whether this address is a trusted proxy's."""
        if not self.networks:
            return False
        address = _address(peer.partition("%")[0])
        return address is not None and self._holds(address)

    def announces(self, peer: str) -> bool:
        """Whether a connection of this peer begins with a header of the PROXY protocol."""
        return self.source == PROXY_PROTOCOL and self.trusts(peer)

    def forwards(self, peer: str) -> bool:
        """Whether requests of several clients come over a connection of this peer, each with its client's name."""
        return self.source != PROXY_PROTOCOL and self.trusts(peer)

    def client_of(self, peer: str, values: Sequence[str]) -> str:
        """Return the address of a request's client.

        ``peer`` is the connection's address, ``values`` are those of ``header`` in the order in which they came. Each
        proxy adds the address that it saw on the right. So the list is read from there, over the proxies that are
        trusted; the first other address is the client's. An element that is no address ends it: then the proxy that
        wrote that element is all that is known.
        """
        if not values or not self.forwards(peer):
            return peer
        read = _forwarded_address if self.source == FORWARDED else _plain_address
        hop = peer
        for element in _from_right(",".join(values)):
            address = read(element)
            if address is None:
                break
            hop = str(address)
            if not self._holds(address):
                break
        return hop

    def _holds(self, address: Address) -> bool:
        return any(address in network for network in self.networks)


def _from_right(text: str) -> Iterator[str]:
    """Yield the elements of a list from its right end, without empty ones. A comma between quotes divides nothing, and
    quotes are counted from the right: what a client wrote stands on the left, and cannot change their meaning."""
    whole = len(text) <= MAX_LIST_CHARS
    text = text[-MAX_LIST_CHARS:]
    end, quoted = len(text), False
    for found in reversed(list(_COMMA_OR_QUOTE.finditer(text))):
        if found[0] == '"':
            quoted = not quoted
        elif not quoted:
            if element := text[found.end() : end].strip(" \t"):
                yield element
            end = found.start()
    if whole and not quoted and (element := text[:end].strip(" \t")):
        yield element


def _forwarded_address(element: str) -> Address | None:
    """The address in one element of ``Forwarded``; None where there is none, or more than one."""
    if _ELEMENT.fullmatch(element) is None:
        return None
    nodes = [value for name, value in _PAIR.findall(element) if name.lower() == "for"]
    return _plain_address(nodes[0]) if len(nodes) == 1 else None


def _plain_address(node: str) -> Address | None:
    """The address that a node's name has, without port, brackets and quotes; None where it is none."""
    if len(node) > 1 and node[0] == node[-1] == '"':
        node = node[1:-1]
    found = _NODE.fullmatch(node)
    return None if found is None else _address(found[1] or found[2] or found[3])


def _address(text: str) -> Address | None:
    """The address; that of IPv4 where it is written as one of IPv6."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return (address.ipv4_mapped or address) if isinstance(address, ipaddress.IPv6Address) else address


SIGNATURE = b"\r\n\r\n\0\r\nQUIT\n"
"""First bytes of a header of the PROXY protocol, version 2 (HAProxy's proxy-protocol.txt, section 2.2)."""

START_BYTES = len(SIGNATURE) + 4
"""Signature, version and command, family, and the length of what follows."""

MAX_HEADER_BYTES = 4_096
"""Bytes of a whole header: addresses take 232 at most, the rest is for extensions, which are skipped."""

_LOCAL, _PROXY = 0x20, 0x21
"""Version 2 with its two commands: a connection of the proxy's own, and a client's."""

_TCP4, _TCP6 = 0x11, 0x21
_ADDRESS_BYTES = {0x00: 0, _TCP4: 12, _TCP6: 36, 0x31: 216}
"""Family and transport -> bytes of its two addresses and ports. 0x00 is "not known", 0x31 a Unix socket."""


class ProxyHeaderError(Exception):
    """The bytes are no header of the PROXY protocol, version 2, for a stream."""


class ProxyHeader:
    """Reads one header, however its bytes are cut. ``missing`` says how many may be fed next, so that none of what
    follows the header is taken."""

    def __init__(self) -> None:
        self._data = b""
        self._size = START_BYTES

    @property
    def missing(self) -> int:
        """Bytes that are sure to belong to the header and have not come; 0 once it is whole."""
        return self._size - len(self._data)

    def feed(self, data: bytes) -> None:
        """Take the next bytes, ``missing`` at most.

        Raises:
            ProxyHeaderError: they are no such header; told by the first byte that cannot be one.
        """
        self._data += data
        if not SIGNATURE.startswith(self._data[: len(SIGNATURE)]):
            raise ProxyHeaderError("no header of the PROXY protocol, version 2")
        if len(self._data) == START_BYTES:
            self._size = START_BYTES + self._rest()

    def _rest(self) -> int:
        """Bytes that follow the start."""
        command, family, length = struct.unpack_from(">BBH", self._data, len(SIGNATURE))
        if command not in (_LOCAL, _PROXY):
            raise ProxyHeaderError("neither PROXY nor LOCAL of version 2")
        if START_BYTES + length > MAX_HEADER_BYTES:
            raise ProxyHeaderError(f"more than {MAX_HEADER_BYTES} bytes")
        if command == _PROXY and length < _ADDRESS_BYTES.get(family, MAX_HEADER_BYTES):
            raise ProxyHeaderError("a family that no stream has, or shorter than its addresses")
        return int(length)

    def address(self) -> str | None:
        """Return the client's address; None for a connection of the proxy's own, or of a client without one. The header
        is whole."""
        assert self.missing == 0, "an address is asked for once all bytes have come"
        command, family = self._data[len(SIGNATURE) : len(SIGNATURE) + 2]
        size = {_TCP4: 4, _TCP6: 16}.get(family)
        if command == _LOCAL or size is None:
            return None
        address = ipaddress.ip_address(self._data[START_BYTES : START_BYTES + size])
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return str(mapped or address)
