"""One text sandbox as the gateway sees it: jobs answered in order, the oldest one watched by a clock.

The worker is serial, so the oldest unanswered job is the one being worked on. When it takes longer than
``JOB_TIMEOUT_S`` the sandbox is ended: that job fails, the others are lost through no fault of their own and their
callers may send them again to the next sandbox.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from appliance.gateway.assembler import VocabularyTable
from appliance.gateway.link import Link, LinkFullError
from isolation.ipc.channel import Channel
from isolation.ipc.messages import (
    MAX_VOCABULARY_ENTRIES,
    Decode,
    Decoded,
    Encode,
    Encoded,
    Failed,
    Message,
    ReadVocabulary,
    TextReady,
    Vocabulary,
)

JOB_TIMEOUT_S = 5.0
"""The longest one job may take: a 4 MiB text tokenises in about one second on a slow core."""

MAX_JOBS = 512
"""Jobs that may wait for the worker; one more is refused at once."""

Job = Encode | Decode | ReadVocabulary
Answer = Encoded | Decoded | Vocabulary | Failed


class TextFullError(Exception):
    """The worker has as many jobs as it may."""


class TextLostError(Exception):
    """The sandbox ended before it answered. ``culprit`` says that this job was the one being worked on."""

    def __init__(self, reason: str, *, culprit: bool) -> None:
        super().__init__(reason)
        self.culprit = culprit


@dataclass(slots=True)
class _Waiting:
    answer: asyncio.Future[Answer]
    kind: type


class TextLink:
    """The text worker's jobs. ``on_end(link, reason, at_fault)`` is called once when the sandbox is lost."""

    def __init__(
        self,
        channel: Channel,
        ready: TextReady,
        generation: int,
        on_end: Callable[[TextLink, str, bool], None],
    ) -> None:
        self.ready = ready
        self.generation = generation
        self.table: VocabularyTable | None = None
        self._on_end = on_end
        self._jobs: dict[int, _Waiting] = {}
        self._clock: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._link = Link(channel, self._on_message, self._ended)

    async def read_table(self, next_id: Callable[[], int]) -> None:
        """Fetch the id-to-bytes table.

        Raises:
            TextLostError: the sandbox ended, or its table is not what it announced.
        """
        entries: list[bytes] = []
        total = self.ready.vocab_size
        while len(entries) < total:
            answer = await self.ask(ReadVocabulary(next_id(), len(entries)))
            wanted = min(MAX_VOCABULARY_ENTRIES, total - len(entries))
            if (
                not isinstance(answer, Vocabulary)
                or answer.start != len(entries)
                or len(answer.entries) != wanted
            ):
                self._break("sent a vocabulary that it had not announced")
                raise TextLostError("the vocabulary is malformed", culprit=False)
            entries.extend(answer.entries)
        self.table = VocabularyTable(tuple(entries), self.ready.strip_leading_space)

    async def ask(self, job: Job) -> Answer:
        """Send a job and wait for its answer.

        Raises:
            TextFullError: too many jobs wait.
            TextLostError: the sandbox ended first.
        """
        if self._link.closed:
            raise TextLostError("the sandbox is gone", culprit=False)
        if len(self._jobs) >= MAX_JOBS:
            raise TextFullError
        future: asyncio.Future[Answer] = self._loop.create_future()
        self._jobs[job.request] = _Waiting(future, _ANSWERS[type(job)])
        if len(self._jobs) == 1:
            self._watch_oldest()
        try:
            self._link.send(job)
        except LinkFullError as error:
            self._jobs.pop(job.request, None)
            raise TextFullError from error
        return await future

    def close(self) -> None:
        """Let the sandbox go: all jobs are lost."""
        if not self._link.closed:
            self._link.close()
            self._lose("the sandbox was let go", culprit=False)

    def _on_message(self, message: Message) -> None:
        if not isinstance(message, Encoded | Decoded | Vocabulary | Failed):
            self._break(f"sent {type(message).__name__}")
            return
        oldest = next(iter(self._jobs), None)
        if oldest is None or message.request != oldest:
            self._break("answered out of order")
            return
        waiting = self._jobs[oldest]
        if not isinstance(message, Failed | waiting.kind):
            self._break("answered another question")
            return
        del self._jobs[oldest]
        if not waiting.answer.done():
            waiting.answer.set_result(message)
        self._watch_oldest()

    def _watch_oldest(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
        self._clock = self._loop.call_later(JOB_TIMEOUT_S, self._too_long) if self._jobs else None

    def _too_long(self) -> None:
        self._break(f"took longer than {JOB_TIMEOUT_S:g} s over one text")

    def _break(self, reason: str) -> None:
        self._link.close()
        self._ended(reason, at_fault=True)

    def _ended(self, reason: str, at_fault: bool) -> None:
        if self._clock is not None:
            self._clock.cancel()
        self._on_end(self, reason, at_fault)
        self._lose(reason, culprit=True)

    def _lose(self, reason: str, *, culprit: bool) -> None:
        jobs, self._jobs = self._jobs, {}
        for index, waiting in enumerate(jobs.values()):
            if not waiting.answer.done():
                waiting.answer.set_exception(TextLostError(reason, culprit=culprit and index == 0))


_ANSWERS: dict[type, type] = {Encode: Encoded, Decode: Decoded, ReadVocabulary: Vocabulary}
