"""The engine and text sandbox of one model as they come and go; requests wait here for them, within a bound.

``ModelSandboxes`` also has the probation gate: while a suspect runs alone, no other request enters the engine. A
suspect waits a little for the engine to become empty, and meanwhile no new request enters. On a busy engine it does not
wait for ever: it then enters beside the others, and ``suspects`` judges a death as an ambiguous one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field

from appliance.common.control import COLD, FALLEN_BACK, RESTORED, SandboxUp
from appliance.common.errors import NoPlaceLeftError, UnavailableError
from appliance.gateway.sandboxes.engine_link import EngineLink
from appliance.gateway.sandboxes.link import RETRY_AFTER_S
from appliance.gateway.sandboxes.model_leaving import Leaving
from appliance.gateway.sandboxes.sleep_state import SleepState
from appliance.gateway.sandboxes.state_changes import StateChanges
from appliance.gateway.sandboxes.text_link import TextLink, VocabularyTable
from isolation.ipc.kv import KvQuotas
from isolation.ipc.messages import EngineReady
from isolation.ipc.public import PublicPrefixes

BOOT_WAIT_S = 8.0
"""Longest wait, in seconds, of a request for a sandbox that is booting: a client gets an answer within ten seconds."""

EMPTY_WAIT_S = 2.0
"""Longest wait, in seconds, of a suspect for an empty engine, during which other requests are kept out; afterwards the
others may enter for as long."""

PROBATION_S = 5.0
"""Longest time, in seconds, for which a suspect has the engine alone: requests that kill an engine mostly do so at
once, and a long prompt must not keep the others out."""


STARTS = (COLD, RESTORED, FALLEN_BACK)

MAX_UNCOUNTED = 64
"""Starts kept between two counts, which are seconds apart."""


@dataclass(slots=True)
class SandboxRecord:
    """State of one sandbox, as status shows it."""

    state: str = "booting"
    generation: int = 0
    restarts: int = 0
    pid: int = 0
    since: float = field(default_factory=time.monotonic)
    """When it entered its state, in monotonic seconds."""
    away_since: float = field(default_factory=time.monotonic)
    """When it was last ready, or first known, in monotonic seconds."""
    cause: str = ""
    computes: str = ""
    """What an engine said last that it computes with."""
    ranks: int = 1
    """Processes that compute together in an engine, as the supervisor starts it."""
    hang: str = ""
    """Why a sandbox that is there counts as hung, as it was last looked at; empty while it answers."""
    frozen: bool = False
    """Whether the supervisor has frozen it, because nobody uses it; it is ready all the same."""
    memory_bytes: int = 0
    """Memory in use, as the supervisor said last."""
    memory_limit_bytes: int = 0
    """0 before the supervisor has said it."""
    away_s: float | None = None
    """Seconds that it was away, or booted, before it was last ready; None before that."""
    starts: list[str] = field(default_factory=list)
    """How it began each time since the last count: at most ``MAX_UNCOUNTED``."""

    def note_up(self, message: SandboxUp) -> None:
        """Note that the sandbox is there."""
        self.become("ready")
        self.pid, self.restarts = message.pid, message.restarts
        self.computes, self.ranks = message.computes, message.ranks
        self.note_start(message.start)

    def note_start(self, start: str) -> None:
        """Note how the sandbox began once more."""
        if start in STARTS and len(self.starts) < MAX_UNCOUNTED:
            self.starts.append(start)

    def take_starts(self) -> list[str]:
        """Return the starts since the last count."""
        taken, self.starts = self.starts, []
        return taken

    def become(self, state: str, cause: str = "") -> None:
        """Enter a state now; ``cause`` says why the sandbox is not ready."""
        now = time.monotonic()
        if self.state == "ready":
            self.away_since = now
        if state == "ready" and self.state != "ready":
            self.away_s = now - self.away_since
        self.state, self.cause, self.since, self.frozen, self.hang = state, cause, now, False, ""


class EngineVisit:
    """One request's visit to the engine; ``alone`` while it is on probation."""

    __slots__ = ("_model", "alone", "engine")

    def __init__(self, model: ModelSandboxes, engine: EngineLink, alone: bool) -> None:
        self._model = model
        self.engine = engine
        self.alone = alone

    def passed(self) -> None:
        """Let other requests enter: the first token came, or the visit ended. Idempotent."""
        if self.alone:
            self.alone = False
            self._model.end_probation()


