"""The gateway's end of the control socket to the supervisor.

A supervisor that goes takes its sandboxes with it, as far as the gateway is concerned; the gateway goes on answering
(with ``UNAVAILABLE``) and attaches again.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from pathlib import Path

import structlog

from appliance.common.control import CONTROL_VERSION, Attach, Audited, Control, num_unread, receive, send
from appliance.common.errors import ControlError

log = structlog.get_logger()

RETRY_S = 0.2
"""Seconds between two attempts to attach to a supervisor that is absent."""

MAX_UNREAD = 32 << 10
"""Bytes of the control socket, of some 200 kB, that audit entries may take up: the rest is for what cannot wait."""

MAX_UNSENT = 8_192
"""Messages that wait for room in the socket: thousands of requests' reservations, and some sixty about 10,000 tenants
at an attachment. A supervisor that leaves more unread has stopped."""

STOPPING = "the gateway stops"
"""Reason for detaching that is no fault of the supervisor."""


Take = Callable[[Control, tuple[int, ...]], None]
"""Acts on a message and takes over its descriptors; raises KeyError, TypeError or ValueError at what no supervisor of
this release sends."""


class SupervisorLink:
    """One control socket; ``run`` attaches and attaches again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._take: Take = lambda _message, _fds: None
        self._on_lost: Callable[[], None] = lambda: None
        self._lost = asyncio.Event()
        self._unsent: deque[Control] = deque()
        """Messages that the socket had no room for, in their order."""
        self.socket: socket.socket | None = None
        """Control socket while it is connected."""

    async def run(self, take: Take, lost: Callable[[], None]) -> None:
        """Attach, and attach again whenever the supervisor was lost; ends by cancellation. ``take`` gets each message;
        ``lost`` closes everything that came from the supervisor."""
        self._take, self._on_lost = take, lost
        try:
            while True:
                if self._attach():
                    await self._lost.wait()
                    self._lost.clear()
                await asyncio.sleep(RETRY_S)
        finally:
            self.detach(STOPPING)

    def offer(self, message: Control) -> bool:
        """Send a message that can wait; False when there is no supervisor or others wait for room in the socket."""
        if self.socket is None or self._unsent:
            return False
        self.tell(message)
        return True

    def tell(self, message: Control) -> None:
        """Send a message if there is a supervisor; where the socket is full it is sent once there is room."""
        if self.socket is None:
            return
        self._unsent.append(message)
        if len(self._unsent) == 1:
            self._send_waiting()
        elif len(self._unsent) > MAX_UNSENT:
            self.detach("it does not read")

    def _send_waiting(self) -> None:
        """Send what waits, as far as there is room."""
        loop = asyncio.get_running_loop()
        while self.socket is not None and self._unsent:
            try:
                send(self.socket, self._unsent[0])
            except ControlError as error:
                if isinstance(error.__cause__, BlockingIOError):
                    loop.add_writer(self.socket.fileno(), self._send_waiting)
                    return
                self.detach(error.message)
                return
            self._unsent.popleft()
        if self.socket is not None:
            loop.remove_writer(self.socket.fileno())

    def report(self, message: Audited) -> bool:
        """Send entries for the audit log; False when there is no supervisor or it has not read those before: a full
        socket would cost the attachment, and with it every sandbox."""
        if self.socket is None or self._unsent or num_unread(self.socket) > MAX_UNREAD:
            return False
        try:
            send(self.socket, message)
        except ControlError as error:
            if not isinstance(error.__cause__, BlockingIOError):
                self.detach(error.message)
            return False
        return True

    def detach(self, reason: str) -> None:
        """Close the socket and everything that came over it; idempotent."""
        sock, self.socket = self.socket, None
        if sock is None:
            return
        asyncio.get_running_loop().remove_reader(sock.fileno())
        asyncio.get_running_loop().remove_writer(sock.fileno())
        self._unsent.clear()
        sock.close()
        # The gateway's own end is nothing that an operator has to be woken for.
        (log.info if reason == STOPPING else log.warning)("supervisor is gone", reason=reason)
        self._on_lost()
        self._lost.set()

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
        self.socket = sock
        asyncio.get_running_loop().add_reader(sock.fileno(), self._read)
        return True

    def _read(self) -> None:
        while self.socket is not None:
            try:
                item = receive(self.socket, repeats=True)
            except BlockingIOError:
                return
            except ControlError as error:
                self.detach(error.message)
                return
            if item is None:
                self.detach("it closed its end")
                return
            try:
                self._take(*item)
            except (KeyError, TypeError, ValueError) as error:
                self.detach(f"it sent what cannot be: {error}")
