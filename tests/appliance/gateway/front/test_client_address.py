"""Whose request it is behind proxies: lists in headers, and headers of the PROXY protocol, whatever clients send.

The rules are those of RFC 7239, of common use of ``X-Forwarded-For``, and of HAProxy's proxy-protocol.txt.
"""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.gateway.front.client_address import (
    FORWARDED,
    MAX_HEADER_BYTES,
    MAX_LIST_CHARS,
    PROXY_PROTOCOL,
    START_BYTES,
    X_FORWARDED_FOR,
    ProxyHeader,
    ProxyHeaderError,
    TrustedProxies,
)
from tests.appliance.gateway.front import proxy_header as raw

NETWORKS = ("10.0.0.0/8", "192.0.2.7", "2001:db8:f::/48")
PEER = "10.0.0.1"
PLAIN = TrustedProxies.of(NETWORKS, X_FORWARDED_FOR)
RFC_7239 = TrustedProxies.of(NETWORKS, FORWARDED)


@pytest.mark.parametrize(
    ("values", "client"),
    [
        ([], PEER),
        ([""], PEER),
        (["203.0.113.5"], "203.0.113.5"),
        (["203.0.113.5:4711"], "203.0.113.5"),
        ([" 203.0.113.5\t"], "203.0.113.5"),
        (["2001:db8::1"], "2001:db8::1"),
        (["2001:DB8:0:0::1"], "2001:db8::1"),
        (["[2001:db8::1]"], "2001:db8::1"),
        (["[2001:db8::1]:443"], "2001:db8::1"),
        (['"[2001:db8::1]:443"'], "2001:db8::1"),
        (["::ffff:203.0.113.5"], "203.0.113.5"),
        # What a client wrote stands on the left of what the first trusted proxy saw.
        (["198.51.100.1, 203.0.113.5"], "203.0.113.5"),
        (["10.9.9.9, 203.0.113.5"], "203.0.113.5"),
        (['"198.51.100.1, 203.0.113.5'], "203.0.113.5"),
        (["198.51.100.1", "203.0.113.5"], "203.0.113.5"),
        (["198.51.100.1,", ",203.0.113.5, ,"], "203.0.113.5"),
        # Over trusted hops, of either kind of address.
        (["203.0.113.5, 10.2.3.4, 192.0.2.7, 2001:db8:f::2"], "203.0.113.5"),
        (["203.0.113.5, ::ffff:10.2.3.4"], "203.0.113.5"),
        (["203.0.113.5, 192.0.2.8"], "192.0.2.8"),
        # All are trusted: the one furthest away.
        (["10.2.3.4, 10.5.6.7"], "10.2.3.4"),
        # An element that is no address ends the list at the hop that wrote it.
        (["203.0.113.5, unknown"], PEER),
        (["203.0.113.5, nonsense, 10.2.3.4"], "10.2.3.4"),
        (["203.0.113.5, _hidden, 10.2.3.4"], "10.2.3.4"),
        (["203.0.113"], PEER),
        (["203.0.113.005"], PEER),
        (["203.0.113.5:"], PEER),
        (["203.0.113.5:123456"], PEER),
        (["[203.0.113.5]"], "203.0.113.5"),
        (["[2001:db8::1"], PEER),
        (["fe80::1%eth0"], PEER),
        (["203.0.113.5;x"], PEER),
        (["<script>"], PEER),
        (["\u0662\u0660\u0663.0.113.5"], PEER),
    ],
)
def test_x_forwarded_for(values: list[str], client: str) -> None:
    """The last address that is no trusted proxy's is the client's."""
    assert PLAIN.client_of(PEER, values) == client


@pytest.mark.parametrize(
    ("values", "client"),
    [
        ([], PEER),
        (["for=203.0.113.5"], "203.0.113.5"),
        (["For=203.0.113.5;proto=https;by=10.0.0.1"], "203.0.113.5"),
        (["proto=https; for=203.0.113.5"], "203.0.113.5"),
        (['for="203.0.113.5:4711"'], "203.0.113.5"),
        (['for="[2001:db8::1]"'], "2001:db8::1"),
        (['for="[2001:db8::1]:_port"'], "2001:db8::1"),
        (["for=198.51.100.1, for=203.0.113.5"], "203.0.113.5"),
        (["for=198.51.100.1", "for=203.0.113.5, for=10.3.3.3"], "203.0.113.5"),
        # Quotes that a client left open, and its text between a proxy's quotes.
        (['for="198.51.100.1, for=203.0.113.5'], "203.0.113.5"),
        (['for="198.51.100.1, for="[2001:db8::1]"'], "2001:db8::1"),
        (['for=203.0.113.5;host="a, for=198.51.100.1, b"'], "203.0.113.5"),
        (['for=203.0.113.5;host="a;for=198.51.100.1"'], "203.0.113.5"),
        (['for=203.0.113.5;host="for=198.51.100.1"'], "203.0.113.5"),
        (['for=203.0.113.5;host="a\\", for=198.51.100.1;x=\\"b"'], PEER),
        # No address.
        (["for=unknown"], PEER),
        (["for=_hidden, for=10.3.3.3"], "10.3.3.3"),
        (["by=203.0.113.5"], PEER),
        (["for=203.0.113.5;for=198.51.100.1"], PEER),
        (["for=2001:db8::1"], PEER),
        (["for = 203.0.113.5"], PEER),
        (["203.0.113.5"], PEER),
        (["for="], PEER),
        (['for=""'], PEER),
    ],
)
def test_forwarded(values: list[str], client: str) -> None:
    """RFC 7239's header is read by its grammar; text of a client inside an element names nobody."""
    assert RFC_7239.client_of(PEER, values) == client


