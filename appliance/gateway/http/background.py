"""Responses that go on without their client (``background``): computed by a task of their own, read from a window."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial

from appliance.common.errors import ApplianceError, CancelledError, FeatureNotAllowedError, InvalidRequestError
from appliance.common.ids import new_request_id
from appliance.common.tracebacks import forget_frames
from appliance.gateway.front.cut import Cut
from appliance.gateway.front.defect import defect
from appliance.gateway.generate_request import Delta, Finished, GenerateRequest, Principal
from appliance.gateway.http import header_fields
from appliance.gateway.http.body import ClientGoneError
from appliance.gateway.http.collecting import Events, checked, started
from appliance.gateway.http.dialect import AnswerWriter, ErrorForm
from appliance.gateway.http.event_window import BackgroundRun, BackgroundRuns, EventWindow
from appliance.gateway.http.exchange import Exchange
from appliance.gateway.http.header_fields import Headers
from appliance.gateway.http.keeping import Keeping
from appliance.gateway.service import Service
from appliance.gateway.stored_work import ResponseKeeper

LOOK_S = 1.0
"""Seconds between two looks at what is to be forgotten, and at which readers' credentials still hold."""

LAST_EVENT_ID = "last-event-id"
"""Header with which a client of event streams says what it has (WHATWG HTML, section 9.2.4)."""

MAX_NUMBER_CHARS = 10
"""Digits of an event's number."""


class WindowSink:
    """Writes deltas into a window (``generate_request.Sink``). The window is bounded and keeps the newest: no reader
    holds up the engine."""

    ready = True

    def __init__(self, window: EventWindow, writer: AnswerWriter) -> None:
        self._window = window
        self._writer = writer

    def on_ready(self, call: Callable[[], None] | None) -> None:
        """Do nothing: it is always ready."""

    def delta(self, delta: Delta) -> None:
        """Take the events for the delta; part of a character has none."""
        if chunk := self._writer.delta(delta):
            self._window.add(chunk)


class Background:
    """Begins such responses, and lets clients read them."""

    def __init__(self, service: Service, keeper: ResponseKeeper | None, keepalive_s: float) -> None:
        """``keeper``: says who may have any; None where the appliance keeps nothing."""
        self._service = service
        self._keeper = keeper
        self._keepalive_s = keepalive_s
        self.runs = BackgroundRuns()
        """The responses that go on, and those that are kept for a while."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._following: dict[Cut, Exchange] = {}
        """The streams to clients, by what ends them."""
        self._looking: asyncio.TimerHandle | None = None

    async def serve(
        self,
        exchange: Exchange,
        principal: Principal,
        request: GenerateRequest,
        writer: AnswerWriter,
        keeping: Keeping,
        notes: Headers,
    ) -> None:
        """Begin a response, and stream it to the client that asked for it while that is there.

        Raises:
            ApplianceError: it failed before its first event.
            ClientGoneError: the client left.
        """
        run = self._begin(exchange, principal, keeping.response_id)
        exchange.request_id = request.request_id
        sink = WindowSink(run.window, writer)
        events = self._service.generate(principal, request, exchange.context, sink)
        del request  # with the prompt, which the session keeps no longer than it needs it
        begun = self._start(run, exchange.request_id, events, writer, keeping, exchange.errors)
        with run.read(self.runs.clock):  # from now on, since it may wait for long in a queue or for its model to wake
            await self._began(exchange, principal, keeping.response_id, begun)
            rows = [*header_fields.rates(self._service.rates(principal)), *notes]
            await self._follow(exchange, run.window, 0, rows)

    def _begin(self, exchange: Exchange, principal: Principal, response: str) -> BackgroundRun:
        """Return a run for a new response.

        Raises:
            ApplianceError: its tenant may have none, or no more.
        """
        if self._keeper is None or exchange.padding is not None:
            raise FeatureNotAllowedError(
                "this tenant's answers are padded, and are not resumed; leave background out", param="background"
            )
        exchange.context.attributes["athanor.response.background"] = 1
        run = self.runs.begin(principal.tenant, response, self._keeper.epoch(principal.tenant))
        self._look_later()
        return run

    def _start(
        self,
        run: BackgroundRun,
        request_id: str,
        events: Events,
        writer: AnswerWriter,
        keeping: Keeping,
        form: ErrorForm,
    ) -> asyncio.Future[None]:
        """Compute the response in a task of its own; gives what is done once it runs, or has failed before."""
        begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        begun.add_done_callback(lambda done: done.cancelled() or done.exception())  # its client may have left
        task = asyncio.ensure_future(self._guarded(run, request_id, form, begun, events, writer, keeping))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return begun

    async def _guarded(
        self,
        run: BackgroundRun,
        request_id: str,
        form: ErrorForm,
        begun: asyncio.Future[None],
        events: Events,
        writer: AnswerWriter,
        keeping: Keeping,
    ) -> None:
        """Compute the response; an error before its first event is its caller's, a later one the stream's last
        event."""
        try:
            await run.cut.run(_compute(run.window, begun, events, writer, keeping))
        except Exception as error:  # noqa: BLE001 - a boundary: a defect shows its request id, nothing else
            known = error if isinstance(error, ApplianceError) else defect(error, request_id)
            forget_frames(error)
            if begun.done():
                run.window.add(form.event(known, request_id))
            else:
                begun.set_exception(known)
        finally:
            begun.cancel()
            run.window.end()
            run.quiet_since = self.runs.clock()

    async def _began(
        self, exchange: Exchange, principal: Principal, response: str, begun: asyncio.Future[None]
    ) -> None:
        """Wait until a response runs; a client that leaves meanwhile does not end it.

        Raises:
            ApplianceError: it failed before; nothing is kept of it.
            ClientGoneError: the client left.
        """
        cut = Cut()
        exchange.when_gone(partial(cut.end, ClientGoneError()))
        try:
            await cut.run(_done(begun))
        except ApplianceError:
            self.drop(principal, response)
            raise

    @property
    def tasks(self) -> frozenset[asyncio.Task[None]]:
        """The work on responses that have not ended, with a reader or without."""
        return frozenset(self._tasks)

    def cut_all(self, reason: ApplianceError) -> None:
        """End every response that runs with ``reason``."""
        for run in self.runs.running():
            run.cut.end(reason)

    async def follow(self, exchange: Exchange, run: BackgroundRun, number: int, rows: Headers) -> None:
        """Stream the events from this number on to a client, to the end of the response.

        Raises:
            RateLimitedError: as many clients read it as may.
            UnauthenticatedError: the client's credential was withdrawn meanwhile.
            ClientGoneError: it left, or read so slowly that events it has not are not kept any more.
        """
        with run.read(self.runs.clock) as window:
            exchange.request_id = exchange.request_id or new_request_id()
            await self._follow(exchange, window, number, rows)

    async def _follow(self, exchange: Exchange, window: EventWindow, number: int, rows: Headers) -> None:
        cut = Cut()
        exchange.when_gone(partial(cut.end, ClientGoneError()))
        exchange.keep_alive(self._keepalive_s)
        self._following[cut] = exchange
        self._look_later()
        try:
            await cut.run(_pour(exchange, window, number, rows))
        finally:
            del self._following[cut]

    def find(self, principal: Principal, response: str) -> BackgroundRun | None:
        """Return a response of the caller's tenant that goes on or is kept, if it may be read."""
        run = self.runs.find(principal.tenant, response)
        return run if run is not None and self._epoch(principal.tenant) == run.epoch else None

    def drop(self, principal: Principal, response: str) -> bool:
        """End and forget a response; False where there is none that may be read: one whose key was destroyed is gone,
        though its events are forgotten a moment later."""
        there = self.find(principal, response) is not None
        self.runs.drop(principal.tenant, response, _ended())
        return there

    def _epoch(self, tenant: str) -> bytes | None:
        if self._keeper is None or self._keeper.withheld(Principal(tenant, ""), "background") is not None:
            return None
        return self._keeper.epoch(tenant)

    def _look_later(self) -> None:
        if self._looking is None:
            self._looking = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _look(self) -> None:
        self._looking = None
        self.runs.look(self._epoch, _ended)
        for cut, exchange in list(self._following.items()):
            try:
                exchange.authenticate()
            except ApplianceError as error:
                cut.end(error)
        if self.runs.held or self._following:
            self._look_later()


