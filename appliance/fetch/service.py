"""The downloader as a service on a Unix socket, and as a child of a command on one connection.

It has a network and the cache's folder, and neither tenants' keys nor a program to start. The kernel says who is at the
other end (SO_PEERCRED, unix(7)): root, or the service's own user.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import structlog

from appliance.common import notify
from appliance.common.config import ApplianceConfig
from appliance.common.errors import ApplianceError, ModelCacheError, reason_of
from appliance.common.model_cache.store import ModelCache
from appliance.fetch.download import Report
from appliance.fetch.pace import Pace
from appliance.fetch.protocol import MAX_LINE_BYTES, FetchOrder, check_order, read_order
from appliance.fetch.pull import Puller
from appliance.fetch.settings import FetchSettings, fetch_socket, settings_of

log = structlog.get_logger()

MAX_CONNECTIONS = 8
"""Most connections at once: as many pulls, each with its ranges."""

READ_TIMEOUT_S = 5.0
"""Seconds after which a connection without an order is closed."""

REPORT_EVERY_S = 0.5
"""Seconds between two messages of progress."""

_UCRED = struct.Struct("3i")


class FetchService:
    """Carries out orders that come on connections."""

    def __init__(self, settings: Callable[[], FetchSettings]) -> None:
        """``settings`` is asked for every order: what the configuration names may have changed."""
        self._settings = settings
        self._pace = Pace(settings().max_rate)
        self._connections = 0

    async def listen(self, path: Path) -> asyncio.AbstractServer:
        """Listen on a socket that only its user and root may open.

        Raises:
            OSError: the path cannot be used.
        """
        with suppress(FileNotFoundError):
            os.unlink(path)
        before = os.umask(0o177)
        try:
            return await asyncio.start_unix_server(self._accept, path, limit=MAX_LINE_BYTES)
        finally:
            os.umask(before)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        user = peer_user(writer.get_extra_info("socket"))
        if user not in (0, os.geteuid()):
            log.warning("refused an order of another user", uid=user)
            writer.close()
        elif self._connections >= MAX_CONNECTIONS:
            _send(writer, {"event": "failed", "message": f"{MAX_CONNECTIONS} pulls are running; wait for one to end"})
            writer.close()
        else:
            await self.serve(reader, writer)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry out the order of one connection; its end ends the work."""
        self._connections += 1
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                line = await reader.readline()
            if not line:  # a command that looked whether there is a service
                return
            working = asyncio.create_task(self._answer(line, _Reporter(writer)))
            ended = asyncio.create_task(reader.read(1))
            await asyncio.wait((working, ended), return_when=asyncio.FIRST_COMPLETED)
            for task in (ended, working):
                task.cancel()
                with suppress(asyncio.CancelledError, OSError):
                    await task
            await writer.drain()
        except (TimeoutError, ValueError, OSError) as error:
            log.warning("an order did not come whole, or its answer was not read", problem=str(error))
        finally:
            self._connections -= 1
            writer.close()

    async def _answer(self, line: bytes, report: _Reporter) -> None:
        try:
            order = read_order(line)
            answer = await self._do(order, report.progress)
        except ApplianceError as error:
            log.warning("an order about models failed", problem=error.message)
            report.send({"event": "failed", "message": error.message})
        except OSError as error:
            log.warning("an order about models failed", problem=str(error))
            report.send({"event": "failed", "message": f"the cache of models fails: {error.strerror or error}"})
        else:
            report.send({"event": "done", **answer})

    async def _do(self, order: FetchOrder, report: Report) -> dict[str, Any]:
        settings = self._settings()
        cache = ModelCache(settings.directory)
        if order.pull is not None:
            check_order(order.pull)
            kept = frozenset(settings.kept)
            puller = Puller(cache, self._pace)
            pulled = await puller.pull(order.pull, settings.sources, settings.max_bytes, kept, report)
            log.info("pulled a model", **{name: value for name, value in asdict(pulled).items() if name != "folder"})
            return asdict(pulled)
        cache.prepare()
        if order.do == "remove":
            if order.model in settings.kept:
                raise ModelCacheError(f"{order.model[:16]} is named by athanor.yaml; take it out there first")
            await asyncio.to_thread(cache.remove, order.model)
        else:
            cache.note(order.model, lambda notes: replace(notes, pinned=order.do == "pin"))
        log.info("changed the cache of models", what=order.do, model=order.model)
        return {"model": order.model}


async def run_service(load: Callable[[], ApplianceConfig]) -> None:
    """Serve orders on the configuration's socket until SIGTERM. Without a cache in the configuration there is nothing
    to do, and the service ends at once, which is no failure.

    Args:
        load: gives the configuration, again and again: what it names may have changed.

    Raises:
        ModelCacheError: the cache or the socket cannot be used.
    """
    config = load()
    if config.model_cache is None:
        notify.ready("the configuration has no model_cache: nothing to do")
        return
    settings = settings_of(config)
    ModelCache(settings.directory).prepare()
    path = fetch_socket(config)
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    service = FetchService(lambda: settings_of(load()))
    try:
        server = await service.listen(path)
    except OSError as error:
        raise ModelCacheError(f"cannot listen on {path}: {reason_of(error)}") from error
    notify.ready(f"pulls into {settings.directory}")
    log.info("the downloader takes orders", socket=str(path), cache=str(settings.directory))
    interval = notify.watchdog_interval_s()
    while not stop.is_set():
        notify.watchdog()
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), interval)
    notify.stopping()
    server.close()
    with suppress(FileNotFoundError):
        os.unlink(path)


class _Reporter:
    """Sends progress now and then, and answers."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._sent_at, self._doing = 0.0, ""

    def progress(self, doing: str, done: int, total: int) -> None:
        """Send progress, unless the last of this kind is fresh, or is still unread."""
        now = asyncio.get_running_loop().time()
        fresh = now - self._sent_at < REPORT_EVERY_S and doing == self._doing
        if fresh or self._writer.transport.get_write_buffer_size() > MAX_LINE_BYTES:
            return
        self._sent_at, self._doing = now, doing
        self.send({"event": "progress", "doing": doing, "done": done, "total": total})

    def send(self, values: dict[str, Any]) -> None:
        """Send a message."""
        _send(self._writer, values)


def _send(writer: asyncio.StreamWriter, values: dict[str, Any]) -> None:
    writer.write(json.dumps(values).encode() + b"\n")


def peer_user(peer: socket.socket) -> int:
    """User id of the process at the other end, from the kernel."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return int(_UCRED.unpack(credentials)[1])
