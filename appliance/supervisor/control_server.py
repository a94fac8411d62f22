"""The supervisor's end of the control socket: one gateway at a time, typed messages, no more than two kinds of wish."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Callable
from pathlib import Path

import structlog

from appliance.control import (
    CONTROL_VERSION,
    Attach,
    Control,
    ControlError,
    Fault,
    NamespaceQuery,
    Namespaces,
    Welcome,
    receive,
    send,
)
from isolation.ipc.messages import NAMESPACE_KEY_BYTES

log = structlog.get_logger()

MAX_TENANTS = 1_000
"""Tenants with a namespace key: what one datagram carries."""

SOCKET_MODE = 0o660
"""The gateway's user reaches the socket through its group; the folder keeps everybody else out."""


class Namespace:
    """Random namespace keys, one a tenant, drawn at first need and kept until the supervisor ends."""

    def __init__(self) -> None:
        self._keys: dict[str, str] = {}

    def keys(self, tenants: list[str]) -> dict[str, str]:
        """Tenant to key in hex.

        Raises:
            ControlError: more tenants than ``MAX_TENANTS``.
        """
        if len(self._keys.keys() | set(tenants)) > MAX_TENANTS:
            raise ControlError(f"more than {MAX_TENANTS} tenants")
        for tenant in tenants:
            if tenant not in self._keys:
                self._keys[tenant] = secrets.token_hex(NAMESPACE_KEY_BYTES)
        return {tenant: self._keys[tenant] for tenant in tenants}


class ControlServer:
    """Listens for the gateway; calls back on attach, leave and fault. All methods run in one event loop."""

    def __init__(
        self,
        path: Path,
        welcome: Welcome,
        on_attach: Callable[[], None],
        on_leave: Callable[[], None],
        on_fault: Callable[[Fault], None],
    ) -> None:
        self._path = path
        self._welcome = welcome
        self._on_attach, self._on_leave, self._on_fault = on_attach, on_leave, on_fault
        self._namespace = Namespace()
        self._peer: socket.socket | None = None
        self._listener: socket.socket | None = None

    def open(self) -> None:
        """Begin to listen."""
        self._path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        listener.setblocking(False)
        listener.bind(str(self._path))
        self._path.chmod(SOCKET_MODE)
        listener.listen(4)
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener.fileno(), self._accept)

    def close(self) -> None:
        """Stop listening and let the gateway go."""
        self._drop("the supervisor stops")
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
            self._path.unlink(missing_ok=True)

    def publish(self, message: Control, fds: tuple[int, ...]) -> bool:
        """Send to the attached gateway; False when there is none or it does not take messages."""
        if self._peer is None:
            return False
        try:
            send(self._peer, message, fds)
        except ControlError as error:
            self._drop(error.message)
            return False
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
        while self._peer is not None:
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
            self.publish(self._welcome, ())
            log.info("gateway attached")
            self._on_attach()
        elif isinstance(message, NamespaceQuery):
            self.publish(Namespaces(self._namespace.keys(message.tenants)), ())
        elif isinstance(message, Fault):
            self._on_fault(message)
        else:
            raise ControlError(f"{type(message).__name__} is not for the supervisor")

    def _drop(self, reason: str) -> None:
        if self._peer is None:
            return
        asyncio.get_running_loop().remove_reader(self._peer.fileno())
        self._peer.close()
        self._peer = None
        log.info("gateway detached", reason=reason)
        self._on_leave()
