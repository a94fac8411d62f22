"""Both front ends on one event loop: bind, serve, drain.

HTTP/1.1 is ``appliance.gateway.http.listener``, gRPC is ``grpc.aio``. A port of 0 binds a free one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from appliance.common import held_sockets
from appliance.common.certificate_dates import read_validity
from appliance.common.config import ListenConfig, TlsConfig, split_address
from appliance.common.errors import StartError
from appliance.gateway.front.auth import Resolver
from appliance.gateway.front.request_builder import MAX_BODY_BYTES
from appliance.gateway.generate_request import Service
from appliance.gateway.grpc.servicer import HEALTH, SERVICE, STALL_S, GrpcFrontEnd
from appliance.gateway.http.app import HttpFrontEnd
from appliance.gateway.http.listener import BACKLOG, HttpListener
from appliance.gateway.http.settings import HttpSettings

TICK_S = 1.0
"""Between two looks at readiness, and two values of the Date header."""

LINGER_S = 1.0
"""Seconds that open connections have, once no more are taken, to bring the request that they were opened for: some
round trips, and the pause of a client that asks again and again."""

CUT_S = 1.0
"""Seconds that a session cut by a drain has to tell its client."""

_GRPC_OPTIONS = (
    ("grpc.so_reuseport", 0),  # a second process on our port is a mistake or an attack, never a wish
    ("grpc.max_receive_message_length", MAX_BODY_BYTES + (64 << 10)),
    ("grpc.max_metadata_size", 16 << 10),
    ("grpc.absolute_max_metadata_size", 32 << 10),
    ("grpc.max_concurrent_streams", 256),
    ("grpc.server_handshake_timeout_ms", 10_000),
    # A certificate is looked at once, in the handshake: an hour bounds how long an expired one still serves.
    ("grpc.max_connection_age_ms", 3_600_000),
    ("grpc.max_connection_age_grace_ms", 3_600_000),
    ("grpc.max_connection_idle_ms", 600_000),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 2),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontEndSettings:
    """Where and how to listen."""

    http_host: str = "127.0.0.1"
    http_port: int = 8080
    grpc_host: str = "127.0.0.1"
    grpc_port: int = 8081
    http: HttpSettings = field(default_factory=HttpSettings)
    tls: TlsConfig | None = None
    """None: plain text, for loopback or behind a proxy that ends TLS."""
    max_rpcs: int = 1_024
    """Calls at once over all gRPC connections; one more ends with RESOURCE_EXHAUSTED."""
    grpc_stall_s: float = STALL_S
    listen: Callable[[str, int, Callable[[str, int], socket.socket]], socket.socket] = field(
        default=lambda host, port, make: make(host, port)
    )
    """Gives HTTP's listening socket: makes one by the third argument, or takes one that was kept, where connections
    then wait for ``FrontEnds.accept``."""

    @classmethod
    def of(cls, listen: ListenConfig) -> FrontEndSettings:
        """Return the settings for the configured addresses and certificates; HTTP's socket is kept over restarts."""
        http_host, http_port = split_address(listen.http)
        grpc_host, grpc_port = split_address(listen.grpc)
        kept = partial(held_sockets.listen, "http")
        return cls(
            http_host=http_host,
            http_port=http_port,
            grpc_host=grpc_host,
            grpc_port=grpc_port,
            tls=listen.tls,
            listen=kept,
        )