@pytest.mark.parametrize("peer", ["203.0.113.9", "11.0.0.1", "2001:db8:e::1", "", "nonsense"])
def test_anybody_elses_word_is_ignored(peer: str) -> None:
    """From a peer that is not trusted, and with no proxies at all, the peer is the client; a trusted one is the
    control."""
    for trusting, value in ((PLAIN, "203.0.113.5"), (RFC_7239, "for=203.0.113.5")):
        assert trusting.client_of(peer, [value]) == peer
        assert trusting.client_of(PEER, [value]) == "203.0.113.5"
    assert not PLAIN.trusts(peer)
    assert TrustedProxies().client_of(PEER, ["203.0.113.5"]) == PEER


def test_one_source_counts() -> None:
    """Which header is asked for, and whether connections are announced, is one choice."""
    announced = TrustedProxies.of(NETWORKS, PROXY_PROTOCOL)
    assert (PLAIN.header, RFC_7239.header, announced.header) == ("x-forwarded-for", "forwarded", "")
    assert announced.announces(PEER) and not announced.forwards(PEER) and not announced.announces("11.0.0.1")
    assert PLAIN.forwards(PEER) and not PLAIN.announces(PEER) and not PLAIN.forwards("11.0.0.1")
    assert announced.client_of(PEER, ["203.0.113.5"]) == PEER


@pytest.mark.parametrize("peer", ["10.0.0.1", "::ffff:10.0.0.1", "2001:db8:f::9", "2001:db8:f::9%3"])
def test_a_proxy_is_known_however_its_address_is_written(peer: str) -> None:
    """An IPv4 proxy on an IPv6 socket, or one with a zone, is the same proxy."""
    assert PLAIN.trusts(peer)


