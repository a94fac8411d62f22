"""The supervisor's end of the audit log: takes entries from everywhere, writes them together, once a second at most.

Nothing waits for the disk: entries lie in a bounded list until a thread has written them, with their checkpoint. When
the disk does not take them they stay there, the problem is logged and told to the gateway, and the write is tried
again; once the list is full further entries are counted, and a ``gap`` entry says how many are missing. Whether the
appliance serves meanwhile is the operator's choice (``audit.on_failure``):

* ``continue`` (default): a full disk is no outage; the gap is in the log, and a metric and a log line call for help;
* ``refuse``: no request without its entry: new ones get UNAVAILABLE until the log is written again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

import structlog

from appliance.common.audit.entry import Entry, EntryError, entry, from_wire
from appliance.common.audit.log import AuditLog, AuditWriteError
from appliance.common.control import REFUSED, Audited, AuditState, Control, Frozen, SandboxDown, SandboxUp
from appliance.common.errors import AuditNamesError, ControlError
from appliance.common.usage.book import UsageAccessError
from appliance.supervisor.metering import Metering
from appliance.supervisor.sandbox_output import MARK
from isolation.ipc.messages import weight_word

log = structlog.get_logger()

FLUSH_S = 1.0
"""Longest that an entry waits before it is written; what a crash of the supervisor may lose."""

MAX_PENDING = 20_000
"""Entries that wait to be written: some minutes of a busy appliance, 10 MB."""

ANNOUNCE_S = 3_600.0
"""How often the journal gets a checkpoint: a witness outside of the audit folder."""

UNLINK_FLUSHES = 5
"""Writes until a tenant that goes on has none of its entries waiting: each takes what came during the one before."""

MAX_ENTRIES = 1_000
"""Entries of one message of the gateway; a datagram holds fewer of ordinary size."""


class Recorder:
    """The one writer of one log; ``run`` is its life, the other methods are called from the same event loop."""

    def __init__(
        self,
        audit: AuditLog | None,
        tell: Callable[[AuditState], object],
        *,
        refuses: bool = False,
        clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        metering: Metering | None = None,
    ) -> None:
        """``audit``: None where no log is kept; ``tell``: gives the gateway the state, when it changes; ``metering``
        counts what was written."""
        self._audit = audit
        self._metering = metering
        self._tell = tell
        self._refuses = refuses
        self._clock_ms = clock_ms
        self._pending: list[tuple[int, Entry]] = []
        self._dropped = 0
        self._more = asyncio.Event()
        self._turn = asyncio.Lock()
        self._flushing: asyncio.Task[None] | None = None
        self._announced = time.monotonic()
        self.on_report: Callable[[Entry], None] = lambda _one: None
        """Takes each entry that the gateway reports; set by the owner."""
        self.on_renamed: Callable[[], None] = lambda: None
        """Called in a thread once the usage book has a tenant's pseudonym in place of its name."""
        self.on_taken: Callable[[Entry], None] = lambda _one: None
        """Likewise, for what must know of requests before their gateway ends."""
        self.problem = ""
        """Why the log is not written now."""
        self.witness = ""
        """What is wrong with the witnesses of its checkpoints."""
        for one in audit.opening if audit is not None else ():
            self.record(one)

    def record(self, one: Entry) -> None:
        """Take an entry; never waits and never fails."""
        if self._audit is None:
            return
        self._more.set()
        if len(self._pending) >= MAX_PENDING:
            self._dropped += 1
            return
        self._pending.append((self._clock_ms(), one))

    @property
    def audit(self) -> AuditLog | None:
        """The log; None where none is kept."""
        return self._audit

    def take(self, message: Audited) -> None:
        """Take what the gateway reports.

        Raises:
            ControlError: it is not what a gateway reports.
        """
        if len(message.entries) > MAX_ENTRIES or message.dropped < 0:
            raise ControlError("too many audit entries in one message")
        try:
            entries = [from_wire(text) for text in message.entries]
        except EntryError as error:
            raise ControlError(str(error)) from error
        if message.dropped:
            self.record(entry("gap", where="gateway", dropped=message.dropped))
        for one in entries:
            self.record(one)
            self.on_report(one)
            self.on_taken(one)

    def greet(self) -> None:
        """Tell a gateway that has attached about a problem of the log."""
        if self.problem or self.witness:
            self._tell(self._state())

    def note_witnesses(self, problem: str) -> None:
        """Take what is wrong with the witnesses, and tell the gateway what is new of it."""
        if problem == self.witness:
            return
        self.witness = problem
        if problem:
            log.warning("a witness of the audit log does not cosign", problem=problem)
        else:
            log.info("all witnesses of the audit log cosign")
        self._tell(self._state())

    async def run(self) -> None:
        """Write what comes until cancelled. A write that is on its way then goes on in its thread, and ``close`` waits
        for it: two writers at once would spoil the log."""
        while True:
            await self._more.wait()
            await asyncio.sleep(FLUSH_S)
            self._flushing = asyncio.create_task(self.flush(), name="audit flush")
            await asyncio.shield(self._flushing)

    async def close(self) -> None:
        """Write what is left, and close the log."""
        if self._audit is None:
            return
        await self.flush()
        self._announce(self._audit)
        await asyncio.to_thread(self._audit.close)

    async def append(self, entries: list[tuple[int, Entry]]) -> int | None:
        """Write entries with their times now, behind what waits; returns the log's size after that, or None where it
        does not take them: then they are not kept here."""
        async with self._turn:
            await self._flush()
            audit = self._audit
            if audit is None or self.problem:
                return None
            entries = await self._disguised(entries)
            try:
                first = await asyncio.to_thread(audit.append, entries)
            except AuditWriteError as error:
                self._become(str(error))
                return None
            if self._metering is not None:
                await asyncio.to_thread(self._metering.count, audit.name, first, entries)
            return audit.size

    async def unlink(self, tenant: str) -> str:
        """Destroy what leads from pseudonyms to a tenant, once what waits is written; returns its pseudonym until now,
        or nothing where it had none.

        Raises:
            AuditNamesError: what waits cannot be written, and nothing was destroyed; or the disk does not take it.
                Asking again goes on.
        """
        audit = self._audit
        if audit is None:
            return ""
        async with self._turn:
            for _ in range(UNLINK_FLUSHES):
                await self._flush()
                if not self._waits(tenant):
                    break
            if self.problem or self._dropped or self._waits(tenant):
                cause = self.problem or "entries still wait to be written"
                raise AuditNamesError(f"the pseudonyms of {tenant} stay as they are: {cause}")
            try:
                return await asyncio.to_thread(self._unlink, audit, tenant)
            except (OSError, UsageAccessError) as error:
                raise AuditNamesError(f"the pseudonyms of {tenant} cannot be unlinked: {error}") from error

    def _waits(self, tenant: str) -> bool:
        """Return whether an entry about a tenant waits."""
        return any(one.fields.get("tenant") == tenant for _, one in self._pending)

    def _unlink(self, audit: AuditLog, tenant: str) -> str:
        pseudonym = audit.names.pseudonym(tenant)
        if pseudonym and self._metering is not None:
            # First the book: while the key lives, a second attempt finds the same pseudonym.
            self._metering.rename(tenant, pseudonym)
            self.on_renamed()
        audit.names.forget(tenant)
        return pseudonym

    async def flush(self) -> None:
        """Write what waits, once who writes already is done. A failure leaves it waiting."""
        async with self._turn:
            await self._flush()

    async def _flush(self) -> None:
        batch, dropped, audit = list(self._pending), self._dropped, self._audit
        if dropped:
            batch = [*batch, (self._clock_ms(), entry("gap", where="supervisor", dropped=dropped))]
        if not batch or audit is None:
            return
        self._more.clear()
        taken = len(self._pending)
        batch = await self._disguised(batch)
        try:
            first = await asyncio.to_thread(audit.append, batch)
        except AuditWriteError as error:
            self._more.set()
            self._become(str(error))
            return
        del self._pending[:taken]
        self._dropped -= dropped
        if self._pending:
            self._more.set()
        if self._metering is not None:
            # Only now that the entries are no more to be written: whatever comes of counting, none is written twice.
            await asyncio.to_thread(self._metering.count, audit.name, first, batch)
        self._become("")
        if time.monotonic() - self._announced >= ANNOUNCE_S:
            self._announce(audit)

    async def _disguised(self, batch: list[tuple[int, Entry]]) -> list[tuple[int, Entry]]:
        """Return entries without what leads to end users; where there is no book, without end users."""
        if self._metering is not None:
            return await asyncio.to_thread(self._metering.disguised, batch)
        named = [(time_ms, one) for time_ms, one in batch if one.fields.get("end_user")]
        return batch if not named else [(at, _without_user(one)) for at, one in batch]

    def _become(self, problem: str) -> None:
        if problem == self.problem:
            return
        self.problem = problem
        if problem:
            log.error("the audit log is not written", problem=problem, refuses=self._refuses)
        else:
            log.info("the audit log is written again")
        self._tell(self._state())

    def _state(self) -> AuditState:
        return AuditState(self.problem, int(self._refuses and bool(self.problem)), self.witness)

    def _announce(self, audit: AuditLog) -> None:
        self._announced = time.monotonic()
        log.info("audit checkpoint", note=audit.checkpoint())


