"""The admin listener: one small HTTP server on loopback or on a Unix socket, for the operator alone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import uvicorn

from appliance.common.config import split_address
from appliance.common.errors import StartError
from appliance.common.status import ReloadOutcome
from appliance.gateway.console.routes import console_routes
from appliance.gateway.telemetry.admin import AdminParts, admin_app
from appliance.gateway.telemetry.tracer import OtelTelemetry
from appliance.gateway.watch.gauges import Gauges
from appliance.gateway.watch.state import ApplianceState

MAX_CONNECTIONS = 64
"""Connections of dashboards, scrapers and commands; one more is refused."""

SOCKET_MODE = 0o660
"""The operator's group may use a Unix socket; the folder keeps everybody else out."""


@contextlib.asynccontextmanager
async def serve_admin(
    address: str,
    telemetry: OtelTelemetry,
    state: ApplianceState,
    gauges: Gauges,
    reload: Callable[[], Awaitable[ReloadOutcome]],
) -> AsyncIterator[str]:
    """Serve the admin routes while the block runs; gives the address as a URL, or ``unix:PATH``.

    Raises:
        StartError: the address cannot be bound.
    """
    sock, shown = _bind(address)
    parts = AdminParts(
        traces=telemetry.store,
        metrics=telemetry.metrics.render,
        refresh=gauges.refresh,
        status=state.status,
        ready=state.readiness,
        reload=reload,
    )
    console = console_routes(state.look, telemetry.store)
    server = _Quiet(
        uvicorn.Config(
            admin_app(parts, console),
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            date_header=False,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_keep_alive=5,
        )
    )
    task = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        yield shown
    finally:
        server.should_exit = True
        server.force_exit = True
        server.ended.set()
        await task
        sock.close()
        _unbind(shown)


def _unbind(shown: str) -> None:
    if shown.startswith("unix:"):
        Path(shown.removeprefix("unix:")).unlink(missing_ok=True)


class _Quiet(uvicorn.Server):
    """A server that leaves the process's signals alone and sleeps until it is ended, where uvicorn's own looks ten
    times a second (for that no Date header can be kept current, and none is sent)."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ended = asyncio.Event()

    async def main_loop(self) -> None:
        """Uvicorn's hook between startup and shutdown."""
        await self.ended.wait()

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]  # noqa: ANN202 - uvicorn's own signature
        yield


def _bind(address: str) -> tuple[socket.socket, str]:
    try:
        if address.startswith("unix:"):
            path = Path(address.removeprefix("unix:"))
            if path.is_socket():  # What a killed gateway left; anything else there is a mistake to be told.
                path.unlink(missing_ok=True)
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.bind(str(path))
            os.chmod(path, SOCKET_MODE)
            shown = address
        else:
            host, port = split_address(address)
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            sock = socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
            shown_host = f"[{host}]" if family is socket.AF_INET6 else host
            shown = f"http://{shown_host}:{sock.getsockname()[1]}"
    except OSError as error:
        why = (os.strerror(error.errno) if error.errno else str(error)).lower()
        raise StartError(
            f"cannot listen for admin on {address}: {why}; `athanor doctor` says who has it; `listen: admin` in "
            f"athanor.yaml, or --admin-port of a demo, names another"
        ) from error
    sock.setblocking(False)
    return sock, shown
