"""Addresses that listeners of the configuration have. Pure."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether a host, by its number or as localhost, is this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listens_on_loopback(address: str) -> bool:
    """Whether only this machine reaches an address: a Unix socket, or HOST:PORT on loopback.

    Raises:
        ValueError: as ``split_address``.
    """
    return address.startswith("unix:") or is_loopback(split_address(address)[0])


def collide(one: str, other: str) -> bool:
    """Whether two addresses cannot both be listened on: one socket, or one port of one host or of all."""
    if one.startswith("unix:") or other.startswith("unix:"):
        return one == other
    (host, port), (others_host, others_port) = split_address(one), split_address(other)
    same = host == others_host or bool({"0.0.0.0", "::"} & {host, others_host})  # noqa: S104 - compared, not bound
    return same and port == others_port != 0


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT`` or ``[V6]:PORT``.

    Raises:
        ValueError: not of that form, or a port beyond 65535.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise ValueError(f"{address!r} is not HOST:PORT")
    return host.strip("[]"), int(port)
