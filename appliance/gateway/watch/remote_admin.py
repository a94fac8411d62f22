"""The routes of the admin listener over TLS, for operators on other machines: each route needs a role.

Who calls is proved before anything else is looked at; a route that the table of roles does not have is done for nobody.
What changes something is in the audit log before it begins and when it has ended, with who asked for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.server import ServerState

from appliance.common.audit.entry import MAX_TEXT
from appliance.common.errors import (
    ApplianceError,
    OriginNotAllowedError,
    RateLimitedError,
    UnauthenticatedError,
    UnavailableError,
)
from appliance.common.ids import new_request_id
from appliance.common.kept_tasks import kept
from appliance.common.operator_calls import MAX_MILLISECONDS, OperatorCall
from appliance.common.operator_config import RemoteOperatorsConfig
from appliance.common.operator_roles import LOCAL_ONLY, NEEDED, OperatorRole, require
from appliance.common.refused_credentials import CredentialRefusal
from appliance.gateway.console.headers import ROLES, foreign
from appliance.gateway.front.allowance import Allowance, Rate
from appliance.gateway.front.connections import Slot
from appliance.gateway.front.listener import Opened
from appliance.gateway.front.operator_access import SECTION, OperatorResolver, RemoteOperator
from appliance.gateway.front.operator_door import OperatorDoor, bind_port
from appliance.gateway.front.operator_rate import OperatorRates
from appliance.gateway.front.tls_files import peer_names
from appliance.gateway.front.tokens import TokenVerifier
from appliance.gateway.request.audit_feed import AuditFeed
from appliance.gateway.telemetry import names
from appliance.gateway.telemetry.tracer import OtelTelemetry
from appliance.gateway.watch.operator_server import BoundedConnection, ServerLimits, server_config

LIMITS = ServerLimits(connections=64)
"""As those of the admin listener: an answer has no deadline, since a reload waits for its outcome."""

AGE_S = 3_600.0
"""Age at which a connection takes no more requests: a certificate is looked at in the handshake alone."""

NOBODY = 65_534
"""User id of callers on other machines, as in calls of the operator's API."""

REFUSED = Rate(burst=20, per_s=1)
"""Requests of operators without the role that are audited one by one; those beyond are counted. Operators with some
role have a rate of their own: no stranger's flood hides what one of them tries."""

RETRY_S = 1.0
"""When a caller may try again that was refused for the number of requests."""

BEGUN = "BEGUN"
"""Outcome of a request that is about to change something."""

_OUTCOMES = {400: "INVALID_ARGUMENT", 403: "PERMISSION_DENIED", 404: "NOT_FOUND", 409: "FAILED_PRECONDITION"}
"""Status of an answer to the word that the audit log and the metrics have for it; below 400 it is OK."""

log = structlog.get_logger()


NOT_PROVED = RemoteOperator("", frozenset())
"""Who calls, until that is proved."""


@dataclass(frozen=True, slots=True)
class Observers:
    """What is told of requests."""

    audit: AuditFeed
    telemetry: OtelTelemetry
    failed: Callable[[str], None] = lambda _why: None
    """Told why the listener serves no more, in one line."""


