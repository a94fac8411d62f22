"""Endpoints that generate or embed: a session for each request, streamed or collected, ended early with its client.

While a session runs, three things may cut it: the client's disconnect (the connection reads on while nothing is
written), the caller's deadline (the session holds it too; this is the backstop), and the appliance's drain. A cut
closes the session's iterator, which stops the engine within a step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

from appliance.common.errors import ApplianceError, DeadlineExceededError
from appliance.common.ids import new_request_id
from appliance.common.scopes import Scope
from appliance.gateway.front.auth import require
from appliance.gateway.front.cut import Cut
from appliance.gateway.front.request_builder import Stamp
from appliance.gateway.generate_request import (
    AttestRequest,
    CallContext,
    Delta,
    Finished,
    GenerateRequest,
    Principal,
    TokenizerRequest,
)
from appliance.gateway.http import attest_route, header_fields, openai_embeddings, tokenizer_routes
from appliance.gateway.http.background import Background
from appliance.gateway.http.body import BodyBudget, ClientGoneError, read_body
from appliance.gateway.http.collecting import Events, Several, checked, collect, started
from appliance.gateway.http.dialect import AnswerWriter, Parsed
from appliance.gateway.http.exchange import Exchange
from appliance.gateway.http.keeping import Keeping, KeptWriter
from appliance.gateway.http.openai_embeddings import ParsedEmbed
from appliance.gateway.http.openai_objects import joined, pieces_of
from appliance.gateway.http.paced import PacedSink
from appliance.gateway.http.parsing import Parser
from appliance.gateway.http.response_items import EarlierNeededError
from appliance.gateway.http.scoring import ParsedScore
from appliance.gateway.http.settings import HttpSettings
from appliance.gateway.http.tokenizer_routes import ParsedTokenizer
from appliance.gateway.service import Service
from appliance.gateway.stored_work import ResponseKeeper

DEADLINE_MARGIN_S = 0.25
"""Seconds by which the backstop comes after the deadline, so that the session's own, traced error wins."""

BYTES_A_TURN = 16 << 10
"""Bytes of JSON after whose making the loop turns: about a millisecond."""

T = TypeVar("T")

ParseCount = Callable[[bytes, Stamp], tuple[TokenizerRequest, tuple[str, ...]]]
"""Parses a request for the number of a prompt's tokens; gives the names of fields without effect besides."""


ParsePooled = Callable[[bytes, Stamp], ParsedEmbed | ParsedScore]
"""Parses a request for vectors or scores."""


class SseSink:
    """Writes deltas straight into the connection of an exchange that has begun its event stream: no task and no await
    for a token (``generate_request.Sink``)."""

    def __init__(self, exchange: Exchange, writer: AnswerWriter) -> None:
        self._exchange = exchange
        self._connection = exchange.connection
        self._writer = writer

    @property
    def ready(self) -> bool:
        """Whether the connection's buffer has room."""
        return self._connection.writable

    def on_ready(self, call: Callable[[], None] | None) -> None:
        """Set what is called each time that the buffer has room again; None for nothing."""
        self._connection.on_writable = call

    def delta(self, delta: Delta) -> None:
        """Write the event for the delta; part of a character has none."""
        chunk = self._writer.delta(delta)
        if chunk:
            self._connection.write(chunk)
            self._exchange.quiet = 0


