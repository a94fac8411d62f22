"""Attacks on another machine, or on servers of this one."""

from __future__ import annotations

import os
import socket

from appliance.selftest.redteam.base import Target, attack

WAIT_S = 2.0

FAMILIES = {
    "AX25": 3,
    "X25": 9,
    "KEY": 15,
    "PACKET": 17,
    "RDS": 21,
    "PPPOX": 24,
    "LLC": 26,
    "CAN": 29,
    "TIPC": 30,
    "BLUETOOTH": 31,
    "PHONET": 35,
    "ALG": 38,
    "NFC": 39,
    "VSOCK": 40,
    "KCM": 41,
    "QIPCRTR": 42,
    "SMC": 43,
    "XDP": 44,
}
"""Address families of linux/socket.h that reach a driver, a hypervisor or kernel code."""


def _greeted(family: int, address: tuple[object, ...]) -> str | None:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(WAIT_S)
        probe.connect(address)
        return probe.recv(64).decode() or None


@attack("network")
def tcp(target: Target) -> str | None:
    """Connect to a server on the machine's own address."""
    return _greeted(socket.AF_INET, (target["address"], target["tcp"]))


@attack("network")
def loopback(target: Target) -> str | None:
    """Connect to a server on the machine's loopback address."""
    return _greeted(socket.AF_INET, ("127.0.0.1", target["tcp"]))


@attack("network")
def loopback6(target: Target) -> str | None:
    """Connect to a server on the IPv6 loopback address."""
    return _greeted(socket.AF_INET6, ("::1", target["tcp6"]))


@attack("network")
def udp(target: Target) -> str | None:
    """Send a datagram and wait for its answer."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.settimeout(WAIT_S)
        probe.sendto(b"hello", (target["address"], target["udp"]))
        return probe.recv(64).decode()


@attack("network")
def interfaces(_target: Target) -> str | None:
    """List network devices other than a private loopback."""
    names = [name for _, name in socket.if_nameindex() if name != "lo"]
    return ", ".join(names) or None


@attack("network")
def raw(target: Target) -> str | None:
    """Send an ICMP echo request over a raw socket (RFC 792) to the machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as probe:
        probe.settimeout(WAIT_S)
        probe.sendto(bytes.fromhex("0800f7ff00000000"), (target["address"], 0))
        return f"{len(probe.recv(256))} bytes"


@attack("network")
def families(_target: Target) -> str | None:
    """Open sockets of every other family."""
    made = []
    for name, number in FAMILIES.items():
        for kind in (socket.SOCK_RAW, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET, socket.SOCK_STREAM):
            try:
                socket.socket(number, kind).close()
            except OSError:
                continue
            made.append(name)
            break
    return ", ".join(made) or None


@attack("network")
def abstract(target: Target) -> str | None:
    """Connect to an abstract Unix socket (unix(7)), which belongs to the network namespace and to no directory."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(WAIT_S)
        probe.connect("\0" + target["abstract"])
        return probe.recv(64).decode() or None


@attack("network")
def uevents(_target: Target) -> str | None:
    """Receive the kernel's device announcements (netlink, NETLINK_KOBJECT_UEVENT)."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 15) as probe:
        probe.bind((os.getpid(), 1))
        return "bound to the kernel's events"
