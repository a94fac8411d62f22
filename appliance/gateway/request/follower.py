"""One run of a request in one engine: its token streams as events, or written straight into the caller's sink.

With a sink, one output and an exact vocabulary table, no task wakes up for a token: the delivery's pass calls the
stream's ``deliver``, which decodes what has arrived and writes it; the request's task sleeps until the end. A sink that
is not ready leaves its tokens in the stream, whose bound ends this request alone; when it is ready again it calls back.

Several outputs share the event that wakes the task. An output that ends is reported at once, the request ends with its
last one, and whatever ends one stream in any other way ends the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace

from appliance.common.usage.open_charges import NO_CHARGE, OUTPUT, OpenCharge
from appliance.gateway.generate_request import (
    ChoiceFinished,
    Event,
    Finished,
    FinishReason,
    PromptTokens,
    Sink,
    Started,
)
from appliance.gateway.request.output import LocalText, OutputText
from appliance.gateway.request.prompt_report import PromptReport
from appliance.gateway.request.thinking_text import ThinkingText
from appliance.gateway.sandboxes.model_sandboxes import EngineVisit
from appliance.gateway.sandboxes.stream import TokenStream
from appliance.gateway.telemetry.attributes import told
from appliance.gateway.telemetry.request_trace import Phase, RequestTrace
from isolation.ipc.engine import Started as EngineStarted
from isolation.ipc.messages import Finish
from isolation.ipc.spill import KvTier


@dataclass(slots=True)
class Outcome:
    """Counts of a request over all its runs, for the trace, the audit log and the ledger."""

    input_tokens: int = 0
    cached_tokens: int = 0
    restored_tokens: tuple[int, ...] = (0, 0, 0)
    """Cached tokens whose KV came back for this request from each ``KvTier``: memory, disk, store."""
    store_gap: bool = False
    """Whether the engine asked the store for blocks of the prompt and the store lacks one."""
    output_tokens: int = 0
    reasoning_tokens: int = 0
    """Output tokens that are reasoning, shown or not."""
    finish: FinishReason | None = None
    started: bool = False
    """Whether an engine took the request up."""
    elsewhere: bool = False
    """Whether another host has computed the prompt, or worked on it until the caller left or the time was over: it is
    charged whatever comes then."""
    text_tokens: int = 0
    """Tokens that the text sandbox made of the prompt, or gave it up at."""
    emitted: bool = False
    """Whether some of the answer was shown: then the request cannot be replayed."""
    streamed: bool = False
    """Whether the answer is shown while it is made; one that is collected is shown at its end."""
    came: float | None = None
    """When it first needed its model's shared sandboxes, in monotonic seconds; None where it did not."""
    kept: OpenCharge = NO_CHARGE
    """What is kept of the request in case that this process ends."""
    charge: OpenCharge = NO_CHARGE
    """Where the numbers of an answer that is streamed are kept."""

    def keep(self, kept: OpenCharge) -> None:
        """Keep the request's charge; that of a collected answer is noted at its end, before its first byte leaves."""
        self.kept = kept
        if self.streamed:
            self.charge = kept

    def take(self, started: EngineStarted) -> None:
        """Note that an engine took the request up, and what it says that it had of the prompt."""
        self.started = True
        self.cached_tokens = min(started.cached_tokens, self.input_tokens)
        self.restored_tokens = restored_of(started, self.cached_tokens)
        self.store_gap = started.store_gap

    def show(self) -> None:
        """Note that some of the answer is about to be shown."""
        self.emitted = True
        self.charge.show(self.input_tokens, self.cached_tokens)


def restored_of(started: EngineStarted, cached_tokens: int) -> tuple[int, ...]:
    """Return the tokens that came back from memory, disk and store, together at most ``cached_tokens``: an engine may
    say what it likes. Pure."""
    left, found = cached_tokens, list[int]()
    for tokens in (started.memory_tokens, started.disk_tokens, started.store_tokens):
        found.append(min(tokens, left))
        left -= found[-1]
    return tuple(found)


