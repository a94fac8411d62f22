"""The engine of an external model: the other end of a channel whose requests an endpoint computes.

It stands where an engine's sandbox stands for other models and sends the messages that a sandbox would send, so that
``EngineLink`` checks what it gives as it checks a sandbox. It runs in the gateway's event loop and has the endpoint's
key and the prompts' token ids. It needs nothing but its channel, its endpoint and its vocabulary, and may be moved into
a process of its own.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from functools import partial
from typing import Any

import structlog

from appliance.gateway.external.client import Endpoint, EndpointError, asked
from appliance.gateway.external.completion import (
    AnswerReader,
    EndpointUsage,
    Piece,
    Vocabulary,
    WrongAnswerError,
    body_of,
    cache_salt,
    most_bytes,
    most_events,
    not_passed_on,
)
from appliance.gateway.external.queue import FairQueue, Output
from isolation.ipc.channel import Channel
from isolation.ipc.codec import Message
from isolation.ipc.engine import Abort, RequestFailure, Started, StepOutput, Submit
from isolation.ipc.errors import PeerGoneError, RingFull
from isolation.ipc.messages import FailureCode, Finish
from isolation.ipc.ping import Ping, Pong

LOOK_S = 0.1
"""Seconds after which the channel is looked at though no bell has rung."""

FULL_S = 0.002
"""Seconds until a full ring is tried again."""

SALT_BYTES = 32

BEAT_S = 1.0
"""Seconds between two signs of life while requests are with the endpoint, whose silence is not this program's."""

USAGE_S = 2.0
"""Seconds for which the endpoint's count of the tokens is waited for behind the last token."""

RETRY_S = 0.2
"""Seconds until a second connection is tried, where the endpoint has seen nothing of the request."""

LOG_EVERY_S = 5.0
"""Least seconds between two lines of the log on one kind of failure: an endpoint that is gone fails every request."""

log = structlog.get_logger()

Count = Callable[[str, str], None]
"""Counts what an endpoint did: the model, and one of ``completion.OUTCOMES``."""

OUTCOME_OF = {
    FailureCode.ENDPOINT_FAILED: "failed",
    FailureCode.ENDPOINT_BUSY: "busy",
    FailureCode.ENDPOINT_LATE: "late",
    FailureCode.ENDPOINT_WRONG: "wrong",
}


