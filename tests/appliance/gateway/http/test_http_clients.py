"""The official OpenAI client against the HTTP front end, over a real socket."""

from __future__ import annotations

import asyncio
import json
import re

import httpx
import openai
import pytest

from appliance.common.errors import ContextLengthError, PermissionDeniedError, RateLimitedError, UnavailableError
from appliance.gateway.generate_request import Operation, Started
from appliance.gateway.telemetry.attributes import response_id, server
from tests.appliance.gateway.front.support import MODEL, Running, logprob_script, serving, text_script

MESSAGES = [{"role": "user", "content": "hi"}]


def _client(running: Running, **options: object) -> openai.AsyncOpenAI:
    options = {"max_retries": 0, "api_key": running.key} | options
    return openai.AsyncOpenAI(base_url=running.base_url + "/v1", **options)


async def _read(stream: openai.AsyncStream, got: list[str]) -> None:
    """Add the text of each chunk."""
    async for chunk in stream:
        got += [choice.delta.content or "" for choice in chunk.choices]


async def _ask(client: openai.AsyncOpenAI, stream: bool, **options: object) -> None:
    """One chat request, read to its end."""
    answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=stream, **options)
    if stream:
        await _read(answer, [])


async def test_chat(running):
    """Text, usage with cached tokens, and the headers of a good answer."""
    async with _client(running) as client:
        raw = await client.chat.completions.with_raw_response.create(
            model=MODEL, messages=MESSAGES, user="u", metadata={"a": "b"}
        )
        answer = raw.parse()
    assert answer.choices[0].message.content == "Hello"
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert raw.headers["x-request-id"] == running.service.requests[0].request_id
    assert answer.id == "chatcmpl-" + raw.headers["x-request-id"].removeprefix("req_")
    assert raw.headers["x-ratelimit-remaining-requests"] == "59"
    assert "x-ratelimit-limit-tokens" not in raw.headers
    assert int(raw.headers["openai-processing-ms"]) >= 0
    assert raw.headers["x-athanor-ignored"] == "metadata"
    assert "server" not in raw.headers
    assert running.service.principals[0].credential == "key:acme-1"


async def test_chat_streamed(running):
    """Deltas add up, the reason comes, and usage comes where asked for."""
    async with _client(running) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(texts) == "Hello"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.total_tokens == 9


async def test_completion_of_text_and_of_ids(running):
    """The other endpoint, both kinds of prompt."""
    async with _client(running) as client:
        answer = await client.completions.create(model=MODEL, prompt="hi")
        await client.completions.create(model=MODEL, prompt=[1, 2, 3])
    assert answer.choices[0].text == "Hello"
    assert [request.operation for request in running.service.requests] == [Operation.TEXT_COMPLETION] * 2
    assert list(running.service.requests[1].prompt.token_ids) == [1, 2, 3]


async def test_completion_streamed(running):
    """Streamed text adds up."""
    async with _client(running) as client:
        stream = await client.completions.create(model=MODEL, prompt="hi", stream=True)
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello"


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_of_both_endpoints(running, stream):
    """Chat's content list and the completions' parallel lists, whole and in chunks."""
    running.service.script = logprob_script()
    async with _client(running) as client:
        chat = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=2, stream=stream
        )
        parts = [chunk async for chunk in chat] if stream else [chat]
        entries = [
            entry
            for part in parts
            for choice in part.choices
            if choice.logprobs is not None
            for entry in choice.logprobs.content
        ]
        assert [entry.logprob for entry in entries] == [-0.5, -0.25, -0.125]
        assert [entry.logprob for entry in entries[0].top_logprobs] == [-0.5, -1.5]
        text = await client.completions.create(model=MODEL, prompt="x", logprobs=2, stream=stream)
        parts = [chunk async for chunk in text] if stream else [text]
        offsets = [
            offset
            for part in parts
            if part.choices[0].logprobs is not None
            for offset in part.choices[0].logprobs.text_offset
        ]
        assert offsets == [0, 1, 1]


def _synchronous(base_url: str, key: str) -> tuple[str, str, str]:
    with openai.OpenAI(base_url=base_url + "/v1", api_key=key) as client:
        whole = client.chat.completions.create(model=MODEL, messages=MESSAGES)
        pieces = client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in pieces)
        model = client.models.retrieve("org/other")
    return whole.choices[0].message.content or "", text, model.id


async def test_the_synchronous_client(running):
    """Whole, streamed, and a model whose name holds a slash."""
    assert await asyncio.to_thread(_synchronous, running.base_url, running.key) == ("Hello", "Hello", "org/other")


