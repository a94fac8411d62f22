"""The two sandboxes of one model as they come and go: whoever needs one waits here, within a bound.

``ModelRooms`` also keeps the probation gate: while a suspect runs alone, nobody else enters the engine; a suspect
waits a little for the engine to be empty, and meanwhile nobody new goes in. On a busy engine it does not wait for
ever: it then enters beside the others, and a death is judged by ``suspects`` as an ambiguous one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from appliance.errors import NoPlaceLeftError, UnavailableError
from appliance.gateway.assembler import VocabularyTable
from appliance.gateway.engine_link import EngineLink
from appliance.gateway.text_link import TextLink
from isolation.ipc.kv_messages import KvQuotas
from isolation.ipc.messages import EngineReady
from isolation.ipc.public_messages import PublicPrefixes

BOOT_WAIT_S = 8.0
"""The longest that a request waits for a sandbox that is booting: a client hears within ten seconds what is the
matter."""

EMPTY_WAIT_S = 2.0
"""The longest that a suspect waits for an empty engine, and that suspects keep others out by waiting; then the others
have the same time."""

PROBATION_S = 5.0
"""The longest that a suspect has the engine to itself: requests that kill an engine mostly do so at once, and a long
prompt shall not keep everybody out."""

RETRY_AFTER_S = 2.0
"""What a client is told when the sandbox is not there: about the time one boot takes."""


class EngineVisit:
    """One request's stay in the engine; ``alone`` while it is on probation."""

    __slots__ = ("_rooms", "alone", "engine")

    def __init__(self, rooms: ModelRooms, engine: EngineLink, alone: bool) -> None:
        self._rooms = rooms
        self.engine = engine
        self.alone = alone

    def passed(self) -> None:
        """The first token came, or the visit ended: others may enter. Idempotent."""
        if self.alone:
            self.alone = False
            self._rooms.end_probation()


