"""Endpoints that are slow, lie, break off or answer nonsense: each request gets a typed error, and nothing is left."""

from __future__ import annotations

import asyncio
import ssl
import time
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from appliance.common.errors import (
    ApplianceError,
    ExternalModelBusyError,
    ExternalModelError,
    ExternalModelLateError,
    InvalidRequestError,
)
from appliance.gateway.external.engine import ExternalEngine
from appliance.gateway.sandboxes.stream import TokenStream
from isolation.ipc.engine import Submit
from isolation.ipc.messages import Finish
from isolation.ipc.sampling import Sampling
from tests.appliance.gateway.external.peer import (
    DONE,
    HEAD,
    WORDS,
    Peer,
    Script,
    Served,
    event,
    peer,
    says,
    served,
    usage,
    write_key,
)
from tests.appliance.gateway.front.pki import Pki

NEXT = iter(range(1_000, 1 << 30, 16))
"""Wire ids; a request may have several choices."""


def submit(*, max_tokens: int = 8, namespace: bytes = b"a" * 32, **options: Any) -> Submit:
    """A request of three ids."""
    sampling = options.pop("sampling", Sampling(temperature=0.0, seed=7))
    ids = array("I", [1, 2, 3])
    return Submit(next(NEXT), namespace, ids, max_tokens, sampling, **options)


async def ended(stream: TokenStream, within_s: float = 5.0) -> TokenStream:
    """The stream once nothing more will come."""
    async with asyncio.timeout(within_s):
        while not stream.ended:
            await stream.wake.wait()
            stream.wake.clear()
    return stream


def text(ids: Iterable[int]) -> bytes:
    """Bytes of ids."""
    return b"".join(WORDS.bytes_of(one) for one in ids)


def error_of(stream: TokenStream) -> ApplianceError | None:
    """What the caller is told."""
    try:
        stream.raise_if_lost()
    except ApplianceError as error:
        return error
    return None


async def nothing_left(at: Served, there: Peer) -> None:
    """Until every connection of the peer is closed and no task of an output is there; a few turns of the loop."""
    async with asyncio.timeout(5):
        for gone in there.gone:
            await gone.wait()
        while any("output" in task.get_name() for task in asyncio.all_tasks()):
            await asyncio.sleep(0.01)
    assert at.engine.live == ()


async def test_token_ids_are_handed_on() -> None:
    """The control of all that follows: ids arrive as they are, with the end, the request has the prompt's ids, greedy
    sampling and a salt, and the endpoint's count is compared."""
    ids = event(text="a", token_ids=[5, 6]), event(text="", token_ids=[7, 0], finish_reason="stop"), usage(3, 4), DONE
    async with peer(says(HEAD, *ids)) as there, served(f"http://127.0.0.1:{there.port}/v1") as at:
        stream = await ended(at.engine.submit(submit(), b"f"))
        assert (stream.token_ids, stream.finish) == ([5, 6, 7, 0], Finish.STOP)
        assert stream.started is not None and error_of(stream) is None
        await nothing_left(at, there)
        body = there.bodies[0]
        assert body["prompt"] == [1, 2, 3] and body["model"] == "there" and body["max_tokens"] == 8
        assert (body["temperature"], body["stream"], body["return_token_ids"]) == (0.0, True, True)
        assert (
            there.heads[0].startswith(b"POST /v1/completions HTTP/1.1\r\n") and b"authorization" not in there.heads[0]
        )
        assert at.counts == {"ok": 1}


async def test_text_becomes_ids_of_the_vocabulary() -> None:
    """Of an endpoint that gives text alone, the longest entries are taken; the bytes are the text's, and an end without
    an id ends the output."""
    parts = event(text="sing"), event(text=" the"), event(text="x", finish_reason="stop"), usage(3, 9), DONE
    async with peer(says(HEAD, *parts)) as there, served(f"http://127.0.0.1:{there.port}/v1") as at:
        stream = await ended(at.engine.submit(submit(), b"f"))
        assert text(stream.token_ids) == b"sing thex"
        assert (len(stream.token_ids), stream.token_ids[-1], stream.finish) == (5, 0, Finish.STOP)
        await nothing_left(at, there)
        assert at.counts == {"ok": 1, "usage_differs": 1}, "9 tokens there, 5 here"