async def test_models(running):
    """The list, one of it, and a typed error for one that is not in it."""
    async with _client(running) as client:
        assert [model.id async for model in client.models.list()] == [MODEL, "org/other"]
        assert (await client.models.retrieve(MODEL)).created == 1_700_000_000
        with pytest.raises(openai.NotFoundError) as caught:
            await client.models.retrieve("nope")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ContextLengthError("too long", param="messages"), openai.BadRequestError),
        (PermissionDeniedError("not for you"), openai.PermissionDeniedError),
        (RateLimitedError("slow down", retry_after_s=1.5), openai.RateLimitError),
        (UnavailableError("booting", retry_after_s=2.0), openai.InternalServerError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_refusals_before_the_first_event_are_statuses(running, error, kind, stream):
    """Streamed or not: what goes wrong before the engine starts is a status, an error object and retry headers."""
    running.service.script = [error]
    async with _client(running) as client:
        with pytest.raises(kind) as caught:
            await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=stream)
    assert caught.value.status_code == error.wire.http
    assert caught.value.body == {
        "message": error.message,
        "type": error.wire.kind,
        "param": error.param,
        "code": error.wire.code,
    }
    headers = caught.value.response.headers
    assert headers.get("retry-after-ms") == (
        None if error.retry_after_s is None else str(int(error.retry_after_s * 1000))
    )
    assert headers["x-request-id"] == running.service.requests[0].request_id
    assert running.service.refusals == []  # the session traces its own errors


async def test_the_client_retries_when_told_to(running):
    """A 429 with retry-after-ms is tried again and succeeds; one without is not."""
    running.service.script = [RateLimitedError("slow down", retry_after_s=0.01)]

    async def relent() -> None:
        await running.service.closed.wait()
        running.service.script = text_script("ok")

    relenting = asyncio.ensure_future(relent())
    async with _client(running, max_retries=2) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES)
        assert answer.choices[0].message.content == "ok"
        await relenting
        running.service.requests.clear()
        running.service.script = [RateLimitedError("budget used up")]
        with pytest.raises(openai.RateLimitError):
            await client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert len(running.service.requests) == 1


@pytest.mark.parametrize("defect", [False, True])
async def test_a_failure_inside_a_stream_raises_in_the_client(running, defect, capsys):
    """The error event ends the stream without an end mark; a defect shows its id and nothing of itself."""
    failure = ValueError("secret detail") if defect else UnavailableError("the sandbox died", retry_after_s=1.0)
    running.service.script = [*text_script("a", "b")[:3], failure]
    async with _client(running) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        got: list[str] = []
        with pytest.raises(openai.APIError) as caught:
            await _read(stream, got)
    assert "".join(got) == "ab"
    assert "secret" not in str(caught.value)
    assert caught.value.code == ("internal_error" if defect else "server_is_overloaded")
    assert running.service.refusals == []
    logged = capsys.readouterr().out
    assert ("ValueError" in logged and running.service.requests[0].request_id in logged) is defect
    assert "secret" not in logged


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [[], [Started(1, 0)], text_script("a")[1:]])
async def test_a_session_that_breaks_its_contract_is_an_internal_error(running, stream, script, capsys):
    """No Started, or no Finished: the client gets an error, never a truncated answer that looks whole."""
    running.service.script = script
    async with _client(running) as client:
        with pytest.raises(openai.APIError):
            await _ask(client, stream)
    assert "RuntimeError" in capsys.readouterr().out


async def test_every_event_is_one_chunk_and_silence_is_filled():
    """Each body chunk holds exactly one whole event; a keepalive comes in the silence, and only there."""
    async with serving(sse_keepalive_s=0.05) as running:
        running.service.script = [*text_script("a", "b")[:2], 0.3, *text_script("a", "b")[2:]]
        body = {"model": MODEL, "messages": MESSAGES, "stream": True}
        async with (
            httpx.AsyncClient(base_url=running.base_url, headers=running.authorization) as client,
            client.stream("POST", "/v1/chat/completions", json=body) as answer,
        ):
            assert answer.headers["content-type"].startswith("text/event-stream")
            chunks = [chunk async for chunk in answer.aiter_raw()]
    events = b"".join(chunks).split(b"\n\n")[:-1]
    assert all(event.startswith((b"data: ", b": keepalive")) for event in events)
    data = [event for event in events if event.startswith(b"data: ")]
    comments = [event for event in events if event.startswith(b": ")]
    assert data[-1] == b"data: [DONE]"
    assert 2 <= len(comments) <= 6
    first_comment = events.index(b": keepalive")
    assert events[first_comment : first_comment + len(comments)] == comments
    assert all(chunk.endswith(b"\n\n") for chunk in chunks)


async def test_context_passes_trace_and_deadline(running):
    """A well-formed traceparent and the timeout header reach the session."""
    parent = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    async with _client(running) as client:
        await client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            extra_headers={"traceparent": parent, "x-request-timeout-ms": "60000", "x-request-id": "mine"},
        )
    context, request = running.service.contexts[0], running.service.requests[0]
    assert context.traceparent == parent
    assert context.route == "POST /v1/chat/completions"
    assert context.attributes["client.address"] == "127.0.0.1"
    assert request.deadline is not None
    assert request.request_id.startswith("req_")