class ModelRooms:
    """One model's engine and text link, or their absence. All methods run in one event loop."""

    def __init__(self, name: str, runner: str = "model", *, truncates: bool = False, tenant: str = "") -> None:
        self.name = name
        self.tenant = tenant
        """Whose own they are; empty: shared."""
        self.runner = runner
        """``model``; ``embed`` for one that gives vectors; ``null`` in a benchmark."""
        self.truncates = truncates
        """Whether the first numbers of a vector may be asked for alone."""
        self.created = int(time.time())
        self.engine: EngineLink | None = None
        self.text: TextLink | None = None
        self.draining = False
        self.failed = False
        """Whether a sandbox of the model has failed since the start."""
        self.capacity: EngineReady | None = None
        """What the engine last announced; kept over restarts, since it is the same model."""
        self.table: VocabularyTable | None = None
        """The id-to-bytes table; kept likewise."""
        self._refused = False
        self._quotas = KvQuotas()
        self._public = PublicPrefixes()
        self._waiters: set[asyncio.Future[None]] = set()
        self._inside = 0
        self._probation = False
        self._suspects_waiting = 0
        self._gate_until = 0.0
        self._gate_again = 0.0
        self._alone_since = 0.0
        self._alone_again = 0.0
        """When a suspect may have the engine to itself again: the others have it for as long as the last one kept them
        out, or whoever sends suspects one after the other, and ends each before it has ended well, had it all the time.
        """

    @property
    def ready(self) -> bool:
        """Whether both are there."""
        return self.engine is not None and self.text is not None

    def set_quotas(self, quotas: KvQuotas) -> None:
        """What accounts may keep of the engine's KV from now on."""
        self._quotas = quotas
        if self.engine is not None:
            self.engine.set_quotas(quotas)

    def set_public(self, public: PublicPrefixes) -> None:
        """What the engine keeps of public prefixes from now on."""
        if public == self._public:
            return
        self._public = public
        if self.engine is not None:
            self.engine.set_public(public)

    def set_engine(self, link: EngineLink | None) -> None:
        """The engine is there, or gone. It hears of quotas before it hears of requests."""
        self.engine = link
        if link is not None:
            self.capacity = link.ready
            link.set_quotas(self._quotas)
            if self._public.prefixes:
                link.set_public(self._public)
        self._tell()

    def set_text(self, link: TextLink | None) -> None:
        """The text sandbox is there (its table read), or gone."""
        self.text = link
        if link is not None:
            self.table = link.table
        self._tell()

    def forget_text(self, link: TextLink) -> None:
        """This link is lost; nobody shall be handed it again."""
        if self.text is link:
            self.text = None

    def note_failure(self) -> None:
        """A sandbox failed; it may come back."""
        self.failed = True
        self._tell()

    def begin_drain(self) -> None:
        """Let nobody wait any more; who is in stays."""
        self.draining = True
        self._tell()

    def refuse(self) -> None:
        """They will not come: who waits need wait no longer."""
        self._refused = True
        self._tell()

    def end_probation(self) -> None:
        """The suspect showed a sign of health, or left."""
        now = time.monotonic()
        took_s = now - self._alone_since
        self._probation, self._alone_again = False, now + took_s
        asyncio.get_running_loop().call_later(took_s, self._tell)
        self._tell()

    async def wait_ready(self, until: float) -> None:
        """Until both are there; ``until`` is monotonic seconds. This wait has no other bound.

        Raises:
            UnavailableError: they were not there in time.
        """
        await self._wait(lambda: self.ready, until)

    async def limits_by(self, until: float) -> EngineReady:
        """What the engine can do; waits for the first boot, up to ``until`` and ``BOOT_WAIT_S``.

        Raises:
            UnavailableError: it has not been there yet.
        """
        if self.capacity is None:
            await self.wait_ready(min(until, time.monotonic() + BOOT_WAIT_S))
        if self.capacity is None:
            raise UnavailableError("the model is starting", retry_after_s=RETRY_AFTER_S)
        return self.capacity

    async def wait_settled(self, until: float) -> None:
        """Until both are there, or one has failed to come.

        Raises:
            UnavailableError: neither happened in time.
        """
        await self._wait(lambda: self.ready or self.failed, until)

    async def wait_text(self, until: float) -> TextLink:
        """The text link, as soon as there is one.

        Raises:
            UnavailableError: none came in time.
        """
        await self._wait(lambda: self.text is not None, min(until, time.monotonic() + BOOT_WAIT_S))
        assert self.text is not None
        return self.text

    @contextlib.asynccontextmanager
    async def enter_engine(
        self, until: float, *, suspect: bool, alone_only: bool = False
    ) -> AsyncIterator[EngineVisit]:
        """A place in the engine; a suspect gets it alone where that can be, or with ``alone_only`` not at all.

        Raises:
            UnavailableError: no engine, or no turn, in time.
        """
        until = min(until, time.monotonic() + BOOT_WAIT_S)
        alone = suspect and await self._wait_empty(until, alone_only)
        if not alone:
            await self._wait(lambda: self._may_enter(suspect), until)
        assert self.engine is not None
        self._inside += 1
        if alone:
            self._probation, self._alone_since = True, time.monotonic()
        visit = EngineVisit(self, self.engine, alone)
        timer = asyncio.get_running_loop().call_later(PROBATION_S, visit.passed) if alone else None
        try:
            yield visit
        finally:
            if timer is not None:
                timer.cancel()
            self._inside -= 1
            visit.passed()
            self._tell()

    def _may_enter(self, suspect: bool) -> bool:
        waits = self._suspects_waiting > 0 and not suspect and time.monotonic() < self._gate_until
        return self.engine is not None and not self._probation and not waits

    def _may_be_alone(self) -> bool:
        empty = self.engine is not None and self._inside == 0 and not self._probation
        return empty and time.monotonic() >= self._alone_again

    def _close_gate(self) -> None:
        """Keep newcomers out for a while, so that the engine empties; as long again it stays open."""
        now = time.monotonic()
        if now >= max(self._gate_again, self._alone_again):
            self._gate_until, self._gate_again = now + EMPTY_WAIT_S, now + 2 * EMPTY_WAIT_S
            asyncio.get_running_loop().call_later(EMPTY_WAIT_S, self._tell)

    async def _wait_empty(self, until: float, alone_only: bool) -> bool:
        """Wait for an empty engine; False when it stays busy."""
        self._suspects_waiting += 1
        self._close_gate()
        try:
            await self._wait(lambda: self.engine is not None, until)
            await self._wait(
                self._may_be_alone,
                until if alone_only else min(until, time.monotonic() + EMPTY_WAIT_S),
            )
        except UnavailableError:
            if self.engine is None or alone_only or self.draining:
                raise
            return False
        else:
            return True
        finally:
            self._suspects_waiting -= 1
            self._tell()

    def _tell(self) -> None:
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _wait(self, predicate: Callable[[], bool], until: float) -> None:
        while not predicate():
            if self.draining:
                raise UnavailableError("the appliance is shutting down", retry_after_s=RETRY_AFTER_S)
            if self._refused:
                raise NoPlaceLeftError("the sandboxes that this tenant's class asks for are not granted now")
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                async with asyncio.timeout(until - time.monotonic()):
                    await waiter
            except TimeoutError:
                raise UnavailableError(
                    f"the model {self.name} is not available at the moment: its sandbox is starting",
                    retry_after_s=RETRY_AFTER_S,
                ) from None
            finally:
                self._waiters.discard(waiter)
