"""The console's fleet: hosts that are asked over real sockets, and what is made of their answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import httpx
import pytest
from cryptography import x509

from appliance.common.clocks import Clocks
from appliance.common.fleet_file import FleetHost
from appliance.common.fleet_hosts import HostState
from appliance.common.fleet_status import FleetStatus
from appliance.common.json_codec import encode
from appliance.gateway.console import fleet as module
from appliance.gateway.console.fleet import ConsoleFleet, ask_host
from appliance.gateway.console.fleet_look import FleetLook, fleet_look
from appliance.gateway.front.http_get import get
from tests.appliance.admin_server import STATUS, FakeAppliance, serve_admin
from tests.appliance.gateway.console.conftest import Console
from tests.appliance.gateway.console.fleet_pictures import OTHER, SAME, TROUBLED, host
from tests.appliance.gateway.front.pki import Authority

MODELS = {"athanor-mini": "a" * 64}


def listed(folder: Path, **hosts: str) -> Path:
    """A list of hosts by their admin addresses."""
    path = folder / "fleet.yaml"
    path.write_text(json.dumps({"hosts": [{"name": name, "admin": admin} for name, admin in hosts.items()]}))
    return path


async def look(path: Path | None) -> FleetLook:
    """One look of a gateway with this list."""
    return await ConsoleFleet(lambda: STATUS, path).look("p1")


async def test_hosts_are_asked_at_their_sockets(tmp_path: Path) -> None:
    """One at a Unix socket, one on loopback, and one that is not there: state, policy and what differs, in the order of
    the list. The list is read anew for each look."""
    one, other = FakeAppliance(), FakeAppliance()
    one.status = replace(STATUS, fleet=FleetStatus(key="f00d", models=MODELS, kv_keys="held", role="decode"))
    other.status = replace(one.status, fleet=FleetStatus(key="beef", models=MODELS, draining=True, shreds=1))
    with serve_admin(one, tmp_path / "a.sock"), serve_admin(other) as address:
        path = listed(tmp_path, a="unix:a.sock", b=address, c="unix:nothing.sock")
        found = await look(path)
        assert [(row.name, row.state, row.role) for row in found.hosts] == [
            ("a", "serving", "decode"),
            ("b", "draining", "mixed"),
            ("c", "silent", ""),
        ]
        assert found.hosts[2].problem == "no such file or directory"
        assert [row.kv_keys for row in found.hosts] == ["held", "", ""]
        assert [row.shreds for row in found.hosts] == [0, 1, 0]
        assert [one.what for one in found.differences] == ["fleet key"]
        assert found.page == "p1" and found.listed and not found.problem
        listed(tmp_path, b=address)
        assert [row.name for row in (await look(path)).hosts] == ["b"]


async def test_a_host_is_believed_by_its_certificate(tmp_path: Path) -> None:
    """Over https a host of another authority is no answer, however well it answers. Control: with its authority."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n{}")
            await writer.drain()
        writer.close()

    own, foreign = Authority.create("own"), Authority.create("foreign")
    for name, authority in (("own", own), ("foreign", foreign)):
        (tmp_path / f"{name}.ca").write_bytes(authority.pem)
    key, certificate = own.issue(x509.DNSName("localhost"))
    (tmp_path / "h.key").write_bytes(key)
    (tmp_path / "h.pem").write_bytes(certificate)
    for name, told in (("own", "is not understood"), ("foreign", "certificate")):
        problem = await asked_over_tls(tmp_path, name, answer)
        assert told in problem.lower(), name


async def asked_over_tls(
    folder: Path, trusted: str, answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
) -> str:
    """The problem of a look at a host that has the folder's certificate, by who trusts an authority."""
    import ssl

    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(folder / "h.pem", folder / "h.key")
    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=serving)
    port = server.sockets[0].getsockname()[1]
    (folder / "fleet.yaml").write_text(
        json.dumps(
            {
                "hosts": [{"name": "a", "admin": f"https://localhost:{port}"}],
                "tls": {"ca": f"{trusted}.ca", "certificate": "h.pem", "key": "h.key"},
            }
        )
    )
    async with server:
        (row,) = (await look(folder / "fleet.yaml")).hosts
    return row.problem


@contextlib.asynccontextmanager
async def liar(answer: bytes, wait_s: float = 0.0) -> AsyncIterator[str]:
    """A host that answers anything with these bytes, after a while; gives its address."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            await asyncio.sleep(wait_s)
            writer.write(answer)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


HEAD = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"SSH-2.0-x\r\n", "the answer is not used: it is no whole answer of HTTP"),
        (b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\n\r\n", "the answer is not used: its status is 302"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{}", "the answer is not used: it is no whole answer of HTTP"),
        (HEAD + b"[" * 100_000, "the answer is not understood"),
        (HEAD + b'{"version": 1}', "the answer is not understood"),
        (HEAD + b"\xff", "the answer is not understood"),
        (HEAD + b" " * (5 << 20), "the answer is not used: it has more than"),
    ],
)
async def test_a_host_that_lies_is_a_row_with_a_problem(answer: bytes, problem: str) -> None:
    """No answer of a host breaks the page, leads elsewhere, or takes more than a bound."""
    async with liar(answer) as address:
        found = await ask_host(FleetHost(name="a", admin=address), None)
    assert found.state == "silent"
    assert found.problem.startswith(problem)


def lie(**told: object) -> bytes:
    """A status whose load, or part in the fleet, is changed."""
    values = json.loads(json.dumps(encode(STATUS)))
    for part in ("load", "fleet"):
        values[part] |= {name: value for name, value in told.items() if name in values[part]}
    return json.dumps(values).encode()


@pytest.mark.parametrize(
    "told",
    [
        {"kv_free": 10**400, "kv_blocks": 3},
        {"kv_free": -1, "kv_blocks": 3},
        {"running": 10**400},
        {"shreds": -1},
        {"models": {f"m{number}": "" for number in range(1_000)}},
        {"hosts": [f"h{number}" for number in range(1_000)]},
    ],
)
async def test_a_host_that_lies_spoils_no_other_row(told: dict[str, object], tmp_path: Path) -> None:
    """One that was taken over, and tells of numbers that nothing divides, or of more than it can have: its row has the
    problem, and the look is there. Control: without the lie its row is as the other's."""
    with serve_admin(FakeAppliance(), tmp_path / "a.sock"):
        for body, state in ((lie(**told), "silent"), (lie(), "serving")):
            async with liar(HEAD + body) as address:
                found = await look(listed(tmp_path, a="unix:a.sock", b=address))
            assert [(row.name, row.state) for row in found.hosts] == [("a", "serving"), ("b", state)]
            json.dumps(encode(found), allow_nan=False)