async def test_the_client_s_id_is_that_of_the_trace(running):
    """Each route's answer has the id that its generation span has; so does each chunk of a stream. The server span has
    scheme and path of a known route, and no path of an unknown one, which is the client's text."""
    seen = []
    async with _client(running) as client:
        for stream in (False, True):
            chat = {"model": MODEL, "messages": MESSAGES, "stream": stream, "max_tokens": 4}
            bodies = {"chat/completions": chat, "messages": chat}
            bodies["completions"] = {"model": MODEL, "prompt": "hi", "stream": stream}
            bodies["responses"] = {"model": MODEL, "input": "hi", "stream": stream}
            for path, body in bodies.items():
                answer = await client.post(f"/{path}", body=body, cast_to=httpx.Response)
                seen.append(set(re.findall(r'"id":"((?:chatcmpl-|cmpl-|resp_|msg_)[0-9a-f]{24})"', answer.text)))
        with pytest.raises(openai.NotFoundError):
            await client.get("/secret-path", cast_to=httpx.Response)
    asked = zip(running.service.contexts, running.service.requests, strict=False)
    assert seen == [{response_id(context.route, request.request_id)} for context, request in asked]
    assert len(seen) == 8
    found = server(running.service.contexts[0], "r", None)
    assert (found["url.scheme"], found["url.path"]) == ("http", "/v1/chat/completions")
    assert (found["server.address"], type(found["server.port"])) == ("127.0.0.1", int)
    assert (found["network.protocol.version"], "OpenAI/Python" in found["user_agent.original"]) == ("1.1", True)
    unknown = running.service.refusals[-1][0]
    assert not {"url.path", "user_agent.original", "server.address"} & unknown.attributes.keys()
    assert "secret" not in str(unknown)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_ends_a_session_that_ignores_it(running, stream):
    """The backstop answers 504 and closes the session's iterator."""
    running.service.script = [Started(1, 0), asyncio.Event()] if stream else [asyncio.Event()]
    async with _client(running) as client:
        with pytest.raises(openai.APIError) as caught:
            await _ask(client, stream, extra_headers={"x-request-timeout-ms": "50"})
    assert caught.value.code == "deadline_exceeded"
    await asyncio.wait_for(running.service.closed.wait(), 20.0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [[asyncio.Event], [lambda: Started(1, 0), asyncio.Event]])
async def test_a_client_that_leaves_ends_its_session(running, stream, script):
    """Before the first event or after it, streamed or not: the iterator is closed at once."""
    running.service.script = [make() for make in script]
    body = json.dumps({"model": MODEL, "messages": MESSAGES, "stream": stream}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n"
    head += f"authorization: Bearer {running.key}\r\n\r\n"
    _, writer = await asyncio.open_connection("127.0.0.1", running.front_ends.http_port)
    writer.write(head.encode() + body)
    await asyncio.wait_for(running.service.asked.wait(), 20.0)
    assert not running.service.closed.is_set()
    writer.close()
    await asyncio.wait_for(running.service.closed.wait(), 20.0)
    assert running.service.refusals == []


async def test_a_client_that_leaves_an_endless_stream_stops_it_soon(running):
    """While tokens flow, the session yields no more than a few of its thousands after the disconnect."""
    running.service.script = [Started(1, 0), *[step for _ in range(5_000) for step in (text_script("x")[1], 0.002)]]
    async with _client(running) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        seen = 0
        async for _ in stream:
            seen += 1
            if seen == 5:
                break
        await stream.close()
    at_close = running.service.yielded
    await asyncio.wait_for(running.service.closed.wait(), 20.0)
    assert running.service.yielded - at_close <= 100


async def test_connections_are_reused(running):
    """Ten good answers and a refused body go over two connections: only the unread body costs one."""
    async with httpx.AsyncClient(base_url=running.base_url, headers=running.authorization) as client:
        peers = set()
        for _ in range(10):
            answer = await client.get("/v1/models")
            assert answer.status_code == 200
            peers.add(answer.extensions["network_stream"].get_extra_info("client_addr"))
        assert len(peers) == 1
        early = await client.post("/v1/models", content=b"x" * 100)
        assert early.status_code == 405
        assert early.headers["connection"] == "close"
        assert (await client.get("/v1/models")).status_code == 200


async def test_health_follows_readiness(running):
    """Live is live; ready says 503 while the gateway says no."""
    async with httpx.AsyncClient(base_url=running.base_url) as client:
        assert (await client.get("/health/live")).status_code == 200
        assert (await client.get("/health/ready")).status_code == 200
        running.ready[0] = False
        assert (await client.get("/health/ready")).status_code == 503
        assert (await client.get("/health/live")).status_code == 200
        head = await client.head("/health/live")
        assert (head.status_code, head.content) == (200, b"")


async def test_an_invalid_body_is_recorded_as_refused(running):
    """What ends before a session gets its id, trace and log line from the service."""
    async with _client(running) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model=MODEL, messages=MESSAGES, n=17)
    ((context, error, tenant),) = running.service.refusals
    assert (context.route, tenant, error.param) == ("POST /v1/chat/completions", "acme", "n")
    assert caught.value.response.headers["x-request-id"].startswith("req_")
    assert running.service.requests == []