async def _compute(
    window: EventWindow, begun: asyncio.Future[None], events: Events, writer: AnswerWriter, keeping: Keeping
) -> None:
    async with aclosing(events):
        opening = writer.opening(await started(events))
        window.add(opening)
        if not begun.done():
            begun.set_result(None)
        finished: Finished | None = None
        async for event in events:
            if isinstance(event, Finished):
                finished = event
            elif chunk := writer.event(event):
                window.add(chunk)
        await keeping.keep_streamed(checked(finished))
        window.add(b"".join(writer.closing(checked(finished))))


async def _pour(exchange: Exchange, window: EventWindow, number: int, rows: Headers) -> None:
    await exchange.stream(str(exchange.request_id), rows)
    while await window.more(number):
        if number < window.first:
            raise ClientGoneError
        chunk, number = window.read(number)
        await exchange.write(chunk)
    await exchange.end()


def first_wanted(window: EventWindow, query: Mapping[str, str], headers: Sequence[str]) -> int:
    """Return the number of the first event that a client has not: behind that of the query's ``starting_after``, or of
    the header ``Last-Event-ID``.

    Raises:
        InvalidRequestError: no event has that number, or those behind it are not kept any more.
    """
    asked = query.get("starting_after")
    if len(headers) > 1 or (asked is not None and headers and headers[0] != asked):
        raise InvalidRequestError("starting_after and Last-Event-ID name several events", param="starting_after")
    text = asked if asked is not None else headers[0] if headers else None
    if text is None:
        first = 0
    elif text.isascii() and text.isdigit() and len(text) <= MAX_NUMBER_CHARS and int(text) < window.next:
        first = int(text) + 1
    else:
        raise InvalidRequestError("no event of the stream has this number", param="starting_after")
    if first < window.first:
        raise InvalidRequestError(
            f"events before {window.first} are not kept any more; ask for the whole response, without stream",
            param="starting_after",
        )
    return first


def _ended() -> CancelledError:
    return CancelledError("nobody read the response, or it was deleted; it was ended")


async def _done(begun: asyncio.Future[None]) -> None:
    await asyncio.shield(begun)
