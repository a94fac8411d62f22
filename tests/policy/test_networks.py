"""Networks of a tenant: what is within, what is not, and what is no network."""

from __future__ import annotations

import pytest

from policy.networks import admits, read_network


@pytest.mark.parametrize(
    ("networks", "address", "within"),
    [
        ((), "203.0.113.9", True),
        ((), "", True),
        (("10.0.0.0/8",), "10.255.0.1", True),
        (("10.0.0.0/8",), "11.0.0.1", False),
        (("192.0.2.7",), "192.0.2.7", True),
        (("192.0.2.7",), "192.0.2.8", False),
        (("2001:db8::/32",), "2001:db8:1::5", True),
        (("2001:db8::/32",), "2001:db9::5", False),
        (("10.0.0.0/8", "2001:db8::/32"), "2001:db8::1", True),
        (("10.0.0.0/8",), "::ffff:10.1.2.3", True),
        (("::ffff:10.0.0.0/104",), "10.1.2.3", True),
        (("::ffff:10.0.0.0/104",), "11.1.2.3", False),
        (("fe80::/10",), "fe80::1%eth0", True),
        (("0.0.0.0/0",), "203.0.113.9", True),
        (("0.0.0.0/0",), "2001:db8::1", False),
        (("::/0",), "203.0.113.9", False),
        (("0.0.0.0/0", "::/0"), "", False),
        (("0.0.0.0/0", "::/0"), "unix", False),
        (("10.0.0.0/8",), "10.0.0.1, 10.0.0.2", False),
        (("10.0.0.0/8",), "0x0a000001", False),
        (("10.0.0.0/8",), "010.0.0.1", False),
    ],
)
def test_an_address_is_within_or_not(networks: tuple[str, ...], address: str, within: bool) -> None:
    """Both families, mapped ones, zones; what is no address is in no network."""
    assert admits(networks, address) is within


@pytest.mark.parametrize(
    "text",
    [
        "",
        "10.0.0.1/8",
        "10.0.0.0/33",
        "10.0.0",
        "x",
        "2001:db8::/129",
        "::ffff:0:0/80",
        "fe80::1%eth0",
        "1" * 60,
        "10/8",
    ],
)
def test_what_is_no_network(text: str) -> None:
    """Bits behind the prefix, prefixes that are too long, half of IPv4 in IPv6, zones, other texts."""
    with pytest.raises(ValueError):
        read_network(text)