def note_restored(outcome: Outcome, trace: RequestTrace, count: Callable[..., None]) -> None:
    """Say on the span, and count by tier, how many tokens of a request that ends came back from outside the engine."""
    if any(outcome.restored_tokens):
        for tier, tokens in zip(KvTier, outcome.restored_tokens, strict=True):
            count(tokens, tier=tier.name.lower())
        memory, disk, store = outcome.restored_tokens
        trace.annotate(**told(kv_memory_tokens=memory, kv_disk_tokens=disk, kv_store_tokens=store))


class RunProgress:
    """Reports the progress of one run, over all its outputs, to the trace, the outcome and the engine visit."""

    def __init__(
        self, visit: EngineVisit, outcome: Outcome, trace: RequestTrace, taken: Callable[[], None] = lambda: None
    ) -> None:
        """``taken`` is called when the engine has taken the request up, behind what the outcome notes of it."""
        self._visit, self._taken = visit, taken
        self._outcome = outcome
        self._trace = trace
        self._began_ns = trace.now_ns()
        self._first = True
        self.begun = False
        """Whether ``started`` was called."""

    def started(self, stream: TokenStream) -> Started | None:
        """Note that the engine took the request up; None when the caller was told so of an earlier run."""
        outcome, self.begun = self._outcome, True
        again = outcome.started
        # An engine that sends tokens without reporting their start has cached nothing and queued nothing.
        reported = stream.started or EngineStarted(stream.request, 0, 0)
        scheduled_ns = min(self._trace.now_ns(), self._began_ns + reported.queue_us * 1_000)
        outcome.take(reported)
        self._taken()
        self._trace.end(Phase.QUEUE, at_ns=scheduled_ns)
        self._trace.begin(Phase.PREFILL, at_ns=scheduled_ns)
        return None if again else Started(outcome.input_tokens, outcome.cached_tokens)

    async def prompt(self, report: PromptReport) -> PromptTokens:
        """Make the event that shows the prompt."""
        self._outcome.show()
        return await report.event()

    def tokens(self, count: int) -> None:
        """Note that ``count`` tokens, which arrived in one pass, are about to be shown."""
        if self._first:
            self._first = False
            self._outcome.show()
            self._visit.passed()
            self._trace.end(Phase.PREFILL, cached_tokens=self._outcome.cached_tokens)
            self._trace.first_token(count)
            self._trace.begin(Phase.DECODE)

    def finished(self, reason: FinishReason, stop: str | None, choice: int) -> Finished:
        """Note that the last token was shown; returns the last event."""
        outcome = self._outcome
        outcome.finish = reason
        self._trace.end(Phase.DECODE, output_tokens=outcome.output_tokens)
        return Finished(reason, outcome.input_tokens, outcome.cached_tokens, outcome.output_tokens, stop, choice)