class ExternalEngine:
    """Serves one channel until its other end closes."""

    def __init__(self, name: str, endpoint: Endpoint, channel: Channel, vocabulary: Vocabulary, count: Count) -> None:
        """``name`` is the model's, for the log and ``count``."""
        self._name = name
        self._endpoint = endpoint
        self._channel = channel
        self._vocabulary = vocabulary
        self._count = count
        self._queue = FairQueue()
        self._running: dict[int, asyncio.Task[None]] = {}
        self._failing: set[asyncio.Task[None]] = set()
        """Errors of defects that wait for room in the ring."""
        self._closed = False
        self._rung = asyncio.Event()
        self._said: dict[str, float] = {}

    @property
    def running(self) -> int:
        """Outputs that are with the endpoint."""
        return len(self._running)

    async def run(self) -> None:
        """Serve; returns when the other end has closed and no connection is left."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._channel.fileno(), self._rung.set)
        beat = asyncio.create_task(self._beat(), name=f"beat of external model {self._name}")
        try:
            await self._serve()
        except PeerGoneError:
            pass
        finally:
            loop.remove_reader(self._channel.fileno())
            self._closed = True  # What waits does not begin.
            tasks = [beat, *self._running.values(), *self._failing]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._channel.close()

    async def _serve(self) -> None:
        while True:
            self._rung.clear()
            self._channel.disarm()
            while messages := self._channel.receive():
                for message in messages:
                    await self._take(message)
                await asyncio.sleep(0)
            if self._channel.arm():
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._rung.wait()

    async def _take(self, message: Message) -> None:
        if isinstance(message, Submit):
            for choice in range(message.choices):
                self._queue.add(Output(message.request + choice, choice, message))
            self._begin()
        elif isinstance(message, Abort):
            await self._abort(message.request)
        elif isinstance(message, Ping):
            await self._send(Pong(message.number))
        # Quotas and public prefixes are of KV, which is the endpoint's own.

    def _begin(self) -> None:
        """Send what may go out now."""
        while (
            not self._closed
            and len(self._running) < self._endpoint.config.max_concurrent
            and (output := self._queue.take()) is not None
        ):
            name = f"output {output.request} of external model {self._name}"
            task = self._running[output.request] = asyncio.create_task(self._work(output), name=name)
            task.add_done_callback(partial(self._ended, output.request))

    def _ended(self, request: int, task: asyncio.Task[None]) -> None:
        """Go on with what waits; an output that a defect has ended gets its error."""
        self._running.pop(request, None)
        self._begin()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a defect ended an output of an external model", model=self._name, exc_info=error)
            failing = asyncio.create_task(self._fail(request, FailureCode.INTERNAL))
            self._failing.add(failing)
            failing.add_done_callback(self._failing.discard)

    async def _abort(self, request: int) -> None:
        if (task := self._running.get(request)) is not None:
            task.cancel()
        if self._queue.remove(request) or task is not None:
            await self._fail(request, FailureCode.ABORTED)

    async def _work(self, output: Output) -> None:
        try:
            await self._compute(output)
        except asyncio.CancelledError:
            self._count(self._name, "cancelled")
            raise
        except TimeoutError:
            await self._lose(output, FailureCode.ENDPOINT_LATE, "it gave no token in time")
        except EndpointError as error:
            code = FailureCode.ENDPOINT_BUSY if error.busy else FailureCode.ENDPOINT_FAILED
            await self._lose(output, code, str(error))
        except WrongAnswerError as error:
            await self._lose(output, FailureCode.ENDPOINT_WRONG, str(error))

    async def _compute(self, output: Output) -> None:
        """Have one output computed. What goes wrong behind its last token is nothing to the request."""
        if what := not_passed_on(output.submit):
            self._say("not passed on", f"{what} cannot be had from an external model")
            await self._fail(output.request, FailureCode.INVALID)
            return
        reader, usage = AnswerReader(output.submit, self._vocabulary), None
        try:
            usage = await self._answer(output, reader)
        except (TimeoutError, EndpointError, WrongAnswerError):
            if not reader.finished:
                raise
        self._count(self._name, "ok")
        counted = EndpointUsage(len(output.submit.token_ids), reader.received)
        if usage is not None and usage != counted:
            self._count(self._name, "usage_differs")
            told = {"endpoint": [usage.input, usage.output], "here": [counted.input, counted.output]}
            self._say("usage", "the endpoint counts other tokens than this gateway", **told)

    async def _answer(self, output: Output, reader: AnswerReader) -> EndpointUsage | None:
        """Hand on one answer; returns the endpoint's count of the tokens, if it gives one."""
        loop, timeout_s = asyncio.get_running_loop(), self._endpoint.config.timeout_s
        async with asyncio.timeout(timeout_s) as timer, self._asked(output) as events, aclosing(events):
            await self._send(self._step(starts=(Started(output.request, 0, 0),)))
            async for event in events:
                piece = reader.read(event)
                if piece.token_ids:
                    await self._send(self._step(output.request, piece))
                    # Comments and empty events are no progress.
                    timer.reschedule(loop.time() + (USAGE_S if reader.finished else timeout_s))
                if reader.finished and piece.usage is not None:
                    return piece.usage
        if not reader.finished:
            raise WrongAnswerError("it says that its answer has ended, and the answer has no end")
        return None

    @asynccontextmanager
    async def _asked(self, output: Output) -> AsyncIterator[AsyncGenerator[Any]]:
        """Ask the endpoint, a second time where it has seen nothing of the first."""
        submit, config = output.submit, self._endpoint.config
        # Who keeps nothing gets a salt that no later request has.
        key = (submit.user or submit.group or submit.namespace) if submit.retain else secrets.token_bytes(SALT_BYTES)
        body = body_of(submit, output.choice, config.model, cache_salt(key, config.url, config.model))
        bounds = {"most_bytes": most_bytes(submit), "most_events": most_events(submit)}
        async with AsyncExitStack() as stack:
            try:
                events = await stack.enter_async_context(asked(self._endpoint, body, **bounds))
            except EndpointError as error:
                if not error.again:
                    raise
                await asyncio.sleep(RETRY_S)
                events = await stack.enter_async_context(asked(self._endpoint, body, **bounds))
            yield events

    def _step(self, request: int = 0, piece: Piece | None = None, **parts: Any) -> StepOutput:
        """Return a frame with the state of the queue, and what a piece of a request's answer gave."""
        columns: dict[str, Any] = {}
        if piece is not None:
            number = len(piece.token_ids)
            columns["requests"] = array("Q", [request]) * number
            columns["token_ids"] = array("I", piece.token_ids)
            columns["finishes"] = bytes([Finish.NONE] * (number - 1) + [piece.finish])
        return StepOutput(**columns, **parts, running=len(self._running), waiting=len(self._queue), free_blocks=1)

    async def _lose(self, output: Output, code: FailureCode, reason: str) -> None:
        """End an output that the endpoint did not give."""
        kind = OUTCOME_OF[code]
        self._count(self._name, kind)
        self._say(kind, reason)
        await self._fail(output.request, code)

    async def _fail(self, request: int, code: FailureCode) -> None:
        await self._send(self._step(failures=(RequestFailure(request, code),)))

    async def _send(self, message: Message) -> None:
        """Send as soon as the ring has room."""
        while True:
            try:
                self._channel.send(message)
            except RingFull:
                await asyncio.sleep(FULL_S)
            except PeerGoneError:
                return  # ``run`` ends by itself.
            else:
                return

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            if self._running or self._queue:
                await self._send(self._step())

    def _say(self, kind: str, reason: str, **told: Any) -> None:
        """Log what the endpoint did, at most every ``LOG_EVERY_S`` of a kind."""
        now = time.monotonic()
        if now - self._said.get(kind, -LOG_EVERY_S) >= LOG_EVERY_S:
            self._said[kind] = now
            url = self._endpoint.config.url
            log.warning("external model", model=self._name, url=url, outcome=kind, reason=reason, **told)
