"""Turns of TLS handshakes: strangers share one rate, networks take turns, and tenants do not wait for strangers."""

from __future__ import annotations

import asyncio
import ssl
import time

import pytest

from appliance.common.listen_config import TlsConfig
from appliance.gateway.front.allowance import MOST_ADDRESSES, Rate
from appliance.gateway.front.handshakes import STRANGERS, Handshakes
from tests.appliance.gateway.front.pki import Authority
from tests.appliance.gateway.front.support import serving

SLOW = Rate(burst=1, per_s=20)
NEVER = Rate(burst=1, per_s=1e-6)


def turns(strangers: Rate = SLOW, known: Rate = NEVER) -> Handshakes:
    """A queue with rates that a test can wait for."""
    return Handshakes(time.monotonic, strangers, known)


async def begin(queue: Handshakes, begun: list[str], *networks: str) -> list[asyncio.Task[None]]:
    """Let handshakes of these networks ask in this order; each writes its network when it begins."""

    async def one(network: str) -> None:
        await queue.turn(network)
        begun.append(network)

    tasks = [asyncio.ensure_future(one(network)) for network in networks]
    await asyncio.sleep(0)
    return tasks


async def test_a_newcomer_passes_a_flood() -> None:
    """Of ten handshakes of one network and one of another that came last, the other's is the next that begins."""
    queue, begun = turns(), []
    flood = await begin(queue, begun, *["a"] * 10)
    newcomer = await begin(queue, begun, "b")
    assert begun == ["a"] and queue.waiting == 10 and queue.delayed == 10
    await asyncio.wait_for(newcomer[0], 1.0)
    assert begun == ["a", "b"]
    for task in flood:
        task.cancel()
    await asyncio.gather(*flood, return_exceptions=True)
    assert queue.waiting == 0


async def test_networks_take_turns() -> None:
    """Three networks that each ask three times begin one after the other, whatever the order of asking."""
    queue, begun = turns(Rate(burst=1, per_s=200)), []
    tasks = await begin(queue, begun, *"aaabbbccc")
    await asyncio.wait_for(asyncio.gather(*tasks), 2.0)
    assert sorted(begun[:3]) == sorted(begun[3:6]) == sorted(begun[6:]) == ["a", "b", "c"]


async def test_strangers_share_one_rate() -> None:
    """Handshakes of as many networks as handshakes begin no faster than the rate allows."""
    queue, begun = turns(Rate(burst=4, per_s=100)), []
    start = time.monotonic()
    await asyncio.gather(*await begin(queue, begun, *map(str, range(24))))
    assert time.monotonic() - start >= 20 / 100 - 0.01 and len(begun) == 24


async def test_a_network_with_a_credential_waits_for_nobody() -> None:
    """Behind a flood that uses up the rate, a known network's handshake begins at once; a stranger's (control) not."""
    queue, begun = turns(NEVER, Rate(burst=2, per_s=1e-6)), []
    queue.credential("tenant")
    tasks = await begin(queue, begun, "a", "a", "tenant", "tenant", "tenant", "b")
    assert begun == ["a", "tenant", "tenant"] and queue.waiting == 3
    queue.credential("tenant")
    await asyncio.sleep(0)
    assert begun[3:] == ["tenant"] and queue.waiting == 2, "its third waited until one of the first two was paid back"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_the_first_credential_lets_the_rest_of_a_pool_begin() -> None:
    """A client that opens ten connections at once gets all of them as soon as the first has shown a credential."""
    queue, begun = turns(NEVER, Rate(burst=16, per_s=1e-6)), []
    tasks = await begin(queue, begun, *["pool"] * 10)
    assert begun == ["pool"]
    queue.credential("pool")
    await asyncio.wait_for(asyncio.gather(*tasks), 1.0)


async def test_whoever_leaves_is_forgotten() -> None:
    """Cancelled handshakes leave nothing in the queue, and take no turn from those that stay."""
    queue, begun = turns(), []
    tasks = await begin(queue, begun, "a", *["b"] * 50, "c")
    for task in tasks[1:51]:
        task.cancel()
    await asyncio.gather(*tasks[1:51], return_exceptions=True)
    assert queue.waiting == 1
    await asyncio.wait_for(tasks[51], 0.5)
    assert begun == ["a", "c"] and queue.waiting == 0


async def test_a_turn_that_was_just_cancelled_is_passed_over() -> None:
    """Whoever is cancelled in the very moment in which it would be its turn costs nobody else a turn."""
    queue, begun = turns(Rate(burst=1, per_s=50)), []
    tasks = await begin(queue, begun, "a", "b", "b", "c")
    asyncio.get_running_loop().call_at(queue._timer.when() - 1e-4, lambda: [tasks[1].cancel(), time.sleep(0.01)])
    await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 1.0)
    assert begun == ["a", "b", "c"] and queue.waiting == 0


async def test_remembered_networks_are_bounded() -> None:
    """Of more networks than are remembered the first is a newcomer again; the last is known."""
    queue = turns(Rate(burst=1e9, per_s=1.0))
    for number in range(MOST_ADDRESSES + 1):
        queue.credential(str(number))
        await queue.turn(f"stranger-{number}")
    assert len(queue._known) == len(queue._served) == MOST_ADDRESSES
    assert "0" not in queue._known and str(MOST_ADDRESSES) in queue._known


@pytest.fixture
def tls(tmp_path):
    """Files of a listener's certificate, and a context that trusts it."""
    authority = Authority.create("handshakes")
    key, certificate = authority.issue()
    for name, text in (("key", key), ("certificate", certificate), ("authority", authority.pem)):
        (tmp_path / name).write_bytes(text)
    context = ssl.create_default_context(cafile=str(tmp_path / "authority"))
    context.check_hostname = False
    return TlsConfig(certificate=tmp_path / "certificate", key=tmp_path / "key"), context


async def test_a_flood_of_handshakes_is_held_to_the_rate(tls) -> None:
    """Over real sockets, 100 strangers that ask for a handshake at once get no more than the rate; a tenant that is
    known by its key has its own meanwhile (the control: most of the flood still waits)."""
    config, context = tls
    async with serving(tls=config) as running:

        async def shake(host: str, request: bytes = b"") -> bytes:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1",
                running.front_ends.http_port,
                ssl=context,
                server_hostname="",
                local_addr=(host, 0),
                ssl_handshake_timeout=20.0,
            )
            writer.write(request)
            answer = await reader.readline() if request else b""
            writer.transport.abort()
            return answer

        request = f"GET /v1/models HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {running.key}\r\n\r\n".encode()
        assert (await shake("127.0.0.2", request)).split()[1] == b"200"
        start = time.monotonic()
        flood = [asyncio.ensure_future(shake("127.0.0.3")) for _ in range(100)]
        await asyncio.sleep(0.3)
        assert (await shake("127.0.0.2", request)).split()[1] == b"200"
        tenant_s, still = time.monotonic() - start - 0.3, sum(not one.done() for one in flood)
        await asyncio.gather(*flood)
        assert still > 25 and tenant_s < 0.5
        assert time.monotonic() - start >= (100 - STRANGERS.burst) / STRANGERS.per_s - 0.1
