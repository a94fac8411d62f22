"""Supervisor's end of the control socket: one gateway at a time, typed messages."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import structlog

from appliance.common.control import (
    CONTROL_VERSION,
    Attach,
    Attest,
    Audited,
    Control,
    DiskState,
    Fault,
    Freeze,
    HandedOver,
    KeysUsed,
    NamespaceQuery,
    Namespaces,
    OpenStore,
    Release,
    ReserveSpend,
    Retention,
    SandboxUse,
    SpendQuery,
    SpillState,
    StoreState,
    Want,
    Welcome,
    receive,
    send,
)
from appliance.common.control_charges import KeepCharges
from appliance.common.control_checkpoints import CheckpointState
from appliance.common.control_models import ModelWishes
from appliance.common.control_usage import UsageQuestion
from appliance.common.errors import ControlError, MessageTooLargeError
from appliance.common.paths import identity
from appliance.supervisor.namespaces import Namespace

log = structlog.get_logger()

READ_BATCH = 16
"""Most messages taken in one turn of the event loop, so that a flood of them does not block other work."""

LAST_MESSAGES = 1_000
"""Most messages taken of a gateway that has left: more than a socket holds of those with an entry."""

Level = SandboxUse | SpillState | DiskState | CheckpointState | StoreState
"""Message that says, every few seconds, how much there is of something: the last one of its subject holds."""

SOCKET_MODE = 0o660
"""Mode of the socket: the gateway's user reaches it through its group; the folder excludes all others."""