def test_a_long_list_is_read_from_its_right_end() -> None:
    """So many hops and no more: an element that the limit cuts is not read as another address."""
    hops = ", ".join(["10.2.3.4"] * (MAX_LIST_CHARS // 10 - 2))
    assert PLAIN.client_of(PEER, [f"203.0.113.5, {hops}"]) == "203.0.113.5"
    for extra in range(12):
        cut = f"203.0.113.5, {hops}".rjust(MAX_LIST_CHARS + extra, "1")
        assert PLAIN.client_of(PEER, [cut]) in ("203.0.113.5", "10.2.3.4")
    assert PLAIN.client_of(PEER, ["203.0.113.5, " + "10.2.3.4, " * 10_000]) == "10.2.3.4"


ADDRESSES = st.ip_addresses().map(lambda one: getattr(one, "ipv4_mapped", None) or one)


@given(
    forged=st.text(alphabet=st.characters(min_codepoint=0x20, max_codepoint=0xFF), max_size=60),
    client=ADDRESSES.filter(lambda one: not PLAIN.trusts(str(one))),
    hops=st.lists(st.sampled_from(["10.2.3.4", "192.0.2.7"]), max_size=4),
)
def test_no_text_of_a_client_changes_what_the_proxies_saw(forged: str, client: object, hops: list[str]) -> None:
    """Whatever stands on the left of the proxies' own elements, the client is the one that the first of them saw."""
    plain = ", ".join([forged, str(client), *hops])
    assert PLAIN.client_of(PEER, [plain]) == str(client)
    bracketed = f"[{client}]" if ":" in str(client) else str(client)
    elements = [forged, f'for="{bracketed}";proto=https', *(f"for={hop}" for hop in hops)]
    assert RFC_7239.client_of(PEER, [", ".join(elements)]) == str(client)
    assert RFC_7239.client_of(PEER, elements) == str(client)


@given(text=st.text(alphabet='0123456789abcdef.:,;="[]\\ \tfor_', max_size=80))
def test_any_list_gives_an_address(text: str) -> None:
    """No list raises, and what is given is an address in its shortest form."""
    for trusting in (PLAIN, RFC_7239):
        client = trusting.client_of(PEER, [text])
        assert str(ipaddress.ip_address(client)) == client


def test_networks_that_are_none_are_refused() -> None:
    """A word or a network with bits set behind its prefix is a mistake, not a guess."""
    for text in ("proxy", "10.0.0.1/8", "10.0.0.0/33"):
        with pytest.raises(ValueError, match=r"proxy|10\.0\.0"):
            TrustedProxies.of([text], X_FORWARDED_FOR)


def read(data: bytes, step: int = MAX_HEADER_BYTES) -> tuple[str | None, bytes]:
    """The address in a header, and the bytes behind it; fed as a socket would, at most ``step`` bytes each time."""
    header = ProxyHeader()
    while header.missing:
        part, data = data[: min(step, header.missing)], data[min(step, header.missing) :]
        if not part:
            raise EOFError
        header.feed(part)
    return header.address(), data


@pytest.mark.parametrize("step", [1, 7, MAX_HEADER_BYTES])
@pytest.mark.parametrize(
    ("data", "client"),
    [
        (raw.header_of("203.0.113.5"), "203.0.113.5"),
        (raw.header_of("2001:db8::1"), "2001:db8::1"),
        (raw.header_of("::ffff:203.0.113.5"), "203.0.113.5"),
        (raw.header_of("203.0.113.5", b"\x03\x00\x04abcd" * 20), "203.0.113.5"),
        (raw.header_of("203.0.113.5", bytes(MAX_HEADER_BYTES - START_BYTES - 12)), "203.0.113.5"),
        (raw.raw_header(raw.LOCAL, raw.UNSPEC, b""), None),
        (raw.raw_header(raw.LOCAL, raw.TCP4, raw.header_of("203.0.113.5")[START_BYTES:]), None),
        (raw.raw_header(raw.LOCAL, 0x77, b"anything"), None),
        (raw.raw_header(raw.PROXY, raw.UNSPEC, b""), None),
        (raw.raw_header(raw.PROXY, raw.UNSPEC, b"ignored"), None),
        (raw.raw_header(raw.PROXY, raw.UNIX, bytes(216)), None),
    ],
)
def test_proxy_headers(data: bytes, client: str | None, step: int) -> None:
    """Addresses of both kinds, connections of the proxy's own, extensions; cut anywhere, and not a byte too far."""
    assert read(data + b"\x16\x03\x01", step) == (client, b"\x16\x03\x01")


@pytest.mark.parametrize(
    ("data", "least"),
    [
        (b"GET / HTTP/1.1\r\n", 1),
        (b"\x16\x03\x01\x02\x00", 1),
        (b"PROXY TCP4 203.0.113.5 10.0.0.1 1 2\r\n", 1),
        (b"\r\n\r\n\0\r\nQUIT\r", 12),
        (raw.raw_header(0x11, raw.TCP4, bytes(12)), START_BYTES),
        (raw.raw_header(0x22, raw.TCP4, bytes(12)), START_BYTES),
        (raw.raw_header(raw.PROXY, raw.UDP4, bytes(12)), START_BYTES),
        (raw.raw_header(raw.PROXY, 0x41, bytes(300)), START_BYTES),
        (raw.raw_header(raw.PROXY, raw.TCP4, bytes(11)), START_BYTES),
        (raw.raw_header(raw.PROXY, raw.TCP6, bytes(35)), START_BYTES),
        (raw.raw_header(raw.PROXY, raw.UNIX, bytes(215)), START_BYTES),
        (raw.raw_header(raw.LOCAL, raw.UNSPEC, b"", length=MAX_HEADER_BYTES - START_BYTES + 1), START_BYTES),
        (raw.raw_header(raw.PROXY, raw.TCP4, b"", length=65_535), START_BYTES),
    ],
)
def test_what_is_no_proxy_header_is_refused(data: bytes, least: int) -> None:
    """Version 1, other protocols, commands and families, too short or too long: refused with the first byte that shows
    it, before any of the announced length is waited for."""
    for step in (1, MAX_HEADER_BYTES):
        with pytest.raises(ProxyHeaderError):
            read(data, step)
    header = ProxyHeader()
    for place in range(least - 1):
        header.feed(data[place : place + 1])
    with pytest.raises(ProxyHeaderError):
        header.feed(data[least - 1 : least])


@given(st.binary(max_size=60), st.booleans())
def test_any_bytes_are_a_header_or_refused(data: bytes, signed: bool) -> None:
    """Nothing but the error comes of any bytes, and what is accepted has an address or none."""
    try:
        client, _ = read((raw.SIGNATURE if signed else b"") + data)
    except (ProxyHeaderError, EOFError):
        return
    assert client is None or ipaddress.ip_address(client)