async def test_a_length_that_comes_alone_ends_the_output() -> None:
    """An end by length behind the last piece is an end by length here."""
    parts = event(text="a"), event(text="", finish_reason="length"), DONE
    async with peer(says(HEAD, *parts)) as there, served(f"http://127.0.0.1:{there.port}/v1") as at:
        stream = await ended(at.engine.submit(submit(), b"f"))
        assert (text(stream.token_ids), stream.finish) == (b"a", Finish.LENGTH)


BAD: dict[str, tuple[bytes, type[ApplianceError], str]] = {
    "500": (b"HTTP/1.1 500 Oh\r\ncontent-length: 2\r\n\r\nno", ExternalModelError, "failed"),
    "401": (b"HTTP/1.1 401 No\r\ncontent-length: 0\r\n\r\n", ExternalModelError, "failed"),
    "429": (b"HTTP/1.1 429 No\r\ncontent-length: 0\r\n\r\n", ExternalModelBusyError, "busy"),
    "503": (b"HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n", ExternalModelBusyError, "busy"),
    "redirect": (b"HTTP/1.1 307 Go\r\nlocation: http://127.0.0.1:1/\r\n\r\n", ExternalModelError, "failed"),
    "no answer": (b"", ExternalModelError, "failed"),
    "no HTTP": (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", ExternalModelError, "wrong"),
    "a long head": (b"HTTP/1.1 200 OK\r\nx: " + b"a" * 70_000, ExternalModelError, "wrong"),
    "no events": (b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{}", ExternalModelError, "wrong"),
    "no JSON": (HEAD + b"data: {nonsense\n\n", ExternalModelError, "wrong"),
    "no object": (HEAD + b"data: 7\n\n", ExternalModelError, "wrong"),
    "an error inside": (HEAD + b'data: {"error": {"message": "x"}}\n\n', ExternalModelError, "wrong"),
    "cut": (HEAD + event(text="a"), ExternalModelError, "failed"),
    "an end without an end": (HEAD + event(text="a") + DONE, ExternalModelError, "wrong"),
    "more ids than asked for": (HEAD + event(text="", token_ids=[5] * 10), ExternalModelError, "wrong"),
    "ids beyond the vocabulary": (HEAD + event(text="", token_ids=[5_000]), ExternalModelError, "wrong"),
    "negative ids": (HEAD + event(text="", token_ids=[-1]), ExternalModelError, "wrong"),
    "ids that are none": (HEAD + event(text="", token_ids=[True, "x"]), ExternalModelError, "wrong"),
    "text that cannot be written": (HEAD + event(text="\u00e9"), ExternalModelError, "wrong"),
    "half a character": (HEAD + b'data: {"choices": [{"text": "\\ud800"}]}\n\n', ExternalModelError, "wrong"),
    "another choice": (HEAD + event(text="a", index=1), ExternalModelError, "wrong"),
    "an unknown end": (HEAD + event(text="a", finish_reason="whim"), ExternalModelError, "wrong"),
    "counts that cannot be": (HEAD + event(text="a") + usage(-1, 1), ExternalModelError, "wrong"),
    "an endless event": (HEAD + b"data: " + b"a" * 70_000, ExternalModelError, "wrong"),
    "endless comments": (HEAD + b": still here\n\n" * 200, ExternalModelError, "wrong"),
    "deep JSON": (HEAD + b"data: " + b"[" * 5_000 + b"\n\n", ExternalModelError, "wrong"),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_wrong_answer_is_a_typed_error_at_once(name: str) -> None:
    """Each gets its error long before any deadline, the connection is closed from this side where the other leaves it
    open, and the next request is served."""
    answer, error, kind = BAD[name]
    closes = name in ("no answer", "cut", "an end without an end")
    good = says(HEAD, event(text="", token_ids=[5, 0], finish_reason="stop"), DONE)
    scripts: list[Script] = [says(answer, closes=closes), good]

    async def script(there: Peer, writer: asyncio.StreamWriter) -> None:
        await scripts[min(len(there.bodies), 2) - 1](there, writer)

    async with peer(script) as there, served(f"http://127.0.0.1:{there.port}/v1", timeout_s=60) as at:
        began = time.monotonic()
        stream = await ended(at.engine.submit(submit(), b"f"))
        assert type(error_of(stream)) is error
        assert time.monotonic() - began < 3
        await nothing_left(at, there)
        assert at.counts == {kind: 1}
        after = await ended(at.engine.submit(submit(), b"f"))
        assert after.token_ids == [5, 0], "the link has survived"


async def test_silence_is_bounded_whatever_else_comes() -> None:
    """Neither no byte at all nor comments, nor events without a token, prolong the time for a token."""

    async def drips(there: Peer, writer: asyncio.StreamWriter) -> None:
        if len(there.bodies) == 1:
            return
        writer.write(HEAD)
        while True:
            writer.write(b": alive\n\n" if len(there.bodies) == 2 else event(text=""))
            await writer.drain()
            await asyncio.sleep(0.05)

    async with peer(drips) as there, served(f"http://127.0.0.1:{there.port}/v1") as at:
        for _ in range(3):
            stream = await ended(at.engine.submit(submit(max_tokens=200), b"f"))
            assert isinstance(error_of(stream), ExternalModelLateError)
        await nothing_left(at, there)
        assert at.counts == {"late": 3}


async def test_behind_the_last_token_nothing_is_waited_for() -> None:
    """What an endpoint does behind its last token is nothing to the request: it has ended already."""
    parts = HEAD, event(text="", token_ids=[5, 0], finish_reason="stop"), b"data: {nonsense\n\n"
    async with peer(says(*parts, closes=False)) as there, served(f"http://127.0.0.1:{there.port}/v1") as at:
        stream = await ended(at.engine.submit(submit(), b"f"))
        assert (stream.token_ids, error_of(stream)) == ([5, 0], None)
        await nothing_left(at, there)
        assert at.counts == {"ok": 1}


async def test_nobody_listens(unused_tcp_port: int) -> None:
    """A refused connection is tried twice, and is an error at once."""
    async with served(f"http://127.0.0.1:{unused_tcp_port}/v1", timeout_s=60) as at:
        stream = await ended(at.engine.submit(submit(), b"f"))
        assert type(error_of(stream)) is ExternalModelError
        assert at.counts == {"failed": 1}


async def test_a_client_that_leaves_closes_the_connection() -> None:
    """An abort closes the endpoint's connection at once, and that of an output that waits never opens."""
    async with (
        peer(says(HEAD, event(text="a"), closes=False)) as there,
        served(f"http://127.0.0.1:{there.port}/v1", timeout_s=60, max_concurrent=1) as at,
    ):
        first, second = at.engine.submit(submit(), b"f"), at.engine.submit(submit(), b"g")
        async with asyncio.timeout(5):
            while not first.token_ids:
                await asyncio.sleep(0.005)
        assert len(there.bodies) == 1
        at.engine.abort(second)
        at.engine.abort(first)
        await nothing_left(at, there)
        async with asyncio.timeout(5):
            while at.engine.inside:
                await asyncio.sleep(0.005)
        assert (len(there.bodies), at.counts) == (1, {"cancelled": 1})


async def test_the_end_of_the_gateway_closes_every_connection() -> None:
    """Links that close leave no connection and no task."""
    async with peer(says(HEAD, event(text="a"), closes=False)) as there:
        async with served(f"http://127.0.0.1:{there.port}/v1", timeout_s=60) as at:
            streams = [at.engine.submit(submit(), b"f") for _ in range(4)]
            async with asyncio.timeout(5):
                while not all(stream.token_ids for stream in streams):
                    await asyncio.sleep(0.005)
        async with asyncio.timeout(5):
            for gone in there.gone:
                await gone.wait()
        assert all(stream.engine_gone for stream in streams)


async def test_salts_are_of_tenants_and_tell_nothing() -> None:
    """Two requests of one tenant have one salt, other tenants, users and groups others; who keeps nothing has a new one
    each time; no key stands in one."""
    good = says(HEAD, event(text="", token_ids=[5, 0], finish_reason="stop"), DONE)
    async with peer(good) as there, served(f"http://127.0.0.1:{there.port}/v1", max_concurrent=1) as at:
        asked = [
            submit(),
            submit(),
            submit(namespace=b"b" * 32),
            submit(group=b"g" * 32),
            submit(namespace=b"b" * 32, group=b"g" * 32),
            submit(user=b"u" * 32),
            submit(retain=False),
            submit(retain=False),
        ]
        for one in asked:
            await ended(at.engine.submit(one, b"f"))
        salts = [body["cache_salt"] for body in there.bodies]
        assert salts[0] == salts[1] and salts[3] == salts[4]
        assert len({salts[0], salts[2], salts[3], salts[5], salts[6], salts[7]}) == 6
        assert all(len(salt) == 43 for salt in salts)


async def test_tenants_take_turns_for_the_endpoint() -> None:
    """One place, a tenant with six outputs waiting, and one that comes after it: the latter is second or third."""
    good = says(HEAD, event(text="", token_ids=[5, 0], finish_reason="stop"), DONE)
    async with peer(good) as there, served(f"http://127.0.0.1:{there.port}/v1", max_concurrent=1) as at:
        busy = [at.engine.submit(submit(max_tokens=10 + number), b"f") for number in range(6)]
        late = at.engine.submit(submit(namespace=b"b" * 32, max_tokens=99), b"g")
        for stream in (*busy, late):
            await ended(stream)
        assert [body["max_tokens"] for body in there.bodies].index(99) <= 2


async def test_choices_are_requests_of_their_own() -> None:
    """Three choices are three requests with seeds that follow each other, and three streams."""
    good = says(HEAD, event(text="", token_ids=[5, 0], finish_reason="stop"), DONE)
    async with peer(good) as there, served(f"http://127.0.0.1:{there.port}/v1") as at:
        streams = at.engine.submit_all(submit(choices=3), b"f")
        for stream in streams:
            assert (await ended(stream)).token_ids == [5, 0]
        assert sorted(body["seed"] for body in there.bodies) == [7, 8, 9]


async def test_what_is_not_passed_on_is_refused() -> None:
    """A request for log-probabilities or determinism reaches no endpoint."""
    async with peer(says(b"")) as there, served(f"http://127.0.0.1:{there.port}/v1") as at:
        for options in ({"logprobs": 1}, {"deterministic": True}, {"prompt_logprobs": 0}):
            stream = await ended(at.engine.submit(submit(**options), b"f"))
            assert isinstance(error_of(stream), InvalidRequestError)
        assert there.bodies == []


async def test_the_key_is_read_for_every_request(tmp_path: Path) -> None:
    """The file's key is sent; another one holds from the next request on; a file without a key is an error."""
    path = write_key(tmp_path, "sk-one\n")
    good = says(HEAD, event(text="", token_ids=[5, 0], finish_reason="stop"), DONE)
    async with peer(good) as there, served(f"http://127.0.0.1:{there.port}/v1", api_key_file=str(path)) as at:
        await ended(at.engine.submit(submit(), b"f"))
        write_key(tmp_path, "sk-two")
        await ended(at.engine.submit(submit(), b"f"))
        assert [b"authorization: Bearer " + key in head for head, key in zip(there.heads, (b"sk-one", b"sk-two"))] == [
            True,
            True,
        ]
        write_key(tmp_path, "two words")
        assert type(error_of(await ended(at.engine.submit(submit(), b"f")))) is ExternalModelError
        assert len(there.bodies) == 2


async def test_tls_is_verified(tmp_path: Path, pki: Pki) -> None:
    """With the authority named the endpoint is taken; without it, it is refused before a byte of the request."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pki.files.certificate, pki.files.key)
    good = says(HEAD, event(text="", token_ids=[5, 0], finish_reason="stop"), DONE)
    async with peer(good, context) as there:
        url = f"https://127.0.0.1:{there.port}/v1"
        async with served(url, timeout_s=20, ca_file=str(pki.files.client_ca)) as at:
            assert (await ended(at.engine.submit(submit(), b"f"), 20)).token_ids == [5, 0]
        async with served(url, timeout_s=20) as at:
            stream = await ended(at.engine.submit(submit(), b"f"), 20)
            assert type(error_of(stream)) is ExternalModelError
        assert len(there.bodies) == 1


def test_what_it_needs_is_its_channel() -> None:
    """The engine's module may be moved into a process of its own: it imports nothing of requests and front ends."""
    source = Path(__file__).parents[4] / "appliance/gateway/external"
    names = ("engine", "client", "completion", "queue")
    lines = [line for name in names for line in (source / f"{name}.py").read_text().splitlines()]
    imported = {line.split()[1] for line in lines if line.startswith("from appliance.gateway.")}
    assert ExternalEngine.__module__ == "appliance.gateway.external.engine"
    assert all(name.startswith("appliance.gateway.external.") for name in imported)
