"""Both front ends on one event loop, with their listeners of all tenants and of single ones: bind, serve, drain.

Both accept by ``appliance.gateway.front.listener``; a connection is then HTTP/1.1's or gRPC's own. A port of 0 binds a
free one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from functools import partial

import structlog
from grpc_health.v1 import health_pb2

from appliance.common.addresses import split_address
from appliance.common.aligned_sleep import aligned_sleep
from appliance.common.errors import StartError
from appliance.common.held_sockets import HeldSockets
from appliance.common.listen_config import ListenConfig, TlsConfig
from appliance.gateway.front.affinity import open_affinity
from appliance.gateway.front.allowance import StrangersAllowances
from appliance.gateway.front.auth import Resolver
from appliance.gateway.front.client_address import TrustedProxies
from appliance.gateway.front.connections import Places, Slot
from appliance.gateway.front.handshakes import Handshakes
from appliance.gateway.front.listener import BACKLOG, Listener, Opened
from appliance.gateway.front.own_listeners import (
    OF_ALL,
    OWN_CONNECTIONS,
    OWN_STRANGERS,
    Entrance,
    OwnAddress,
    Stalls,
    bind_own,
    own_addresses,
    shown,
)
from appliance.gateway.front.request_builder import MAX_BODY_BYTES
from appliance.gateway.front.starts import Starts
from appliance.gateway.front.stranger_time import StrangerTime
from appliance.gateway.front.tls_files import CertificateDates, TlsContexts, TlsFiles
from appliance.gateway.grpc import connection as grpc_connection
from appliance.gateway.grpc.servicer import HEALTH, MAX_CALLS, SERVICES, STALL_S, GrpcFrontEnd
from appliance.gateway.http import protocol as http_protocol
from appliance.gateway.http.app import HttpFrontEnd
from appliance.gateway.http.cross_origin import CrossOrigin
from appliance.gateway.http.event_window import BackgroundRuns
from appliance.gateway.http.settings import HttpSettings
from appliance.gateway.service import Service
from appliance.gateway.stored_work import StoredWork

TICK_S = 1.0
"""Between two looks at readiness, and two values of the Date header."""

LINGER_S = 1.0
"""Seconds that open connections have, once no more are taken, to bring the request that they were opened for: some
round trips, and the pause of a client that asks again and again."""

RESERVED_DESCRIPTORS = 256
"""Open files kept for what is no client's connection: rings and doorbells of 32 sandboxes, the control socket, the
admin port, exporters, files. Without one, the hand-over of a restarted sandbox would have to
wait (``spare_descriptors`` holds some for that)."""

MESSAGE_FIELDS_BYTES = 64 << 10
"""Bytes of a gRPC message beside the longest prompt."""

CUT_S = 1.0
"""Seconds that a session cut by a drain has to tell its client."""


log = structlog.get_logger()


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
    certificate: CertificateDates = field(default_factory=lambda: CertificateDates(None))
    """Is told the dates of the certificate in use."""
    proxies: TrustedProxies = field(default_factory=TrustedProxies)
    """Peers whose word about their clients counts."""
    max_rpcs: int = MAX_CALLS
    grpc_stall_s: float = STALL_S
    own: tuple[OwnAddress, ...] = ()
    """Addresses of single tenants."""
    listen: Callable[[str, str, Callable[[], socket.socket]], socket.socket] = field(
        default=lambda _name, _address, make: make()
    )
    """Gives a listening socket of HTTP by name and address: makes one by the third argument, or takes one that was
    kept, where connections then wait for ``FrontEnds.accept``."""
    leaving: Callable[[], bool] = lambda: False
    """Whether connections shall end with their next answers because a drain has begun."""
    settle: Callable[[], None] = lambda: None
    """Called once all sockets are bound."""

    @classmethod
    def of(
        cls, listen: ListenConfig, certificate: CertificateDates, leaving: Callable[[], bool] = lambda: False
    ) -> FrontEndSettings:
        """Return the settings for the configured addresses and certificates; HTTP's socket is kept over restarts."""
        http_host, http_port = split_address(listen.http)
        grpc_host, grpc_port = split_address(listen.grpc)
        kept = HeldSockets()
        return cls(
            http_host=http_host,
            http_port=http_port,
            grpc_host=grpc_host,
            grpc_port=grpc_port,
            tls=listen.tls,
            certificate=certificate,
            proxies=TrustedProxies.of(listen.trusted_proxies, listen.client_address),
            own=own_addresses(listen),
            listen=kept.listen,
            settle=kept.settle,
            leaving=leaving,
            http=HttpSettings(
                cross_origin=CrossOrigin(frozenset(listen.cors_origins)), affinity=open_affinity(listen.fleet_key)
            ),
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
        wanted = settings.http.max_connections
        total, own = _affordable(wanted, len(settings.own))
        each = max(1, settings.http.max_connections_each * total // wanted)  # the same part of fewer
        strangers = min(settings.http.max_strangers, max(1, total // 2))
        self.handshakes = Handshakes(time.monotonic)
        """The turns of TLS handshakes, of all listeners together."""
        self.places = {
            **{(name, ""): Places(each, total, strangers, self.handshakes.credential) for name in ("http", "grpc")},
            **{
                one.key: Places(own, own, max(1, own * OWN_STRANGERS // OWN_CONNECTIONS), self.handshakes.credential)
                for one in settings.own
            },
        }
        """The connections of each listener, by front end and the one tenant that it takes, empty where it takes all."""
        self.starts = Starts(time.monotonic)
        """The turns of requests, of all listeners together."""
        self.stranger_time = StrangerTime(self.starts.strangers)
        """The turns in which strangers' gRPC connections are read."""
        shared = (self.handshakes, self.starts, self.stranger_time)
        self._opened = {key: Opened(places, *shared) for key, places in self.places.items()}
        self._http_shared = [self._share_http(("http", ""), OF_ALL)]
        self._tls_files: TlsFiles | None = None
        self._tls: TlsContexts | None = None
        self._listeners: dict[tuple[str, str], Listener] = {}
        """By front end and tenant, in the order of ``places``."""
        self._waiting: list[Listener] = []
        """Those at sockets that were kept, where connections wait for ``accept``."""
        self.own: dict[str, str] = {}
        """Addresses of single tenants' listeners, by ``FRONT_END-TENANT``."""
        self._ticker: asyncio.Task[None] | None = None

    @property
    def background(self) -> BackgroundRuns:
        """Responses that go on without their client."""
        return self._http.background.runs

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
        settings = self._settings
        if settings.tls is not None:
            self._tls_files = TlsFiles(settings.tls, self._settings.certificate.read)
            self._tls = self._tls_files.load()
        bound, kept = _bind_http(settings)
        sockets = [bound]
        try:
            sockets.append(_bind_grpc(settings))
            self.http_port, self.grpc_port = (one.getsockname()[1] for one in sockets)
            self._listen(("http", ""), self._make_http(self._http_shared[0]), bound)
            self._listen(("grpc", ""), self._make_grpc(self._share_grpc(("grpc", ""), OF_ALL)), sockets[1])
            self._waiting = [self._listeners["http", ""]] if kept else []
            for one in settings.own:
                sockets.append(self._start_own(one))
        except BaseException:
            for one_bound in sockets:
                one_bound.close()
            raise
        settings.settle()
        self.refresh()
        for listener in self._listeners.values():
            if listener not in self._waiting:
                listener.accept()
        self._ticker = asyncio.ensure_future(self._tick())

    def _start_own(self, one: OwnAddress) -> socket.socket:
        """Bind an address of a tenant's own. gRPC's clients connect anew by themselves: its sockets are not kept."""
        settings, http, made = self._settings, one.front_end == "http", False

        def listen(name: str, address: str, make: Callable[[], socket.socket]) -> socket.socket:
            def noted() -> socket.socket:
                nonlocal made
                made = True
                return make()

            return settings.listen(name, address, noted) if http else noted()

        bound = bind_own(one, BACKLOG, listen)
        if http:
            self._http_shared.append(self._share_http(one.key, one.entrance))
            self._listen(one.key, self._make_http(self._http_shared[-1]), bound, local=one.entrance.local)
        else:
            make_grpc = self._make_grpc(self._share_grpc(one.key, one.entrance))
            self._listen(one.key, make_grpc, bound, local=one.entrance.local)
        if not made:
            self._waiting.append(self._listeners[one.key])
        if not one.entrance.local:
            _bound_stall(bound, settings.http.stall_s if http else settings.grpc_stall_s)
        self.own[one.name] = shown(one, bound, "http://" if settings.tls is None else "https://")
        return bound

    def _listen(
        self,
        key: tuple[str, str],
        make: Callable[[Slot], asyncio.Protocol],
        bound: socket.socket,
        *,
        local: bool = False,
    ) -> None:
        settings = self._settings
        within_s, proxies = settings.http.head_timeout_s, settings.proxies
        stalls = Stalls(settings.grpc_stall_s if key[0] == "grpc" else settings.http.stall_s) if local else None
        tls = None if local else self._context(key[0])
        self._listeners[key] = Listener(self._opened[key], make, tls, bound, within_s, proxies, stalls)

    def _context(self, front_end: str) -> ssl.SSLContext | None:
        if self._tls is None:
            return None
        return self._tls.http if front_end == "http" else self._tls.grpc

    def _share_http(self, key: tuple[str, str], entrance: Entrance) -> http_protocol.Shared:
        serve = partial(self._http.serve, entrance=entrance)
        return http_protocol.Shared(self._settings.http, self._opened[key], serve)

    def _share_grpc(self, key: tuple[str, str], entrance: Entrance) -> grpc_connection.GrpcShared:
        return grpc_connection.GrpcShared(
            opened=self._opened[key],
            serve=partial(self._grpc.serve, entrance=entrance),
            strangers=StrangersAllowances(grpc_connection.STRANGER, time.monotonic),
            most=MAX_BODY_BYTES + MESSAGE_FIELDS_BYTES,
            stall_s=self._settings.grpc_stall_s,
        )

    def _make_http(self, shared: http_protocol.Shared) -> Callable[[Slot], asyncio.Protocol]:
        return partial(http_protocol.HttpConnection, shared)

    def _make_grpc(self, shared: grpc_connection.GrpcShared) -> Callable[[Slot], asyncio.Protocol]:
        return partial(grpc_connection.GrpcConnection, shared)

    async def accept(self) -> None:
        """Take the connections that wait at sockets that were kept. Idempotent; after ``stop`` nothing happens."""
        if self._ticker is not None:
            for listener in self._waiting:
                listener.accept()

    async def stop(self, grace_s: float) -> None:
        """Take no connection any more, give what runs ``grace_s`` seconds, then end it with a retryable error.
        Idempotent.

        A connection that is open already is still answered: a request may be on its way. It ends behind that answer,
        or after ``LINGER_S`` without one.
        """
        if self._ticker is None:
            return
        ticker, self._ticker = self._ticker, None
        ticker.cancel()
        self._http.begin_drain()
        self._grpc.begin_drain()
        self._grpc.health.end()
        listeners = list(self._listeners.values())
        for listener in listeners:
            listener.end_accepting()
        lingered_s = max(await asyncio.gather(*(one.linger(min(grace_s, LINGER_S)) for one in listeners)))
        for listener in listeners:
            listener.end_idle()
        await self._settle(grace_s - lingered_s)
        self._http.cut_all()
        self._grpc.cut_all()
        await self._settle(CUT_S)
        for listener in listeners:
            listener.abort()
        await self._settle(CUT_S)
        for listener in listeners:
            listener.cancel()

    async def _settle(self, timeout_s: float) -> None:
        """Wait until nothing runs in either front end, nor for a client that may come back, at most so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while running := {task for listener in self._listeners.values() for task in listener.tasks} | (
                    self._http.background.tasks
                ):
                    await asyncio.wait(running)

    async def _tick(self) -> None:
        while True:
            await aligned_sleep(TICK_S)
            self.refresh()
            await self._renew()

    async def _renew(self) -> None:
        """Use TLS files that have changed. Connections that were opened under other authorities of clients take no more
        requests."""
        found = None if self._tls_files is None else await self._tls_files.renewed()
        if found is None:
            return
        before, self._tls = self._tls, found
        for (front_end, _), listener in self._listeners.items():
            listener.secure(found.http if front_end == "http" else found.grpc)
            if before is not None and before.authorities != found.authorities:
                listener.end_idle()

    def refresh(self) -> None:
        """Look now whether requests would be served, and tell health checks; else done every ``TICK_S``."""
        for shared in self._http_shared:
            shared.refresh()
        for listener in self._listeners.values():
            listener.look()
            listener.announce(ending=self._settings.leaving())
        kinds = health_pb2.HealthCheckResponse
        status = kinds.SERVING if self._ready() else kinds.NOT_SERVING
        for name in ("", *SERVICES, HEALTH):
            self._grpc.health.set(name, status)


@contextlib.asynccontextmanager
async def serve_front_ends(
    service: Service,
    resolver: Resolver,
    settings: FrontEndSettings,
    ready: Callable[[], bool] = lambda: True,
    stored: StoredWork | None = None,
) -> AsyncIterator[FrontEnds]:
    """Serve both front ends inside the block; leaving it stops them at once (call ``stop`` before to drain).

    ``ready`` says whether requests would be served now; it is asked often and must not raise. ``stored`` keeps files
    and batches, if anything does.

    Raises:
        StartError: a port cannot be bound or a TLS file not used.
    """
    demands = settings.tls is not None and settings.tls.http_clients == "required"
    of_http = replace(settings.http, demands_certificate=demands)
    http = HttpFrontEnd(service, resolver, of_http, ready, settings.proxies, stored)
    shared = settings.http.padding, settings.max_rpcs, settings.proxies, settings.http.affinity
    rpcs = GrpcFrontEnd(service, resolver, *shared, stored)
    front_ends = FrontEnds(settings, http, rpcs, ready)
    await front_ends.start()
    try:
        yield front_ends
    finally:
        await front_ends.stop(0.0)


def _affordable(wanted: int, own: int) -> tuple[int, int]:
    """Return how many connections each of the two listeners of all tenants, and each of ``own`` listeners of single
    ones, may hold by the process's limit of open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted, OWN_CONNECTIONS
    left = max(16 + 8 * own, soft - RESERVED_DESCRIPTORS)
    each_own = min(OWN_CONNECTIONS, max(8, left // (2 * own))) if own else OWN_CONNECTIONS
    affordable = min(wanted, (left - each_own * own) // 2)
    if affordable < wanted or each_own < OWN_CONNECTIONS:
        log.warning("few open files allowed: fewer connections at once", limit=soft, connections=affordable)
    return affordable, each_own


def _bind_grpc(settings: FrontEndSettings) -> socket.socket:
    host, port = settings.grpc_host, settings.grpc_port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        bound = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise StartError(
            f"gRPC cannot listen on {_bracketed(host)}:{port}: {_why(error)}; `athanor doctor` says who has it; "
            f"`listen: grpc` in athanor.yaml, or --grpc-port of a demo, names another port"
        ) from None
    _bound_stall(bound, settings.grpc_stall_s)
    return bound


def _bound_stall(bound: socket.socket, stall_s: float) -> None:
    """Let the kernel end each connection whose peer takes nothing, dead or alive (RFC 5482); accepted sockets inherit
    it."""
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall_s * 1_000))


def _bind_http(settings: FrontEndSettings) -> tuple[socket.socket, bool]:
    """The listening socket, and whether it is one that was kept."""
    host, port = settings.http_host, settings.http_port
    made: list[socket.socket] = []

    def make() -> socket.socket:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        made.append(socket.create_server((host, port), family=family, backlog=BACKLOG))
        return made[0]

    try:
        bound = settings.listen("http", f"{_bracketed(host)}:{port}", make)
    except OSError as error:
        raise StartError(
            f"HTTP cannot listen on {host}:{port}: {_why(error)}; "
            f"`athanor doctor` says who has it; `listen: http` in athanor.yaml, or --http-port of a demo, names another"
        ) from None
    _bound_stall(bound, settings.http.stall_s)
    return bound, not made


def _bracketed(host: str) -> str:
    """Return the host as it stands before a port."""
    return f"[{host}]" if ":" in host else host


def _why(error: OSError) -> str:
    """The system's own words, without what asyncio and socket add to them."""
    return (os.strerror(error.errno) if error.errno else str(error)).lower()
