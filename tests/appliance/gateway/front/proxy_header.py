"""Headers of the PROXY protocol as a proxy writes them (HAProxy's proxy-protocol.txt, section 2.2)."""

from __future__ import annotations

import ipaddress
import struct

SIGNATURE = bytes.fromhex("0d0a0d0a000d0a515549540a")
PROXY, LOCAL = 0x21, 0x20
UNSPEC, TCP4, UDP4, TCP6, UNIX = 0x00, 0x11, 0x12, 0x21, 0x31


def raw_header(command: int, family: int, rest: bytes, *, length: int | None = None) -> bytes:
    """A header of these fields; ``length``: what it says of the rest, where that is not true."""
    return SIGNATURE + struct.pack(">BBH", command, family, len(rest) if length is None else length) + rest


def header_of(client: str, tlvs: bytes = b"") -> bytes:
    """The header of a client's connection to port 8080 of the same kind of address."""
    address = ipaddress.ip_address(client)
    family = TCP4 if address.version == 4 else TCP6
    return raw_header(PROXY, family, address.packed * 2 + struct.pack(">HH", 40_000, 8_080) + tlvs)