class RolesOnly:
    """ASGI application that does for each caller what its roles allow, and nothing else."""

    def __init__(self, routes: Sequence[Route], resolver: OperatorResolver, observers: Observers) -> None:
        """``routes``: those of the admin listener.

        Raises:
            KeyError: the table of roles lacks one of the routes.
        """
        self._routes: dict[str, Route] = {}
        for route in routes:
            for method in sorted(route.methods or ()):
                name = f"{method} {route.path}"
                if method != "HEAD" and name not in LOCAL_ONLY:
                    NEEDED[name]  # default deny: a route without a role is an error of the start
                    self._routes[name] = route
        self._app = Starlette(routes=list(self._routes.values()))
        self._resolver = resolver
        self._observers = observers
        self._rates = OperatorRates()
        self._refused = {known: Allowance(REFUSED, time.monotonic()) for known in (False, True)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        asked = _Asked(*self._find(scope), new_request_id(), time.monotonic())
        try:
            asked = replace(asked, caller=self._proved(scope))
            self._rates.spend(asked.caller.who, changes=asked.changes)
            self._check(asked, scope)
        except ApplianceError as error:
            self._refuse(asked, error)
            await _answer(error, asked)(scope, receive, send)
            return
        await self._serve(asked, scope, receive, send)

    def _find(self, scope: Scope) -> tuple[str, str]:
        """Name of the route that a request is for, ``*`` for none, and what it is about."""
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        for name, route in self._routes.items():
            match, found = route.matches(scope)
            if match is Match.FULL and name.startswith(f"{method} "):
                subject = "/".join(str(one) for one in found.get("path_params", {}).values())
                return name, subject[:MAX_TEXT]
        return "*", ""

    def _proved(self, scope: Scope) -> RemoteOperator:
        authorization = [value.decode("latin-1") for name, value in scope["headers"] if name == b"authorization"]
        peer: _Peer = scope["state"]["peer"]
        found = self._resolver.resolve(authorization, peer.names)
        if found.roles and not peer.slot.claim(found.who):
            raise RateLimitedError("this operator has too many connections at once", retry_after_s=RETRY_S)
        return found

    def _check(self, asked: _Asked, scope: Scope) -> None:
        caller = asked.caller
        require(caller.roles, NEEDED.get(asked.route, OperatorRole.VIEWER), asked.route, SECTION)
        if foreign(Request(scope)):
            raise OriginNotAllowedError("operators' requests are not taken from pages of other origins")
        audit = self._observers.audit
        if asked.changes and audit.problem:
            raise UnavailableError(f"the audit log takes no entry, so nothing was changed: {audit.problem}")

    def _refuse(self, asked: _Asked, error: ApplianceError) -> None:
        """Tell of a request that is refused; a flood of them is counted, not listed."""
        outcome = error.wire.grpc
        if isinstance(error, UnauthenticatedError):
            self._observers.audit.count("refused", outcome=outcome, reason=error.refusal)
            self._observers.telemetry.count(names.REFUSED_CREDENTIALS, reason=error.refusal)
        elif asked.caller.roles and isinstance(error, RateLimitedError):
            pass  # metrics and log have it
        elif self._refused[bool(asked.caller.roles)].spend(1, time.monotonic()):
            self._audit(asked, outcome)
        else:
            self._observers.audit.count("refused", outcome=outcome, reason=CredentialRefusal.SCOPE)
        self._count(asked, outcome)

    async def _serve(self, asked: _Asked, scope: Scope, receive: Receive, send: Send) -> None:
        status = 500

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], (b"x-request-id", asked.request.encode())]}
            await send(message)

        if asked.changes:
            self._audit(asked, BEGUN)
        scope["state"]["asked_by"] = f"operator {asked.caller.who}"
        scope["state"][ROLES] = lambda: asked.caller.roles
        try:
            await self._app(scope, receive, noted)
        finally:
            outcome = "OK" if status < 400 else _OUTCOMES.get(status, "INTERNAL")
            if asked.changes:
                self._audit(asked, outcome)
            self._count(asked, outcome)

    def _audit(self, asked: _Asked, outcome: str) -> None:
        caller = asked.caller
        self._observers.audit.add(
            "admin",
            route=asked.route,
            subject=asked.subject,
            caller=caller.who,
            roles=caller.shown_roles,
            request=asked.request,
            outcome=outcome,
        )

    def _count(self, asked: _Asked, outcome: str) -> None:
        """Count a request; one that changes something has a span."""
        telemetry = self._observers.telemetry
        if not asked.changes:
            telemetry.count(names.OPERATOR_CALLS, method=asked.route, outcome=outcome)
            return
        took = min(round((time.monotonic() - asked.began) * 1_000), MAX_MILLISECONDS)
        call = OperatorCall(
            method=asked.route,
            user=NOBODY,
            roles=asked.caller.shown_roles,
            subject=asked.subject,
            request=asked.request,
            outcome=outcome,
            milliseconds=took,
        )
        telemetry.operator_call(call)


