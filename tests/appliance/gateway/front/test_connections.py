"""Connections of one address and of one tenant: bounded, counted out again, and apart from each other's."""

from __future__ import annotations

import asyncio
import socket

from appliance.gateway.front.connections import Connections, Places, network_of
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
    """One over its address's bound holds nothing; a released place is free again, and only once."""
    places = Places(2, total=4, strangers=3)
    first, second, third = places.admit("a"), places.admit("a"), places.admit("b")
    assert first and second and third
    assert places.admit("a") is None and places.held == 3
    first.release()
    first.release()
    assert places.admit("a") is not None and places.held == 3


def test_the_oldest_stranger_of_the_largest_holder_makes_room() -> None:
    """Where strangers hold their share, whoever holds most loses its oldest connection; a newcomer is admitted."""
    places, closed = Places(8, total=8, strangers=6), []
    slots = {name: places.admit(name[0]) for name in ("a1", "a2", "a3", "a4", "b1", "b2")}
    for name, slot in slots.items():
        slot.on_evicted = lambda name=name: closed.append(name)
    assert closed == [] and places.strangers == 6
    assert places.admit("c") is not None and closed == ["a1"]
    assert places.admit("d") is not None and closed == ["a1", "a2"]
    assert places.strangers == 6 and places.held == 6 and places.evicted == 2


def test_a_flood_closes_its_own_connections() -> None:
    """However many one address opens, the connections of others stay."""
    places, closed = Places(100, total=8, strangers=6), []
    other = places.admit("b")
    other.on_evicted = lambda: closed.append("b")
    for _ in range(50):
        slot = places.admit("a")
        slot.on_evicted = lambda: closed.append("a")
    assert set(closed) == {"a"} and places.strangers == 6


def test_a_tenants_connection_is_never_closed_for_a_stranger() -> None:
    """Connections with a credential stay, up to all there are; then a newcomer is refused, until one leaves."""
    places, closed = Places(9, total=4, strangers=3), []
    known = []
    for name in "abcd":
        known.append(places.admit(name))
        known[-1].on_evicted = lambda: closed.append("tenant")
        assert known[-1].claim("t")
    assert places.strangers == 0 and places.held == 4
    assert places.admit("e") is None and closed == []
    known[0].release()
    assert places.admit("e") is not None and places.strangers == 1


def test_a_proxys_connection_counts_to_the_total_alone() -> None:
    """Neither its address nor a tenant has it in its count, and strangers make room for it, not it for them."""
    places, closed = Places(2, total=4, strangers=3), []
    held = [places.admit("p", proxy=True) for _ in range(3)]
    assert all(held) and (places.held, places.strangers) == (3, 0)
    for slot in held:
        slot.on_evicted = lambda: closed.append("proxy")
        assert slot.claim("t") and slot.claim("u")
    stranger = places.admit("a")
    stranger.on_evicted = lambda: closed.append("a")
    held.append(places.admit("p", proxy=True))
    assert closed == ["a"] and (places.held, places.strangers) == (4, 0)
    assert places.admit("p", proxy=True) is None and places.admit("a") is None and places.held == 4
    for slot in held:
        slot.release()
    assert places.held == 0
    known = [places.admit(name) for name in "ab"]
    assert [slot.claim("t") for slot in known] == [True, True], "no claim of a proxy is left behind"


def test_an_assigned_connection_counts_as_its_clients() -> None:
    """A connection that a proxy opened for one client is that client's stranger's connection, bounded as any other."""
    places, closed = Places(2, total=8, strangers=6), []
    slots = [places.admit("p", proxy=True) for _ in range(3)]
    for slot in slots:
        slot.on_evicted = lambda: closed.append("a")
    assert slots[0].assign("a") and slots[1].assign("a") and places.strangers == 2
    assert not slots[2].assign("a"), "as many as one address may have"
    slots[2].release()
    assert (places.held, places.strangers) == (2, 2)
    assert places.admit("a") is None
    for name in "bcdef":
        other = places.admit("p", proxy=True)
        assert other.assign(name) and (other.address, other.network) == (name, name)
    assert closed == ["a"] and places.strangers == 6, "the oldest of the largest holder made room"
    slots[1].release()
    assert places.admit("p", proxy=True).assign("a")


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


async def test_a_connection_that_was_closed_for_a_newcomer_is_never_a_tenants() -> None:
    """Closed in the very turn in which its first request came, a connection counts to nobody afterwards; as often as a
    tenant may hold connections, and once more, and the tenant is served still."""
    places = Places(8, total=8, strangers=1)
    slot = places.admit("a")
    assert slot is not None and places.admit("b") is not None
    assert not slot.claim("tenant"), "it was counted out, so nobody would count the tenant's out"
    async with serving(max_strangers=1, max_connections_each=2) as running:
        port, opened = running.front_ends.http_port, running.front_ends.places["http", ""]
        request = f"GET /v1/models HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {running.key}\r\n\r\n".encode()
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", port)) as first:
                await asyncio.sleep(0.01)
                first.send(request)
                with socket.create_connection(("127.0.0.1", port)):  # both wait at the loop's next turn
                    await asyncio.sleep(0.01)
        assert opened.evicted, "some were closed for the next one"
        async with asyncio.timeout(5):
            while opened.held:
                await asyncio.sleep(0.01)
        assert (await ask(port, running.key))[2].startswith(b"HTTP/1.1 200")


async def test_one_tenant_cannot_hold_all_that_few_descriptors_allow(monkeypatch) -> None:
    """Where fewer connections are affordable than one tenant may hold by the settings, it holds the same part of them,
    half, and another tenant is served."""
    monkeypatch.setattr("appliance.gateway.servers._affordable", lambda wanted, own: (8, own))
    async with serving() as running:
        port = running.front_ends.http_port
        held = [await ask(port, running.key, f"127.0.1.{number}") for number in range(1, 9)]
        assert [status.split()[1] for _, _, status in held] == [b"200"] * 4 + [b"429"] * 4
        assert (await ask(port, running.other_key, "127.0.2.1"))[2].split()[1] == b"200"
