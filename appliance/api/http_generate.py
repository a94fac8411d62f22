"""The two endpoints that generate: one session each, streamed or collected, ended early when nobody wants the answer.

While a session runs, three things may cut it: the client's disconnect (seen by a task that keeps reading the
connection, also while nothing is written), the caller's deadline (the session holds it too; this is the backstop), and
the appliance's drain. A cut closes the session's iterator, which stops the engine within a step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial
from typing import TypeVar, cast

from appliance.api import http_headers, openai, openai_embeddings, sse
from appliance.api.body_budget import BodyBudget
from appliance.api.cut import Cut
from appliance.api.http_body import ClientGoneError, read_body, wait_disconnect
from appliance.api.http_exchange import Exchange
from appliance.api.http_settings import HttpSettings
from appliance.api.http_sink import sink_of
from appliance.api.json_pieces import pieces_of
from appliance.api.limits import Stamp
from appliance.api.openai_embeddings import ParsedEmbed
from appliance.api.openai_objects import Writer
from appliance.api.paced import PacedSink
from appliance.api.parsing import Parser
from appliance.errors import ApplianceError, DeadlineExceededError
from appliance.ids import new_request_id
from appliance.request import (
    ChoiceFinished,
    Delta,
    Event,
    Finished,
    Operation,
    Principal,
    PromptTokens,
    Service,
    Started,
)

DEADLINE_MARGIN_S = 0.25
"""Seconds by which the backstop comes after the deadline, so that the session's own, traced error wins."""

BYTES_A_TURN = 16 << 10
"""Bytes of JSON after whose making the loop turns: about a millisecond."""

Events = AsyncGenerator[Event, None]

T = TypeVar("T")


