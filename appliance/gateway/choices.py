"""One run of a request for several outputs: all its streams in turn, as events with the choice that each belongs to.

A choice that ends is told at once; the request ends with its last one. Whatever ends one stream in any other way ends
the request.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

from appliance.gateway.answer import Course, Outcome, reason_of, woken
from appliance.gateway.losses import raise_if_lost
from appliance.gateway.output import LocalText, RemoteText
from appliance.gateway.prompt_report import PromptReport
from appliance.gateway.stream import TokenStream
from appliance.request import ChoiceFinished, Delta, Event, Finished
from isolation.ipc.messages import Finish


class Choices:
    """Follows the streams of one request to their ends; they share the event that wakes whoever waits."""

    def __init__(
        self,
        streams: list[TokenStream],
        texts: list[LocalText | RemoteText],
        course: Course,
        outcome: Outcome,
        abort: Callable[[TokenStream], None],
        prompt: PromptReport | None = None,
    ) -> None:
        """``abort`` stops a choice whose stop string was met; ``prompt``: the event to give before any output."""
        self._prompt = prompt
        self._streams = streams
        self._texts = texts
        self._course = course
        self._outcome = outcome
        self._abort = abort
        self._open = set(range(len(streams)))
        self._used = [0] * len(streams)

    async def events(self) -> AsyncGenerator[Event]:
        """``Started`` unless an earlier run gave it, deltas and ends of choices, ``Finished``.

        Raises:
            EngineGoneError: its engine is gone.
            ApplianceError: the request itself has ended.
        """
        while True:
            await woken(self._streams[0].wake)
            for choice in sorted(self._open):
                stream = self._streams[choice]
                if not self._course.begun and (stream.started is not None or stream.token_ids):
                    started = self._course.started(stream)
                    if started is not None:
                        yield started
                if self._prompt is not None and self._outcome.started and self._prompt.ready:
                    yield await self._course.prompt(self._prompt)
                    self._prompt = None
                if self._prompt is not None:
                    raise_if_lost(stream)
                    continue
                finish = stream.finish
                delta = await self._take(choice, finish)
                if delta is not None:
                    yield delta
                if self._texts[choice].stopped is not None or finish is not Finish.NONE:
                    ended = self._end(choice, finish)
                    yield ended
                    if isinstance(ended, Finished):
                        return
                else:
                    raise_if_lost(stream)

    async def _take(self, choice: int, finish: Finish) -> Delta | None:
        """What has arrived for a choice up to now. ``finish``: as of before its tokens are taken."""
        stream, text = self._streams[choice], self._texts[choice]
        token_ids, logprobs = stream.take()
        if not token_ids:
            return None
        self._course.tokens(len(token_ids))
        pushed = text.push(token_ids, logprobs, hide_last=finish is Finish.STOP)
        delta, used = pushed if isinstance(pushed, tuple) else await pushed
        self._used[choice] += used
        self._outcome.output_tokens += used
        if text.stopped is None and finish is not Finish.NONE:
            rest = text.finish()
            delta = replace(delta, text=delta.text + (rest if isinstance(rest, str) else await rest))
        return replace(delta, choice=choice)

    def _end(self, choice: int, finish: Finish) -> ChoiceFinished | Finished:
        self._open.discard(choice)
        self._abort(self._streams[choice])
        stopped = self._texts[choice].stopped
        reason = reason_of(finish, stopped)
        if self._open:
            return ChoiceFinished(choice, reason, stopped)
        return self._course.finished(reason, stopped, choice)

    def charge_unread(self) -> None:
        """What the engine computed for a caller who left, or did not read, is charged as well; what a dead engine
        computed, or what came behind a stop string, is not."""
        for choice in self._open:
            stream = self._streams[choice]
            if stream.engine_gone is None:
                self._outcome.output_tokens += max(0, stream.received - self._used[choice])
                self._outcome.started = self._outcome.started or stream.started is not None
