"""The supervisor's end of metering: the one writer of the usage book.

Entries of the audit log are counted in the thread that writes them, right after them. Reservations that come while
others are being written are written together, and the gateway is told of each once it is on disk. A book that takes
nothing loses nothing: entries are taken from the log once it works again. Meanwhile no reservation is confirmed, so the
requests of tenants with a limit of spend wait and are refused; those of others are served.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import structlog

from appliance.common.audit.entry import Entry
from appliance.common.audit.files import LogFormatError
from appliance.common.control import Control, ReserveSpend, SpendQuery, SpendReserved, Spent
from appliance.common.errors import ControlError
from appliance.common.figures import counted
from appliance.common.usage.book import Reserved, UsageBook, UsageWriteError, open_book
from appliance.common.usage.periods import period_of
from appliance.common.usage.replay import replay

log = structlog.get_logger()

MAX_WAITING = 8_192
"""Reservations that wait to be written: more than requests can be admitted while one group is forced to disk."""

MAX_ID_CHARS = 64
"""Longest id of a request; a gateway's have 28 characters."""

MAX_COST = 1 << 53
"""Bound of one reservation, as of numbers of the audit log."""

MAX_ASKED = 500
"""Tenants of one question: the answer must fit one datagram."""

MAX_QUESTIONS = 64
"""Questions that wait for their answers: those about 10,000 tenants, three times."""

Publish = Callable[[Control, tuple[int, ...]], bool]


class Metering:
    """Counts usage and records reservations; its coroutines and callbacks run in one event loop."""

    def __init__(self, book: UsageBook, folder: Path, publish: Publish, clock: Callable[[], float] = time.time) -> None:
        """``folder`` is the audit log's; ``publish`` sends to the gateway."""
        self._book = book
        self._folder = folder
        self._publish = publish
        self._clock = clock
        self._waiting: list[Reserved] = []
        self._asked: list[SpendQuery] = []
        self._more = asyncio.Event()
        self.written: Callable[[], Awaitable[None]] = _at_once
        """Returns once the entries that the gateway has reported are in the log; set by the owner."""
        self._problem = ""

    def count(self, name: str, first: int, batch: Sequence[tuple[int, Entry]]) -> None:
        """Count entries that were just written to the log ``name``; blocks, never fails. What the book does not take
        now it takes from the log later."""
        try:
            if self._book.position(name) == first:
                self._book.apply(name, first, batch)
            else:
                replay(self._book, self._folder, name)
        except (UsageWriteError, LogFormatError, OSError) as error:
            self._become(str(error))
        else:
            self._become("")

    def take(self, message: SpendQuery | ReserveSpend) -> None:
        """Take a reservation, which is confirmed once it is on disk, or a question, which is answered then.

        Raises:
            ControlError: it is none that a gateway sends, or far more come than requests can run.
        """
        if isinstance(message, SpendQuery):
            if len(message.tenants) > MAX_ASKED or len(self._asked) >= MAX_QUESTIONS:
                raise ControlError("too many questions about spend, or a question about too many tenants")
            self._asked.append(message)
        else:
            if not 0 <= message.cost < MAX_COST or len(message.request) > MAX_ID_CHARS:
                raise ControlError("a reservation of spend is not one that a gateway makes")
            if len(self._waiting) >= MAX_WAITING:
                raise ControlError("too many reservations of spend wait to be written")
            self._waiting.append(Reserved(message.request, message.tenant, message.cost))
        self._more.set()

    async def run(self) -> None:
        """Write reservations and answer questions as they come, until cancelled."""
        await asyncio.to_thread(self._forget)
        while True:
            await self._more.wait()
            self._more.clear()
            group, self._waiting = self._waiting, []
            if group:
                await self._reserve(group)
            asked, self._asked = self._asked, []
            if asked:
                await self.written()
            for query in asked:
                await self._answer(query)

    async def _reserve(self, group: list[Reserved]) -> None:
        try:
            await asyncio.to_thread(self._book.reserve, self._clock(), group)
        except UsageWriteError as error:
            self._become(str(error))
            return
        self._become("")
        self._publish(SpendReserved([one.request for one in group]), ())

    async def _answer(self, query: SpendQuery) -> None:
        now = self._clock()
        period = period_of(now)
        spent = await asyncio.to_thread(self._book.spent, now, query.tenants)
        told = {tenant: list(amounts) for tenant, amounts in spent.items()}
        self._publish(Spent(period.day, period.month, query.tenants, told), ())

    def close(self) -> None:
        """Close the book; blocks."""
        self._book.close()

    def _forget(self) -> None:
        try:
            self._book.forget_reservations(self._clock())
        except UsageWriteError as error:
            self._become(str(error))

    def _become(self, problem: str) -> None:
        if problem and problem != self._problem:
            log.error("the usage book is not written; requests of tenants with a limit of spend wait", problem=problem)
        elif self._problem and not problem:
            log.info("the usage book is written again")
        self._problem = problem


async def _at_once() -> None:
    """Wait for nothing."""


def open_metering(folder: Path, name: str, publish: Publish) -> Metering:
    """Open the book in an audit folder and take from the log ``name`` what the book does not have. Blocks.

    Raises:
        UsageError: the book cannot be used.
    """
    book, damaged = open_book(folder)
    if damaged:
        log.error("the usage book was damaged; it is made again from the audit log, the damaged one is beside it")
    metering = Metering(book, folder, publish)
    metering.count(name, -1, ())
    log.info("usage book", entries=counted(book.position(name), "entry", "entries"))
    return metering