class ModelSandboxes:
    """Links to one model's engine and text sandbox, or their absence. All methods run in one event loop."""

    def __init__(
        self,
        name: str,
        runner: str = "model",
        *,
        truncates: bool = False,
        tenant: str = "",
        adapters: Mapping[str, bytes] | None = None,
        templated: bool = False,
        labels: tuple[str, ...] = (),
    ) -> None:
        self.name = name
        self.clock: Callable[[], float] = time.monotonic
        self.adapters = adapters or {}
        """Digest of each adapter of the model, by its whole name."""
        self.tenant = tenant
        """Tenant whose own sandboxes these are; empty: shared."""
        self.runner = runner
        """Runner of the engine: ``model``; ``embed`` for vectors; ``classify`` for labels; ``null`` in a benchmark."""
        self.truncates = truncates
        """Whether the first numbers of a vector may be asked for alone."""
        self.templated = templated
        """Whether its chat template makes one text of a query and a document."""
        self.labels = labels
        """Names of its labels; fewer than it has where they have no names."""
        self.created = int(time.time())
        self.digest = ""  # of the model's files, told with each sandbox; empty before, and for none
        self.engine: EngineLink | None = None
        self.text: TextLink | None = None
        self.records: dict[str, SandboxRecord] = {}
        """States of the sandboxes by role (``engine``, ``text``), of those that were ever there or are asked for."""
        self.draining = False
        self.sleep_state = SleepState()
        self.changed: Callable[[], None] = lambda: None
        """Called after each change of its state; for requests that wait."""
        self.leaving = Leaving.NO
        """Whether it takes no request any more, because it is being taken away; set by ``leave``."""
        self.arriving = False
        """Whether it came while the appliance served, and was not ready yet: readiness does not wait for it."""
        self.failed = False
        """Whether a sandbox of the model has failed since the start."""
        self.capacity: EngineReady | None = None
        """Limits that the engine last announced; kept over restarts, since it is the same model."""
        self.table: VocabularyTable | None = None
        """Vocabulary table, kept over restarts as well."""
        self._refused = False
        self._quotas = KvQuotas()
        self._public = PublicPrefixes()
        self._changes = StateChanges()
        self._inside = self._suspects_waiting = 0
        self._probation = False
        self._gate_until = 0.0
        self._gate_again = 0.0
        self._alone_since = 0.0
        self._alone_again = 0.0
        """When a suspect may have the engine alone again. The others get it for as long as the last suspect kept them
        out: otherwise a client that sends one suspect after the other could have the engine all the time."""

    def leave(self, *, again: bool) -> None:
        """Take no request any more, and end the waits for a wake: the model is being taken away; ``again``: it comes
        again, with another entry of the configuration."""
        self.leaving = Leaving.AGAIN if again else Leaving.FOR_GOOD
        self._tell()

    @property
    def ready(self) -> bool:
        """Whether both sandboxes are there."""
        return self.engine is not None and self.text is not None

    @property
    def hangs(self) -> dict[str, str]:
        """Why sandboxes that are there count as hung, by role; empty while all answer."""
        links = {"engine": self.engine, "text": self.text}
        return {role: link.hang for role, link in links.items() if link is not None and link.hang}

    @property
    def frozen(self) -> bool:
        """Whether one of its sandboxes is frozen because nobody uses it."""
        return any(record.frozen for record in self.records.values())

    def record(self, role: str) -> SandboxRecord:
        """Return the state of the sandbox of this role; a sandbox that is new is booting."""
        return self.records.setdefault(role, SandboxRecord())

    def close_links(self) -> None:
        """Drop and close both links."""
        engine, text = self.engine, self.text
        self.set_engine(None)
        self.set_text(None)
        for link in (engine, text):
            if link is not None:
                link.close()

    def set_quotas(self, quotas: KvQuotas) -> None:
        """Set what accounts may keep of the engine's KV from now on."""
        self._quotas = quotas
        if self.engine is not None:
            self.engine.set_quotas(quotas)

    def set_public(self, public: PublicPrefixes) -> None:
        """Set the public prefixes that the engine keeps from now on."""
        if public == self._public:
            return
        self._public = public
        if self.engine is not None:
            self.engine.set_public(public)

    def set_engine(self, link: EngineLink | None) -> None:
        """Set or drop the engine's link. Quotas are sent before any request."""
        self.engine = link
        if link is not None:
            self.capacity = link.ready
            link.set_quotas(self._quotas)
            if self._public.prefixes:
                link.set_public(self._public)
        self._tell()

    def set_text(self, link: TextLink | None) -> None:
        """Set the text sandbox's link, whose table has been read, or drop it."""
        self.text = link
        if link is not None:
            self.table = link.table
        self._tell()

    def forget_text(self, link: TextLink) -> None:
        """Drop this link, which is lost, so that no request uses it again."""
        if self.text is link:
            self.text = None

    def note_failure(self) -> None:
        """Note that a sandbox failed; it may come back."""
        self.failed = True
        self._tell()

    def begin_drain(self) -> None:
        """End all waits; requests in the engine stay."""
        self.draining = True
        self._tell()

    def refuse(self) -> None:
        """End all waits: these sandboxes will not be booted."""
        self._refused = True
        self._tell()

    def end_probation(self) -> None:
        """Let other requests enter: the suspect gave a token, or left."""
        now = self.clock()
        took_s = now - self._alone_since
        self._probation, self._alone_again = False, now + took_s
        asyncio.get_running_loop().call_later(took_s, self._tell)
        self._tell()

    async def wait_ready(self, until: float) -> None:
        """Wait until both sandboxes are there; ``until`` (monotonic seconds) is the only bound.

        Raises:
            UnavailableError: they were not there in time.
        """
        await self.wait_for(lambda: self.ready, until)

    async def limits_by(self, until: float) -> EngineReady:
        """Return the engine's limits; waits for the first boot, up to ``until`` and ``BOOT_WAIT_S``.

        Raises:
            UnavailableError: it has not been there yet.
        """
        if self.capacity is None:
            await self.wait_ready(min(until, self.clock() + BOOT_WAIT_S))
        if self.capacity is None:
            raise UnavailableError("the model is starting", retry_after_s=RETRY_AFTER_S)
        return self.capacity

    async def wait_settled(self, until: float) -> None:
        """Wait until both sandboxes are there, or one has failed, or the model sleeps.

        Raises:
            UnavailableError: none of it happened in time.
        """
        await self.wait_for(lambda: self.ready or self.failed or self.sleep_state.asleep, until)

    async def wait_woken(self, until: float) -> None:
        """Wait until both sandboxes are there, or the model sleeps again or is taken away, or one was lost; raises as
        ``wait_ready``."""
        await self.wait_for(lambda: self.ready or self._wakes_in_vain, until)

    @property
    def _wakes_in_vain(self) -> bool:
        lost = any(record.state == "failed" for record in self.records.values())
        return lost or self.sleep_state.asleep or self.leaving is not Leaving.NO

    def begin_wake(self) -> None:
        """Note that the model is being woken; one whose sandboxes are there is awake: nothing would end its wake."""
        begin = self.sleep_state.note_awake if self.ready else self.sleep_state.begin_wake
        begin(self.clock())
        for record in () if self.ready else self.records.values():
            record.become("booting")
        self.changed()

    def fall_asleep(self, cause: str = "") -> None:
        """Note that the model has no sandboxes now, and end the waits for them; ``cause``: why it could not be woken,
        if that is so."""
        self.sleep_state.fall_asleep(cause, self.clock())
        for record in self.records.values():
            record.become("asleep", cause)
            record.pid = record.memory_bytes = 0
        self._tell()

    async def wait_text(self, until: float) -> TextLink:
        """Return the text link, as soon as there is one.

        Raises:
            UnavailableError: none came in time.
        """
        await self.wait_for(lambda: self.text is not None, min(until, self.clock() + BOOT_WAIT_S))
        assert self.text is not None
        return self.text

    @contextlib.asynccontextmanager
    async def enter_engine(
        self, until: float, *, suspect: bool, alone_only: bool = False
    ) -> AsyncIterator[EngineVisit]:
        """Enter the engine; a suspect enters alone where possible, and with ``alone_only`` alone or not at all.

        Raises:
            UnavailableError: no engine, or no turn, in time.
        """
        until = min(until, self.clock() + BOOT_WAIT_S)
        alone = suspect and await self._wait_empty(until, alone_only)
        if not alone:
            await self.wait_for(lambda: self._may_enter(suspect), until)
        assert self.engine is not None
        self._inside += 1
        if alone:
            self._probation, self._alone_since = True, self.clock()
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
        waits = self._suspects_waiting > 0 and not suspect and self.clock() < self._gate_until
        return self.engine is not None and not self._probation and not waits

    def _may_be_alone(self) -> bool:
        empty = self.engine is not None and self._inside == 0 and not self._probation
        return empty and self.clock() >= self._alone_again

    def _close_gate(self) -> None:
        """Keep new requests out for a while, so that the engine empties; afterwards the gate stays open for as long."""
        now = self.clock()
        if now >= max(self._gate_again, self._alone_again):
            self._gate_until, self._gate_again = now + EMPTY_WAIT_S, now + 2 * EMPTY_WAIT_S
            asyncio.get_running_loop().call_later(EMPTY_WAIT_S, self._tell)

    async def _wait_empty(self, until: float, alone_only: bool) -> bool:
        """Wait for an empty engine; False when it stays busy."""
        self._suspects_waiting += 1
        self._close_gate()
        try:
            await self.wait_for(lambda: self.engine is not None, until)
            await self.wait_for(self._may_be_alone, until if alone_only else min(until, self.clock() + EMPTY_WAIT_S))
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
        if self.ready and self.sleep_state.waking:
            self.sleep_state.note_awake(self.clock())
        self.arriving = self.arriving and not self.ready
        self._changes.tell()
        self.changed()

    async def wait_for(self, predicate: Callable[[], bool], until: float) -> None:
        """Wait until something holds; after each change who came first looks first; raises as ``wait_ready``."""
        ticket = self._changes.enter()
        while not predicate():
            if self.draining:
                raise UnavailableError("the appliance is shutting down", retry_after_s=RETRY_AFTER_S)
            if self._refused:
                raise NoPlaceLeftError("the sandboxes that this tenant's class asks for are not granted now")
            try:
                await self._changes.next(until - self.clock(), ticket)
            except TimeoutError:
                if not predicate():  # Else it was about to be told.
                    raise _starting(self.name) from None


def _starting(name: str) -> UnavailableError:
    message = f"the model {name} is not available at the moment: its sandbox is starting"
    return UnavailableError(message, retry_after_s=RETRY_AFTER_S)


async def first_ready(models: Iterable[ModelSandboxes], longest_s: float) -> None:
    """Wait until both sandboxes of one of the models are there, or it sleeps, or none can come, at most ``longest_s``
    seconds."""
    until = time.monotonic() + longest_s
    waits = [asyncio.ensure_future(_ready_or_asleep(model, until)) for model in models]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in waits:
            one.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


async def _ready_or_asleep(model: ModelSandboxes, until: float) -> None:
    await model.wait_for(lambda: model.ready or model.sleep_state.asleep, until)
