"""Random damage to valid requests, cut at random points, against a real socket.

Whatever comes, each answer is a whole one, no request is answered twice, nothing is left behind, and an honest client
is served.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re

import pytest

from appliance.gateway.http.protocol import HttpConnection
from tests.appliance.gateway.front.support import Running
from tests.appliance.gateway.http.test_rfc9112 import CHUNK, LIVE, SIZE, chunked, final_status, live, post

ROUNDS = 300
SEEDS = (
    LIVE,
    live(b"x: y", b"connection: keep-alive"),
    post(b"content-length: %d" % SIZE),
    post(b"content-length: %d" % SIZE, b"expect: 100-continue"),
    chunked(CHUNK + b"0\r\n\r\n"),
    chunked(CHUNK[:-2] + b"\r\n0;a=b\r\nx: y\r\n\r\n"),
    LIVE.replace(b"GET", b"HEAD"),
    LIVE.replace(b"1.1", b"1.0"),
)
PIECES = (
    b"\r\n",
    b"\n",
    b"\r",
    b"\x00",
    b" ",
    b":",
    b"0",
    b"f" * 9,
    b"\r\n\r\n",
    b"content-length: 3\r\n",
    b"\xff",
    b",",
)
PIECES += (
    b"transfer-encoding: chunked\r\n",
    b"connection: close\r\n",
    b"HTTP/1.1",
    b"GET / HTTP/1.1\r\n",
    b"A" * 70_000,
)


def damaged(chance: random.Random) -> bytes:
    """Some requests in a row, with a few insertions, deletions, changes and swaps."""
    sent = bytearray(b"".join(chance.choices(SEEDS, k=chance.randint(1, 4))))
    for _ in range(chance.choice((0, 1, 1, 2, 5))):
        at = chance.randrange(len(sent) + 1)
        kind = chance.randrange(5)
        if kind == 0:
            sent[at:at] = chance.choice(PIECES)
        elif kind == 1:
            del sent[at : at + chance.choice((1, 2, 10, 100))]
        elif kind == 2:
            sent[at : at + 1] = bytes([chance.randrange(256)])
        elif kind == 3:
            sent[at:at] = sent[at : at + chance.randint(1, 200)]
        else:
            other = chance.randrange(len(sent) + 1)
            sent[at : at + 8], sent[other : other + 8] = sent[other : other + 8], sent[at : at + 8]
    return bytes(sent)


def requests_in(sent: bytes) -> int:
    """How many requests could be read there at most: one for each place that may be a version's end, or a refusal."""
    return sent.count(b"HTTP/") + sent.count(b"\r\n\r\n") + 1


def answers_in(answer: bytes) -> list[int]:
    """The statuses of whole answers, interim ones left out.

    Raises:
        AssertionError: something stands there that is no whole answer.
    """
    statuses, at = [], 0
    while at < len(answer):
        head = re.compile(rb"HTTP/1\.1 (\d{3}) [A-Z][A-Za-z ]*\r\n(?:[a-z0-9-]+: [^\r\n]*\r\n)*\r\n").match(answer, at)
        assert head is not None, answer[at : at + 200]
        at = head.end()
        if head[1] == b"100":
            continue
        length = re.search(rb"content-length: (\d+)\r\n", head[0])
        assert length is not None
        bodiless = answer[at : at + 9] == b"HTTP/1.1 " or at == len(answer)  # of HEAD
        at += 0 if bodiless else int(length[1])
        statuses.append(int(head[1]))
    assert at == len(answer)
    return statuses


async def attack(running: Running, chance: random.Random) -> None:
    """Send one damaged row of requests in random pieces, read what comes, and look at it."""
    sent = damaged(chance).replace(b"KEY", running.key.encode())
    reader, writer = await asyncio.open_connection("127.0.0.1", running.front_ends.http_port)
    answer, at = b"", 0
    with contextlib.suppress(ConnectionError):
        while at < len(sent):
            piece = chance.choice((1, 3, 50, 1_000, 100_000))
            writer.write(sent[at : at + piece])
            at += piece
            await writer.drain()
            await asyncio.sleep(0)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.03):
                while part := await reader.read(1 << 20):
                    answer += part
        writer.write_eof()
        async with asyncio.timeout(20):
            answer += await reader.read()
    writer.close()
    statuses = answers_in(answer)
    assert set(statuses) <= {200, 400, 401, 404, 405, 413, 431, 501, 505}
    assert len(statuses) <= requests_in(sent)


@pytest.mark.parametrize("seed", range(4))
async def test_damaged_requests_harm_nobody(running: Running, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """Some hundred rows of damaged requests: whole answers only, no more of them than requests, no handler and no
    connection left behind, nothing logged as an error, and the next client is served."""
    chance = random.Random(seed)
    for _ in range(ROUNDS // 10):
        await asyncio.gather(*(attack(running, chance) for _ in range(10)))
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    async with asyncio.timeout(20):
        while [task for task in asyncio.all_tasks() if "HttpFrontEnd.serve" in repr(task)]:
            await asyncio.sleep(0.01)
        reader, writer = await asyncio.open_connection("127.0.0.1", running.front_ends.http_port)
        writer.write(LIVE)
        assert await final_status(reader) == 200
        writer.close()


async def test_each_request_has_exactly_one_answer(running: Running) -> None:
    """Undamaged rows, cut at random points: as many answers as requests, in their order, and each session ran once."""
    chance = random.Random(11)
    kinds = {LIVE: 17, post(b"content-length: %d" % SIZE): None, chunked(CHUNK + b"0\r\n\r\n"): None}
    for _ in range(60):
        row = chance.choices(list(kinds), k=chance.randint(1, 8))
        before = len(running.service.requests)
        reader, writer = await asyncio.open_connection("127.0.0.1", running.front_ends.http_port)
        sent, at = b"".join(row).replace(b"KEY", running.key.encode()), 0
        async with asyncio.timeout(20):
            while at < len(sent):
                piece = chance.randint(1, 400)
                writer.write(sent[at : at + piece])
                at += piece
                await asyncio.sleep(0)
            for request in row:
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200 OK")
                length = int(head.partition(b"content-length: ")[2].split()[0])
                assert (length == 17) is (kinds[request] == 17)
                await reader.readexactly(length)
            writer.write(live(b"connection: close"))
            assert (await reader.read()).endswith(b'\r\n\r\n{"status":"live"}')
        writer.close()
        assert len(running.service.requests) - before == sum(kinds[request] is None for request in row)


def test_the_damage_reaches_the_protocol() -> None:
    """Control: rows are damaged in most rounds, and the protocol under attack is ours."""
    chance = random.Random(0)
    rows = [damaged(chance) for _ in range(100)]
    whole = re.compile(b"(?:" + b"|".join(map(re.escape, SEEDS)) + b")+")
    assert sum(whole.fullmatch(row) is None for row in rows) > 60
    assert HttpConnection.__module__ == "appliance.gateway.http.protocol"
