"""The metrics listener over real sockets: what it serves, to whom, and how little a stranger can occupy."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from appliance.common.errors import StartError
from appliance.common.listen_config import ListenConfig
from appliance.common.status import Readiness
from appliance.gateway.console.routes import console_routes
from appliance.gateway.console.runbooks import runbooks_route
from appliance.gateway.telemetry.admin import admin_app
from appliance.gateway.telemetry.loopback import LoopbackOnly
from appliance.gateway.telemetry.scrape import FRESH_S, FRESH_SHARE, RecentScrape, Scrape
from appliance.gateway.watch import operator_server
from appliance.gateway.watch.admin_listener import LIMITS as ADMIN_LIMITS
from appliance.gateway.watch.metrics_listener import LIMITS, read_token, serve_metrics
from appliance.gateway.watch.operator_server import KEEP_ALIVE_S, MAX_HEAD_BYTES, ServerLimits, bind, serving
from tests.appliance.admin_server import FakeAppliance
from tests.appliance.gateway.console.pictures import FakeGateway
from tests.appliance.gateway.telemetry import samples

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "RELOAD")
PAGES = ("/metrics", "/metrics/picker", "/health/ready", "/runbooks")
SERVED = {(method, path) for method in ("GET", "HEAD") for path in PAGES}
TOKEN = "0123456789abcdef0123456789abcdef"
PATIENCE_S = 30.0
"""How long a test waits for what comes at once."""

Fetch = Callable[..., httpx.Response]


@contextlib.asynccontextmanager
async def listening(fake: FakeAppliance, **words: object) -> AsyncIterator[str]:
    """A metrics listener in front of this appliance; gives its URL."""
    listen = ListenConfig.model_validate({"metrics": "127.0.0.1:0", **words})
    parts = fake.parts()
    async with serve_metrics(listen, parts.metrics, parts.refresh, parts.ready, picker) as shown:
        yield shown["metrics"]


@contextlib.asynccontextmanager
async def listening_admin(fake: FakeAppliance) -> AsyncIterator[tuple[str, list[Route]]]:
    """An admin listener with the console in front of it; gives its URL and its routes."""
    gateway = FakeGateway()
    console = console_routes(gateway.look, gateway.traces, gateway.usage, gateway.fleet)
    app = cast(LoopbackOnly, admin_app(fake.parts(), [*console, runbooks_route()]))
    routes = [route for route in cast(Starlette, app._app).routes if isinstance(route, Route)]
    async with serving(app, bind("127.0.0.1:0", "admin", 8), ADMIN_LIMITS) as url:
        yield url, routes


def picker(model: str) -> str | None:
    """The page of a picker for one model, ``m``, and for all."""
    return f"queue_of_{model or 'all'} 1\n" if model in ("", "m") else None


async def fetch(method: str, url: str, **options: object) -> httpx.Response:
    """One request over a connection of its own."""
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        return await client.request(method, url, **options)  # type: ignore[arg-type]  # as httpx has them


async def test_nothing_of_the_admin_listener_is_there_but_metrics() -> None:
    """Every path of the admin listener with every method is 404 or 405 at the metrics listener, and nothing reloads;
    metrics, readiness and the page of the alerts alone are served. Control: at the admin listener every path answers,
    and POST /reload reloads."""
    fake = FakeAppliance()
    async with listening_admin(fake) as (admin, routes), listening(fake) as metrics:
        wanted = samples.answered().summary.request_id
        paths = {route.path.replace("{wanted}", wanted): route for route in routes}
        assert len(paths) >= 9
        for path in (*paths, "/metrics/picker", "/nothing", "/metrics/", "//metrics", "/metrics/../reload"):
            for method in METHODS:
                answer = await fetch(method, metrics + path)
                served = answer.status_code not in (404, 405, 307)
                assert served is ((method, path) in SERVED), (method, path, answer.status_code)
        assert fake.reloads == 0
        for path, route in paths.items():
            if "{" not in path:
                method = "POST" if "POST" in (route.methods or ()) else "GET"
                answer = await fetch(method, admin + path)
                assert answer.status_code < 404, (path, answer.status_code)
        assert fake.reloads == 1
        text = (await fetch("GET", metrics + "/metrics")).text
        assert "athanor_policy_reloads_total" in text
        assert set(text.splitlines()[0]) and text.splitlines()[0].startswith("# HELP")


async def test_readiness_is_that_of_the_appliance() -> None:
    """200 when a request can be served, else 503 with the reason."""
    fake = FakeAppliance()
    async with listening(fake) as url:
        assert (await fetch("GET", url + "/health/ready")).status_code == 200
        fake.not_ready = "no engine is ready"
        answer = await fetch("GET", url + "/health/ready")
        assert (answer.status_code, answer.json()["reason"]) == (503, "no engine is ready")


async def test_a_picker_asks_for_all_models_or_one() -> None:
    """In Prometheus' text format; a model that is not served is 404. With a token the pages need it too."""
    fake = FakeAppliance()
    async with listening(fake) as url:
        every = await fetch("GET", url + "/metrics/picker")
        assert (every.text, every.headers["content-type"].split(";")[0]) == ("queue_of_all 1\n", "text/plain")
        assert (await fetch("GET", url + "/metrics/picker/m")).text == "queue_of_m 1\n"
        assert (await fetch("GET", url + "/metrics/picker/n")).status_code == 404


