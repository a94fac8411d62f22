"""The gateway's link to one text sandbox: jobs answered in order, the oldest one watched by a timer.

The worker is serial, so the oldest unanswered job is the one being worked on. When it takes longer than
``JOB_TIMEOUT_S`` the sandbox is ended: that job fails, the others are lost without having caused it, and their callers
may send them again to the next sandbox.

Only ``WINDOW`` jobs are in the sandbox at a time. The others wait here, a queue for each tenant, and tenants take
turns: many slow prompts of one tenant cost another tenant the time of one, and a caller that leaves takes its job
along.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from appliance.gateway.sandboxes.grammars import Grammars
from appliance.gateway.sandboxes.link import Link, LinkFullError, SandboxLink
from isolation.ipc.channel import Channel
from isolation.ipc.codec import Message
from isolation.ipc.errors import LocalProtocolError
from isolation.ipc.grammar import Masks
from isolation.ipc.messages import MAX_ENTRY_BYTES, MAX_VOCABULARY_ENTRIES, Failed, TextReady
from isolation.ipc.output import CloseOutput, OutputRead, ReadOutput
from isolation.ipc.text import Decode, Decoded, Encode, Encoded, ReadVocabulary, Vocabulary

JOB_TIMEOUT_S = 5.0
"""Longest time of one job, in seconds. A megabyte of text takes one on a slow core; of a text that has far more tokens
than a model takes, only the beginning is encoded (``engine.text.tokenizer``)."""

WINDOW = 2
"""Jobs in the sandbox at once: one that is worked on and one behind it, so that the worker never waits for the
gateway."""

LARGE_JOB_BYTES = 64 << 10
"""Bytes of a text from which on encoding takes more than some ten milliseconds. Of such jobs one is in the sandbox at a
time: two of the largest of one tenant would delay the next tenant by two seconds."""

MAX_JOBS = 1_024
"""Jobs that may wait for the worker; beyond them the tenant with the most loses its last one."""

MAX_TENANT_JOBS = 512
"""Jobs of one tenant that may wait, so that one tenant alone does not fill the queue."""

MAX_VOCABULARY = 1 << 20
"""Entries of a table; the largest published vocabularies have a quarter of it."""

MAX_TABLE_BYTES = 64 << 20
"""Bytes of all entries of a table: 64 for each of ``MAX_VOCABULARY``."""

Job = Encode | Decode | ReadVocabulary | ReadOutput
Answer = Encoded | Decoded | Vocabulary | OutputRead | Failed


@dataclass(frozen=True, slots=True)
class VocabularyTable:
    """Id-to-bytes table of one tokenizer, as the text sandbox exported it."""

    entries: tuple[bytes, ...]
    strip_leading_space: bool

    def bytes_of(self, token_id: int) -> bytes:
        """Return the token's bytes; an id beyond the table (padding rows of the logits) has none."""
        return self.entries[token_id] if token_id < len(self.entries) else b""


class TextFullError(Exception):
    """The queue of the text worker is full."""


class TextLostError(Exception):
    """The sandbox ended before it answered; ``culprit`` says that it was working on this job."""

    def __init__(self, reason: str, *, culprit: bool) -> None:
        super().__init__(reason)
        self.culprit = culprit


@dataclass(slots=True, eq=False)
class _Waiting:
    job: Job
    answer: asyncio.Future[Answer]