class ControlServer:
    """Server of the control socket; calls back on attach, leave and request. All methods run in one event loop."""

    def __init__(
        self,
        path: Path,
        welcome: Welcome,
        on_attach: Callable[[], None],
        on_leave: Callable[[], None],
        on_wish: Callable[[Fault | Freeze | Want | Release | HandedOver], None],
        *,
        on_audited: Callable[[Audited], None] = lambda _: None,
        on_keys: Callable[[int], None] = lambda _: None,
    ) -> None:
        """``on_wish`` is called for sandboxes that shall end, rest or come, or were handed over, ``on_audited`` with
        entries for the audit log, ``on_keys`` with the number of namespace keys given out."""
        self._path = path
        self._welcome = welcome
        self.models: Callable[[], list[str]] = lambda: welcome.models
        """Gives the names of the models that are served."""
        self._on_attach, self._on_leave, self._on_wish = on_attach, on_leave, on_wish
        self._on_audited, self._on_keys = on_audited, on_keys
        self.namespace = Namespace()
        self.on_retention: Callable[[dict[str, int]], None] = lambda _kept: None
        """Takes which tenants' KV may be kept outside of engines."""
        self.on_keys_used: Callable[[KeysUsed], None] = lambda _message: None
        """Takes last uses of API keys."""
        self.on_spend: Callable[[SpendQuery | ReserveSpend], None] = lambda _message: None
        """Takes questions about spend and reservations of it."""
        self.on_question: Callable[[Attest | UsageQuestion], None] = lambda _message: None
        """Takes questions for attestations and about usage."""
        self.on_store: Callable[[OpenStore], None] = lambda _message: None
        """Takes the question for the socket of files and batches."""
        self.on_charges: Callable[[KeepCharges], None] = lambda _message: None
        """Takes the question for memory of open charges."""
        self.on_models: Callable[[ModelWishes], None] = lambda _message: None
        """Takes words about models that come and go, sleep and wake."""
        self._peer: socket.socket | None = None
        self._attached = False
        """Whether the peer has sent a matching version; before that nothing is sent to it."""
        self._levels: dict[tuple[str, ...], Level] = {}
        """What the peer knows, by subject, since anything else was told: at most one for each sandbox, and three."""
        self._left_out: set[tuple[str, ...]] = set()
        """Subjects of levels that are too large to be sent: each is logged once, though it comes every few seconds."""
        self._listener: socket.socket | None = None
        self._identity: tuple[int, int] | None = None
        """Device and inode of the socket's file."""

    def open(self) -> None:
        """Begin to listen, in place of an earlier socket.

        Raises:
            OSError: the path cannot be used.
        """
        self._path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            listener.setblocking(False)
            listener.bind(str(self._path))
            self._path.chmod(SOCKET_MODE)
            listener.listen(4)
        except OSError:
            listener.close()
            raise
        self._stop_listening()
        self._listener, self._identity = listener, identity(self._path)
        asyncio.get_running_loop().add_reader(listener.fileno(), self._accept)

    def mend(self) -> None:
        """Listen anew where the socket's file was removed: no gateway could attach any more, and the one that is
        attached would not notice before it dies. To be called now and then; a failure is tried again."""
        if self._listener is not None and identity(self._path) != self._identity:
            try:
                self.open()
            except OSError as error:
                log.error("the control socket was removed and cannot be made again", problem=str(error))
            else:
                log.warning("the control socket was removed, and is there again")

    def _stop_listening(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None

    def close(self) -> None:
        """Stop listening and disconnect the gateway."""
        self._drop("the supervisor stops")
        if self._listener is not None:
            self._stop_listening()
            self._path.unlink(missing_ok=True)

    def publish(self, message: Control, fds: tuple[int, ...]) -> bool:
        """Send to the attached gateway; False when there is none, it does not take messages, or the message is too
        large: that is no fault of the gateway, which stays attached without that message. A level that it knows is not
        sent again, so that an idle appliance stays idle; after any other message all are."""
        if self._peer is None or not self._attached:
            return False
        level = _subject(message) if isinstance(message, Level) else None
        if level is None:
            self._levels.clear()
        elif self._levels.get(level) == message:
            return True
        try:
            send(self._peer, message, fds)
        except MessageTooLargeError as error:
            if level is None or level not in self._left_out:
                log.error("a message for the gateway is left out; please report this", problem=error.message)
            if level is not None:
                self._left_out.add(level)
            return False
        except ControlError as error:
            self._drop(error.message)
            return False
        if level is not None and isinstance(message, Level):
            self._levels[level] = message
            self._left_out.discard(level)
        return True

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            peer, _ = self._listener.accept()
        except OSError:
            return
        if self._peer is not None:
            log.warning("a second gateway was refused")
            peer.close()
            return
        peer.setblocking(False)
        self._peer = peer
        asyncio.get_running_loop().add_reader(peer.fileno(), self._read)

    def _read(self) -> None:
        for _ in range(READ_BATCH):
            if self._peer is None:
                return
            try:
                item = receive(self._peer)
            except BlockingIOError:
                return
            except ControlError as error:
                self._drop(error.message)
                return
            if item is None:
                self._drop("the gateway closed its end")
                return
            for stray in item[1]:
                os.close(stray)
            try:
                self._serve(item[0])
            except ControlError as error:
                self._drop(error.message)

    def _serve(self, message: Control) -> None:
        if isinstance(message, Attach):
            if message.version != CONTROL_VERSION:
                raise ControlError(f"the gateway speaks version {message.version}, not {CONTROL_VERSION}")
            self._attached = True
            self.publish(replace(self._welcome, models=self.models()), ())
            log.info("gateway attached")
            self._on_attach()
        elif not self._attached:
            raise ControlError(f"the gateway's first word is {type(message).__name__}")
        elif isinstance(message, NamespaceQuery):
            self.publish(Namespaces(self.namespace.keys(message.tenants)), ())
            self._on_keys(len(message.tenants))
        elif isinstance(message, Audited):
            self._on_audited(message)
        elif isinstance(message, KeysUsed):
            self.on_keys_used(message)
        elif isinstance(message, SpendQuery | ReserveSpend):
            self.on_spend(message)
        elif isinstance(message, Attest | UsageQuestion):
            self.on_question(message)
        elif isinstance(message, OpenStore):
            self.on_store(message)
        elif isinstance(message, KeepCharges):
            self.on_charges(message)
        else:
            self._serve_sandboxes(message)

    def _serve_sandboxes(self, message: Control) -> None:
        """Serve what is about sandboxes and their models."""
        if isinstance(message, ModelWishes):
            self.on_models(message)
        elif isinstance(message, Retention):
            self.on_retention(message.kept)
        elif isinstance(message, Fault | Freeze | Want | Release | HandedOver):
            self._on_wish(message)
        else:
            raise ControlError(f"{type(message).__name__} is not for the supervisor")

    def _drop(self, reason: str) -> None:
        if self._peer is None:
            return
        asyncio.get_running_loop().remove_reader(self._peer.fileno())
        peer, self._peer, self._attached = self._peer, None, False
        self._levels.clear()
        self._left_out.clear()
        self._take_last(peer)
        peer.close()
        log.info("gateway detached", reason=reason)
        self._on_leave()

    def _take_last(self, peer: socket.socket) -> None:
        """Take the entries that a gateway had sent before it left: a message to it may fail before they were read."""
        for _ in range(LAST_MESSAGES):
            try:
                item = receive(peer)
                if item is None:
                    return
                for stray in item[1]:
                    os.close(stray)
                if isinstance(item[0], Audited):
                    self._on_audited(item[0])
            except (BlockingIOError, ControlError):
                return


def _subject(level: Level) -> tuple[str, ...]:
    """Return what a level is of."""
    if isinstance(level, SandboxUse):
        return type(level).__name__, level.model, level.role, level.tenant
    return (type(level).__name__,)
