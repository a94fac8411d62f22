"""One run in one engine: its tokens as events, or straight into the caller's sink.

With a sink and a table that is exact nobody is woken for a token: the delivery's pass calls ``_deliver``, which decodes
what has arrived and writes it, and the request's task sleeps until the end. A sink that is not ready leaves its tokens
in the stream, whose bound ends this request alone; when it is ready again it calls back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace

from appliance.gateway.losses import raise_if_lost
from appliance.gateway.output import LocalText, RemoteText
from appliance.gateway.prompt_report import PromptReport
from appliance.gateway.rooms import EngineVisit
from appliance.gateway.stream import TokenStream
from appliance.request import Event, Finished, FinishReason, PromptTokens, Sink, Started
from appliance.telemetry.api import Phase, RequestTrace
from isolation.ipc import messages as wire
from isolation.ipc.messages import Finish


@dataclass(slots=True)
class Outcome:
    """What the trace and the ledger are told at the end; one a request, over all its runs."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    finish: FinishReason | None = None
    started: bool = False
    """Whether an engine took the request up."""
    emitted: bool = False
    """Whether some of the answer was shown: it cannot be replayed."""


class Course:
    """What one run of a request tells its trace, its outcome and the rooms; over all its choices."""

    def __init__(self, visit: EngineVisit, outcome: Outcome, trace: RequestTrace) -> None:
        self._visit = visit
        self._outcome = outcome
        self._trace = trace
        self._began_ns = time.time_ns()
        self._first = True
        self.begun = False
        """Whether ``started`` was called."""

    def started(self, stream: TokenStream) -> Started | None:
        """The engine took the request up; None when the caller was told of an earlier run."""
        outcome, self.begun = self._outcome, True
        anew = outcome.started
        # An engine that gives tokens without a word about their start has cached nothing and queued nothing.
        told = stream.started or wire.Started(stream.request, 0, 0)
        outcome.started = True
        scheduled_ns = min(time.time_ns(), self._began_ns + told.queue_us * 1_000)
        outcome.cached_tokens = min(told.cached_tokens, outcome.input_tokens)
        self._trace.end(Phase.QUEUE, at_ns=scheduled_ns)
        self._trace.begin(Phase.PREFILL, at_ns=scheduled_ns)
        return None if anew else Started(outcome.input_tokens, outcome.cached_tokens)

    async def prompt(self, report: PromptReport) -> PromptTokens:
        """The prompt is about to be shown."""
        self._outcome.emitted = True
        return await report.event()

    def tokens(self, count: int) -> None:
        """So many tokens are about to be shown, all of which came in one pass."""
        if self._first:
            self._first = False
            self._outcome.emitted = True
            self._visit.passed()
            self._trace.end(Phase.PREFILL, cached_tokens=self._outcome.cached_tokens)
            self._trace.first_token(count)
            self._trace.begin(Phase.DECODE)

    def finished(self, reason: FinishReason, stop: str | None, choice: int = 0) -> Finished:
        """The last token was shown."""
        outcome = self._outcome
        outcome.finish = reason
        self._trace.end(Phase.DECODE, output_tokens=outcome.output_tokens)
        return Finished(
            reason, outcome.input_tokens, outcome.cached_tokens, outcome.output_tokens, stop, choice
        )


def reason_of(finish: Finish, stopped: str | None) -> FinishReason:
    """Why an output ended, by its last token and the stop string that was met."""
    return FinishReason.LENGTH if stopped is None and finish is Finish.LENGTH else FinishReason.STOP


class Answer:
    """Follows one stream to its end."""

    def __init__(
        self,
        stream: TokenStream,
        text: LocalText | RemoteText,
        outcome: Outcome,
        course: Course,
        prompt: PromptReport | None = None,
    ) -> None:
        """``prompt``: the event to give before any output, as soon as it is ready."""
        self._stream = stream
        self._text = text
        self._outcome = outcome
        self._course = course
        self._prompt = prompt
        self._over = False
        self._defect: Exception | None = None

    async def events(self, sink: Sink | None) -> AsyncGenerator[Event]:
        """``Started`` unless an earlier run gave it, deltas unless they go into the sink, ``Finished``.

        Raises:
            EngineGoneError: its engine is gone.
            ApplianceError: the request itself has ended.
        """
        stream, text, outcome = self._stream, self._text, self._outcome
        while True:
            await woken(stream.wake)
            if stream.started is not None or stream.token_ids:
                if not self._course.begun and (started := self._course.started(stream)) is not None:
                    yield started
                if self._prompt is not None and self._prompt.ready:
                    yield await self._course.prompt(self._prompt)
                    self._prompt = None
                if self._prompt is not None:
                    raise_if_lost(stream)
                    continue
                if sink is not None and isinstance(text, LocalText):
                    await self._write_to(sink, text)
                    yield self._finished()
                    return
                # As of this moment: while an event is written, the next frame may bring more tokens and the end.
                finish = stream.finish
                token_ids, logprobs = stream.take()
                if token_ids:
                    self._course.tokens(len(token_ids))
                    hide = finish is Finish.STOP
                    pushed = text.push(token_ids, logprobs, hide_last=hide)
                    delta, used = pushed if isinstance(pushed, tuple) else await pushed
                    outcome.output_tokens += used
                    if text.stopped is None and finish is not Finish.NONE:
                        rest = text.finish()
                        delta = replace(delta, text=delta.text + (rest if isinstance(rest, str) else await rest))
                    yield delta
                if text.stopped is not None or finish is not Finish.NONE:
                    yield self._finished()
                    return
            raise_if_lost(stream)

    async def _write_to(self, sink: Sink, text: LocalText) -> None:
        """Let the passes write; return when the answer is written to its end."""
        stream = self._stream

        def deliver() -> None:
            if self._over or not sink.ready:
                return
            try:
                self._over = self._write(sink, text)
            except Exception as error:  # noqa: BLE001 - the border of one request in a pass over all: it is raised below
                self._over, self._defect = True, error
            if self._over:
                stream.wake.set()

        stream.deliver = deliver
        sink.on_ready(deliver)
        try:
            deliver()
            while not self._over:
                await woken(stream.wake)
                # What came before a loss still counts.
                deliver()
                if not self._over:
                    raise_if_lost(stream)
            if self._defect is not None:
                raise self._defect
        finally:
            stream.deliver = None
            sink.on_ready(None)

    def _write(self, sink: Sink, text: LocalText) -> bool:
        """Write what has arrived; says whether it was the end."""
        stream = self._stream
        finish = stream.finish
        token_ids, logprobs = stream.take()
        if token_ids:
            self._course.tokens(len(token_ids))
            delta, used = text.push(token_ids, logprobs, hide_last=finish is Finish.STOP)
            self._outcome.output_tokens += used
            if text.stopped is None and finish is not Finish.NONE:
                delta = replace(delta, text=delta.text + text.finish())
            sink.delta(delta)
        return text.stopped is not None or finish is not Finish.NONE

    def charge_unread(self) -> None:
        """What the engine computed for a caller who left, or did not read, is charged as well; what a dead engine
        computed, or what came behind a stop string, is not."""
        stream, outcome = self._stream, self._outcome
        if outcome.finish is None and stream.engine_gone is None:
            outcome.output_tokens = max(outcome.output_tokens, stream.received)
            outcome.started = outcome.started or stream.started is not None

    def _finished(self) -> Finished:
        stopped = self._text.stopped
        return self._course.finished(reason_of(self._stream.finish, stopped), stopped)


async def woken(wake: asyncio.Event) -> None:
    """Wait for the event, and clear it."""
    if not wake.is_set():
        await wake.wait()
    wake.clear()
