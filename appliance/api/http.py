"""The HTTP front end: one router table, default deny, one boundary for errors.

Authentication comes before routing: without a credential a stranger learns nothing but the two health routes, not even
which paths exist. Then come the host's name, the route, the method, and only then the body.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.routing import Match
from starlette.routing import Route as StarletteRoute

from appliance.api import http_headers
from appliance.api.auth import Auth, Resolver
from appliance.api.defect import log_defect
from appliance.api.http_body import ClientGoneError, Receive
from appliance.api.http_exchange import Exchange, Send
from appliance.api.http_generate import Generation
from appliance.api.http_protocol import connection_of
from appliance.api.http_settings import HttpSettings
from appliance.api.openai_objects import model_list, model_object
from appliance.errors import (
    ApplianceError,
    InternalError,
    InvalidRequestError,
    MethodNotAllowedError,
    ModelNotFoundError,
    RateLimitedError,
    RouteNotFoundError,
    UnavailableError,
)
from appliance.ids import new_request_id
from appliance.request import CallContext, Operation, Principal, Service

DRAIN_RETRY_S = 2.0
"""When a client turned away by a drain is told to come back: another instance, or this one restarted."""

CONNECTIONS_RETRY_S = 1.0
"""When a tenant with too many connections may try again: idle ones are closed by clients within seconds."""


Handler = Callable[["HttpFrontEnd", Exchange, Mapping[str, Any]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Route:
    """One row of the router table."""

    method: str
    path: str
    auth: Auth
    handler: Handler


class HttpFrontEnd:
    """The ASGI application."""

    def __init__(self, service: Service, resolver: Resolver, settings: HttpSettings, ready: Callable[[], bool]) -> None:
        self._service = service
        self._resolver = resolver
        self._settings = settings
        self._ready = ready
        self._draining = self._over = False
        self._generation = Generation(service, settings)
        self._table = [
            (route, StarletteRoute(route.path, endpoint=_unused, methods=[route.method])) for route in ROUTES
        ]

    def begin_drain(self) -> None:
        """Say that it is not ready, and keep nobody waiting for the sake of padding; what comes is still answered."""
        self._draining = True
        self._generation.hurry()

    def cut_all(self) -> None:
        """End those that still run with a retryable error, and take none any more."""
        self._over = True
        self._generation.cut_all(_shutting_down())

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """ASGI's entry: one exchange, start to end; never raises an Exception."""
        if scope["type"] != "http":
            return
        exchange = Exchange(scope, receive, send)
        try:
            await self._serve(exchange)
        except ClientGoneError:
            return
        except ApplianceError as error:
            request_id = exchange.request_id or self._record(exchange, error)
            await self._fail(exchange, error, request_id)
        except Exception as error:  # noqa: BLE001 - the HTTP boundary: a defect shows its request id, nothing else
            request_id = exchange.request_id or self._record(exchange, error)
            log_defect(error, request_id)
            shown = InternalError(f"internal error; the operator finds it under request id {request_id}")
            await self._fail(exchange, shown, request_id)
        finally:
            exchange.close()

    async def _serve(self, exchange: Exchange) -> None:
        route, parameters, allowed = self._match(exchange.scope)
        exchange.context = _context(exchange, route)
        self._check_host(exchange)
        if route is None or route.auth is not Auth.PUBLIC:
            exchange.principal = self._resolver.resolve(exchange.headers.getlist("authorization"))
            if self._service.pads(exchange.principal):
                exchange.padding = self._settings.padding
            _claim(exchange, exchange.principal.tenant)
        if route is not None:
            await route.handler(self, exchange, parameters)
        elif allowed:
            raise MethodNotAllowedError(
                f"this route takes {', '.join(allowed)} only", details={"allow": ", ".join(allowed)}
            )
        else:
            raise RouteNotFoundError("no such route; see the documentation for the paths served")

    def _match(self, scope: Mapping[str, Any]) -> tuple[Route | None, Mapping[str, Any], list[str]]:
        """The route for the request, its path parameters, and the methods of routes that match the path alone."""
        allowed: list[str] = []
        for route, pattern in self._table:
            match, found = pattern.matches(dict(scope))
            if match is Match.FULL:
                return route, found["path_params"], []
            if match is Match.PARTIAL:
                allowed.append(route.method)
        return None, {}, allowed

    def _check_host(self, exchange: Exchange) -> None:
        hosts = exchange.headers.getlist("host")
        if self._settings.allowed_hosts and not (len(hosts) == 1 and hosts[0].lower() in self._settings.allowed_hosts):
            raise InvalidRequestError("the Host header names a host that is not served here", param="host")

    def _record(self, exchange: Exchange, error: Exception) -> str:
        return self._service.record_refusal(exchange.context, error, exchange.tenant)

    async def _fail(self, exchange: Exchange, error: ApplianceError, request_id: str) -> None:
        rates: http_headers.Headers = []
        if exchange.principal is not None and isinstance(error, RateLimitedError):
            rates = http_headers.rates(self._service.rates(exchange.principal))
        with suppress(ClientGoneError):
            await exchange.fail(error, request_id, rates)

    async def chat(self, exchange: Exchange, _parameters: Mapping[str, Any]) -> None:
        """``POST /v1/chat/completions``."""
        await self._generate(exchange, Operation.CHAT)

    async def complete(self, exchange: Exchange, _parameters: Mapping[str, Any]) -> None:
        """``POST /v1/completions``."""
        await self._generate(exchange, Operation.TEXT_COMPLETION)

    async def embed(self, exchange: Exchange, _parameters: Mapping[str, Any]) -> None:
        """``POST /v1/embeddings``."""
        if self._over:
            raise _shutting_down()
        await self._generation.embed(exchange, _principal(exchange))

    async def models(self, exchange: Exchange, _parameters: Mapping[str, Any]) -> None:
        """``GET /v1/models``."""
        cards = self._service.models(_principal(exchange))
        await exchange.answer(200, model_list(cards), new_request_id())

    async def model(self, exchange: Exchange, parameters: Mapping[str, Any]) -> None:
        """``GET /v1/models/{id}``; the id may hold slashes."""
        for card in self._service.models(_principal(exchange)):
            if card.name == parameters["model"]:
                await exchange.answer(200, model_object(card), new_request_id())
                return
        raise ModelNotFoundError("no such model, or none that you may use", param="model")

    async def live(self, exchange: Exchange, _parameters: Mapping[str, Any]) -> None:
        """``GET /health/live``: this process answers."""
        await exchange.answer(200, {"status": "live"}, new_request_id())

    async def ready(self, exchange: Exchange, _parameters: Mapping[str, Any]) -> None:
        """``GET /health/ready``: requests will be served; 503 while they would not."""
        ready = self._ready() and not self._draining
        await exchange.answer(200 if ready else 503, {"status": "ready" if ready else "not ready"}, new_request_id())

    async def _generate(self, exchange: Exchange, operation: Operation) -> None:
        if self._over:
            raise _shutting_down()
        await self._generation.serve(exchange, _principal(exchange), operation)