class TextLink(SandboxLink):
    """Jobs of one text worker. ``on_end(link, reason, at_fault)`` is called once when the sandbox is lost."""

    def __init__(
        self, channel: Channel, ready: TextReady, generation: int, on_end: Callable[[TextLink, str, bool], None]
    ) -> None:
        self.ready = ready
        self.generation = generation
        self.table: VocabularyTable | None = None
        self._on_end = on_end
        self._sent: dict[int, _Waiting] = {}
        self._queues: OrderedDict[str, deque[_Waiting]] = OrderedDict()
        self._queued = 0
        self._clock: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._link = Link(channel, self._on_message, self._ended, lambda: bool(self._sent) or self.grammars.waiting)
        self.grammars = Grammars(self._tell, ready.vocab_size, self._break)
        """Requests that follow grammars; they do not queue, since no grammar keeps the worker from its jobs."""

    @property
    def occupied(self) -> bool:
        """Whether a job is outstanding, or a request follows a grammar."""
        return bool(self._sent or self._queued) or self.grammars.occupied

    async def read_table(self, next_id: Callable[[], int]) -> None:
        """Fetch the id-to-bytes table.

        Raises:
            TextLostError: the sandbox ended, or its table is not what it announced, or larger than any.
        """
        entries: list[bytes] = []
        size = 0
        total = self.ready.vocab_size
        while len(entries) < total:
            answer = await self.ask(ReadVocabulary(next_id(), len(entries)))
            wanted = min(MAX_VOCABULARY_ENTRIES, total - len(entries))
            if (
                total > MAX_VOCABULARY
                or size > MAX_TABLE_BYTES
                or not isinstance(answer, Vocabulary)
                or answer.start != len(entries)
                or len(answer.entries) != wanted
            ):
                self._break("sent a vocabulary that it had not announced, or larger than any")
                raise TextLostError("the vocabulary is malformed", culprit=False)
            entries.extend(answer.entries)
            size += sum(map(len, answer.entries))
        self.table = VocabularyTable(tuple(entries), self.ready.strip_leading_space)

    async def ask(self, job: Job, tenant: str = "") -> Answer:
        """Send a job in its tenant's turn and return its answer; the appliance's own jobs name no tenant.

        Raises:
            TextFullError: too many jobs wait.
            TextLostError: the sandbox ended first.
            LocalProtocolError: the job is outside the protocol's bounds.
        """
        if self._link.closed:
            raise TextLostError("the sandbox is gone", culprit=False)
        own = len(self._queues.get(tenant, ()))
        if own >= MAX_TENANT_JOBS or (self._queued >= MAX_JOBS and not self._make_room(own)):
            raise TextFullError
        queue = self._queues.setdefault(tenant, deque())
        waiting = _Waiting(job, self._loop.create_future())
        queue.append(waiting)
        self._queued += 1
        self._fill()
        try:
            return await waiting.answer
        finally:
            # Still queued: the caller leaves. The answer to a job that is in the sandbox already is dropped.
            if waiting in queue and self._queues.get(tenant) is queue:
                queue.remove(waiting)
                self._queued -= 1
                if not queue:
                    del self._queues[tenant]

    def close_output(self, request: int) -> None:
        """Have the sandbox forget an output that it reads."""
        if not self._link.closed:
            self._tell(CloseOutput(request))

    def check_alive(self, limit_s: float) -> None:
        """Probe a sandbox that works on no text, and end one that has answered no probe for ``limit_s`` seconds. To be
        called every few seconds."""
        self._link.check_alive(limit_s, idle=not self._sent)

    def close(self) -> None:
        """Let the sandbox go: all jobs are lost."""
        if not self._link.closed:
            self._link.close()
            self._lose("the sandbox was let go", culprit=False)

    def _make_room(self, own: int) -> bool:
        """Refuse the last job of the tenant with the most, where that is more than a tenant with ``own`` will have: no
        two or three keep everybody else out."""
        who = max(self._queues, key=lambda name: len(self._queues[name]))
        longest = self._queues[who]
        if len(longest) <= own + 1:
            return False
        last = longest.pop()
        self._queued -= 1
        if not last.answer.done():
            last.answer.set_exception(TextFullError())
        return True

    def _fill(self) -> None:
        """Send jobs while the window has room, one of each tenant in turn."""
        while len(self._sent) < WINDOW and not self._link.closed and (tenant := self._next()) is not None:
            queue = self._queues[tenant]
            waiting = queue.popleft()
            self._queued -= 1
            if queue:
                self._queues.move_to_end(tenant)
            else:
                del self._queues[tenant]
            self._sent[waiting.job.request] = waiting
            if len(self._sent) == 1:
                self._watch_oldest()
            try:
                self._link.send(waiting.job)
            except (LinkFullError, LocalProtocolError) as error:
                self._sent.pop(waiting.job.request, None)
                self._watch_oldest()
                waiting.answer.set_exception(TextFullError() if isinstance(error, LinkFullError) else error)

    def _next(self) -> str | None:
        """Return the first tenant whose next job may go into the sandbox now."""
        crowded = any(_is_large(waiting.job) for waiting in self._sent.values())
        return next((who for who, queue in self._queues.items() if not (crowded and _is_large(queue[0].job))), None)

    def _tell(self, message: Message) -> None:
        try:
            self._link.send(message)
        except LinkFullError:
            self._break("does not read its ring")

    def _on_message(self, message: Message) -> None:
        if isinstance(message, Masks):
            self.grammars.take(message)
            return
        if isinstance(message, Failed) and self.grammars.refused(message):
            return
        if not isinstance(message, Encoded | Decoded | Vocabulary | OutputRead | Failed):
            self._break(f"sent {type(message).__name__}")
            return
        oldest = next(iter(self._sent), None)
        if oldest is None or message.request != oldest:
            self._break("answered out of order")
            return
        if not _answers(message, self._sent[oldest].job):
            self._break("answered another question, or more than was asked")
            return
        waiting = self._sent.pop(oldest)
        if not waiting.answer.done():
            waiting.answer.set_result(message)
        self._watch_oldest()
        self._fill()

    def _watch_oldest(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
        self._clock = self._loop.call_later(JOB_TIMEOUT_S, self._too_long) if self._sent else None

    def _too_long(self) -> None:
        self._break(f"took longer than {JOB_TIMEOUT_S:g} s over one text")

    def _break(self, reason: str) -> None:
        if self._link.closed:
            return
        self._link.close()
        self._ended(reason, at_fault=True)

    def _ended(self, reason: str, at_fault: bool) -> None:
        self._on_end(self, reason, at_fault)
        # Behind a ping that was not answered no job was begun.
        self._lose(reason, culprit=not self._link.probe.outstanding)

    def _lose(self, reason: str, *, culprit: bool) -> None:
        self.grammars.lost()
        if self._clock is not None:
            self._clock.cancel()
        sent, self._sent = self._sent, {}
        queues, self._queues, self._queued = self._queues, OrderedDict(), 0
        lost = [*sent.values(), *(waiting for queue in queues.values() for waiting in queue)]
        for index, waiting in enumerate(lost):
            if not waiting.answer.done():
                guilty = culprit and bool(sent) and index == 0
                waiting.answer.set_exception(TextLostError(reason, culprit=guilty))


def _is_large(job: Job) -> bool:
    return isinstance(job, Encode) and len(job.source) > LARGE_JOB_BYTES


def _answers(message: Answer, job: Job) -> bool:
    """Return whether a message can be the answer to a job, in kind and in size."""
    if isinstance(message, Failed):
        return True
    if isinstance(job, Encode):
        return isinstance(message, Encoded) and len(message.token_ids) <= job.max_tokens
    if isinstance(job, Decode):
        return isinstance(message, Decoded) and len(message.text) <= MAX_ENTRY_BYTES * len(job.token_ids)
    if isinstance(job, ReadOutput):
        return isinstance(message, OutputRead)
    return isinstance(message, Vocabulary)