class Generation:
    """Serves ``/v1/chat/completions``, ``/v1/completions`` and ``/v1/embeddings``."""

    def __init__(self, service: Service, settings: HttpSettings) -> None:
        self._service = service
        self._settings = settings
        self._budget = BodyBudget()
        self._parser = Parser()
        self._live: set[Cut] = set()
        self._padded: set[Exchange] = set()
        self._hurries = False

    def hurry(self) -> None:
        """The appliance drains: padding keeps nobody waiting from here on."""
        self._hurries = True
        for exchange in self._padded:
            exchange.hurry()

    def cut_all(self, reason: ApplianceError) -> None:
        """End every session that runs with ``reason``."""
        for cut in list(self._live):
            cut.end(reason)

    async def serve(self, exchange: Exchange, principal: Principal, operation: Operation) -> None:
        """One request, body to last byte.

        Raises:
            ApplianceError: for the client.
            ClientGoneError: it left.
        """
        deadline = exchange.until = http_headers.deadline(exchange.headers.getlist("x-request-timeout-ms"))
        stamp = Stamp(new_request_id(), deadline)
        parsed = await self._read(exchange, principal, partial(openai.parse, operation), stamp)
        writer = Writer(parsed.request, int(time.time()), parsed.include_usage)
        notes = http_headers.ignored(parsed.ignored)
        streamed = parsed.request.stream
        async with self._guarded(exchange, deadline, streamed=streamed) as cut:
            exchange.request_id = stamp.request_id
            padded = PacedSink(writer) if exchange.padding is not None else None
            sink = (padded or sink_of(exchange, writer)) if streamed else None
            events = self._service.generate(principal, parsed.request, exchange.context, sink)
            del parsed  # with the prompt, which the session lets go of as soon as it can
            if streamed:
                await cut.run(self._stream(exchange, principal, writer, events, notes, padded))
            else:
                await cut.run(self._collect(exchange, principal, writer, events, notes))

    async def embed(self, exchange: Exchange, principal: Principal) -> None:
        """``/v1/embeddings``, body to last byte.

        Raises:
            ApplianceError: for the client.
            ClientGoneError: it left.
        """
        deadline = exchange.until = http_headers.deadline(exchange.headers.getlist("x-request-timeout-ms"))
        stamp = Stamp(new_request_id(), deadline)
        parsed = await self._read(exchange, principal, openai_embeddings.parse, stamp)
        async with self._guarded(exchange, deadline, streamed=False) as cut:
            exchange.request_id = stamp.request_id
            await cut.run(self._embed(exchange, principal, parsed))

    async def _embed(self, exchange: Exchange, principal: Principal, parsed: ParsedEmbed) -> None:
        embeddings = await self._service.embed(principal, parsed.request, exchange.context)
        exchange.computed = True
        body = await _written(openai_embeddings.answer(embeddings, parsed.request.model, base64=parsed.base64))
        notes = [*http_headers.rates(self._service.rates(principal)), *http_headers.ignored(parsed.ignored)]
        await exchange.answer(200, body, parsed.request.request_id, notes)

    async def _read(
        self, exchange: Exchange, principal: Principal, parse: Callable[[bytes, Stamp], T], stamp: Stamp
    ) -> T:
        """The request in the body, which is let go of."""
        with self._budget.account(principal.tenant) as account:
            body = await read_body(
                exchange.receive,
                exchange.headers,
                account,
                max_bytes=self._settings.max_body_bytes,
                timeout_s=self._settings.body_timeout_s,
            )
            exchange.body_pending = False
            return await self._parser.parse(principal.tenant, parse, body, stamp)

    async def _stream(
        self,
        exchange: Exchange,
        principal: Principal,
        writer: Writer,
        events: Events,
        notes: http_headers.Headers,
        padded: PacedSink | None,
    ) -> None:
        async with aclosing(events):
            await _started(events)
            exchange.computed = True
            rows = [*http_headers.rates(self._service.rates(principal)), *notes]
            record_bytes = 0 if exchange.padding is None else writer.record_bytes(exchange.padding)
            await exchange.stream(cast(str, exchange.request_id), rows, record_bytes=record_bytes)
            if padded is not None and exchange.paced is not None:
                padded.attach(exchange.paced)
            opening = writer.opening()
            if opening is not None:
                await exchange.write(opening)
            finished: Finished | None = None
            async for event in events:
                if isinstance(event, Delta) and padded is not None:
                    await padded.event(event)
                elif isinstance(event, Delta):
                    chunk = writer.delta(event)
                    if chunk is not None:
                        await exchange.write(chunk)
                elif isinstance(event, PromptTokens):
                    echo = writer.prompt(event)
                    if echo is not None:
                        await exchange.write(echo)
                elif isinstance(event, ChoiceFinished):
                    await exchange.write(writer.ended(event))
                elif isinstance(event, Finished):
                    finished = event
            _check_finished(finished is not None)
            await exchange.end(b"".join(writer.closing(cast(Finished, finished))))

    async def _collect(
        self,
        exchange: Exchange,
        principal: Principal,
        writer: Writer,
        events: Events,
        notes: http_headers.Headers,
    ) -> None:
        heard: list[PromptTokens | Delta | ChoiceFinished] = []
        finished: Finished | None = None
        async with aclosing(events):
            await _started(events)
            exchange.computed = True
            async for event in events:
                if isinstance(event, PromptTokens | Delta | ChoiceFinished):
                    heard.append(event)
                elif isinstance(event, Finished):
                    finished = event
        _check_finished(finished is not None)
        body = await _written(pieces_of(writer.collected(heard, cast(Finished, finished))))
        rows = [*http_headers.rates(self._service.rates(principal)), *notes]
        await exchange.answer(200, body, cast(str, exchange.request_id), rows)

    @asynccontextmanager
    async def _guarded(self, exchange: Exchange, deadline: float | None, *, streamed: bool) -> AsyncIterator[Cut]:
        """A ``Cut`` that the client's leaving, the deadline and a drain end; keepalives meanwhile."""
        cut = Cut()
        helpers = [asyncio.ensure_future(_watch(exchange, cut))]
        if streamed:
            helpers.append(asyncio.ensure_future(_pulse(exchange, self._settings.sse_keepalive_s)))
        timer = None
        if deadline is not None:
            left = deadline - time.monotonic() + DEADLINE_MARGIN_S
            timer = asyncio.get_running_loop().call_later(left, cut.end, _too_late())
        self._live.add(cut)
        self._padded.add(exchange)
        if self._hurries:
            exchange.hurry()
        try:
            yield cut
        finally:
            self._live.discard(cut)
            self._padded.discard(exchange)
            if timer is not None:
                timer.cancel()
            for helper in helpers:
                helper.cancel()
            for helper in helpers:
                with suppress(asyncio.CancelledError):
                    await helper


async def _written(pieces: Iterable[bytes]) -> bytes:
    """A document, made piece by piece; the loop turns in between."""
    written, since = [], 0
    for piece in pieces:
        written.append(piece)
        since += len(piece)
        if since > BYTES_A_TURN:
            since = 0
            await asyncio.sleep(0)
    return b"".join(written)


async def _watch(exchange: Exchange, cut: Cut) -> None:
    await wait_disconnect(exchange.receive)
    cut.end(ClientGoneError())


async def _pulse(exchange: Exchange, keepalive_s: float) -> None:
    """Write a comment after each ``keepalive_s`` of silence inside a stream."""
    while True:
        silence = time.monotonic() - exchange.last_sent
        if exchange.streaming and not exchange.sending and silence >= keepalive_s:
            await exchange.write(sse.KEEPALIVE)
        else:
            await asyncio.sleep(max(keepalive_s - silence, keepalive_s / 8))


async def _started(events: Events) -> None:
    if not isinstance(await anext(events, None), Started):
        raise RuntimeError("the session's first event is not Started")


def _check_finished(finished: bool) -> None:
    if not finished:
        raise RuntimeError("the session ended without Finished")


def _too_late() -> DeadlineExceededError:
    return DeadlineExceededError("the deadline passed before the answer was complete; raise it or ask for fewer tokens")
