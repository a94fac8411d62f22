"""A client of OpenAI-compatible servers that takes as little of the machine as it can, so that the server is measured.

One process, one event loop; HTTP is parsed by httptools in C and requests are rendered before the load starts. An
answer's event is never an object of its own: its time goes into an array (``appliance.operator.bench.events``). What
the client itself costs for each token, and how late its loop was, belong to every result.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import httptools

from appliance.operator.bench.errors import TargetError
from appliance.operator.bench.events import EventReader, MalformedStreamError
from appliance.operator.bench.sample import Sample, now
from appliance.operator.bench.workload import Planned

MAX_ERROR_BYTES = 64 << 10
"""Bytes kept of an answer that is no stream."""

OK = 200


class Client:
    """Sends planned requests to one server; keeps connections between them."""

    def __init__(
        self, url: str, model: str, api_keys: Sequence[str], *, timeout_s: float = 120.0, tier: str = ""
    ) -> None:
        """``tier``: the service tier that each request asks for; empty for none."""
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise TargetError(f"{url!r} is no address of a server; write http://HOST:PORT")
        self._secure = ssl.create_default_context() if parts.scheme == "https" else None
        self._host = parts.hostname
        self._port = parts.port or (443 if self._secure else 80)
        self._model = model
        self._keys = tuple(api_keys) or ("",)
        self._timeout_s = timeout_s
        self._more = {"service_tier": tier} if tier else {}
        path = parts.path.rstrip("/").removesuffix("/v1")
        self._head = f"POST {path}/v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\n"
        self._idle: list[ClientConnection] = []

    def render(self, planned: Planned) -> bytes:
        """The bytes of a request: greedy, streamed, not ended by an end mark, prompt as token ids."""
        body = json.dumps(
            {
                "model": self._model,
                "prompt": planned.prompt,
                "max_tokens": planned.output_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                **self._more,
            },
            separators=(",", ":"),
        ).encode()
        key = self._keys[planned.tenant % len(self._keys)]
        identity = f"Authorization: Bearer {key}\r\n" if key else ""
        head = f"{self._head}{identity}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        return head.encode() + body

    async def send(self, planned: Planned, rendered: bytes, due: float) -> Sample:
        """Send one request and wait for its end; a failure is a sample too."""
        sample = Sample(planned.tenant, planned.output_tokens, due, now())
        sample.prompt_tokens = len(planned.prompt)
        fresh = not self._idle
        try:
            exchange = await self._connect() if fresh else self._idle.pop()
            sample.sent = now()
            await exchange.run(rendered, sample, self._timeout_s)
            if exchange.untouched and not fresh and sample.failure == "disconnect":
                # The server closed an idle connection, as it may; no byte of an answer was seen.
                sample.reconnects, sample.failure = 1, ""
                exchange = await self._connect()
                await exchange.run(rendered, sample, self._timeout_s)
        except OSError:
            sample.failure, sample.ended = "connect", now()
            return sample
        if exchange.reusable:
            self._idle.append(exchange)
        else:
            exchange.close()
        return sample

    def close(self) -> None:
        """Close the connections that are kept."""
        while self._idle:
            self._idle.pop().close()

    async def _connect(self) -> ClientConnection:
        loop = asyncio.get_running_loop()
        connecting = loop.create_connection(ClientConnection, self._host, self._port, ssl=self._secure)
        try:
            _, exchange = await asyncio.wait_for(connecting, self._timeout_s)
        except TimeoutError as error:
            raise ConnectionError("connecting took too long") from error
        return exchange


class ClientConnection(asyncio.Protocol):
    """One connection; one request at a time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._parser: Any = None
        self._sample: Sample | None = None
        self._events: EventReader | None = None
        self._error_body = b""
        self._ended: asyncio.Future[None] | None = None
        self._now = 0.0
        self.untouched = True
        """No byte of an answer has come to the last request."""
        self.reusable = False
        """The last answer was read to its end and the server keeps the connection."""

    async def run(self, rendered: bytes, sample: Sample, timeout_s: float) -> None:
        """Send a request and fill the sample; returns when the answer has ended in whatever way."""
        self._parser = httptools.HttpResponseParser(self)
        self._sample = sample
        self._events = EventReader(sample.arrivals)
        self._error_body = b""
        self.untouched, self.reusable = True, False
        self._ended = self._loop.create_future()
        if self._transport is None or self._transport.is_closing():
            self._fail("disconnect")
            return
        self._transport.write(rendered)
        timer = self._loop.call_later(timeout_s, self._fail, "timeout")
        try:
            await self._ended
        finally:
            timer.cancel()

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio's."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """asyncio's: one read of the socket; everything in it came at one time."""
        if self._ended is None or self._ended.done():
            self.reusable = False
            return
        self.untouched = False
        self._now = now()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            # An error raised in a callback of ours comes wrapped.
            if not isinstance(error.__context__, MalformedStreamError):
                raise
            self._fail("malformed")
        except httptools.HttpParserError:
            self._fail("malformed")

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio's."""
        self.reusable = False
        self._fail("disconnect")

    def on_body(self, body: bytes) -> None:
        """httptools': a piece of the answer."""
        if self._parser.get_status_code() == OK:
            assert self._events is not None
            self._events.feed(body, self._now)
        elif len(self._error_body) < MAX_ERROR_BYTES:
            self._error_body += body

    def on_message_complete(self) -> None:
        """httptools': the answer has ended as HTTP says it should."""
        self.reusable = bool(self._parser.should_keep_alive())
        self._end(self._judge())

    def _judge(self) -> str:
        """What is wrong with a complete answer; takes its counts."""
        sample, events = self._sample, self._events
        assert sample is not None
        assert events is not None
        status = self._parser.get_status_code()
        if status != OK:
            return f"http {status}"
        try:
            events.finish()
            counted = _take_usage(sample, events.usage)
        except MalformedStreamError:
            return "malformed"
        if events.error is not None:
            return f"error {events.error.get('code') or events.error.get('type') or 'unnamed'}"
        if not events.done:
            return "disconnect"
        if not sample.arrivals and sample.output_tokens:
            # All its tokens were bytes without a visible character; their time is the end's.
            sample.arrivals.append(self._now)
        if sample.output_tokens != sample.wanted_tokens and (counted or not sample.arrivals):
            return "wrong length"
        return ""

    def _fail(self, kind: str) -> None:
        self.reusable = False
        self._now = now()
        self._end(kind)

    def _end(self, failure: str) -> None:
        if self._ended is None or self._ended.done() or self._sample is None:
            return
        self._sample.failure = failure
        self._sample.ended = self._now
        self._ended.set_result(None)


def _take_usage(sample: Sample, usage: dict[str, Any] | None) -> bool:
    """Fill the sample's counts; tells whether the server reported them."""
    sample.output_tokens = len(sample.arrivals)
    if usage is None:
        return False
    details = usage.get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    counts = usage.get("prompt_tokens"), usage.get("completion_tokens"), cached or 0
    if not all(type(count) is int and count >= 0 for count in counts):
        raise MalformedStreamError("usage holds no counts")
    sample.prompt_tokens, sample.output_tokens, sample.cached_tokens = counts  # type: ignore[assignment]
    sample.counted = True
    return True
