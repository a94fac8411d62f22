"""The supervisor's end of metering: the one writer of the usage book.

Entries of the audit log are counted in a thread, right after the log has them. Reservations that come while
others are being written are written together, and the gateway is told of each once it is on disk. A book that takes
nothing loses nothing: entries are taken from the log once it works again. Meanwhile no reservation is confirmed, so the
requests of tenants with a limit of spend wait and are refused; those of others are served.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path

import structlog

from appliance.common.audit.entry import Entry
from appliance.common.control import (
    MAX_RESERVATIONS,
    SPEND_CONFIRM_S,
    Control,
    ReserveSpend,
    SpendQuery,
    SpendReserved,
    Spent,
)
from appliance.common.errors import ControlError, UsageError
from appliance.common.figures import counted
from appliance.common.usage.book import Released, Reserved, UsageAccessError, UsageBook, open_book
from appliance.common.usage.periods import MOST, period_of
from appliance.common.usage.pseudonyms import pseudonym
from appliance.common.usage.replay import replay

log = structlog.get_logger()

MAX_WAITING = 8_192
"""Reservations that wait to be written: more than requests can be admitted while one group is forced to disk."""

MAX_ID_CHARS = 64
"""Longest id of a request; a gateway's have 28 characters."""

MAX_CONFIRMED = 1_000
"""Reservations confirmed by one message, which must fit a datagram."""

MAX_ASKED = 500
"""Tenants of one question: the answer must fit one datagram."""