async def test_without_an_address_there_is_no_listener() -> None:
    """The default is none; nothing is bound and no address is told."""
    parts = FakeAppliance().parts()
    async with serve_metrics(ListenConfig(), parts.metrics, parts.refresh, parts.ready) as shown:
        assert shown == {}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": f"Bearer {TOKEN}"}, 200),
        ({"authorization": f"bearer {TOKEN}"}, 200),
        ({}, 401),
        ({"authorization": f"Bearer {TOKEN}x"}, 401),
        ({"authorization": f"Bearer {TOKEN[:-1]}"}, 401),
        ({"authorization": "Bearer"}, 401),
        ({"authorization": f"Basic {TOKEN}"}, 401),
        ({"authorization": TOKEN}, 401),
    ],
)
async def test_a_token_is_asked_for(tmp_path: Path, headers: dict[str, str], status: int) -> None:
    """With a token file both routes need its token, and a path that does not exist does as well; the page of the alerts
    is for everybody."""
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    async with listening(FakeAppliance(), metrics_token=tmp_path / "token") as url:
        for path in ("/metrics", "/health/ready"):
            answer = await fetch("GET", url + path, headers=headers)
            assert answer.status_code == status
            assert (answer.headers.get("www-authenticate") == "Bearer") is (status == 401)
        assert (await fetch("GET", url + "/reload", headers=headers)).status_code == (404 if status == 200 else 401)
        assert (await fetch("GET", url + "/runbooks", headers=headers)).status_code == 200
        assert (await fetch("GET", url + "/runbooks/", headers=headers)).status_code in (401, 307)


async def test_two_tokens_are_none(tmp_path: Path) -> None:
    """A request that bears the token twice, or beside another, is refused: which of them counts is nobody's guess."""
    (tmp_path / "token").write_text(TOKEN)
    async with listening(FakeAppliance(), metrics_token=tmp_path / "token") as url:
        for other in (TOKEN, "x"):
            pair = [("authorization", f"Bearer {TOKEN}"), ("authorization", f"Bearer {other}")]
            assert (await fetch("GET", url + "/metrics", headers=pair)).status_code == 401


@pytest.mark.parametrize("content", [b"", b"\n", b"short", b"x" * 31, b"x" * 513, b"two words" * 8, b"\xff" * 40])
def test_a_file_without_a_token_ends_the_start(tmp_path: Path, content: bytes) -> None:
    """A token that could be guessed, or that no header can carry, is refused, and so is a file that is not there;
    control: one of hex digits with a line end is read."""
    path = tmp_path / "token"
    with pytest.raises(StartError, match="metrics_token"):
        read_token(path)
    path.write_bytes(content)
    with pytest.raises(StartError, match="openssl rand"):
        read_token(path)
    path.write_text(f"{TOKEN}\n")
    assert read_token(path) == TOKEN.encode()


