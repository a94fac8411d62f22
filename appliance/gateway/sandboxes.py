"""The gateway's end of the control socket: sandboxes that come become links in their model's rooms.

When the supervisor goes, its sandboxes go with it as far as the gateway is concerned; the gateway keeps answering
(with ``UNAVAILABLE``) and tries to attach again.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import structlog

from appliance.control import (
    CONTROL_VERSION,
    LOSS_REASONS,
    REFUSED,
    Attach,
    Audited,
    AuditState,
    Control,
    Fault,
    NamespaceQuery,
    Namespaces,
    Retention,
    SandboxDown,
    SandboxUp,
    SandboxUse,
    SpillState,
    Welcome,
    num_unread,
    receive,
    send,
)
from appliance.errors import ControlError
from appliance.gateway.audit import AuditFeed
from appliance.gateway.engine_link import EngineLink
from appliance.gateway.house import House
from appliance.gateway.records import Attachment, SandboxRecord
from appliance.gateway.rooms import ModelRooms
from appliance.gateway.spill_gauges import SpillGauges
from appliance.gateway.text_link import TextLink, TextLostError
from isolation.ipc.channel import Channel
from isolation.ipc.errors import RemoteProtocolError
from isolation.ipc.messages import MAX_TOKENS_PER_REQUEST, EngineReady, Role, TextReady
from isolation.ipc.segment import Layout

log = structlog.get_logger()

RETRY_S = 0.2
"""How soon an absent supervisor is looked for again."""

GONE_GRACE_S = 2.0
"""A sandbox that let go of its channel should have ended by then, and the supervisor have seen it; one that has not
is ended."""

TENANTS_PER_QUERY = 500
"""Tenants of one question for namespace keys: the answer must fit one datagram."""

MAX_UNREAD = 32 << 10
"""Bytes of the control socket, of some 200 kB, that reports may take up: the rest is for what cannot wait."""

SUPERVISOR_GONE = "the supervisor is gone"

OURS = "the gateway stops"
"""Why it is let go of in peace."""
"""Cause that status shows of a sandbox whose supervisor was lost."""


class Sandboxes:
    """Attaches to the supervisor and keeps every model's rooms current."""

    def __init__(
        self,
        path: Path,
        rooms: dict[str, ModelRooms],
        next_id: Callable[[], int],
        on_engine_end: Callable[[ModelRooms, EngineLink], None],
        house: House | None = None,
    ) -> None:
        self._path = path
        self._rooms = rooms
        self._house = house or House()
        self._house.tell, self._house.forget = self._tell, self._forget
        self._next_id = next_id
        self._on_engine_end = on_engine_end
        self._sock: socket.socket | None = None
        self._lost = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._reading: set[TextLink] = set()
        """Links whose table is being read; they are in no room yet."""
        self._namespaces: dict[str, bytes] = {}
        self._kept: dict[str, int] = {}
        self.on_names: Callable[[dict[str, bytes]], None] = lambda _namespaces: None
        """Called with all namespace keys known, whenever some have come."""
        self.on_loss: Callable[[str, str, str], None] = lambda _model, _role, _reason: None
        """Called with model, role and one of ``LOSS_REASONS`` when the supervisor says that a sandbox has ended."""
        self._named = asyncio.Event()
        self.attachment = Attachment()
        self.audit = AuditFeed(self.report)
        self.spill = SpillGauges()
        """What the supervisor tells of KV outside of engines."""
        self.records: dict[tuple[str, ...], SandboxRecord] = {
            (name, role): SandboxRecord() for name in rooms for role in ("engine", "text")
        }
        """By model, role and, of a tenant's own, tenant."""

    async def run(self) -> None:
        """Attach, and attach again whenever the supervisor was lost; ends by cancellation."""
        try:
            while True:
                if not self._attach():
                    await asyncio.sleep(RETRY_S)
                    continue
                await self._lost.wait()
                self._lost.clear()
                await asyncio.sleep(RETRY_S)
        finally:
            self._detach(OURS)

    def record_of(self, rooms: ModelRooms, role: str) -> SandboxRecord | None:
        """What is known of one of these rooms' sandboxes; None for one that was never heard of."""
        own = (rooms.tenant,) if rooms.tenant else ()
        return self.records.get((rooms.name, role, *own))

    async def namespaces(self, tenants: list[str], timeout_s: float = 30.0) -> dict[str, bytes]:
        """The namespace keys of these tenants.

        Raises:
            ControlError: the supervisor did not answer in time.
        """
        deadline = time.monotonic() + timeout_s
        while missing := [tenant for tenant in tenants if tenant not in self._namespaces]:
            self._named.clear()
            self._tell(NamespaceQuery(missing[:TENANTS_PER_QUERY]))
            try:
                async with asyncio.timeout(min(1.0, deadline - time.monotonic())):
                    await self._named.wait()
            except TimeoutError:
                if time.monotonic() >= deadline:
                    raise ControlError("the supervisor did not give namespace keys in time") from None
        self._namespaces = {tenant: self._namespaces[tenant] for tenant in tenants}
        return dict(self._namespaces)

    def report(self, message: Audited) -> bool:
        """Hand entries for the audit log to the supervisor; False when it is not there, or has not read those before:
        a full socket would cost the attachment, with which every sandbox goes."""
        if self._sock is None or num_unread(self._sock) > MAX_UNREAD:
            return False
        try:
            send(self._sock, message)
        except ControlError as error:
            if not isinstance(error.__cause__, BlockingIOError):
                self._detach(error.message)
            return False
        return True

    def tell_retention(self, kept: dict[str, int]) -> None:
        """Tell the supervisor, now and whenever it comes anew, whose KV may live outside of an engine; tenants that are
        named no more may not."""
        gone = {tenant: 0 for tenant in self._kept if tenant not in kept}
        self._kept = kept
        self._send_retention({**gone, **kept})

    def _send_retention(self, kept: dict[str, int]) -> None:
        items = list(kept.items())
        for start in range(0, len(items), TENANTS_PER_QUERY):
            self._tell(Retention(dict(items[start : start + TENANTS_PER_QUERY])))

    def _tell(self, message: Control) -> None:
        """Say it to the supervisor, if there is one; a supervisor that does not listen is lost."""
        if self._sock is not None:
            try:
                send(self._sock, message)
            except ControlError as error:
                self._detach(error.message)

    def _forget(self, key: tuple[str, str]) -> None:
        for role in ("engine", "text"):
            self.records.pop((key[0], role, key[1]), None)

    def _tell_same(self, sock: socket.socket | None, message: Control) -> None:
        if sock is self._sock:
            self._tell(message)

    def _attach(self) -> bool:
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        except OSError:
            return False  # No descriptor is left; one may be in a moment.
        sock.setblocking(False)
        try:
            sock.connect(str(self._path))
            send(sock, Attach(CONTROL_VERSION))
        except (OSError, ControlError):
            sock.close()
            return False
        self._sock = sock
        asyncio.get_running_loop().add_reader(sock.fileno(), self._read)
        return True

    def _detach(self, reason: str) -> None:
        if self._sock is None:
            return
        asyncio.get_running_loop().remove_reader(self._sock.fileno())
        self._sock.close()
        self._sock = None
        self.attachment = Attachment()
        # What we do ourselves is nothing that anybody must hear of at night.
        (log.info if reason == OURS else log.warning)("supervisor is gone", reason=reason)
        for rooms in (*self._rooms.values(), *self._house.rooms):
            engine, text = rooms.engine, rooms.text
            rooms.set_engine(None)
            rooms.set_text(None)
            if engine is not None:
                engine.close()
            if text is not None:
                text.close()
        for reading in tuple(self._reading):
            reading.close()
        for record in self.records.values():
            if record.state == "ready":
                record.become("failed", SUPERVISOR_GONE)
        self._lost.set()

    def _read(self) -> None:
        while self._sock is not None:
            try:
                item = receive(self._sock)
            except BlockingIOError:
                return
            except ControlError as error:
                self._detach(error.message)
                return
            if item is None:
                self._detach("it closed its end")
                return
            try:
                self._serve(*item)
            except (KeyError, TypeError, ValueError) as error:
                self._detach(f"it sent what cannot be: {error}")

    def _serve(self, message: Control, fds: tuple[int, ...]) -> None:
        if isinstance(message, SandboxUp) and len(fds) == 3:
            self._up(message, (fds[0], fds[1], fds[2]))
            return
        for stray in fds:
            os.close(stray)
        if isinstance(message, Welcome):
            self.attachment = Attachment(message.sandbox, message.limits, attached=True)
            # A supervisor that came anew has drawn other keys.
            known = list(self._namespaces)
            for start in range(0, len(known), TENANTS_PER_QUERY):
                self._tell(NamespaceQuery(known[start : start + TENANTS_PER_QUERY]))
            self._send_retention(self._kept)
        elif isinstance(message, Namespaces):
            self._namespaces.update((name, bytes.fromhex(key)) for name, key in message.keys.items())
            self._named.set()
            self.on_names(dict(self._namespaces))
        elif isinstance(message, SandboxDown):
            self._down(message)
        elif isinstance(message, SandboxUse):
            self._note_use(message)
        elif isinstance(message, AuditState):
            self.audit.problem, self.audit.refuses = message.problem, bool(message.refuses)
        elif isinstance(message, SpillState):
            self.spill.take(message)
        else:
            self._detach(f"it sent {type(message).__name__}")

    def _up(self, message: SandboxUp, fds: tuple[int, int, int]) -> None:
        rooms = self._find(message)
        channel = None
        try:
            if rooms is not None:
                role = Role[message.role.upper()]
                layout = Layout.decode(bytes.fromhex(message.layout))
                channel = Channel.host(*fds, layout, role, established=True)
        except RemoteProtocolError as error:
            # The guest could write into the segment since the supervisor looked at it.
            self._refuse(message, f"broke the protocol: {error}")
        except OSError as error:
            # Unheard of it would be starting for ever: the supervisor has handed it over.
            self._refuse(message, f"the gateway could not take it: {error.strerror}")
        finally:
            if channel is None:
                for fd in fds:
                    os.close(fd)
        if rooms is None or channel is None:
            return
        self._record(message).generation = message.generation
        if role is Role.ENGINE:
            numbers = dict(message.ready)
            deterministic = bool(numbers.pop("deterministic", 0))
            publishes = bool(numbers.pop("publishes", 0))
            ready = EngineReady(**numbers, deterministic=deterministic, publishes=publishes)
            # A claim: what it says beyond the protocol's bounds would break every prompt on its way to the text room.
            ready = replace(ready, max_context=min(ready.max_context, MAX_TOKENS_PER_REQUEST))
            rooms.set_engine(EngineLink(channel, ready, message.generation, partial(self._engine_ended, rooms)))
            self._note_up(message)
        else:
            told = message.ready
            ready_text = TextReady(
                vocab_size=told["vocab_size"],
                has_chat_template=bool(told["has_chat_template"]),
                exact_vocabulary=bool(told["exact_vocabulary"]),
                strip_leading_space=bool(told["strip_leading_space"]),
            )
            link = TextLink(channel, ready_text, message.generation, partial(self._text_ended, rooms))
            task = asyncio.create_task(self._welcome_text(rooms, link, message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _refuse(self, message: SandboxUp, reason: str) -> None:
        fault = Fault(message.model, message.role, message.generation, reason, message.tenant)
        self._note_end(fault, at_fault=True)

    async def _welcome_text(self, rooms: ModelRooms, link: TextLink, message: SandboxUp) -> None:
        """A text sandbox counts as there once its table is read."""
        self._reading.add(link)
        try:
            if link.ready.exact_vocabulary:
                await link.read_table(self._next_id)
        except TextLostError as error:
            log.warning("text sandbox was lost at once", model=rooms.name, reason=str(error))
        finally:
            self._reading.discard(link)
        if rooms.tenant and self._house.find(rooms.name, rooms.tenant) is not rooms:
            link.close()  # Others have needed its place meanwhile.
        # It may have ended between its last answer and this turn of the loop.
        if not link.closed:
            rooms.set_text(link)
            self._note_up(message)

    def _engine_ended(self, rooms: ModelRooms, link: EngineLink, reason: str, at_fault: bool) -> None:
        if rooms.engine is link:
            rooms.set_engine(None)
        self._on_engine_end(rooms, link)
        self._note_end(Fault(rooms.name, "engine", link.generation, reason, rooms.tenant), at_fault=at_fault)

    def _text_ended(self, rooms: ModelRooms, link: TextLink, reason: str, at_fault: bool) -> None:
        if rooms.text is link:
            rooms.set_text(None)
        self._note_end(Fault(rooms.name, "text", link.generation, reason, rooms.tenant), at_fault=at_fault)

    def _note_up(self, message: SandboxUp) -> None:
        record = self._record(message)
        record.become("ready")
        record.pid, record.restarts = message.pid, message.restarts
        record.note_start(message.start)

    def _note_use(self, message: SandboxUse) -> None:
        own = (message.tenant,) if message.tenant else ()
        record = self.records.get((message.model, message.role, *own))
        if record is not None:
            record.memory_bytes, record.memory_limit_bytes = message.memory_bytes, message.memory_limit_bytes

    def _note_end(self, fault: Fault, *, at_fault: bool) -> None:
        self._record(fault).become("failed", fault.reason)
        log.warning("sandbox is lost", **asdict(fault))
        if at_fault:
            self._tell(fault)
        else:
            # Not to the next supervisor, whose generations begin anew.
            asyncio.get_running_loop().call_later(GONE_GRACE_S, self._tell_same, self._sock, fault)

    def _down(self, message: SandboxDown) -> None:
        if message.state == REFUSED:
            self._house.refuse(message.model, message.tenant, message.cause)
            return
        rooms = self._find(message)
        if rooms is not None:
            reason = message.reason if message.reason in LOSS_REASONS else "ended"
            self.on_loss(message.model, message.role, reason)
            record = self._record(message)
            record.generation, record.restarts = message.generation, message.restarts
            record.become(message.state, message.cause)
            rooms.note_failure()

    def _find(self, message: SandboxUp | SandboxDown) -> ModelRooms | None:
        """The rooms that a word is about; None when they are not, or no longer, wanted."""
        if message.tenant:
            return self._house.find(message.model, message.tenant)
        return self._rooms.get(message.model)

    def _record(self, message: SandboxUp | SandboxDown | Fault) -> SandboxRecord:
        own = (message.tenant,) if message.tenant else ()
        return self.records.setdefault((message.model, message.role, *own), SandboxRecord())