class Generation:
    """Serves what generates, embeds, and uses a tokenizer alone."""

    def __init__(self, service: Service, settings: HttpSettings, stored: ResponseKeeper | None = None) -> None:
        """``stored`` keeps responses; None where the appliance keeps none."""
        self._service = service
        self._settings = settings
        self._stored = stored
        self.background = Background(service, stored, settings.sse_keepalive_s)
        """Responses that go on without their client."""
        self._budget = BodyBudget()
        self._parser = Parser()
        self._live: set[Cut] = set()
        self._padded: set[Exchange] = set()
        self._hurries = False

    def hurry(self) -> None:
        """Delay no answer by padding any more, as the appliance drains."""
        self._hurries = True
        for exchange in self._padded:
            exchange.hurry()

    def cut_all(self, reason: ApplianceError) -> None:
        """End every session that runs with ``reason``."""
        for cut in list(self._live):
            cut.end(reason)
        self.background.cut_all(reason)

    async def serve(self, exchange: Exchange, principal: Principal, parse: Callable[[bytes, Stamp], Parsed]) -> None:
        """Answer one request, from its body to the last byte; ``parse`` is its API's.

        Raises:
            ApplianceError: for the client.
            ClientGoneError: it left.
        """
        parsed = await self._read(exchange, principal, parse)
        if parsed.others:
            await self._serve_several(exchange, principal, parsed)
            return
        request = self._service.routed(principal, parsed.request)
        writer = parsed.make_writer(request, int(time.time()))
        keeping = self._keeping(exchange, principal, writer, parsed.items)
        notes = header_fields.ignored(parsed.ignored)
        if parsed.background and keeping is not None:
            del parsed  # with the prompt, as ``serve`` does
            await self.background.serve(exchange, principal, request, writer, keeping, notes)
            return
        streamed = request.stream
        async with self._guarded(exchange, request.request_id, streamed=streamed) as cut:
            padded = PacedSink(writer) if exchange.padding is not None else None
            sink = (padded or SseSink(exchange, writer)) if streamed else None
            events = self._service.generate(principal, request, exchange.context, sink)
            del parsed, request  # with the prompt, which the session lets go of as soon as it can
            if streamed:
                await cut.run(self._stream(exchange, principal, writer, events, notes, padded, keeping))
            else:
                await cut.run(self._collect(exchange, principal, writer, events, notes, keeping))

    def _keeping(
        self, exchange: Exchange, principal: Principal, writer: AnswerWriter, items: bytes | None
    ) -> Keeping | None:
        """Return what keeps the answer that follows these items; None where none is kept."""
        if items is None or self._stored is None:
            return None
        exchange.context.attributes["athanor.response.kept"] = 1
        # Only an API whose answers can be kept gives items.
        return Keeping(self._stored, principal, cast(KeptWriter, writer), items)

    async def _serve_several(self, exchange: Exchange, principal: Principal, parsed: Parsed) -> None:
        """Answer a request of several prompts with one object, in which the choices stand in the prompts' order."""
        notes = header_fields.ignored(parsed.ignored)
        async with self._guarded(exchange, parsed.request.request_id, streamed=False) as cut:
            first = self._service.routed(principal, parsed.request)
            # One model answers all prompts: one object names it.
            requests = [
                first,
                *(replace(one, model=first.model, alias=first.alias, adapter=first.adapter) for one in parsed.others),
            ]
            del parsed, first  # with the prompts
            await cut.run(self._collect_several(exchange, principal, requests, notes))

    async def _collect_several(
        self, exchange: Exchange, principal: Principal, requests: list[GenerateRequest], notes: header_fields.Headers
    ) -> None:
        begun = partial(setattr, exchange, "computed", True)
        several = Several(self._service, principal, exchange.context, int(time.time()), begun)
        body = await _written(pieces_of(joined(await several.answers(requests))))
        rows = [*header_fields.rates(self._service.rates(principal)), *notes]
        await exchange.answer(200, body, cast(str, exchange.request_id), rows)

    async def embed(self, exchange: Exchange, principal: Principal, parse: ParsePooled) -> None:
        """Answer a request for vectors or scores, from its body to the last byte; ``parse`` is its route's.

        Raises:
            ApplianceError: for the client.
            ClientGoneError: it left.
        """
        parsed = await self._read(exchange, principal, parse)
        async with self._guarded(exchange, parsed.request.request_id, streamed=False) as cut:
            await cut.run(self._embed(exchange, principal, parsed))

    async def tokenize(self, exchange: Exchange, principal: Principal) -> None:
        """Answer a request for the token ids of a prompt, from its body to the last byte.

        Raises:
            ApplianceError: for the client.
            ClientGoneError: it left.
        """
        parsed = await self._read(exchange, principal, tokenizer_routes.parse_tokenize)
        async with self._guarded(exchange, parsed.request.request_id, streamed=False) as cut:
            await cut.run(self._tokenize(exchange, principal, parsed))

    async def _tokenize(self, exchange: Exchange, principal: Principal, parsed: ParsedTokenizer) -> None:
        found = await self._service.tokenize(principal, parsed.request, exchange.context)
        await self._answer(exchange, principal, await _written(tokenizer_routes.tokenized(found)), parsed.ignored)

    async def count(self, exchange: Exchange, principal: Principal, parse: ParseCount, answer: dict[str, str]) -> None:
        """Answer a request for the number of a prompt's tokens, from its body to the last byte; ``answer`` is what
        stands beside it.

        Raises:
            ApplianceError: for the client.
            ClientGoneError: it left.
        """
        request, ignored = await self._read(exchange, principal, parse)
        async with self._guarded(exchange, request.request_id, streamed=False) as cut:
            await cut.run(self._counted(exchange, principal, request, ignored, answer))

    async def _counted(
        self,
        exchange: Exchange,
        principal: Principal,
        request: TokenizerRequest,
        ignored: tuple[str, ...],
        answer: dict[str, str],
    ) -> None:
        found = await self._service.tokenize(principal, request, exchange.context)
        await self._answer(exchange, principal, {**answer, "input_tokens": len(found.token_ids)}, ignored)

    async def detokenize(self, exchange: Exchange, principal: Principal) -> None:
        """Answer a request for the text of token ids, from its body to the last byte.

        Raises:
            ApplianceError: for the client.
            ClientGoneError: it left.
        """
        parsed = await self._read(exchange, principal, tokenizer_routes.parse_detokenize)
        async with self._guarded(exchange, parsed.request.request_id, streamed=False) as cut:
            await cut.run(self._detokenize(exchange, principal, parsed))

    async def _detokenize(self, exchange: Exchange, principal: Principal, parsed: ParsedTokenizer) -> None:
        text = await self._service.detokenize(principal, parsed.request, exchange.context)
        await self._answer(exchange, principal, tokenizer_routes.detokenized(text), parsed.ignored)

    async def attest(self, exchange: Exchange, principal: Principal) -> None:
        """Answer a request for an attestation, from its body to the last byte.

        Raises:
            ApplianceError: for the client.
            ClientGoneError: it left.
        """
        asked, ignored = await self._read(exchange, principal, attest_route.parse_attest)
        request = self._service.routed(principal, asked)
        async with self._guarded(exchange, request.request_id, streamed=False) as cut:
            await cut.run(self._attest(exchange, principal, request, ignored))

    async def _attest(
        self, exchange: Exchange, principal: Principal, request: AttestRequest, ignored: tuple[str, ...]
    ) -> None:
        text = await self._service.attest(principal, request, exchange.context)
        await self._answer(exchange, principal, attest_route.attested(request.request_id, request.model, text), ignored)

    async def _answer(self, exchange: Exchange, principal: Principal, document: Any, ignored: tuple[str, ...]) -> None:
        """Send a whole answer with what is left of the tenant's rates."""
        notes = [*header_fields.rates(self._service.rates(principal)), *header_fields.ignored(ignored)]
        await exchange.answer(200, document, cast(str, exchange.request_id), notes)

    async def _embed(self, exchange: Exchange, principal: Principal, parsed: ParsedEmbed | ParsedScore) -> None:
        pieces = await _pooled(self._service, principal, parsed, exchange.context)
        exchange.computed = True
        await self._answer(exchange, principal, await _written(pieces), parsed.ignored)

    async def _read(self, exchange: Exchange, principal: Principal, parse: Callable[[bytes, Stamp], T]) -> T:
        """Return the request in the body, which is then freed; it has a new id, and the caller's deadline."""
        exchange.until = header_fields.deadline(exchange.head.values("x-request-timeout-ms"))
        stamp = Stamp(new_request_id(), exchange.until)
        with self._budget.counting(principal.tenant) as count:
            body = await read_body(
                exchange.body,
                exchange.head,
                count,
                max_bytes=self._settings.max_body_bytes,
                timeout_s=self._settings.body_timeout_s,
            )
            exchange.body_pending = False
            try:
                return await self._parser.parse(principal.tenant, parse, body, stamp)
            except EarlierNeededError as needed:
                assert self._stored is not None, "who keeps nothing refuses to continue"
                again, response = needed.again, needed.response
                # The model can be asked to repeat it, so to continue one is to read it.
                require(principal, Scope.RESPONSES)
            earlier = await self._stored.read(principal, response, "previous_response_id")
            count(len(earlier))
            exchange.context.attributes["athanor.response.previous"] = response
            # The larger one says whether it is parsed beside the loop.
            larger = max(body, earlier, key=len)
            parsed: T = await self._parser.parse(
                principal.tenant, lambda _larger, stamp: again(body, stamp, earlier), larger, stamp
            )
            return parsed

    async def _stream(
        self,
        exchange: Exchange,
        principal: Principal,
        writer: AnswerWriter,
        events: Events,
        notes: header_fields.Headers,
        padded: PacedSink | None,
        keeping: Keeping | None,
    ) -> None:
        async with aclosing(events):
            begun = await started(events)
            exchange.computed = True
            rows = [*header_fields.rates(self._service.rates(principal)), *notes]
            record_bytes = 0 if exchange.padding is None else writer.record_bytes(exchange.padding)
            await exchange.stream(cast(str, exchange.request_id), rows, record_bytes=record_bytes)
            if padded is not None and exchange.paced is not None:
                padded.attach(exchange.paced)
            if opening := writer.opening(begun):
                await exchange.write(opening)
            finished: Finished | None = None
            async for event in events:
                if isinstance(event, Delta) and padded is not None:
                    await padded.event(event)
                elif isinstance(event, Finished):
                    finished = event
                elif chunk := writer.event(event):
                    await exchange.write(chunk)
            if padded is not None:
                # What was gathered for the next tick is part of the answer that the end repeats.
                await exchange.write(b"")
            if keeping is not None:
                await keeping.keep_streamed(checked(finished))
            await exchange.end(b"".join(writer.closing(checked(finished))))

    async def _collect(
        self,
        exchange: Exchange,
        principal: Principal,
        writer: AnswerWriter,
        events: Events,
        notes: header_fields.Headers,
        keeping: Keeping | None,
    ) -> None:
        async with aclosing(events):
            await started(events)
            exchange.computed = True
            heard, finished = await collect(events)
        document = writer.collected(heard, finished)
        body = await _written(pieces_of(document))
        if keeping is not None and not await keeping.keep(body):
            body = await _written(pieces_of({**document, "store": False}))
        rows = [*header_fields.rates(self._service.rates(principal)), *notes]
        await exchange.answer(200, body, cast(str, exchange.request_id), rows)

    @asynccontextmanager
    async def _guarded(self, exchange: Exchange, request_id: str, *, streamed: bool) -> AsyncIterator[Cut]:
        """Yield a ``Cut`` that the client's leaving, the deadline and a drain end; send keepalives meanwhile."""
        cut = Cut()
        exchange.when_gone(partial(cut.end, ClientGoneError()))
        if streamed:
            exchange.keep_alive(self._settings.sse_keepalive_s)
        timer = None
        if exchange.until is not None:
            left = exchange.until - time.monotonic() + DEADLINE_MARGIN_S
            timer = asyncio.get_running_loop().call_later(left, cut.end, _too_late())
        exchange.request_id = request_id
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


async def _pooled(
    service: Service, principal: Principal, parsed: ParsedEmbed | ParsedScore, context: CallContext
) -> Iterator[bytes]:
    """Return the answer to a request for vectors or scores, in pieces."""
    if isinstance(parsed, ParsedScore):
        scored = service.routed(principal, parsed.request)
        return parsed.write(await service.score(principal, scored, context), scored)
    embedded = service.routed(principal, parsed.request)
    embeddings = await service.embed(principal, embedded, context)
    return openai_embeddings.answer(embeddings, embedded.model, base64=parsed.base64)


async def _written(pieces: Iterable[bytes]) -> bytes:
    """Return a document made piece by piece, between which the event loop turns."""
    written, since = [], 0
    for piece in pieces:
        written.append(piece)
        since += len(piece)
        if since > BYTES_A_TURN:
            since = 0
            await asyncio.sleep(0)
    return b"".join(written)


def _too_late() -> DeadlineExceededError:
    return DeadlineExceededError("the deadline passed before the answer was complete; raise it or ask for fewer tokens")