async def test_an_answer_of_tiny_pieces_holds_no_other_work_up() -> None:
    """An answer in chunks of one byte, all of which are here already: others get a turn for each of them."""
    reader, turns = asyncio.StreamReader(), 0
    pieces = 5_000
    reader.feed_data(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * pieces + b"0\r\n\r\n")
    reader.feed_eof()

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    class Nowhere:
        """A connection that takes what is written."""

        def write(self, data: bytes) -> None:
            """Take it."""

    work = asyncio.create_task(others())
    try:
        body = await get(reader, cast(asyncio.StreamWriter, Nowhere()), "h", "/status", 1 << 20)
    finally:
        work.cancel()
    assert len(body) == pieces and turns >= pieces


async def test_a_host_that_hangs_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given up after the patience with one host; the other's row is there."""
    monkeypatch.setattr(module, "ANSWER_S", 0.3)
    with serve_admin(FakeAppliance(), tmp_path / "a.sock"):
        async with liar(HEAD, wait_s=30) as address:
            found = await look(listed(tmp_path, a="unix:a.sock", b=address))
    assert [(row.name, row.state) for row in found.hosts] == [("a", "serving"), ("b", "silent")]
    assert found.hosts[1].problem == "no answer within 0.3 s"


async def test_one_answer_serves_all_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that ask together, and those after them for a while, have hosts asked once; one that leaves spoils nothing
    for the others. Later they are asked again."""
    asked = 0

    async def counted(host: FleetHost, _: object) -> HostState:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0.05)
        return HostState(name=host.name, admin=host.admin, status=STATUS)

    monkeypatch.setattr(module, "ask_host", counted)
    now = 0.0
    clocks = Clocks(monotonic=lambda: now)
    source = ConsoleFleet(lambda: STATUS, listed(tmp_path, a="unix:a.sock", b="unix:b.sock"), clocks)
    pages = [asyncio.create_task(source.look(f"p{number}")) for number in range(20)]
    await asyncio.sleep(0.01)
    pages[0].cancel()
    found = await asyncio.gather(*pages[1:])
    assert [one.page for one in found] == [f"p{number}" for number in range(1, 20)]
    await source.look("p")
    assert asked == 2
    now = module.KEPT_S
    await source.look("p")
    assert asked == 4


async def test_without_a_list_there_is_this_host() -> None:
    """Its own status, asked of nobody; nothing is said of models that are pinned nowhere."""
    found = await look(None)
    assert [(row.name, row.state) for row in found.hosts] == [("this host", "serving")]
    assert not found.listed and found.unknown == ()


async def test_a_list_that_cannot_be_used_is_a_problem(tmp_path: Path) -> None:
    """One that is not there, and one with a wrong line: the page has the reason, and no host is asked."""
    for text, words in ((None, "no such file"), ("hosts: [{name: a, admin: ftp://x}]", "is no admin address")):
        path = tmp_path / "fleet.yaml"
        if text is not None:
            path.write_text(text)
        found = await look(path)
        assert words in found.problem and found.hosts == ()


def test_what_differs_is_marked_on_the_few() -> None:
    """The host with another policy alone; where no value is that of most, all; where there is one host, none."""
    found = fleet_look(TROUBLED, now=0.0, version="1", listed=True)
    assert [row.differs for row in found.hosts] == [(), (), ("policy",), (), ()]
    pair = fleet_look((host("a", SAME), host("b", OTHER)), now=0.0, version="1", listed=True)
    assert [row.differs for row in pair.hosts] == [("policy",), ("policy",)]
    assert fleet_look((host("a"),), now=0.0, version="1", listed=True).differences == ()


def test_what_hosts_say_is_bounded() -> None:
    """A host that says a megabyte of everything makes no large look."""
    long = "x" * (1 << 20)
    models = {f"{long}{number}": long for number in range(90)}
    lie = host("a", long, role=long, store=long, kv_keys=long, key=long, models=models)
    found = fleet_look((lie, host("b"), replace(TROUBLED[-1], problem=long)), now=0.0, version="1", listed=True)
    assert len(repr(found)) < 200_000
    assert found.hosts[0].kv_keys == ""


def test_the_route_is_the_page_s_alone(console: Console) -> None:
    """The look comes as JSON with the console's headers; another origin gets nothing, and nothing else is taken."""
    url = f"{console.url}/console/fleet"
    answer = httpx.get(url)
    assert [row["name"] for row in answer.json()["hosts"]] == ["host-a", "host-b", "host-c"]
    assert answer.headers["cache-control"] == "no-store"
    assert httpx.get(url, headers={"sec-fetch-site": "cross-site"}).status_code == 403
    assert httpx.post(url).status_code == 405