async def test_on_loopback_a_rebound_name_reaches_nothing(tmp_path: Path) -> None:
    """A page that was tricked by DNS gets 403; beyond loopback a scraper may call this machine by any name."""
    evil = {"host": "evil.example"}
    async with listening(FakeAppliance()) as url:
        assert (await fetch("GET", url + "/metrics", headers=evil)).status_code == 403
        assert (await fetch("GET", url + "/metrics")).status_code == 200
    async with listening(FakeAppliance(), metrics="0.0.0.0:0") as url:
        reached = url.replace("0.0.0.0", "127.0.0.1")
        assert (await fetch("GET", reached + "/metrics", headers=evil)).status_code == 200


async def test_a_unix_socket_serves_and_goes(tmp_path: Path) -> None:
    """Over unix:PATH it answers to the group's processes, and the file is removed at the end."""
    path = tmp_path / "metrics.sock"
    async with listening(FakeAppliance(), metrics=f"unix:{path}") as shown:
        assert shown == f"unix:{path}"
        assert path.stat().st_mode & 0o777 == 0o660
        async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(path))) as client:
            assert (await client.get("http://localhost/metrics")).status_code == 200
    assert not path.exists()


async def test_a_taken_port_is_told() -> None:
    """The message names address and key."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(StartError, match=f"cannot listen for metrics on {address}.*`listen: metrics`"):
            async with listening(FakeAppliance(), metrics=address):
                pass


async def test_connections_are_bounded() -> None:
    """Beyond the bound a connection is closed at once, without an answer; control: once one has ended, the next is
    served."""
    async with listening(FakeAppliance()) as url:
        held = [await connect(url) for _ in range(LIMITS.connections)]
        for _ in range(3):
            assert await until_closed(await connect(url)) == b""
        held.pop()[1].close()
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(httpx.TransportError):
                assert (await fetch("GET", url + "/metrics")).status_code == 200
                break
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        for _, writer in held:
            writer.close()


async def test_a_head_is_bounded() -> None:
    """A head that never ends is refused at its bound; control: one of half of it is served."""
    async with listening(FakeAppliance()) as url:
        ample = {"x-filler": "x" * (MAX_HEAD_BYTES // 2)}
        assert (await fetch("GET", url + "/metrics", headers=ample)).status_code == 200
        reader, writer = await connect(url)
        writer.write(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nx-filler: " + b"x" * (2 * MAX_HEAD_BYTES))
        assert (await until_closed((reader, writer))).startswith(b"HTTP/1.1 400 ")


async def test_a_connection_that_rests_is_kept_behind_an_answer() -> None:
    """For longer than a head may take: a client that asks again over it gets its answer. Control: a connection on which
    nothing was asked is ended after that time."""
    app = cast(ASGIApp, Starlette(routes=[Route("/", lambda _: Response("ok"))]))
    limits = ServerLimits(connections=8, head_s=0.3)
    assert 10 * limits.head_s < KEEP_ALIVE_S
    async with serving(app, bind("127.0.0.1:0", "admin", 8), limits) as url:
        place = urlsplit(url)
        silent, nothing = await asyncio.open_connection(place.hostname, place.port)
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        for _ in range(2):
            writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
            async with asyncio.timeout(PATIENCE_S):
                assert (await reader.readuntil(b"\r\n\r\nok")).startswith(b"HTTP/1.1 200")
                with contextlib.suppress(ConnectionError):
                    assert await silent.read() == b""
            await asyncio.sleep(3 * limits.head_s)
        for one in (writer, nothing):
            one.close()


async def test_a_slow_head_and_a_slow_reader_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence, half a head, also behind an answer, silence there, and an answer that is not read each end the
    connection; control: a peer that reads gets all of a large answer, and an answer without a deadline outlasts one."""
    monkeypatch.setattr(operator_server, "KEEP_ALIVE_S", 1)
    ends = ServerLimits(connections=4, head_s=0.2, answer_s=0.2)
    size = 64 << 20
    async with serving(sending(size), bind("127.0.0.1:0", "metrics", 4), ends) as url:
        assert await until_closed(await connect(url)) == b""
        reader, writer = await connect(url)
        writer.write(b"GET /large HTTP/1.1\r\n")
        assert await until_closed((reader, writer)) == b""
        lazy_reader, lazy = await connect(url)
        lazy.write(b"GET /large HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await asyncio.sleep(2.0)
        assert len(await until_closed((lazy_reader, lazy))) < size
        behind_reader, behind = await connect(url)
        behind.write(b"GET /small HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await until_closed((behind_reader, behind))).endswith(b"small")
        half_reader, half = await connect(url)
        half.write(b"GET /small HTTP/1.1\r\nhost: localhost\r\n\r\nGET /small HT")
        assert (await until_closed((half_reader, half))).endswith(b"small")
    unhurried = ServerLimits(connections=4, head_s=0.2)
    async with serving(sending(size), bind("127.0.0.1:0", "admin", 4), unhurried) as url:
        assert len((await fetch("GET", url + "/large")).content) == size
        assert (await fetch("GET", url + "/late")).text == "late"


def sending(size: int) -> ASGIApp:
    """Application with a large answer, a small one, and one that comes late."""

    async def large(_: object) -> Response:
        return Response(b"x" * size)

    async def small(_: object) -> Response:
        return Response(b"small")

    async def late(_: object) -> Response:
        await asyncio.sleep(0.6)
        return Response(b"late")

    return Starlette(routes=[Route("/large", large), Route("/small", small), Route("/late", late)])


async def connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that has said nothing."""
    parts = urlsplit(url)
    return await asyncio.open_connection(parts.hostname, parts.port)


async def until_closed(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> bytes:
    """What comes until the other side ends the connection, which it must."""
    reader, writer = connection
    found = bytearray()
    try:
        async with asyncio.timeout(PATIENCE_S):
            while piece := await reader.read(1 << 20):
                found += piece
    except ConnectionResetError:
        pass
    finally:
        writer.close()
    return bytes(found)


async def test_a_flood_of_scrapes_renders_once() -> None:
    """Those who ask within the bound get one rendering; behind it there is a new one. One that took long is given for
    a multiple of that time."""
    rendered: list[int] = []
    now, takes_s = 100.0, 0.0
    go = threading.Event()

    def render() -> Scrape:
        nonlocal now
        go.wait(PATIENCE_S)
        now += takes_s
        rendered.append(1)
        return "text/plain", str(len(rendered)).encode()

    recent = RecentScrape(render, lambda: None, lambda: now)
    asking = [asyncio.create_task(recent.get()) for _ in range(50)]
    await asyncio.sleep(0)
    go.set()
    assert {body for _, body in await asyncio.gather(*asking)} == {b"1"}
    now += FRESH_S * 0.9
    assert (await recent.get())[1] == b"1"
    now += FRESH_S * 0.2
    takes_s = 2.0
    assert (await recent.get())[1] == b"2"
    now += takes_s * (FRESH_SHARE - 2)
    assert (await recent.get())[1] == b"2"
    now += takes_s * 2
    assert (await recent.get())[1] == b"3"


async def test_a_failed_rendering_is_not_kept() -> None:
    """The scraper that meets it is answered with 500, the next one is served."""
    good = [False]

    def render(_openmetrics: bool) -> Scrape:
        if not good[0]:
            raise OSError("no")
        return "text/plain", b"1"

    listen = ListenConfig.model_validate({"metrics": "127.0.0.1:0"})
    async with serve_metrics(listen, render, lambda: None, lambda: Readiness(ready=True)) as shown:
        assert (await fetch("GET", shown["metrics"] + "/metrics")).status_code == 500
        good[0] = True
        assert (await fetch("GET", shown["metrics"] + "/metrics")).text == "1"
