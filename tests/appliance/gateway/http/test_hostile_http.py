"""Hostile and broken HTTP over raw sockets: every one is refused, bounded, and harms nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time

import httpx
import pytest

from appliance.common.scopes import Scope
from appliance.gateway.front.auth import Auth
from appliance.gateway.generate_request import Started
from appliance.gateway.http.app import ROUTES
from appliance.gateway.http.head import MAX_HEAD_BYTES, MAX_HEADERS
from tests.appliance.gateway.front.support import MODEL, Running, post, serving, talk, text_script

CHAT = "/v1/chat/completions"
GOOD = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}).encode()


def _status(answer: bytes) -> int:
    found = re.match(rb"HTTP/1\.1 (\d{3}) ", answer)
    return int(found[1]) if found else 0


def _head(running: Running, framing: str) -> bytes:
    """The head of a chat request whose body is still to come."""
    lines = [f"POST {CHAT} HTTP/1.1", "host: a", framing, f"authorization: Bearer {running.key}"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


async def _serves(running: Running) -> None:
    """The positive control: an honest client is still served."""
    answer = await talk(running.front_ends.http_port, post(CHAT, GOOD, running.authorization))
    assert _status(answer) == 200


async def _serves_another(running: Running) -> None:
    """The positive control where the scripted service is held up: a route without it is still served."""
    answer = await talk(
        running.front_ends.http_port, b"GET /health/live HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
    )
    assert _status(answer) == 200


def _path(path: str) -> str:
    path = path.replace("{model:path}", MODEL).replace("{file_id}", f"file-{'0' * 32}")
    return path.replace("{batch_id}", f"batch_{'0' * 32}")


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
@pytest.mark.parametrize("proof", ["none", "wrong", "spoiled", "right"])
async def test_every_route_without_and_with_a_wrong_key(running, route, proof):
    """Only the health routes answer strangers; a wrong key is as good as none; the right one passes."""
    value = {
        "none": None,
        "wrong": "Bearer ath_acme-1_" + "0" * 64,
        "spoiled": f"Bearer {running.key[:-1]}",
        "right": f"Bearer {running.key}",
    }[proof]
    headers = {} if value is None else {"authorization": value}
    async with httpx.AsyncClient(base_url=running.base_url) as client:
        answer = await client.request(route.method, _path(route.path), headers=headers, content=GOOD)
    if route.auth is Auth.PUBLIC:
        assert answer.status_code == 200
    elif proof == "right":
        # Here nothing is kept: files, batches and stored responses are features that are off.
        kept = route.scope in (Scope.BATCHES, Scope.RESPONSES)
        assert answer.status_code in ((403,) if kept else (200, 400))
    else:
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        said = answer.json()["error"]
        assert said.get("code", said["type"]) in ("invalid_api_key", "authentication_error")
        assert running.service.requests == []


@pytest.mark.parametrize(
    ("method", "path", "stranger", "tenant"),
    [
        ("GET", "/", 401, 404),
        ("GET", "/v1", 401, 404),
        ("GET", "/metrics", 401, 404),
        ("GET", "/docs", 401, 404),
        ("POST", "/v1/chat/completions/", 401, 404),
        ("POST", "//v1/chat/completions", 401, 404),
        ("POST", "/V1/chat/completions", 401, 404),
        ("POST", "/v1/responses/resp_1", 401, 405),
        ("GET", "/v1/responses/resp_1/other", 401, 404),
        ("GET", "/v1/chat/completions", 401, 405),
        ("DELETE", "/v1/models", 401, 405),
        ("OPTIONS", "/v1/models", 401, 405),
        ("POST", "/health/live", 401, 405),
        ("GET", "/health/live/../../v1/models", 401, 404),
    ],
)
async def test_unknown_paths_are_denied_by_default(running, method, path, stranger, tenant):
    """A stranger learns nothing of which paths exist; a tenant is told, in JSON."""
    request = f"{method} {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n"
    port = running.front_ends.http_port
    assert _status(await talk(port, (request + "\r\n").encode())) == stranger
    known = await talk(port, f"{request}authorization: Bearer {running.key}\r\n\r\n".encode())
    assert _status(known) == tenant
    assert json.loads(known.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/chat/completions", "take /v1/chat/completions."),
        ("/v1/v1/completions", "take /v1/completions."),
        ("/v1/embeddings/", "take /v1/embeddings."),
        ("/rerank", "take /v1/rerank."),
        ("/v1/moderations", "served are POST /v1/chat/completions, POST /v1/completions"),
        ("/%3Cb%3E", "served are"),
    ],
)
async def test_a_tenant_is_told_the_routes(running, path, told):
    """The one that was meant where a base URL is a little wrong, else all; nothing of the path is repeated."""
    request = f"POST {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\nauthorization: Bearer {running.key}\r\n\r\n"
    answer = await talk(running.front_ends.http_port, request.encode())
    message = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
    assert _status(answer) == 404
    assert told in message
    assert "3Cb" not in message


async def test_health_answers_without_a_key(running):
    """At the address where routers and probes look, as the ready route does."""
    request = b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
    answer = await talk(running.front_ends.http_port, request)
    assert (_status(answer), json.loads(answer.partition(b"\r\n\r\n")[2])) == (200, {"status": "ready"})


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"\xff\xfe", 400),
        (b"[]", 400),
        (b'{"model": "\xff"}', 400),
        (b'{"model": NaN}', 400),
        (b"[" * 100_000, 400),
        (b'{"model": "nope", "messages": [{"role": "user", "content": "x"}]}', 404),
        (b'{"model": "' + MODEL.encode() + b'", "messages": []}', 400),
        (GOOD, 200),
    ],
)
async def test_bad_bodies(running, body, status):
    """Each is answered with a JSON error of its status, in time."""
    answer = await talk(running.front_ends.http_port, post(CHAT, body, running.authorization))
    assert _status(answer) == status
    document = json.loads(answer.partition(b"\r\n\r\n")[2])
    if status != 200:
        assert set(document["error"]) == {"message", "type", "param", "code"}


async def test_an_announced_giant_is_refused_unread(running):
    """Content-length over the limit: 413 before a byte of the body is asked for."""
    answer = await talk(running.front_ends.http_port, _head(running, "content-length: 104857600"))
    assert _status(answer) == 413
    assert b"connection: close" in answer.lower()


async def test_a_streamed_giant_is_refused_without_reading_it_all(running):
    """100 MB in chunks: the answer is 413 and most of the bytes are never taken."""
    sent = 0

    async def flood():
        nonlocal sent
        while sent < 100_000_000:
            sent += 65_536
            yield b" " * 65_536

    async with httpx.AsyncClient(base_url=running.base_url, headers=running.authorization) as client:
        try:
            answer = await client.post(CHAT, content=flood())
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == "payload_too_large"
        except (httpx.WriteError, httpx.ReadError):
            pass  # cut off before it had read the answer: a sender this fast may be
    assert sent < 50_000_000
    (refusal,) = running.service.refusals
    assert refusal[1].wire.http == 413
    await _serves(running)


async def test_a_stranger_cannot_make_us_read_a_body(running):
    """Without a key the body is not read: 401 although nothing of it was sent."""
    head = f"POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-length: 4000000\r\n\r\n"
    begun = time.perf_counter()
    assert _status(await talk(running.front_ends.http_port, head.encode())) == 401
    assert time.perf_counter() - begun < 20.0


async def test_compressed_bodies_are_refused(running):
    """No decompression bomb: the encoding itself is refused."""
    answer = await talk(running.front_ends.http_port, post(CHAT, GOOD, running.authorization, "content-encoding: gzip"))
    assert _status(answer) == 400


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param([b"GET / HTTP/1.1\r\n" + b"x-a: b\r\n" * (MAX_HEADERS + 1) + b"\r\n"], id="many headers"),
        pytest.param([b"GET / HTTP/1.1\r\nx-a: " + b"b" * (MAX_HEAD_BYTES + 1) + b"\r\n\r\n"], id="long header"),
        pytest.param([b"GET /" + b"a" * (MAX_HEAD_BYTES + 1) + b" HTTP/1.1\r\n\r\n"], id="long path"),
        pytest.param([b"GET / HTTP/1.1\r\nx-a: "] + [b"b" * 8_192] * 64, id="endless header"),
        pytest.param([b"GET /"] + [b"b" * 8_192] * 64, id="endless path"),
        pytest.param([b"GET / HTTP/1.1\r\n"] + [b"x-%d: y\r\n" % i for i in range(20_000)], id="endless headers"),
    ],
)
async def test_header_floods_are_cut_off(running, pieces):
    """Too many, too long, without end: 431 or a closed connection, and others are served."""
    try:
        answer = await talk(running.front_ends.http_port, *pieces)
    except ConnectionError:
        answer = b""
    assert _status(answer) in (0, 431)
    await _serves(running)


async def test_headers_within_the_limits_pass(running):
    """The positive control of the flood: as many and as long as allowed."""
    extra = [f"x-{i}: {'v' * 200}" for i in range(MAX_HEADERS - 10)]
    answer = await talk(running.front_ends.http_port, post(CHAT, GOOD, running.authorization, *extra))
    assert _status(answer) == 200


async def test_trailers_count_as_headers(running):
    """Headers after a chunked body cannot grow without bound."""
    head = _head(running, "transfer-encoding: chunked")
    trailers = b"".join(b"x-%d: y\r\n" % i for i in range(200))
    answer = await talk(running.front_ends.http_port, head, b"0\r\n", trailers, b"\r\n")
    assert _status(answer) in (400, 431)


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(b"", id="silent"),
        pytest.param(b"GET /", id="half a line"),
        pytest.param(b"GET /health/live HTTP/1.1\r\nhost: a\r\n", id="half a head"),
    ],
)
async def test_half_open_sockets_are_closed(start):
    """A connection that sends no whole head is closed after the timeout, however it drips."""
    async with serving(head_timeout_s=0.2) as running:
        begun = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", running.front_ends.http_port)
        writer.write(start)

        async def drip() -> None:
            while True:
                await asyncio.sleep(0.05)
                writer.write(b"x" if start else b"")

        dripping = asyncio.ensure_future(drip())
        try:
            async with asyncio.timeout(20):
                answer = await reader.read()
        except ConnectionError:
            answer = b""
        dripping.cancel()
        writer.close()
        assert _status(answer) in (0, 400)
        assert 0.1 < time.perf_counter() - begun < 20.0
        await _serves(running)


async def test_a_slow_second_request_is_closed_too():
    """The timeout holds for every request of a connection, not only for the first."""
    async with serving(head_timeout_s=0.2) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.front_ends.http_port)
        writer.write(b"GET /health/live HTTP/1.1\r\nhost: a\r\n\r\n")
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(len(b'{"status":"live"}'))
        writer.write(b"GET /health")
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        writer.close()


async def test_an_idle_connection_outlives_the_head_timeout():
    """The positive control: between two requests the longer keep-alive time counts."""
    async with serving(head_timeout_s=0.1) as running, httpx.AsyncClient(base_url=running.base_url) as client:
        first = await client.get("/health/live")
        peer = first.extensions["network_stream"].get_extra_info("client_addr")
        await asyncio.sleep(0.3)
        second = await client.get("/health/live")
        assert second.extensions["network_stream"].get_extra_info("client_addr") == peer


async def test_a_slow_body_is_given_up():
    """A body that drips is refused after the time for the whole of it."""
    async with serving(body_timeout_s=0.3) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.front_ends.http_port)
        writer.write(_head(running, "content-length: 1000"))

        async def drip() -> None:
            for _ in range(100):
                writer.write(b" ")
                await asyncio.sleep(0.05)

        dripping, answer = asyncio.ensure_future(drip()), b""
        async with asyncio.timeout(20):
            # Whoever writes to a connection that was closed is told so, behind the answer.
            with contextlib.suppress(ConnectionResetError):
                while piece := await reader.read(65_536):
                    answer += piece
        dripping.cancel()
        writer.close()
        assert _status(answer) == 400
        assert b"did not arrive" in answer


async def test_one_connection_too_many_costs_the_oldest():
    """Beyond what strangers may hold the newest is served, and the oldest of the address ends; the others go on."""
    async with serving(max_connections=6, max_strangers=3) as running:
        port = running.front_ends.http_port
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        served = await talk(port, b"GET /health/live HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        assert _status(served) == 200
        assert await held[0][0].read() == b""
        for reader, writer in held[1:]:
            writer.write(b"GET /health/live HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
            assert _status(await reader.read()) == 200
        for _, writer in held:
            writer.close()


async def test_pipelined_requests_wait_for_their_turn(running):
    """A second request before the first one's answer starts no work; it is answered behind the first, in order."""
    gate = asyncio.Event()
    running.service.script = [Started(1, 0), gate, *text_script("done")[1:]]
    request = post(CHAT, GOOD, running.authorization).replace(b"connection: close\r\n", b"")
    reader, writer = await asyncio.open_connection("127.0.0.1", running.front_ends.http_port)
    writer.write(request + request + b"GET /health/live HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
    await asyncio.wait_for(running.service.asked.wait(), 20.0)
    await asyncio.sleep(0.05)
    assert len(running.service.requests) == 1
    gate.set()
    async with asyncio.timeout(20):
        answer = await reader.read()
    writer.close()
    assert len(running.service.requests) == 2
    assert answer.count(b"HTTP/1.1 200 OK") == 3
    ids = [answer.index(request.request_id.encode()) for request in running.service.requests]
    assert ids == sorted(ids)
    assert answer.endswith(b'{"status":"live"}')


async def test_who_pipelines_too_much_is_not_read_on(running):
    """A megabyte behind a request that is being answered stays with the sender, and its leaving ends nothing else."""
    running.service.script = [Started(1, 0), asyncio.Event()]
    request = post(CHAT, GOOD, running.authorization).replace(b"connection: close\r\n", b"")
    _, writer = await asyncio.open_connection("127.0.0.1", running.front_ends.http_port)
    writer.write(request + b"GET /health/live HTTP/1.1\r\nhost: a\r\n\r\n" * 400_000)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(writer.drain(), 1.0)
    assert len(running.service.requests) == 1
    writer.transport.abort()
    await _serves_another(running)


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\nbad header\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 99999999999999999999999\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\nx: \x00\r\n\r\n",
        b"\x00" * 100,
    ],
)
async def test_what_is_not_http_is_refused(running, request_bytes):
    """TLS hellos, HTTP/2, smuggling and garbage: 4xx or a closed connection."""
    try:
        answer = await talk(running.front_ends.http_port, request_bytes)
    except ConnectionError:
        answer = b""
    assert _status(answer) in (0, 400, 401)
    await _serves(running)