class Follower:
    """Follows the streams of one run to their ends."""

    def __init__(
        self,
        streams: Sequence[TokenStream],
        texts: Sequence[OutputText],
        outcome: Outcome,
        progress: RunProgress,
        abort: Callable[[TokenStream], None],
        prompt: PromptReport | None = None,
    ) -> None:
        """``abort`` stops one output in the engine; ``prompt`` is reported before any output, as soon as it is
        ready."""
        self._streams = streams
        self._texts = texts
        self._outcome = outcome
        self._progress = progress
        self._abort = abort
        self._prompt = prompt
        self._open = list(range(len(streams)))
        self._used = [0] * len(streams)
        self._over = False
        self._defect: Exception | None = None

    async def events(self, sink: Sink | None) -> AsyncGenerator[Event]:
        """Yield ``Started`` unless an earlier run did, ``PromptTokens`` where asked for, deltas unless they go into the
        sink, ``ChoiceFinished`` for each output but the last, ``Finished``.

        Raises:
            EngineGoneError: the engine ended.
            ApplianceError: the request itself has ended.
        """
        wake, progress = self._streams[0].wake, self._progress
        writable = self._texts[0] if sink is not None and len(self._texts) == 1 else None
        while True:
            await woken(wake)
            for choice in self._open[:]:
                stream, text = self._streams[choice], self._texts[choice]
                if not progress.begun and (stream.started is not None or stream.token_ids):
                    started = progress.started(stream)
                    if started is not None:
                        yield started
                if self._prompt is not None:
                    if not (progress.begun and self._prompt.ready):
                        stream.raise_if_lost()
                        continue
                    yield await progress.prompt(self._prompt)
                    self._prompt = None
                if progress.begun and sink is not None and isinstance(writable, LocalText | ThinkingText):
                    await self._write_to(sink, writable)
                    yield self._end(choice, stream.finish)
                    return
                # As of now: while an event is handled, the next frame may bring more tokens and the end.
                finish = stream.finish
                token_ids, logprobs = stream.take()
                if token_ids:
                    progress.tokens(len(token_ids))
                    delta, used = await text.decode(token_ids, logprobs, finish)
                    self._count(choice, used)
                    yield delta
                if not text.over and finish is Finish.NONE:
                    stream.raise_if_lost()
                    continue
                yield self._end(choice, finish)
                if not self._open:
                    return

    async def _write_to(self, sink: Sink, text: LocalText | ThinkingText) -> None:
        """Let the delivery's passes write the one output; return when it is written to its end."""
        (stream,) = self._streams

        def deliver() -> None:
            if self._over or not sink.ready:
                return
            try:
                self._over = self._write(stream, sink, text)
            except Exception as error:  # noqa: BLE001 - the border of one request in a pass over all: raised below
                self._over, self._defect = True, error
            if self._over:
                stream.wake.set()

        stream.deliver = deliver
        sink.on_ready(deliver)
        try:
            deliver()
            while not self._over:
                # Tokens that came before a loss still count. It may have come with them, before anybody waited here.
                stream.raise_if_lost()
                await woken(stream.wake)
                deliver()
            if self._defect is not None:
                raise self._defect
        finally:
            stream.deliver = None
            sink.on_ready(None)

    def _write(self, stream: TokenStream, sink: Sink, text: LocalText | ThinkingText) -> bool:
        """Write what has arrived; returns whether the output has ended."""
        finish = stream.finish
        token_ids, logprobs = stream.take()
        if token_ids:
            self._progress.tokens(len(token_ids))
            delta, used = text.push(token_ids, logprobs, finish)
            self._count(0, used)
            sink.delta(delta)
        return text.over or finish is not Finish.NONE

    def charge(self) -> None:
        """Sum up the output tokens to charge: those shown, and those that arrived unread for a caller who left or did
        not read. Unread tokens of an engine that ended, and tokens past a stop string, are not charged."""
        for choice in self._open:
            stream = self._streams[choice]
            if stream.engine_gone is None:
                self._used[choice] = max(self._used[choice], stream.received)
                if stream.started is not None and not self._outcome.started:
                    self._outcome.take(stream.started)
        self._outcome.output_tokens = sum(self._used)
        self._outcome.reasoning_tokens = sum(one.reasoning_tokens for one in self._texts)

    def _count(self, choice: int, used: int) -> None:
        """Count tokens that are delivered now; ``charge`` settles the sum."""
        outcome = self._outcome
        self._used[choice] += used
        outcome.output_tokens += used
        outcome.charge.words[OUTPUT] = outcome.output_tokens

    def _end(self, choice: int, finish: Finish) -> ChoiceFinished | Finished:
        """End one output, in the engine too; returns its last event."""
        self._open.remove(choice)
        self._abort(self._streams[choice])
        text = self._texts[choice]
        reason = text.reason(finish)
        if self._open:
            return ChoiceFinished(choice, reason, text.stopped, text.refused)
        self._outcome.output_tokens = sum(self._used)
        self._outcome.reasoning_tokens = sum(one.reasoning_tokens for one in self._texts)
        finished = self._progress.finished(reason, text.stopped, choice)
        return replace(finished, refused=text.refused, reasoning_tokens=self._outcome.reasoning_tokens)


async def woken(wake: asyncio.Event) -> None:
    """Wait for the event, and clear it."""
    if not wake.is_set():
        await wake.wait()
    wake.clear()
