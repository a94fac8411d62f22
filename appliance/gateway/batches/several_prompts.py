"""Lines of several prompts: each prompt is a request of its tenant, and all answers are one result.

Every prompt needs a place of its own, so a line of many prompts takes no more room than as many lines. Where there is
none, or a prompt meets a limit that passes, the line goes back with the answers that it has, and is continued later. A
line is answered and charged as a whole, also where its batch is cancelled or expires between two prompts: until then
its answers are in this process alone, and a gateway that comes anew runs all prompts again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from appliance.common.audit.entry import Entry
from appliance.common.errors import ApplianceError, InvalidRequestError
from appliance.common.tracebacks import forget_frames
from appliance.gateway.generate_request import BatchLine, CallContext, GenerateRequest, Principal
from appliance.gateway.http.collecting import collect, started
from appliance.gateway.http.openai_objects import Writer, joined, pieces_of
from appliance.gateway.service import Service

LONGEST_S = 3_600.0
"""Seconds that a line of one prompt, or one prompt of several, may take, as any request without a deadline."""

DEFECTS = (RuntimeError, ValueError, TypeError, KeyError, AssertionError)
"""What ends a line by a mistake of the program: it fails, and the others run on."""


class PromptPlaces(Protocol):
    """Places of a line that runs. It has one from the beginning."""

    def take(self) -> bool:
        """Take one more, where a line could begin now; returns whether it was taken."""
        ...

    def leave(self) -> None:
        """Give one back."""
        ...


@dataclass(frozen=True, slots=True)
class PromptAnswer:
    """Answer to one prompt."""

    head: dict[str, Any]
    """Fields of the answer beside its choices."""
    choices: bytes
    """JSON of the choices, without the brackets around them."""
    entries: tuple[Entry, ...]
    """Entries of the audit log that charge it."""


@dataclass(slots=True)
class LineProgress:
    """Answers of a line that is not complete."""

    model: tuple[str, str, str] = ("", "", "")
    """Model, alias and adapter by which the answers were made: one object names one."""
    answers: dict[int, PromptAnswer] = field(default_factory=dict)
    """By place of the prompt."""

    @property
    def size(self) -> int:
        """Bytes of the answers."""
        return sum(len(one.choices) for one in self.answers.values())

    @property
    def entries(self) -> list[Entry]:
        """Entries that charge the answers, in the prompts' order."""
        return [one for place in sorted(self.answers) for one in self.answers[place].entries]

    def body(self) -> bytes:
        """Return the answer of the line: all choices in the prompts' order, with the sums of their usage."""
        answers = [self.answers[place] for place in sorted(self.answers)]
        head = joined([{**one.head, "choices": []} for one in answers])
        del head["choices"]
        start = b"".join(pieces_of(head))[:-1]
        return start + b',"choices":[' + b",".join(one.choices for one in answers) + b"]}"


class DelayedError(Exception):
    """Prompts of a line have to wait for room."""


@dataclass(frozen=True, slots=True)
class LineCall:
    """Line whose prompts are requests."""

    principal: Principal
    context: CallContext
    expires: float
    """Unix time at which its batch ends."""
    wait_of: Callable[[ApplianceError], float | None]
    """Gives the seconds after which a request that met an error is tried again; None where that would not help."""
    charge: Callable[[Entry], None]
    """Takes the entries that charge the line, one for each prompt that ran."""


class PromptRuns:
    """Runs the prompts of one line that have no answer yet."""

    def __init__(
        self, service: Service, call: LineCall, places: PromptPlaces, progress: LineProgress, most: int
    ) -> None:
        """``most``: bytes that all answers may have."""
        self._service, self._call, self._places = service, call, places
        self._progress = progress
        self._most = most
        self._held = 1
        self._tasks: dict[asyncio.Task[PromptAnswer], int] = {}
        self._entries: dict[int, list[Entry]] = {}
        """Entries of prompts that run, by place."""

    async def run(self, requests: Sequence[GenerateRequest]) -> bytes:
        """Return the answer once all prompts have one.

        Raises:
            DelayedError: there is no room for those that are left; their turn comes again.
            ApplianceError: one of them failed; where it is worth trying again, the answers of others are kept.
        """
        first = requests[0]
        model = (first.model, first.alias, first.adapter)
        if self._progress.model != model:
            self._progress.answers.clear()
            self._progress.model = model
        left = [place for place in range(len(requests)) if place not in self._progress.answers]
        try:
            await self._run(left, requests)
        except (ApplianceError, *DEFECTS) as error:
            if not isinstance(error, ApplianceError) or self._call.wait_of(error) is None:
                await self._stop()
                self._charge_all()
            raise
        finally:
            await self._stop()
            while self._held > 1:
                self._leave()
        self._charge_all()
        return self._progress.body()

    async def _run(self, left: list[int], requests: Sequence[GenerateRequest]) -> None:
        delay: ApplianceError | None = None
        if left:
            self._begin(left.pop(0), requests)
        self._begin_others(left, requests)
        while self._tasks:
            ended, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                delay = self._take(task) or delay
                if self._tasks or left:  # The last place stays the line's until its result is kept.
                    self._leave()
            if delay is None:
                self._begin_others(left, requests)
        if delay is not None:
            raise delay
        if left:
            raise DelayedError

    def _take(self, task: asyncio.Task[PromptAnswer]) -> ApplianceError | None:
        """Take the answer of a prompt that has ended; returns the error after which it is tried again.

        Raises:
            ApplianceError: trying again does not help.
        """
        place = self._tasks.pop(task)
        try:
            self._progress.answers[place] = task.result()
        except ApplianceError as error:
            if self._call.wait_of(error) is None:
                raise
            del self._entries[place]
            forget_frames(error)  # They have the task, which has the error.
            return error
        if self._progress.size > self._most:
            raise InvalidRequestError("the answers are longer than a result may be", param="prompt")
        return None

    def _begin_others(self, left: list[int], requests: Sequence[GenerateRequest]) -> None:
        while left and self._places.take():
            self._held += 1
            self._begin(left.pop(0), requests)

    def _begin(self, place: int, requests: Sequence[GenerateRequest]) -> None:
        self._tasks[asyncio.create_task(self._answer(place, requests[place]))] = place

    async def _answer(self, place: int, request: GenerateRequest) -> PromptAnswer:
        entries: list[Entry] = []
        self._entries[place] = entries
        context, line = self._call.context, self._call.context.line
        assert line is not None, "a request of a batch"
        context = replace(context, line=BatchLine(line.batch, entries.append))
        left_s = self._call.expires - time.time()
        request = replace(request, deadline=time.monotonic() + min(left_s, LONGEST_S))
        async with aclosing(self._service.generate(self._call.principal, request, context)) as events:
            await started(events)
            heard, finished = await collect(events)
        writer = Writer(request, int(time.time()), include_usage=False, number=place)
        answer = writer.collected(heard, finished)
        choices = b"".join(pieces_of(answer.pop("choices")))[1:-1]
        return PromptAnswer(answer, choices, tuple(entries[-1:]))

    async def _stop(self) -> None:
        """End the prompts that run."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.exception()  # so that the loop does not report it as lost
        # Frames of their errors refer to this object: kept, all of it would wait for the collector.
        self._tasks.clear()

    def _charge_all(self) -> None:
        """Charge what the prompts were given, those without an answer too."""
        for place in sorted({*self._progress.answers, *self._entries}):
            answer = self._progress.answers.get(place)
            for one in answer.entries if answer is not None else self._entries[place][-1:]:
                self._call.charge(one)

    def _leave(self) -> None:
        self._held -= 1
        self._places.leave()
