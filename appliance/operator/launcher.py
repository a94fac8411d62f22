"""Runs the host processes from one command: a service manager of two children, with systemd's own words between them.

Each child reports over a notification socket (sd_notify(3)) as it would to systemd. A child that ends before it was
ready ends the start; one that ends later is started again, after a growing delay. SIGTERM drains the gateway first,
then the supervisor cleans up; SIGHUP goes to the gateway. A downloader, where there is one, is started when the others
are ready; nothing waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import structlog

from appliance.common import notify
from appliance.common.errors import StartError
from isolation.errors import ProcessError
from isolation.host.process import MINIMAL_ENVIRONMENT, Child, start

log = structlog.get_logger()

NOTIFY_SOCKET = "notify.sock"
"""Name of the notification socket in the run directory."""

MAX_DATAGRAM_BYTES = 64 << 10
"""Bytes of one notification."""

STDERR = 2
"""Both outputs of a child go to our standard error: our standard output is for the ready line."""

END_GRACE_S = 60.0
"""The longest a child may take to end by itself: a drain of 20 s and the removal of every sandbox."""

BASE_DELAY_S = 0.5
MAX_DELAY_S = 10.0
"""Delays between restarts of a child: none before the first, then doubling between these two."""

STABLE_S = 30.0
"""A child that ran this long is started again at once."""

_UCRED = struct.Struct("3i")
"""Process, user and group of who sent a notification, by the kernel's word (unix(7))."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """Addresses, models and kind of sandbox that the gateway reported when it was ready."""

    http: str
    grpc: str
    admin: str
    models: list[str]
    sandbox: str
    metrics: str = ""
    """Empty: metrics are on the admin listener alone."""
    own: dict[str, str] = field(default_factory=dict)
    """Addresses of listeners of single tenants, by ``FRONT_END-TENANT``."""
    remote_admin: str = ""
    """Empty: operators on other machines have no address of the admin routes."""


