"""The client against a server that does everything a server can do wrong, over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest

from appliance.operator.bench.client import Client
from appliance.operator.bench.errors import TargetError
from appliance.operator.bench.metrics import figures
from appliance.operator.bench.run import play
from appliance.operator.bench.sample import Sample
from appliance.operator.bench.workload import Planned, Shape, parse_load, plan

Handler = Callable[[dict[str, object], asyncio.StreamWriter, int], Awaitable[None]]

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """One chunk of the transfer encoding."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def token(text: str = "x") -> bytes:
    """One event with text."""
    return b'data: {"choices":[{"text":"%s","finish_reason":null}]}\n\n' % text.encode()


def usage(tokens: int, cached: int = 0) -> bytes:
    """The last two events: counts and the end mark."""
    counts = {"prompt_tokens": 5, "completion_tokens": tokens, "prompt_tokens_details": {"cached_tokens": cached}}
    return b"data: " + json.dumps({"choices": [], "usage": counts}).encode() + b"\n\ndata: [DONE]\n\n"


class Server:
    """Speaks HTTP/1.1 as far as a request has to be read; the handler writes the answer."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self.bodies: list[dict[str, object]] = []
        self.heads: list[str] = []
        self.connections = 0

    async def __aenter__(self) -> Server:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = int(head.lower().split("content-length:")[1].split("\r\n")[0])
                body = json.loads(await reader.readexactly(length))
                self.heads.append(head)
                self.bodies.append(body)
                await self._handler(body, writer, len(self.bodies))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, RuntimeError, asyncio.CancelledError):
            # Cancelled at the end of the test; a callback of asyncio's would report a cancelled task as an error.
            writer.close()


async def good(body: dict[str, object], writer: asyncio.StreamWriter, number: int) -> None:
    """A right answer of the length asked for."""
    count = int(str(body["max_tokens"]))
    writer.write(HEAD + b"".join(chunk(token()) for _ in range(count)) + chunk(usage(count, 2)) + chunk(b""))


async def ask(handler: Handler, tokens: int = 3, times: int = 1, timeout_s: float = 5.0) -> tuple[list[Sample], Server]:
    """Send requests one after another over the kept connection."""
    async with Server(handler) as server:
        client = Client(server.url + "/v1/", "m", ["k1", "k2"], timeout_s=timeout_s)
        samples = []
        for number in range(times):
            planned = Planned(number, number % 2, (8, 9, 10, 11, 12), tokens)
            samples.append(await client.send(planned, client.render(planned), 0.0))
        client.close()
        return samples, server


async def test_a_right_answer_is_counted_and_the_connection_kept() -> None:
    """Counts are the server's; both tenants' keys are sent over one connection; the request asks for exact length."""
    samples, server = await ask(good, times=3)
    assert [one.failure for one in samples] == [""] * 3
    assert {(one.output_tokens, one.prompt_tokens, one.cached_tokens, len(one.arrivals)) for one in samples} == {
        (3, 5, 2, 3)
    }
    assert all(one.sent <= one.arrivals[0] <= one.arrivals[-1] <= one.ended for one in samples)
    assert server.connections == 1
    assert ["Bearer k1" in head for head in server.heads] == [True, False, True]
    assert server.heads[0].startswith("POST /v1/completions HTTP/1.1\r\n")
    assert server.bodies[0]["ignore_eos"] is True and server.bodies[0]["prompt"] == [8, 9, 10, 11, 12]


async def test_an_answer_in_halves_of_chunks() -> None:
    """Bytes that arrive one by one make the same answer."""

    async def drip(body: dict[str, object], writer: asyncio.StreamWriter, number: int) -> None:
        data = HEAD + chunk(token()) + chunk(token()) + chunk(usage(2)) + chunk(b"")
        for place in range(len(data)):
            writer.write(data[place : place + 1])
            await writer.drain()

    (sample,), _ = await ask(drip, tokens=2)
    assert (sample.failure, sample.output_tokens, len(sample.arrivals)) == ("", 2, 2)


def answering(data: bytes, *, close: bool = False) -> Handler:
    """Always these bytes, and then perhaps the end of the connection."""

    async def handler(body: dict[str, object], writer: asyncio.StreamWriter, number: int) -> None:
        writer.write(data)
        if close:
            await writer.drain()
            writer.close()

    return handler


def status(code: int, body: bytes = b"{}") -> bytes:
    """A whole answer that is no stream."""
    return b"HTTP/1.1 %d No\r\ncontent-length: %d\r\n\r\n%s" % (code, len(body), body)


@pytest.mark.parametrize(
    ("answer", "close", "failure"),
    [
        (status(429), False, "http 429"),
        (status(500, b"x" * 100_000), False, "http 500"),
        (status(200, b'{"choices":[]}'), False, "malformed"),
        (b"SSH-2.0-OpenSSH\r\n", False, "malformed"),
        (HEAD + b"zz\r\n", False, "malformed"),
        (HEAD + chunk(b"data: hello\n\n"), False, "malformed"),
        (HEAD + chunk(token()) + chunk(b'data: {"choices":[{"te'), True, "disconnect"),
        (HEAD + chunk(token()) + chunk(b'data: {"choices":[{"te') + chunk(b""), False, "malformed"),
        (HEAD + chunk(token()) * 3 + chunk(b""), False, "disconnect"),
        (b"", True, "disconnect"),
        (HEAD + chunk(token()) * 2 + chunk(usage(2)) + chunk(b""), False, "wrong length"),
        (HEAD + chunk(usage(-1)) + chunk(b""), False, "malformed"),
        (
            HEAD + chunk(token()) + chunk(b'data: {"error":{"code":"engine_lost"}}\n\n') + chunk(b""),
            False,
            "error engine_lost",
        ),
    ],
)
async def test_each_failure_has_its_name(answer: bytes, close: bool, failure: str) -> None:
    """Nothing that is not a whole right answer is taken for one."""
    (sample,), _ = await ask(answering(answer, close=close))
    assert sample.failure == failure
    assert sample.ended >= sample.sent


async def test_silence_ends_at_the_timeout() -> None:
    """A server that takes a request and says nothing costs the timeout, and the connection is not used again."""
    samples, server = await ask(answering(b""), times=2, timeout_s=0.1)
    assert [one.failure for one in samples] == ["timeout", "timeout"]
    assert server.connections == 2


async def test_nobody_listens() -> None:
    """A refused connection is a failure of the request, not of the run."""
    async with Server(good) as server:
        url = server.url
    client = Client(url, "m", [])
    planned = Planned(0, 0, (8,), 1)
    sample = await client.send(planned, client.render(planned), 0.0)
    assert sample.failure == "connect"


async def test_a_kept_connection_that_was_closed_is_opened_again() -> None:
    """A server may close an idle connection; the request is sent once more, and the table says so."""

    async def once(body: dict[str, object], writer: asyncio.StreamWriter, number: int) -> None:
        if number == 2:
            writer.close()
        else:
            await good(body, writer, number)

    samples, server = await ask(once, times=2)
    assert [(one.failure, one.reconnects) for one in samples] == [("", 0), ("", 1)]
    assert server.connections == 2


@pytest.mark.parametrize("url", ["", "ftp://x", "http://"])
def test_addresses_that_are_none(url: str) -> None:
    """Refused before anything is measured."""
    with pytest.raises(TargetError):
        Client(url, "m", [])


@pytest.mark.parametrize("words", ["closed:4,requests=20", "open:200,requests=20"])
async def test_a_load_sends_exactly_what_was_planned(words: str) -> None:
    """Every planned request is sent once beside the warm-up's, and every one has a sample; a 429 counts as failed."""

    async def some(body: dict[str, object], writer: asyncio.StreamWriter, number: int) -> None:
        if body["max_tokens"] == 7 and number % 5 == 0:
            writer.write(status(429))
        else:
            await good(body, writer, number)

    async with Server(some) as server:
        load = parse_load(words)
        plans = plan(load, Shape(6, 7), tenants=2, seed=0)
        warm = [Planned(0, 0, (8,), 1)] * 3
        run = await play(Client(server.url, "m", ["a", "b"]), load, plans, warm)
        found = figures(run)
        sent = [body["prompt"] for body in server.bodies if body["max_tokens"] == 7]
    assert sorted(map(str, sent)) == sorted(str(list(one.prompt)) for one in plans)
    assert found.requests == 20 and found.failures == {"http 429": found.failed} and 0 < found.failed < 8
    assert found.output_tokens == 7 * (20 - found.failed)