@dataclass(frozen=True, slots=True)
class _Asked:
    """One request."""

    route: str
    subject: str
    request: str
    began: float
    caller: RemoteOperator = NOT_PROVED

    @property
    def changes(self) -> bool:
        """Whether the route changes something."""
        return self.route.startswith("POST ")


@dataclass(frozen=True, slots=True)
class _Peer:
    """The other end of a connection."""

    names: tuple[tuple[str, str], ...] | None
    """Those of its verified certificate; None where it has shown none."""
    slot: Slot


def _answer(error: ApplianceError, asked: _Asked) -> JSONResponse:
    wire = error.wire
    body: dict[str, Any] = {"message": error.message, "type": wire.kind, "code": wire.code, **error.details}
    headers = {"x-request-id": asked.request}
    if not asked.caller.roles:
        # The next attempt costs a handshake, and these have a rate: all of this is done in the tenants' event loop.
        headers["connection"] = "close"
    if wire.http == 401:
        headers["www-authenticate"] = "Bearer"
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    return JSONResponse({"error": body}, status_code=wire.http, headers=headers)


class _Connection(BoundedConnection):
    """One connection of an operator: a ``Connection`` of its listener."""

    def __init__(self, opened: Opened, slot: Slot, config: uvicorn.Config, state: ServerState) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(LIMITS, config=config, server_state=state, app_state={}, _loop=loop)
        self._opened, self._slot = opened, slot
        self._born = loop.time()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        """Note whose certificate was verified."""
        super().connection_made(transport)
        self.app_state = {"peer": _Peer(peer_names(transport), self._slot)}
        self._slot.on_evicted = transport.abort
        self._opened.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Give back the place in the counts."""
        self._opened.connections.discard(self)
        self._slot.release()
        super().connection_lost(exc)

    def end_after_answer(self) -> None:
        """Let the answer that runs be the last one; without one, close."""
        if not self.transport.is_closing():
            self.shutdown()

    def end_if_idle(self) -> None:
        """Close the connection, behind the answer that runs if one does."""
        self.end_after_answer()

    def abort(self) -> None:
        """Close the connection at once."""
        self.transport.abort()

    def look(self, now: float) -> None:
        """End a connection that is too old."""
        if now - self._born > AGE_S:
            self.end_after_answer()


@contextlib.asynccontextmanager
async def serving_remote_admin(
    routes: Sequence[Route], section: Callable[[], RemoteOperatorsConfig | None], observers: Observers
) -> AsyncIterator[dict[str, str]]:
    """Serve the admin routes over TLS while the block runs, where the configuration has an address for it; gives it
    under ``remote_admin``, or nothing.

    Args:
        routes: those of the admin listener.
        section: gives the section of the configuration in force: addresses count at the start, roles at each request.
        observers: audit log and metrics.

    Raises:
        StartError: the address cannot be bound, or a certificate not be used.
    """
    config = section()
    if config is None or config.admin is None:
        yield {}
        return
    tokens = TokenVerifier(config.tokens)
    app: ASGIApp = RolesOnly(routes, OperatorResolver(tokens, section), observers)
    server, state = server_config(app, http="h11"), ServerState()
    server.load()
    bound = bind_port(config.admin, f"{SECTION}.admin")

    def make(opened: Opened, slot: Slot) -> _Connection:
        return _Connection(opened, slot, server, state)

    try:
        door = OperatorDoor(bound, config.tls.files, lambda contexts: contexts.http, make)
    except BaseException:
        bound.close()
        raise
    host, port = bound.getsockname()[:2]
    works = {"listener of operators elsewhere": door.run(), "keys of their token issuers": tokens.run()}
    try:
        with kept(works, observers.failed):
            yield {"remote_admin": f"https://{f'[{host}]' if ':' in host else host}:{port}"}
    finally:
        for work in state.tasks:
            work.cancel()
        door.close()