class Launcher:
    """Keeps supervisor and gateway running; ``run`` is its life."""

    def __init__(
        self,
        config: Path,
        run_dir: Path,
        on_ready: Callable[[Addresses], None],
        resolved: int,
        *,
        environments: Mapping[str, tuple[tuple[str, str], ...]] = MappingProxyType({}),
        beside: tuple[str, ...] = (),
    ) -> None:
        """Prepare; starts nothing.

        Args:
            config: path of the configuration file, which names the children's processes in lists of processes.
            run_dir: run directory, which has the notification socket.
            on_ready: called once, with the addresses.
            resolved: descriptor of the configuration that the children read (``config_handover.sealed``).
            environments: further variables of each child.
            beside: roles that are started when both are ready.
        """
        self._config = config
        self._run_dir = run_dir
        self._on_ready = on_ready
        self._resolved = resolved
        self._environments = environments
        self._beside = beside
        self._stop = asyncio.Event()
        self._children: dict[str, Child] = {}
        self._served: set[int] = set()
        """Living children that have said that they are ready."""
        self._ready: asyncio.Future[Addresses] | None = None

    async def run(self) -> None:
        """Start both, report when they are ready, keep them running until SIGTERM or SIGINT.

        Raises:
            StartError: a child ended before the appliance was ready.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        loop.add_signal_handler(signal.SIGHUP, self._hang_up)
        self._ready = loop.create_future()
        with self._notifications():
            tasks = [asyncio.create_task(self._keep(role)) for role in ("supervisor", "gateway")]
            try:
                await self._wait_ready(tasks)
                tasks += [asyncio.create_task(self._keep(role)) for role in self._beside if not self._stop.is_set()]
                await self._stop.wait()
            finally:
                notify.stopping()
                await self._end_all(tasks)

    async def _wait_ready(self, tasks: list[asyncio.Task[None]]) -> None:
        assert self._ready is not None
        stopped = asyncio.create_task(self._stop.wait())
        waited: list[asyncio.Future[Any]] = [self._ready, stopped, *tasks]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        for task in tasks:
            if task.done() and task.exception() is not None:
                raise StartError(str(task.exception()))
        if self._ready.done():
            addresses = self._ready.result()
            notify.ready(f"serving {', '.join(addresses.models)} in {addresses.sandbox}")
            self._on_ready(addresses)

    async def _keep(self, role: str) -> None:
        """Run one child again and again until the stop."""
        delay = 0.0
        while not self._stop.is_set():
            began = time.monotonic()
            status, served = await self._one_life(role)
            if self._stop.is_set():
                return
            assert self._ready is not None
            if not self._ready.done():
                raise StartError(f"the {role} ended with {status} before the appliance was ready; see above")
            pause, delay = pauses(delay, time.monotonic() - began, served=served)
            log.error("host process ended; starting it again", role=role, status=status, delay_s=pause)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), pause)

    def _start(self, role: str) -> Child:
        words = (role, str(self._config), str(os.getpid()), str(self._resolved))
        argv = (sys.executable, "-m", "appliance.operator.child", *words)
        address = self._run_dir / NOTIFY_SOCKET
        environment = {
            **MINIMAL_ENVIRONMENT,
            **dict(self._environments.get(role, ())),
            **notify.telemetry_environment(),
            "NOTIFY_SOCKET": str(address),
        }
        return start(argv, env=environment, stdio=STDERR, own_group=True, descriptors=(self._resolved,))

    async def _one_life(self, role: str) -> tuple[str, bool]:
        """Start one child and wait for its end; gives how it ended, and whether it was ever ready."""
        try:
            child = self._children[role] = self._start(role)
        except ProcessError as error:
            return str(error), False
        await _ended(child.pid)
        status = f"status {await asyncio.to_thread(child.wait, END_GRACE_S)}"
        served = child.pid in self._served
        self._served.discard(child.pid)
        return status, served

    async def _end_all(self, tasks: list[asyncio.Task[None]]) -> None:
        """Gateway first, so that it can drain into living sandboxes; then the supervisor, which is told before that no
        other gateway comes: it would boot sandboxes for it."""
        self._stop.set()
        supervisor = self._children.get("supervisor")
        if supervisor is not None and supervisor.poll() is None:
            # One that ends just now may have been waited for by another thread already.
            with contextlib.suppress(ProcessLookupError):
                os.kill(supervisor.pid, signal.SIGUSR1)
        for role in (*self._beside, "gateway", "supervisor"):
            child = self._children.get(role)
            if child is not None:
                await asyncio.to_thread(child.end, END_GRACE_S)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _hang_up(self) -> None:
        gateway = self._children.get("gateway")
        if gateway is not None and gateway.poll() is None:
            os.kill(gateway.pid, signal.SIGHUP)

    @contextlib.contextmanager
    def _notifications(self):  # type: ignore[no-untyped-def]  # noqa: ANN202
        """Listen for the children's words while the block runs."""
        path = self._run_dir / NOTIFY_SOCKET
        path.unlink(missing_ok=True)
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            sock.bind(str(path))
            path.chmod(0o600)
            loop.add_reader(sock.fileno(), self._heard, sock)
            try:
                yield
            finally:
                loop.remove_reader(sock.fileno())
                path.unlink(missing_ok=True)

    def _heard(self, sock: socket.socket) -> None:
        try:
            data, beside, _flags, _address = sock.recvmsg(MAX_DATAGRAM_BYTES, socket.CMSG_SPACE(_UCRED.size))
        except BlockingIOError:
            return
        for line in data.decode("utf-8", "replace").splitlines():
            key, _, value = line.partition("=")
            if line == "READY=1":
                said_by = {_UCRED.unpack(one)[0] for _, kind, one in beside if kind == socket.SCM_CREDENTIALS}
                self._served |= said_by & {child.pid for child in self._children.values()}
            if key == notify.ADDRESSES_KEY and self._ready is not None and not self._ready.done():
                self._ready.set_result(Addresses(**json.loads(value)))


def pauses(delay: float, lasted_s: float, *, served: bool) -> tuple[float, float]:
    """Seconds to wait before a child is started again, and the delay to remember, from the one remembered.

    Delays grow for children that fail to start. One that was ready is worth starting again whenever it dies: what it
    served meanwhile was service.
    """
    pause = min(delay, BASE_DELAY_S) if served else delay
    if lasted_s > STABLE_S:
        return pause, 0.0
    return pause, BASE_DELAY_S if served else min(MAX_DELAY_S, max(BASE_DELAY_S, delay * 2))


async def _ended(pid: int) -> None:
    """Wait until this child has ended, without polling."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    pidfd = os.pidfd_open(pid)
    loop.add_reader(pidfd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