async def test_websocket_upgrades_are_not_taken(running):
    """An upgrade is an ordinary request to an unknown route."""
    request = b"GET /ws HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", running.front_ends.http_port)
    writer.write(request)
    async with asyncio.timeout(20):
        assert _status(await reader.readuntil(b"\r\n")) == 401
    writer.close()


@pytest.mark.parametrize(
    ("host", "status"), [("ai.example", 200), ("AI.example", 200), ("evil.example", 400), ("ai.example:80", 400)]
)
async def test_only_allowed_hosts_are_served(host, status):
    """With an allow-list, another name in the Host header is refused (DNS rebinding)."""
    async with serving(allowed_hosts=frozenset({"ai.example"})) as running:
        request = post(CHAT, GOOD, running.authorization).replace(b"host: a", b"host: " + host.encode())
        assert _status(await talk(running.front_ends.http_port, request)) == status


async def test_a_reader_that_takes_nothing_is_cut_off():
    """A client that asks for a stream and never reads is disconnected, and its session ends."""
    async with serving(stall_s=0.5) as running:
        running.service.script = [Started(1, 0), *text_script(*["x" * 16_384] * 2_000)[1:]]
        request = post(CHAT, GOOD[:-1] + b', "stream": true}', running.authorization)
        _, writer = await asyncio.open_connection("127.0.0.1", running.front_ends.http_port, limit=1)
        writer.write(request)
        await asyncio.wait_for(running.service.closed.wait(), 10.0)
        assert running.service.yielded < 2_000
        writer.close()
