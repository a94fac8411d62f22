"""The HTTP front end: one router table, default deny, one boundary for errors.

Authentication comes before routing: without a credential a stranger learns nothing but the two health routes, not even
which paths exist. Then come the host's name, the route, the method, and only then the body.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from appliance.common.errors import (
    ApplianceError,
    InvalidRequestError,
    MethodNotAllowedError,
    ModelNotFoundError,
    OriginNotAllowedError,
    RateLimitedError,
    RouteNotFoundError,
)
from appliance.common.ids import new_request_id
from appliance.common.scopes import Scope
from appliance.common.tracebacks import forget_frames
from appliance.common.version import VERSION
from appliance.gateway.front.affinity import HEADER
from appliance.gateway.front.auth import Auth, Resolver, certificate_wanted, require
from appliance.gateway.front.client_address import TrustedProxies
from appliance.gateway.front.cut import Cut, shutting_down
from appliance.gateway.front.defect import defect
from appliance.gateway.front.end_user import end_user
from appliance.gateway.front.own_listeners import OF_ALL, Entrance
from appliance.gateway.front.prefiller import PREFILLER, named_prefiller
from appliance.gateway.front.request_builder import Stamp, traceparent
from appliance.gateway.generate_request import CallContext, Operation, Principal
from appliance.gateway.http import (
    header_fields,
    messages_objects,
    openai,
    openai_embeddings,
    openai_objects,
    responses_objects,
    scoring,
)
from appliance.gateway.http.account_objects import limits_object, usage_object
from appliance.gateway.http.body import Body, ClientGoneError
from appliance.gateway.http.dialect import ErrorForm, Parsed
from appliance.gateway.http.exchange import Exchange
from appliance.gateway.http.generate import Generation, ParseCount, ParsePooled
from appliance.gateway.http.head import RequestHead
from appliance.gateway.http.messages_request import parse_count, parse_message
from appliance.gateway.http.openai_objects import model_list, model_object
from appliance.gateway.http.protocol import HttpConnection
from appliance.gateway.http.response_items import Withheld, nothing_kept
from appliance.gateway.http.response_routes import ITEMS_PATH, RESPONSE_PATH, ResponseRoutes, response_template
from appliance.gateway.http.responses_request import parse_input_tokens, parse_response
from appliance.gateway.http.settings import HttpSettings
from appliance.gateway.http.span_attributes import span_attributes
from appliance.gateway.http.stored_objects import query_of
from appliance.gateway.http.stored_routes import (
    BATCH_PATH,
    BATCHES,
    CANCEL_PATH,
    CONTENT_PATH,
    FILE_PATH,
    FILES,
    StoredRoutes,
    template_of,
)
from appliance.gateway.service import Service
from appliance.gateway.stored_work import StoredWork

CONNECTIONS_RETRY_S = 1.0
"""When a tenant with too many connections may try again: idle ones are closed by clients within seconds."""


DOCUMENT = Path(__file__).with_name("openapi.json")
"""This API as a document of OpenAPI, which ``python -m appliance.operator.reference`` writes."""

MODEL_PREFIX = "/v1/models/"
MODEL_PATH = MODEL_PREFIX + "{model:path}"
"""The one route with a parameter: a model's name, which may hold slashes."""