ROUTES = (
    Route("POST", "/v1/chat/completions", Auth.TENANT, HttpFrontEnd.chat),
    Route("POST", "/v1/completions", Auth.TENANT, HttpFrontEnd.complete),
    Route("POST", "/v1/embeddings", Auth.TENANT, HttpFrontEnd.embed),
    Route("GET", "/v1/models", Auth.TENANT, HttpFrontEnd.models),
    Route("GET", "/v1/models/{model:path}", Auth.TENANT, HttpFrontEnd.model),
    Route("GET", "/health/live", Auth.PUBLIC, HttpFrontEnd.live),
    Route("GET", "/health/ready", Auth.PUBLIC, HttpFrontEnd.ready),
)
"""Every route there is. What is not here is refused: 401 to strangers, 404 to tenants."""


def build_http(
    service: Service,
    resolver: Resolver,
    settings: HttpSettings | None = None,
    ready: Callable[[], bool] = lambda: True,
) -> HttpFrontEnd:
    """The ASGI application. ``ready`` says whether requests would be served now (a real token was produced lately)."""
    return HttpFrontEnd(service, resolver, settings or HttpSettings(), ready)


def _unused(_request: object) -> None:
    raise AssertionError("routes are matched here and dispatched by the table")


def _context(exchange: Exchange, route: Route | None) -> CallContext:
    attributes: dict[str, str | int] = {"http.request.method": exchange.method}
    client = exchange.scope.get("client")
    if client:
        attributes["client.address"] = client[0]
    return CallContext(
        # An unknown path is the client's text: it must not become a span's name.
        route=f"{exchange.method} {route.path if route else '*'}",
        front_end="http",
        traceparent=http_headers.traceparent(exchange.headers.getlist("traceparent")),
        attributes=attributes,
    )


def _claim(exchange: Exchange, tenant: str) -> None:
    """Count the connection to its tenant.

    Raises:
        RateLimitedError: the tenant holds as many as it may.
    """
    connection = connection_of(exchange.scope)
    if connection is not None and not connection.claim(tenant):
        raise RateLimitedError(
            "too many connections at once; reuse those that are open", retry_after_s=CONNECTIONS_RETRY_S
        )


def _principal(exchange: Exchange) -> Principal:
    assert exchange.principal is not None, "a TENANT route runs after authentication"
    return exchange.principal


def _shutting_down() -> UnavailableError:
    return UnavailableError("the appliance is shutting down; try again shortly", retry_after_s=DRAIN_RETRY_S)
