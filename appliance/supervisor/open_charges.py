"""What a gateway that ended had served and not yet reported: charged, once, and told in the audit log.

The gateway writes what its running requests are to be charged into memory that the supervisor made
(``appliance.common.usage.open_charges``). Once everything that the gateway had sent was taken, and its process is gone,
what is left there becomes entries like those that it would have made. A gateway that was only detached goes on and
tells them itself, so the end of the process is what counts. An entry that arrived and whose slot was not freed any more
is known by its request.

A gateway that was taken over may fill all slots with what takes long to read. They are read in short steps, between
which the loop does its other work.
"""

from __future__ import annotations

import asyncio
import math
import os
import select
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import structlog

from appliance.common.audit.entry import Entry
from appliance.common.control import Control
from appliance.common.control_charges import ChargesUp, KeepCharges
from appliance.common.figures import counted
from appliance.common.kept_tasks import log_failure
from appliance.common.usage.open_charges import create_memory, lost_requests

log = structlog.get_logger()

MAX_REPORTED = 8_192
"""Requests remembered whose entries came, a megabyte: far more than one message has, and a gateway that ends between
sending and freeing had sent one."""

MAX_MEMORIES = 4
"""Memories kept of gateways that were attached and may still live; of an earlier one nothing would be charged."""

STEP_S = 0.002
"""Seconds for which slots are read before the loop does something else: twenty slots that are as long as can be."""

MAX_SETTLING = 2 * MAX_MEMORIES
"""Memories whose charges wait to be made at once: all of one gateway, and of the one that came after it and ended too
before a second had passed."""

Publish = Callable[[Control, tuple[int, ...]], bool]


@dataclass(slots=True, eq=False)
class _Memory:
    memfd: int
    pipe: int
    """End to read from of the pipe whose other end the gateway has."""
    left: bool = False
    """Whether the gateway is detached."""
    ended: bool = False
    """Whether its process has ended."""


@dataclass(slots=True, eq=False)
class _Settlement:
    """Charging of what one memory has."""

    memfd: int
    slots: Iterator[Entry | None]
    reported: frozenset[str]
    """Requests whose entries had come when it began."""
    left: int = 0
    """Requests charged so far."""


class ChargeKeeper:
    """Keeps memory of the gateway that is attached, and of those before it that may live; its methods run in one event
    loop."""

    def __init__(self, publish: Publish, record: Callable[[Entry], None]) -> None:
        """``publish`` sends to the gateway, ``record`` takes entries of the audit log."""
        self._publish = publish
        self._record = record
        self._memories: list[_Memory] = []
        self._reported: dict[str, None] = {}
        """Requests whose entries came lately, in their order."""
        self._problem = ""
        """Why there was no memory when it was last asked for."""
        self._settling: deque[_Settlement] = deque()
        self._work: asyncio.Task[None] | None = None
        """Task that charges what is in ``_settling``."""

    def open(self, _message: KeepCharges) -> None:
        """Hand new memory to the gateway; what it has open it writes there again."""
        try:
            pipe, alive = os.pipe()
            try:
                memfd = create_memory()
            except BaseException:
                os.close(pipe)
                os.close(alive)
                raise
        except OSError as error:
            problem = error.strerror or str(error)
            if problem != self._problem:
                log.error("no memory for charges of running requests", problem=problem)
            self._problem = problem
            self._publish(ChargesUp(), ())  # the gateway shows an alert, and asks again
            return
        self._problem = ""
        sent = self._publish(ChargesUp(), (memfd, alive))
        os.close(alive)
        memory = _Memory(memfd, pipe)
        self._memories.append(memory)
        asyncio.get_running_loop().add_reader(pipe, self._process_ended, memory)
        if not sent:
            memory.left = True
        if len(self._memories) > MAX_MEMORIES:
            self._close(self._least_needed())

    def note(self, one: Entry) -> None:
        """Note an entry that the gateway reports."""
        if one.kind == "request":
            self._reported[str(one.fields["request"])] = None
            if len(self._reported) > MAX_REPORTED:
                del self._reported[next(iter(self._reported))]

    def gateway_left(self) -> None:
        """Charge what the gateway left, now or as soon as its process has ended; everything that it had sent was
        taken."""
        for memory in self._memories[:]:
            memory.left = True
            self._settle(memory)

    def close(self) -> None:
        """Charge what is left to charge of gateways that have ended, also where the loop has not noticed the end yet,
        and forget all memory. A gateway that has left and lives tells its entries to the next supervisor."""
        if self._work is not None:
            self._work.cancel()
        for memory in self._memories[:]:
            if memory.left and _ended(memory.pipe):
                self._leave(memory)
                self._settling.append(self._settlement(memory.memfd))
            else:
                self._close(memory)
        while self._settling:
            self._step(self._settling[0], math.inf)

    def _least_needed(self) -> _Memory:
        """Return memory that never arrived, whose pages nobody has used; the oldest where there is none: a gateway that
        may open no more asks again and again, while its requests stand in the memory before."""
        never = (one for one in self._memories if one.ended and not os.fstat(one.memfd).st_blocks)
        return next(never, self._memories[0])

    def _process_ended(self, memory: _Memory) -> None:
        asyncio.get_running_loop().remove_reader(memory.pipe)
        memory.ended = True
        self._settle(memory)

    def _settle(self, memory: _Memory) -> None:
        if not (memory.left and memory.ended):
            return
        memfd = memory.memfd  # Taken over: a further descriptor might not be had.
        self._leave(memory)
        if len(self._settling) >= MAX_SETTLING:
            os.close(memfd)
            log.error("gateways end faster than what they leave can be charged; one was left out", waiting=MAX_SETTLING)
            return
        self._settling.append(self._settlement(memfd))
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._charge(), name="charges of gateways that ended")
            self._work.add_done_callback(log_failure)

    def _settlement(self, memfd: int) -> _Settlement:
        return _Settlement(memfd, lost_requests(memfd), frozenset(self._reported))

    async def _charge(self) -> None:
        while self._settling:
            self._step(self._settling[0], time.monotonic() + STEP_S)
            await asyncio.sleep(0)

    def _step(self, one: _Settlement, until: float) -> None:
        """Charge what a memory has until this monotonic second; one whose end was reached is taken out."""
        try:
            for found in one.slots:
                if found is not None and not self._known(found, one):
                    one.left += 1
                    self.note(found)
                    self._record(found)
                if time.monotonic() >= until:
                    return
        except OSError as error:
            log.error(
                "what a gateway left cannot be read, and is not charged", problem=error.strerror, charged=one.left
            )
        self._settling.remove(one)
        os.close(one.memfd)
        if one.left:
            log.warning(
                "the gateway ended and left requests without an entry; they are charged what they were shown",
                left=counted(one.left, "request", "requests"),
            )

    def _known(self, found: Entry, one: _Settlement) -> bool:
        request = str(found.fields["request"])
        return request in one.reported or request in self._reported

    def _close(self, memory: _Memory) -> None:
        self._leave(memory)
        os.close(memory.memfd)

    def _leave(self, memory: _Memory) -> None:
        """Forget memory whose descriptor the caller has from now on."""
        self._memories.remove(memory)
        asyncio.get_running_loop().remove_reader(memory.pipe)
        os.close(memory.pipe)


def _ended(pipe: int) -> bool:
    """Return whether every process that had the other end of a pipe has closed it; does not block."""
    look = select.poll()
    look.register(pipe, 0)
    return bool(look.poll(0))