Handler = Callable[["HttpFrontEnd", Exchange], Awaitable[None]]
StoredHandler = Callable[[StoredRoutes, Exchange, Principal], Coroutine[Any, Any, None]]
ResponseHandler = Callable[[ResponseRoutes, Exchange, Principal], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Route:
    """One row of the router table."""

    method: str
    path: str
    auth: Auth
    handler: Handler
    scope: Scope | None = None
    """What a caller's credential must have; None: the route is public."""


class HttpFrontEnd:
    """Answers the requests of one listener. ``ready`` says whether requests would be served now."""

    def __init__(
        self,
        service: Service,
        resolver: Resolver,
        settings: HttpSettings,
        ready: Callable[[], bool],
        proxies: TrustedProxies | None = None,
        stored: StoredWork | None = None,
    ) -> None:
        """``stored`` keeps files, batches and responses; None where the appliance keeps none."""
        self.stored = StoredRoutes(stored, settings)
        self._kept = stored.responses if stored is not None else None
        self._proxies = proxies or TrustedProxies()
        self._service = service
        self._resolver = resolver
        self._settings = settings
        self._ready = ready
        self._draining = self._over = False
        self._keeping: set[Cut] = set()
        """Requests about files and batches that run."""
        self._generation = Generation(service, settings, self._kept)
        self.background = self._generation.background
        """Responses that go on without their client."""
        self.responses = ResponseRoutes(self._kept, self.background)
        self._document = DOCUMENT.read_bytes()

    def begin_drain(self) -> None:
        """Say that it is not ready, and keep nobody waiting for the sake of padding; what comes is still answered."""
        self._draining = True
        self._generation.hurry()

    def cut_all(self) -> None:
        """End those that still run with a retryable error, and take none any more."""
        self._over = True
        self._generation.cut_all(shutting_down())
        for cut in list(self._keeping):
            cut.end(shutting_down())

    async def serve(
        self, connection: HttpConnection, head: RequestHead, body: Body, *, entrance: Entrance = OF_ALL
    ) -> None:
        """One exchange, start to end, that came by this listener; never raises an Exception."""
        exchange = Exchange(connection, head, body, self._settings.cross_origin.rows(head))
        try:
            await self._serve(exchange, entrance)
        except ClientGoneError as gone:
            forget_frames(gone)
        except ApplianceError as error:
            request_id = exchange.request_id or self._record(exchange, error)
            forget_frames(error)  # before the answer: a client may take its time to read it
            await self._fail(exchange, error, request_id)
        except Exception as error:  # noqa: BLE001 - the HTTP boundary: a defect shows its request id, nothing else
            request_id = exchange.request_id or self._record(exchange, error)
            await self._fail(exchange, defect(error, request_id), request_id)
        finally:
            exchange.close()

    async def _serve(self, exchange: Exchange, entrance: Entrance) -> None:
        found = _match(exchange.head.path)
        # HEAD is a GET whose answer's body is left out (RFC 9110, section 9.3.2).
        route = found.get("GET" if exchange.head.method == "HEAD" else exchange.head.method)
        exchange.context = self._context(exchange, route, entrance)
        exchange.errors = _errors_under(exchange.head.path)
        self._check_host(exchange)
        if self._settings.cross_origin.asks(exchange.head):
            await self._preflight(exchange)
            return
        if route is None or route.auth is not Auth.PUBLIC:
            if self._settings.demands_certificate and not exchange.connection.certified and not entrance.local:
                raise certificate_wanted()
            address = str(exchange.context.attributes["client.address"])
            again = partial(
                self._resolver.resolve,
                _proofs(exchange),
                exchange.connection.peer_uris,
                address=address,
                only=entrance.tenant,
                listener=entrance.listener("http"),
            )
            exchange.principal, scope = again(), None if route is None else route.scope
            exchange.authenticate = partial(_hold, again, scope)
            if self._service.pads(exchange.principal):
                exchange.padding = self._settings.padding
            _claim(exchange, exchange.principal.tenant)
            if (affinity := self._settings.affinity) is not None:
                exchange.everywhere += affinity.rows(exchange.principal.credential, exchange.head.values(HEADER))
            if scope is not None:
                require(exchange.principal, scope)
        if route is not None:
            await route.handler(self, exchange)
        elif found:
            raise MethodNotAllowedError(
                f"this route takes {', '.join(found)} only", details={"allow": ", ".join(found)}
            )
        else:
            raise RouteNotFoundError(_no_route(exchange.head.path))

    async def _preflight(self, exchange: Exchange) -> None:
        """Answer a browser that asks whether a page may call: the same for every path, with or without a credential.
        Leave is kept nowhere, as health checks are not; a page that may not call is counted as any refused caller, and
        gets an answer in place of the 401 that a credential would mend."""
        if self._settings.cross_origin.allows(exchange.head):
            await exchange.answer_empty(self._settings.cross_origin.leave(), new_request_id())
            return
        error = OriginNotAllowedError("pages of this origin may not call; the operator lists those that may")
        await exchange.fail(error, self._record(exchange, error), [])

    def _context(self, exchange: Exchange, route: Route | None, entrance: Entrance) -> CallContext:
        head = exchange.head
        client = self._proxies.client_of(exchange.connection.address, head.values(self._proxies.header))
        return CallContext(
            # An unknown path is the client's text: it becomes no span's name and is not kept.
            route=f"{head.method} {route.path if route else '*'}",
            front_end="http",
            listener=entrance.tenant,
            traceparent=traceparent(head.values("traceparent")),
            prefiller=named_prefiller(head.values(PREFILLER)),
            attributes=span_attributes(head, exchange.connection.scheme, client, known=route is not None),
        )

    def _check_host(self, exchange: Exchange) -> None:
        allowed = self._settings.allowed_hosts
        if allowed and (exchange.head.host or "").lower() not in allowed:
            raise InvalidRequestError("the Host header names a host that is not served here", param="host")

    def _record(self, exchange: Exchange, error: Exception) -> str:
        return self._service.record_refusal(exchange.context, error, exchange.principal)

    async def _fail(self, exchange: Exchange, error: ApplianceError, request_id: str) -> None:
        rates: header_fields.Headers = []
        if exchange.principal is not None and isinstance(error, RateLimitedError):
            rates = header_fields.rates(self._service.rates(exchange.principal))
        with suppress(ClientGoneError):
            await exchange.fail(error, request_id, rates)

    async def chat(self, exchange: Exchange) -> None:
        """``POST /v1/chat/completions``."""
        await self._generate(exchange, partial(openai.parse, Operation.CHAT))

    async def complete(self, exchange: Exchange) -> None:
        """``POST /v1/completions``."""
        await self._generate(exchange, partial(openai.parse, Operation.TEXT_COMPLETION))

    async def respond(self, exchange: Exchange) -> None:
        """``POST /v1/responses``."""
        await self._generate(exchange, partial(parse_response, withheld=self._withheld(exchange)))

    async def message(self, exchange: Exchange) -> None:
        """``POST /v1/messages``."""
        await self._generate(exchange, parse_message)

    async def count_response(self, exchange: Exchange) -> None:
        """``POST /v1/responses/input_tokens``."""
        parse = partial(parse_input_tokens, withheld=self._withheld(exchange))
        await self._count(exchange, parse, {"object": "response.input_tokens"})

    async def count_message(self, exchange: Exchange) -> None:
        """``POST /v1/messages/count_tokens``."""
        await self._count(exchange, parse_count, {})

    async def embed(self, exchange: Exchange) -> None:
        """``POST /v1/embeddings``."""
        await self._embed(exchange, openai_embeddings.parse)

    async def rerank(self, exchange: Exchange) -> None:
        """``POST /v1/rerank``, and ``POST /v2/rerank`` where Cohere's client looks for it."""
        await self._embed(exchange, scoring.parse_rerank)

    async def score(self, exchange: Exchange) -> None:
        """``POST /v1/score``."""
        await self._embed(exchange, scoring.parse_score)

    async def classify(self, exchange: Exchange) -> None:
        """``POST /v1/classify``."""
        await self._embed(exchange, scoring.parse_classify)

    async def tokenize(self, exchange: Exchange) -> None:
        """``POST /tokenize``."""
        if self._over:
            raise shutting_down()
        await self._generation.tokenize(exchange, _principal(exchange))

    async def detokenize(self, exchange: Exchange) -> None:
        """``POST /detokenize``."""
        if self._over:
            raise shutting_down()
        await self._generation.detokenize(exchange, _principal(exchange))

    async def attest(self, exchange: Exchange) -> None:
        """``POST /v1/attestations``."""
        if self._over:
            raise shutting_down()
        await self._generation.attest(exchange, _principal(exchange))

    async def limits(self, exchange: Exchange) -> None:
        """``GET /v1/limits``."""
        found = self._service.limits(_principal(exchange))
        await exchange.answer(200, limits_object(found), new_request_id())

    async def usage(self, exchange: Exchange) -> None:
        """``GET /v1/usage``."""
        asked = query_of(exchange.head.query).get("user")
        found = await self._service.usage(_principal(exchange), end_user(asked, "user"))
        await exchange.answer(200, usage_object(found), new_request_id())

    async def version(self, exchange: Exchange) -> None:
        """``GET /version``: of the appliance, for clients that adapt to it."""
        await exchange.answer(200, {"version": VERSION}, new_request_id())

    async def document(self, exchange: Exchange) -> None:
        """``GET /openapi.json``: the same for every tenant, and with a credential only: it says which paths exist."""
        await exchange.answer(200, self._document, new_request_id())

    async def models(self, exchange: Exchange) -> None:
        """``GET /v1/models``."""
        cards = self._service.models(_principal(exchange))
        await exchange.answer(200, model_list(cards), new_request_id())

    async def model(self, exchange: Exchange) -> None:
        """``GET /v1/models/{id}``; the id may hold slashes."""
        for card in self._service.models(_principal(exchange)):
            if card.name == exchange.head.path.removeprefix(MODEL_PREFIX):
                await exchange.answer(200, model_object(card), new_request_id())
                return
        raise ModelNotFoundError("no such model, or none that you may use", param="model")

    async def live(self, exchange: Exchange) -> None:
        """``GET /health/live``: this process answers."""
        await exchange.answer(200, {"status": "live"}, new_request_id())

    async def ready(self, exchange: Exchange) -> None:
        """``GET /health/ready``, and ``GET /health`` where routers look: requests will be served; 503 while they would
        not."""
        ready = self._ready() and not self._draining
        await exchange.answer(200 if ready else 503, {"status": "ready" if ready else "not ready"}, new_request_id())

    async def keep(self, exchange: Exchange, handler: StoredHandler) -> None:
        """Answer a request about files or batches; a drain ends it as it ends answers of models, since it may last as
        long as a file takes."""
        if self._over:
            raise shutting_down()
        cut = Cut()
        self._keeping.add(cut)
        try:
            await cut.run(handler(self.stored, exchange, _principal(exchange)))
        finally:
            self._keeping.discard(cut)

    async def recall(self, exchange: Exchange, handler: ResponseHandler) -> None:
        """Answer a request about stored responses."""
        if self._over:
            raise shutting_down()
        await handler(self.responses, exchange, _principal(exchange))

    def _withheld(self, exchange: Exchange) -> Withheld:
        """What tells why the caller's responses are not kept."""
        return nothing_kept if self._kept is None else partial(self._kept.withheld, _principal(exchange))

    async def _generate(self, exchange: Exchange, parse: Callable[[bytes, Stamp], Parsed]) -> None:
        if self._over:
            raise shutting_down()
        await self._generation.serve(exchange, _principal(exchange), parse)

    async def _embed(self, exchange: Exchange, parse: ParsePooled) -> None:
        if self._over:
            raise shutting_down()
        await self._generation.embed(exchange, _principal(exchange), parse)

    async def _count(self, exchange: Exchange, parse: ParseCount, answer: dict[str, str]) -> None:
        if self._over:
            raise shutting_down()
        await self._generation.count(exchange, _principal(exchange), parse, answer)


def _hold(again: Callable[[], Principal], scope: Scope | None) -> None:
    """Check that a caller's credential still holds, for this scope."""
    found = again()
    if scope is not None:
        require(found, scope)


def _stored(handler: StoredHandler) -> Handler:
    """Make a handler of one of ``StoredRoutes``."""

    async def handle(front: HttpFrontEnd, exchange: Exchange) -> None:
        await front.keep(exchange, handler)

    return handle


def _recalled(handler: ResponseHandler) -> Handler:
    """Make a handler of one of ``ResponseRoutes``."""

    async def handle(front: HttpFrontEnd, exchange: Exchange) -> None:
        await front.recall(exchange, handler)

    return handle


ROUTES = (
    Route("POST", "/v1/chat/completions", Auth.TENANT, HttpFrontEnd.chat, Scope.GENERATE),
    Route("POST", "/v1/completions", Auth.TENANT, HttpFrontEnd.complete, Scope.GENERATE),
    Route("POST", "/v1/responses", Auth.TENANT, HttpFrontEnd.respond, Scope.GENERATE),
    Route("POST", "/v1/responses/input_tokens", Auth.TENANT, HttpFrontEnd.count_response, Scope.TOKENIZE),
    Route("GET", RESPONSE_PATH, Auth.TENANT, _recalled(ResponseRoutes.response), Scope.RESPONSES),
    Route("DELETE", RESPONSE_PATH, Auth.TENANT, _recalled(ResponseRoutes.delete), Scope.RESPONSES),
    Route("GET", ITEMS_PATH, Auth.TENANT, _recalled(ResponseRoutes.items), Scope.RESPONSES),
    Route("POST", "/v1/messages", Auth.TENANT, HttpFrontEnd.message, Scope.GENERATE),
    Route("POST", "/v1/messages/count_tokens", Auth.TENANT, HttpFrontEnd.count_message, Scope.TOKENIZE),
    Route("POST", "/v1/embeddings", Auth.TENANT, HttpFrontEnd.embed, Scope.EMBEDDINGS),
    Route("POST", "/v1/rerank", Auth.TENANT, HttpFrontEnd.rerank, Scope.RERANK),
    Route("POST", "/v2/rerank", Auth.TENANT, HttpFrontEnd.rerank, Scope.RERANK),
    Route("POST", "/v1/score", Auth.TENANT, HttpFrontEnd.score, Scope.RERANK),
    Route("POST", "/v1/classify", Auth.TENANT, HttpFrontEnd.classify, Scope.RERANK),
    Route("POST", "/tokenize", Auth.TENANT, HttpFrontEnd.tokenize, Scope.TOKENIZE),
    Route("POST", "/detokenize", Auth.TENANT, HttpFrontEnd.detokenize, Scope.TOKENIZE),
    Route("POST", "/v1/attestations", Auth.TENANT, HttpFrontEnd.attest, Scope.ATTESTATION),
    Route("POST", FILES, Auth.TENANT, _stored(StoredRoutes.upload), Scope.BATCHES),
    Route("GET", FILES, Auth.TENANT, _stored(StoredRoutes.list_files), Scope.BATCHES),
    Route("GET", FILE_PATH, Auth.TENANT, _stored(StoredRoutes.file), Scope.BATCHES),
    Route("DELETE", FILE_PATH, Auth.TENANT, _stored(StoredRoutes.delete), Scope.BATCHES),
    Route("GET", CONTENT_PATH, Auth.TENANT, _stored(StoredRoutes.content), Scope.BATCHES),
    Route("POST", BATCHES, Auth.TENANT, _stored(StoredRoutes.create), Scope.BATCHES),
    Route("GET", BATCHES, Auth.TENANT, _stored(StoredRoutes.list_batches), Scope.BATCHES),
    Route("GET", BATCH_PATH, Auth.TENANT, _stored(StoredRoutes.batch), Scope.BATCHES),
    Route("POST", CANCEL_PATH, Auth.TENANT, _stored(StoredRoutes.cancel), Scope.BATCHES),
    Route("GET", "/v1/limits", Auth.TENANT, HttpFrontEnd.limits, Scope.ACCOUNT),
    Route("GET", "/v1/usage", Auth.TENANT, HttpFrontEnd.usage, Scope.ACCOUNT),
    Route("GET", "/version", Auth.TENANT, HttpFrontEnd.version, Scope.MODELS),
    Route("GET", "/openapi.json", Auth.TENANT, HttpFrontEnd.document, Scope.MODELS),
    Route("GET", "/v1/models", Auth.TENANT, HttpFrontEnd.models, Scope.MODELS),
    Route("GET", MODEL_PATH, Auth.TENANT, HttpFrontEnd.model, Scope.MODELS),
    Route("GET", "/health", Auth.PUBLIC, HttpFrontEnd.ready),
    Route("GET", "/health/live", Auth.PUBLIC, HttpFrontEnd.live),
    Route("GET", "/health/ready", Auth.PUBLIC, HttpFrontEnd.ready),
)
"""Every route there is. What is not here is refused: 401 to strangers, 404 to tenants."""

_BY_PATH: dict[str, dict[str, Route]] = {}
"""Path -> method -> route."""
for _route in ROUTES:
    _BY_PATH.setdefault(_route.path, {})[_route.method] = _route


def _match(path: str) -> dict[str, Route]:
    """The routes of a path, by method."""
    return _BY_PATH.get(MODEL_PATH if path.startswith(MODEL_PREFIX) else response_template(template_of(path)), {})


def _no_route(path: str) -> str:
    """Tell a tenant which routes there are, or which one was meant where /v1 is missing or there twice, or a slash is
    left over."""
    rest = path.removeprefix("/v1").removeprefix("/v1").strip("/")
    if f"/v1/{rest}" in _BY_PATH:
        return f"no such route; take /v1/{rest}. A client's base URL is the address and /v1, with no slash behind it"
    if f"/{rest}" in _BY_PATH:
        return f"no such route; take /{rest}, which is not under /v1"
    served = ", ".join(f"{route.method} {route.path}" for route in ROUTES if route.auth is Auth.TENANT)
    return f"no such route; served are {served}"


def _errors_under(path: str) -> ErrorForm:
    """The form of errors of the API whose path this is, whether there is such a route or not: a stranger does not learn
    that from it."""
    if (path + "/").startswith("/v1/messages/"):
        return messages_objects.ERRORS
    if (path + "/").startswith("/v1/responses/"):
        return responses_objects.ERRORS
    return openai_objects.ERRORS


def _proofs(exchange: Exchange) -> tuple[str, ...]:
    """The caller's keys: clients of the Messages API send theirs in a header of its own."""
    given = exchange.head.values("authorization")
    own = exchange.head.values("x-api-key") if exchange.errors is messages_objects.ERRORS else ()
    return (*given, *(f"Bearer {key}" for key in own))


def _claim(exchange: Exchange, tenant: str) -> None:
    """Count the connection to its tenant.

    Raises:
        RateLimitedError: the tenant holds as many as it may.
    """
    if not exchange.connection.claim(tenant):
        raise RateLimitedError(
            "too many connections at once; reuse those that are open", retry_after_s=CONNECTIONS_RETRY_S
        )


def _principal(exchange: Exchange) -> Principal:
    assert exchange.principal is not None, "a TENANT route runs after authentication"
    return exchange.principal