class FrontEnds:
    """The running pair. Made by ``serve_front_ends``."""

    def __init__(
        self, settings: FrontEndSettings, http: HttpFrontEnd, grpc_front: GrpcFrontEnd, ready: Callable[[], bool]
    ) -> None:
        self.http_port = 0
        self.grpc_port = 0
        self._settings = settings
        self._http = http
        self._grpc = grpc_front
        self._ready = ready
        self._listener: HttpListener | None = None
        self._rpcs: Any = None
        self._ticker: asyncio.Task[None] | None = None

    @property
    def addresses(self) -> dict[str, str]:
        """Addresses that clients call, by API."""
        settings = self._settings
        scheme = "http" if settings.tls is None else "https"
        return {
            "http": f"{scheme}://{_bracketed(settings.http_host)}:{self.http_port}",
            "grpc": f"{_bracketed(settings.grpc_host)}:{self.grpc_port}",
        }

    async def start(self) -> None:
        """Bind both ports and serve. At an HTTP socket that was kept, connections wait until ``accept``.

        Raises:
            StartError: a port cannot be bound or a TLS file not used.
        """
        # Before gRPC reads the same files: its words for a wrong one are few.
        context = None if self._settings.tls is None else _http_tls(self._settings.tls)
        # HTTP binds first: it can be unbound again without a trace.
        bound, kept = _bind(self._settings)
        try:
            await self._start_grpc()
            self._listener = HttpListener(self._settings.http, self._http.serve, context, bound)
            if not kept:
                self._listener.accept()
            self.http_port = bound.getsockname()[1]
        except BaseException:
            bound.close()
            if self._rpcs is not None:
                await self._rpcs.stop(None)
            raise
        await self.refresh()
        self._ticker = asyncio.ensure_future(self._tick())

    async def accept(self) -> None:
        """Take the connections that wait at a socket that was kept. Idempotent; after ``stop`` nothing happens."""
        if self._ticker is not None and self._listener is not None:
            self._listener.accept()

    async def stop(self, grace_s: float) -> None:
        """Take no connection any more, give what runs ``grace_s`` seconds, then end it with a retryable error.
        Idempotent.

        A connection that is open already is still answered: a request may be on its way. It ends behind that answer,
        or after ``LINGER_S`` without one.
        """
        if self._ticker is None or self._listener is None:
            return
        ticker, self._ticker = self._ticker, None
        ticker.cancel()
        self._http.begin_drain()
        self._grpc.begin_drain()
        await self._grpc.health.enter_graceful_shutdown()
        self._listener.end_accepting()
        rpcs_ended = asyncio.ensure_future(self._rpcs.stop(grace_s + CUT_S))
        lingered_s = await self._listener.linger(min(grace_s, LINGER_S))
        self._listener.end_idle()
        await self._settle(self._listener.tasks, grace_s - lingered_s)
        self._http.cut_all()
        self._grpc.cut_all()
        await self._settle(self._listener.tasks, CUT_S)
        self._listener.abort()
        await self._settle(self._listener.tasks, CUT_S)
        self._listener.cancel()
        await rpcs_ended

    async def _settle(self, tasks: set[asyncio.Task[None]], timeout_s: float) -> None:
        """Wait until nothing runs in either front end, at most so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while tasks:
                    await asyncio.wait(list(tasks))
                await self._grpc.idle()

    async def _start_grpc(self) -> None:
        settings = self._settings
        self._rpcs = grpc.aio.server(options=_GRPC_OPTIONS, maximum_concurrent_rpcs=settings.max_rpcs)
        self._rpcs.add_generic_rpc_handlers((self._grpc,))
        address = f"{_bracketed(settings.grpc_host)}:{settings.grpc_port}"
        try:
            if settings.tls is None:
                self.grpc_port = self._rpcs.add_insecure_port(address)
            else:
                self.grpc_port = self._rpcs.add_secure_port(address, _grpc_tls(settings.tls))
        except RuntimeError:
            raise StartError(
                f"gRPC cannot listen on {address}: the port is in use, or a TLS file is not PEM; `athanor doctor` says "
                f"which; `listen: grpc` in athanor.yaml, or --grpc-port of a demo, names another port"
            ) from None
        await self._rpcs.start()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            await self.refresh()

    async def refresh(self) -> None:
        """Look now whether requests would be served, and tell health checks; else done every ``TICK_S``."""
        if self._listener is not None:
            self._listener.refresh()
        kinds = health_pb2.HealthCheckResponse
        status = kinds.SERVING if self._ready() else kinds.NOT_SERVING
        for name in ("", SERVICE, HEALTH):
            await self._grpc.health.set(name, status)


@contextlib.asynccontextmanager
async def serve_front_ends(
    service: Service, resolver: Resolver, settings: FrontEndSettings, ready: Callable[[], bool] = lambda: True
) -> AsyncIterator[FrontEnds]:
    """Serve both front ends inside the block; leaving it stops them at once (call ``stop`` before to drain).

    ``ready`` says whether requests would be served now; it is asked often and must not raise.

    Raises:
        StartError: a port cannot be bound or a TLS file not used.
    """
    http = HttpFrontEnd(service, resolver, settings.http, ready)
    rpcs = GrpcFrontEnd(service, resolver, settings.grpc_stall_s, settings.http.padding)
    front_ends = FrontEnds(settings, http, rpcs, ready)
    await front_ends.start()
    try:
        yield front_ends
    finally:
        await front_ends.stop(0.0)


def _bind(settings: FrontEndSettings) -> tuple[socket.socket, bool]:
    """The listening socket, and whether it is one that was kept."""
    host, port = settings.http_host, settings.http_port
    made: list[socket.socket] = []

    def make(host: str, port: int) -> socket.socket:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        made.append(socket.create_server((host, port), family=family, backlog=BACKLOG))
        return made[0]

    try:
        bound = settings.listen(host, port, make)
    except OSError as error:
        raise StartError(
            f"HTTP cannot listen on {host}:{port}: {_why(error)}; "
            f"`athanor doctor` says who has it; `listen: http` in athanor.yaml, or --http-port of a demo, names another"
        ) from None
    # Accepted sockets inherit it: the kernel ends a connection whose peer takes nothing, dead or alive (RFC 5482).
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(settings.http.stall_s * 1_000))
    return bound, not made


def _bracketed(host: str) -> str:
    """Return the host as it stands before a port."""
    return f"[{host}]" if ":" in host else host


def _why(error: OSError) -> str:
    """The system's own words, without what asyncio and socket add to them."""
    return (os.strerror(error.errno) if error.errno else str(error)).lower()


def _http_tls(tls: TlsConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(tls.certificate, tls.key)
    except (OSError, ssl.SSLError):
        raise StartError(
            f"the certificate {tls.certificate} and the key {tls.key} cannot be used: one is missing or not PEM, or "
            f"they do not belong together; `athanor doctor` says which"
        ) from None
    return context


def _grpc_tls(tls: TlsConfig) -> Any:
    try:
        pair = (tls.key.read_bytes(), tls.certificate.read_bytes())
        client_ca = None if tls.client_ca is None else tls.client_ca.read_bytes()
    except OSError as error:
        raise StartError(f"cannot read {error.filename}: {(error.strerror or str(error)).lower()}") from None
    return grpc.ssl_server_credentials([pair], root_certificates=client_ca, require_client_auth=client_ca is not None)


def certificate_dates(tls: TlsConfig | None) -> tuple[float, float] | None:
    """Return the Unix times at which the certificate in use begins and ends to be valid; None where there is none, or
    it cannot be read: serving with it reports why."""
    try:
        return None if tls is None else read_validity(tls.certificate)
    except (OSError, ValueError):
        return None