def _without_user(one: Entry) -> Entry:
    return Entry(one.kind, one.fields | {"end_user": ""}) if "end_user" in one.fields else one


def watching(
    publish: Callable[[Control, tuple[int, ...]], bool],
    record: Callable[[Entry], None],
    model_digests: dict[str, str],
    model_signers: dict[str, str],
    image: str,
) -> Callable[[Control, tuple[int, ...]], bool]:
    """``publish`` that also records what keepers publish: which sandboxes came up, once each, which were frozen or
    thawed, and which went down. A sandbox that came up is published with the digest of its model's files.

    Args:
        publish: sends to the gateway.
        record: takes entries.
        model_digests: of every served model.
        model_signers: ids of the keys that have signed them, empty where none must have.
        image: digest of the sandboxes' image, empty where there is none.
    """
    seen: dict[tuple[str, str, str], int] = {}

    def publish_and_record(message: Control, fds: tuple[int, ...]) -> bool:
        if isinstance(message, SandboxUp | SandboxDown | Frozen):
            up = isinstance(message, SandboxUp)
            place = message.model, message.role, message.tenant
            if not up or seen.get(place) != message.generation:
                # A sandbox's last words are its own, and might repeat what it was given.
                cause = message.cause.partition(MARK)[0] if isinstance(message, SandboxDown) else ""
                record(
                    entry(
                        "sandbox",
                        state=_state(message),
                        model=message.model,
                        role=message.role,
                        tenant=message.tenant,
                        generation=message.generation,
                        cause=cause,
                        image=image,
                        model_digest=model_digests.get(message.model, ""),
                        model_signer=model_signers.get(message.model, ""),
                        weights=_weights(message),
                    )
                )
            if up:
                seen[place] = message.generation
        if isinstance(message, SandboxUp):
            message = replace(message, model_digest=model_digests.get(message.model, ""))
        return publish(message, fds)

    return publish_and_record


def _weights(message: SandboxUp | SandboxDown | Frozen) -> str:
    """Form in which an engine that came up says that it holds its weights."""
    return weight_word(message.ready.get("weights", 0)) if isinstance(message, SandboxUp) else ""


def _state(message: SandboxUp | SandboxDown | Frozen) -> str:
    if isinstance(message, Frozen):
        return "frozen" if message.frozen else "thawed"
    if isinstance(message, SandboxUp):
        return "up"
    return REFUSED if message.state == REFUSED else "down"
