"""Runs batches: reads their files, begins lines where there is room, and gives results to the supervisor's store.

Nothing that is here has to survive: the store knows which lines have a result, and gives those that have none. A line
whose result was not taken runs again in the next gateway; its charge comes with the result that is taken.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import suppress
from typing import Any

from appliance.common.batch_status import BatchView
from appliance.common.batches import messages
from appliance.common.batches.values import (
    CANCELLED,
    CANCELLING,
    EXPIRED,
    IN_PROGRESS,
    MAX_LINES_GIVEN,
    VALIDATING,
    StoredBatch,
)
from appliance.common.errors import ApplianceError, UnavailableError
from appliance.gateway.batches.checking import FileCheck
from appliance.gateway.batches.line_calls import LineAnswer, LineCalls, LineDelay, LineState, cancelled, expired
from appliance.gateway.batches.room import Room
from appliance.gateway.batches.several_prompts import LineProgress
from appliance.gateway.batches.turns import BatchTurns, LinePlaces, OpenBatch
from appliance.gateway.front.defect import defect
from appliance.gateway.http.parsing import INLINE_BYTES, and_forget
from appliance.gateway.sandboxes.store_link import StoreDeniedError, StoreLink
from appliance.gateway.telemetry import names

LOOK_S = 0.1
"""Seconds between two looks for room while there are lines."""

TAKE_AGAIN_S = 0.5
"""Seconds until a result is given to the store again that it did not take."""

REST_S = 60.0
"""Seconds for which a batch rests after a line that ended by a defect of the program: the line is tried again."""

LINES_AT_ONCE = 16
"""Lines of one batch that are fetched together."""

MAX_ACTIVE = 32
"""Batches whose lines are in memory: at most 4 MiB of each."""

ACTIVE_EACH = 4
"""Those of one tenant: a batch that waits for its model holds up no other of the same tenant."""

PROGRESS_BYTES = 64 << 20
"""Bytes of the answers of all lines that are continued later: a few of the longest results. A line that has more begins
anew, as after a restart."""

SLICE_S = 60.0
"""Seconds after which batches give their places to those that have none, where there are more."""


class BatchRunner:
    """Runs the batches of all tenants; all methods run in one event loop."""

    def __init__(
        self,
        store: StoreLink,
        calls: LineCalls,
        room: Room,
        count: Callable[..., None] = lambda *_args, **_labels: None,
    ) -> None:
        """``count`` adds to a counter of ``names``."""
        self._store = store
        self._calls = calls
        self._count = count
        self._open: dict[str, OpenBatch] = {}
        self._turns = BatchTurns(room, lambda: self._open.values(), self._wake_up)
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._stale = True
        """Whether the store has to be asked which batches are open."""
        self._turned = time.monotonic()
        store.on_up = self.refresh

    @property
    def running_lines(self) -> int:
        """Lines that run, each prompt of several counted."""
        return self._turns.running.total()

    def views(self, most: int) -> tuple[BatchView, ...]:
        """Return the batches that have stood still longest, at most so many."""
        still = sorted(self._open.values(), key=lambda one: one.moved)
        return tuple(map(self._turns.view, still[:most]))

    def _wake_up(self) -> None:
        self._wake.set()

    def refresh(self) -> None:
        """Ask the store which batches are open."""
        self._stale = True
        self._wake.set()

    def changed(self, batch: StoredBatch) -> None:
        """Take a batch that was made or cancelled."""
        known = self._open.setdefault(batch.id, OpenBatch(batch))
        known.batch, known.ended = batch, 0
        self._wake.set()

    async def run(self) -> None:
        """Run batches until cancelled; lines that run then end without a result."""
        try:
            while True:
                self._wake.clear()
                if self._store.up:
                    try:
                        await self._turn()
                    except UnavailableError:
                        self._stale = True
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S if self._open and self._store.up else None):
                        await self._wake.wait()
        finally:
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)

    async def _turn(self) -> None:
        if self._stale:
            await self._reload()
        for one in list(self._open.values()):
            if one.work is None:
                self._advance(one)
        active = self._active()
        for one in active:
            unread = not one.exhausted or not one.running
            if not one.lines and unread and one.not_before <= time.monotonic():
                await self._fetch(one)
        self._begin_lines(active)

    async def _reload(self) -> None:
        found = await self._store.ask(messages.OpenBatches(), messages.BatchesFound)
        self._stale = False
        before, self._open = self._open, {}
        for batch in found.batches:
            one = before.get(batch.id) or OpenBatch(batch)
            one.batch, one.ended = batch, 0
            if one.exhausted and not one.lines and not one.running:
                one.forget_lines()
            self._open[batch.id] = one

    def _advance(self, one: OpenBatch) -> None:
        """Begin what a batch's state asks for beside running its lines."""
        status = one.batch.status
        if status == VALIDATING:
            self._begin_work(one, self._check(one))
        elif status == CANCELLING:
            if not one.running:
                self._begin_work(one, self._end(one))
        elif status == IN_PROGRESS and one.batch.expires <= time.time() and not one.running:
            self._begin_work(one, self._expire(one))
        elif status != IN_PROGRESS:
            del self._open[one.batch.id]

    def _begin_work(self, one: OpenBatch, work: Coroutine[Any, Any, None]) -> None:
        one.work = self._start(self._guarded(one, work), f"batch {one.batch.id}")

    async def _guarded(self, one: OpenBatch, work: Coroutine[Any, Any, None]) -> None:
        self._turns.working += 1
        try:
            await work
        except StoreDeniedError as error:
            if error.reason == "unknown":
                self._open.pop(one.batch.id, None)
            else:
                await asyncio.sleep(TAKE_AGAIN_S)
        except UnavailableError:
            self._stale = True
            await asyncio.sleep(TAKE_AGAIN_S)
        finally:
            self._turns.working -= 1
            one.work = None
            self._wake.set()

    async def _check(self, one: OpenBatch) -> None:
        """Read a batch's file; its lines may run, or it has failed."""
        check, batch = FileCheck(one.batch.endpoint), one.batch
        async for number, text in self._each(batch.id):
            if len(text) <= INLINE_BYTES:
                check.take(number, text)
            else:
                await asyncio.to_thread(and_forget, check.take, number, text)
            if check.full:
                break
        call = messages.BatchChecked(batch.id, check.end())
        one.batch = (await self._store.ask(call, messages.BatchFound)).batch
        one.moved = time.monotonic()

    async def _expire(self, one: OpenBatch) -> None:
        """Give every line without a result the error of an expired batch."""
        batch = one.batch
        await self._store.ask(messages.BatchEnd(batch.id, EXPIRED), messages.Accepted)
        async for number, text in self._each(batch.id):
            progress = one.progress.pop(number, None) or LineProgress()
            await self._give(batch, number, expired(batch, number, text, progress.entries))
        self._open.pop(batch.id, None)

    async def _end(self, one: OpenBatch) -> None:
        """End a cancelled batch of which nothing runs. Lines that wait with answers to some of their prompts have an
        error as their result, and are charged for the answers."""
        batch = one.batch
        for number, progress in sorted(one.progress.items()):
            found, text = await self._store.fetch(messages.LineQuery(batch.id, number - 1, 1), messages.LinesFound)
            if found.lines == [number]:
                await self._give(batch, number, cancelled(batch, number, text, progress.entries))
        one.progress.clear()
        await self._store.ask(messages.BatchEnd(one.batch.id, CANCELLED), messages.Accepted)
        self._open.pop(one.batch.id, None)

    async def _each(self, batch: str) -> AsyncIterator[tuple[int, bytes]]:
        """Yield the lines of a batch that have no result."""
        after = 0
        while True:
            call = messages.LineQuery(batch, after, MAX_LINES_GIVEN)
            found, data = await self._store.fetch(call, messages.LinesFound)
            for number, text in _texts(found, data):
                yield number, text
                after = number
            if found.last or not found.lines:
                return

    def _active(self) -> list[OpenBatch]:
        """Return the batches whose lines may run, the oldest first, a few of each tenant."""
        going = [
            one
            for one in self._open.values()
            if one.work is None and one.batch.status == IN_PROGRESS and one.batch.expires > time.time()
        ]
        if len(going) > MAX_ACTIVE and time.monotonic() - self._turned > SLICE_S:
            self._turned = time.monotonic()
            for one in going[: MAX_ACTIVE // 2]:
                self._open[one.batch.id] = self._open.pop(one.batch.id)
            going = going[MAX_ACTIVE // 2 :] + going[: MAX_ACTIVE // 2]
        each: Counter[str] = Counter()
        active: list[OpenBatch] = []
        for one in going:
            if each[one.batch.tenant] < ACTIVE_EACH and len(active) < MAX_ACTIVE:
                each[one.batch.tenant] += 1
                active.append(one)
            elif one.lines:
                one.forget_lines()
        return active

    async def _fetch(self, one: OpenBatch) -> None:
        call = messages.LineQuery(one.batch.id, one.cursor, LINES_AT_ONCE)
        try:
            found, data = await self._store.fetch(call, messages.LinesFound)
        except StoreDeniedError as error:
            if error.reason == "unknown":
                self._open.pop(one.batch.id, None)
            one.not_before = time.monotonic() + TAKE_AGAIN_S
            return
        one.stored = found.stored
        one.exhausted = bool(found.last)
        one.lines += [(number, text) for number, text in _texts(found, data) if number not in one.running]
        one.cursor = found.lines[-1] if found.lines else one.cursor
        if one.exhausted and not one.lines and not one.running:
            self._stale = True  # Its last line has a result, so it is over.

    def _begin_lines(self, active: list[OpenBatch]) -> None:
        """Begin lines, each of the tenant of which the fewest run, while there is room."""
        waiting = [one for one in active if one.waits]
        while waiting and self._turns.has_room:
            one = min(waiting, key=lambda each: self._turns.running[each.batch.tenant])
            if not self._turns.may_begin(one):
                waiting.remove(one)
                continue
            number, text = one.lines.pop(0)
            one.running.add(number)
            places = LinePlaces(self._turns, one)
            self._start(self._run_line(one, number, text, places), f"line {number} of {one.batch.id}")
            if not one.lines:
                waiting.remove(one)

    async def _run_line(self, one: OpenBatch, number: int, text: bytes, places: LinePlaces) -> None:
        batch = one.batch

        def note_model(model: str) -> None:
            one.model = model

        progress = one.progress.pop(number, None) or LineProgress()
        ended = False
        try:
            answer = await self._calls.run(batch, number, text, LineState(note_model, places, progress))
            ended = True
            if isinstance(answer, LineDelay):
                self._delay(one, number, text, progress, answer.wait_s)
            else:
                await self._give(batch, number, answer)
                one.moved = time.monotonic()
                one.ended += 1
        finally:
            if not ended:
                one.not_before = max(one.not_before, time.monotonic() + REST_S)
            one.running.discard(number)
            places.leave_all()
            if one.exhausted and not one.lines:
                self._wake.set()

    def _delay(self, one: OpenBatch, number: int, text: bytes, progress: LineProgress, wait_s: float) -> None:
        """Have a line be continued later."""
        if wait_s:
            self._count(names.BATCH_LINES, tenant=one.batch.tenant, outcome=names.LINE_DELAYED)
            one.not_before = max(one.not_before, time.monotonic() + wait_s)
        held = sum(each.size for other in self._open.values() for each in other.progress.values())
        if progress.answers and held + progress.size <= PROGRESS_BYTES:
            one.progress[number] = progress
        one.lines.insert(0, (number, text))

    async def _give(self, batch: StoredBatch, number: int, answer: LineAnswer) -> None:
        """Give the store a result until it has it."""
        call = messages.LineResult(batch.id, number, int(answer.ok), answer.entries)
        while True:
            try:
                await self._store.ask(call, messages.Accepted, answer.data)
            except StoreDeniedError as error:
                if error.reason == "unknown":
                    return
                await asyncio.sleep(TAKE_AGAIN_S)
            except ApplianceError:
                await asyncio.sleep(TAKE_AGAIN_S)
            else:
                outcome = names.LINE_COMPLETED if answer.ok else names.LINE_FAILED
                self._count(names.BATCH_LINES, tenant=batch.tenant, outcome=outcome)
                return

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._wake.set()
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            defect(error, task.get_name())


def _texts(found: messages.LinesFound, data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    for number, size in zip(found.lines, found.sizes, strict=True):
        yield number, data[at : at + size]
        at += size