MAX_QUESTIONS = 64
"""Questions that wait for their answers: those about 10,000 tenants, three times."""

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Id that the kernel draws at each boot (random(4))."""

Publish = Callable[[Control, tuple[int, ...]], bool]


class Metering:
    """Counts usage and records reservations; its coroutines and callbacks run in one event loop."""

    def __init__(self, book: UsageBook, folder: Path, publish: Publish, clock: Callable[[], float] = time.time) -> None:
        """``folder`` is the audit log's; ``publish`` sends to the gateway."""
        self._book = book
        self._folder = folder
        self._publish = publish
        self._clock = clock
        self._waiting: list[tuple[float, Reserved]] = []
        """Reservations, each with the monotonic time at which it came."""
        self._asked: list[SpendQuery] = []
        self._more = asyncio.Event()
        self.written: Callable[[], Awaitable[None]] = _at_once
        """Returns once the entries that the gateway has reported are in the log; set by the owner."""
        self._problems: dict[str, str] = {}
        """What fails now, by what it is done for."""
        self._boot = ""
        """Id of this boot of the machine while the book has not taken it."""

    def count(self, name: str, first: int, batch: Sequence[tuple[int, Entry]]) -> None:
        """Count entries that were just written to the log ``name``; blocks, never fails. What the book does not take
        now it takes from the log later."""
        try:
            if self._book.position(name) == first:
                self._book.apply(name, first, batch)
            else:
                for problem in replay(self._book, self._folder, name).unreadable:
                    log.error("a part of the audit log cannot be read, and is not counted", problem=problem)
        except (UsageAccessError, OSError) as error:
            self._become("counting", str(error))
        else:
            self._become("counting", "")

    def disguised(self, batch: Sequence[tuple[int, Entry]]) -> list[tuple[int, Entry]]:
        """Return entries with pseudonyms of end users in place of the digests that the gateway told; blocks. Where the
        book gives no key they name none."""
        keys: dict[str, bytes] = {}
        return [(time_ms, self._disguised(one, keys)) for time_ms, one in batch]

    def _disguised(self, one: Entry, keys: dict[str, bytes]) -> Entry:
        digest, tenant = str(one.fields.get("end_user", "")), str(one.fields.get("tenant", ""))
        if not digest:
            return one
        try:
            key = keys.get(tenant) or keys.setdefault(tenant, self._book.user_key(tenant))
        except UsageAccessError as error:
            self._become("end users", str(error))
            return Entry(one.kind, one.fields | {"end_user": ""})
        return Entry(one.kind, one.fields | {"end_user": pseudonym(key, digest)})

    def take(self, message: SpendQuery | ReserveSpend) -> None:
        """Take reservations, which are confirmed once they are on disk, or a question, which is answered then. Of more
        than can be waited for nothing is kept: the gateway asks again, or refuses the request.

        Raises:
            ControlError: it is none that a gateway sends.
        """
        if isinstance(message, SpendQuery):
            if len(message.tenants) > MAX_ASKED:
                raise ControlError("a question about the spend of too many tenants")
            if message not in self._asked and len(self._asked) < MAX_QUESTIONS:
                self._asked.append(message)
        else:
            group = [
                Reserved(request, tenant, cost)
                for tenant, costs in message.costs.items()
                for request, cost in costs.items()
            ]
            if len(group) > MAX_RESERVATIONS or not all(map(_possible, group)):
                raise ControlError("a reservation of spend is not one that a gateway makes")
            now = time.monotonic()
            self._waiting += [(now, one) for one in group[: MAX_WAITING - len(self._waiting)]]
        self._more.set()

    def rename(self, tenant: str, pseudonym: str) -> None:
        """Put what a tenant used under a pseudonym. Blocks.

        Raises:
            UsageAccessError: the book does not take it.
        """
        self._book.rename(self._clock(), tenant, pseudonym)

    def release(self, tenant: str) -> Released:
        """Release a tenant's reservations of requests that ended with an earlier boot of the machine. Blocks.

        Raises:
            UsageAccessError: the book does not take it.
        """
        return self._book.release(tenant)

    def gateway_left(self) -> None:
        """Forget what a gateway that is gone waited for."""
        self._waiting.clear()
        self._asked.clear()

    async def run(self) -> None:
        """Write reservations and answer questions as they come, until cancelled."""
        await asyncio.to_thread(self._forget)
        while True:
            await self._more.wait()
            self._more.clear()
            waiting, self._waiting = self._waiting, []
            late = time.monotonic() - SPEND_CONFIRM_S
            if group := [one for since, one in waiting if since > late]:
                await self._reserve(group)
            asked, self._asked = self._asked, []
            if asked:
                await self.written()
            for query in asked:
                await self._answer(query)

    async def _reserve(self, group: list[Reserved]) -> None:
        if self._boot:
            await asyncio.to_thread(self.begin_boot, self._boot)
        if self._boot:
            return  # Written now, they would count as ended at the next start.
        try:
            await asyncio.to_thread(self._book.reserve, self._clock(), group)
        except UsageAccessError as error:
            self._become("reserving", str(error))
            return
        self._become("reserving", "")
        for start in range(0, len(group), MAX_CONFIRMED):
            self._publish(SpendReserved([one.request for one in group[start : start + MAX_CONFIRMED]]), ())

    async def _answer(self, query: SpendQuery) -> None:
        now = self._clock()
        period = period_of(now)
        try:
            spent = await asyncio.to_thread(self._book.spent, now, query.tenants)
        except UsageAccessError as error:
            self._become("answering", str(error))  # the gateway asks again
            return
        self._become("answering", "")
        told = {tenant: [one.day, one.month, one.reserved, one.reserved_before] for tenant, one in spent.items()}
        self._publish(Spent(period.day, period.month, query.tenants, told), ())

    def begin_boot(self, boot: str) -> None:
        """Note the id of this boot of the machine, unless it is not known, and tell what ended with earlier ones.
        Blocks, never fails: what the book does not take now it takes before the first reservation."""
        if not boot:
            return
        self._boot = boot
        try:
            ended = self._book.begin_boot(boot)
        except UsageAccessError as error:
            self._become("reserving", str(error))
            return
        self._boot = ""
        if ended:
            log.warning(
                "requests ended with an earlier boot of the machine, and their reservations count against limits of "
                "spend; `athanor tenant release TENANT` releases them",
                left=counted(ended, "reservation", "reservations"),
            )

    def close(self) -> None:
        """Close the book; blocks."""
        with suppress(UsageAccessError):
            self._book.close()

    def _forget(self) -> None:
        try:
            self._book.forget_reservations(self._clock())
        except UsageAccessError as error:
            self._become("reserving", str(error))

    def _become(self, what: str, problem: str) -> None:
        before = self._problems.get(what, "")
        if problem and problem != before:
            log.error("the usage book fails; tenants with a limit of spend may be refused", what=what, problem=problem)
        elif before and not problem:
            log.info("the usage book works again", what=what)
        self._problems[what] = problem


def _possible(one: Reserved) -> bool:
    """Return whether a gateway makes such a reservation."""
    return 0 <= one.cost < MOST and len(one.request) <= MAX_ID_CHARS


async def _at_once() -> None:
    """Wait for nothing."""


def read_boot_id() -> str:
    """Return the kernel's id of this boot of the machine; empty where it tells none."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def open_metering(folder: Path, name: str, size: int, publish: Publish, boot: str = "") -> Metering:
    """Open the book in an audit folder, and count what the log ``name``, of ``size`` entries, has more; ``boot`` is the
    id of this boot of the machine, empty where it is not known. Blocks.

    Raises:
        UsageError: the book cannot be used.
    """
    book, damaged = open_book(folder)
    if damaged:
        log.error("the usage book was damaged; it is made again from the audit log, the damaged one is beside it")
    metering = Metering(book, folder, publish)
    try:
        if book.position(name) > size:
            log.error("the usage book knows more entries than the log has: the log is an older copy", entries=size)
            book.apply(name, size, [])
    except UsageAccessError as error:
        raise UsageError(str(error)) from error
    metering.count(name, -1, ())
    # Behind the entries that the log has more: what those release did not end with the boot.
    metering.begin_boot(boot)
    log.info("usage book", log_entries=counted(size, "entry", "entries"))
    return metering
