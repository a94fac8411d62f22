"""Connections of one address and of one tenant: bounded, counted out again, and apart from each other's."""

from __future__ import annotations

import asyncio

from appliance.gateway.front.connections import Connections, network_of
from tests.appliance.gateway.front.support import serving


def test_counts_are_by_kind_and_name() -> None:
    """What one may hold is neither a neighbour's nor that of another kind; who leaves makes room."""
    counts = Connections(2)
    assert counts.enter("tenant", "a") and counts.enter("tenant", "a")
    assert not counts.enter("tenant", "a")
    assert counts.enter("tenant", "b") and counts.enter("address", "a")
    counts.leave("tenant", "a")
    assert counts.enter("tenant", "a")


def test_a_refused_connection_takes_no_place() -> None:
    """One over its address's bound, or over all, holds nothing; a released place is free again, and only once."""
    counts = Connections(2, total=3)
    first, second, third = counts.admit("a"), counts.admit("a"), counts.admit("b")
    assert first and second and third
    assert counts.admit("a") is None and counts.admit("c") is None
    first.release()
    first.release()
    assert counts.admit("a") is not None
    assert counts.admit("c") is None


def test_ipv6_is_counted_by_network() -> None:
    """Addresses of one /64 are one; IPv4 stays apart, also where it is written as IPv6."""
    assert network_of("2001:db8:1:2::1") == network_of("2001:db8:1:2:ffff::9") == "2001:db8:1:2::/64"
    assert network_of("2001:db8:1:3::1") != network_of("2001:db8:1:2::1")
    assert network_of("fe80::1%eth0") == "fe80::/64"
    assert network_of("::ffff:10.0.0.1") == network_of("10.0.0.1") == "10.0.0.1"
    assert network_of("10.0.0.2") != network_of("10.0.0.1")


async def ask(
    port: int, key: str, address: str = "127.0.0.1"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes]:
    """One request from this address on a connection that is kept; gives the status line too."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
    writer.write(f"GET /v1/models HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {key}\r\n\r\n".encode())
    return reader, writer, await reader.readline()


async def test_one_address_cannot_take_all_connections() -> None:
    """One more than it may hold is closed without an answer; after one has left, the next is served."""
    async with serving(max_connections_each=3) as running:
        port = running.front_ends.http_port
        held = [await ask(port, running.key) for _ in range(3)]
        assert all(status.startswith(b"HTTP/1.1 200") for _, _, status in held)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await reader.read() == b""
        writer.close()
        held[0][1].close()
        await held[0][1].wait_closed()
        async with asyncio.timeout(20):
            while not (await ask(port, running.key))[2]:
                await asyncio.sleep(0.01)


async def test_a_tenant_with_too_many_connections_is_told() -> None:
    """Over the tenant's bound, from whatever addresses, the answer is 429; another tenant is served."""
    async with serving(max_connections_each=2) as running:
        port = running.front_ends.http_port
        held = [await ask(port, running.key, f"127.0.0.{number}") for number in (1, 2, 3)]
        assert [status.split()[1] for _, _, status in held] == [b"200", b"200", b"429"]
        held.append(await ask(port, running.other_key, "127.0.0.4"))
        assert held[-1][2].split()[1] == b"200"
