"""The admin listener's routes: metrics, status, traces, health, reload. For the operator alone.

The caller binds it on loopback or a Unix socket; over TLS, for operators on other machines, each route needs a role
(``appliance.gateway.watch.remote_admin``). A page in the operator's own browser can reach
loopback too, so a request must name a loopback host (else a DNS name that was rebound to
127.0.0.1 could read tenants' traces) and a reload must not come from a page at all.

============================  =============================================================
GET  /metrics                 Prometheus text, or OpenMetrics
GET  /status                  ``ApplianceStatus``
GET  /tenants                 ``TenantTable``
GET  /policy/shadow           ``ShadowStatus``
GET  /keys                    ``KeysStatus``
GET  /traces?limit=N          ``TraceList``, newest first
GET  /traces/ID               ``StoredTrace``; 300 with a ``TraceList`` when ID names several
GET  /health/live             200 while the process answers
GET  /health/ready            200 when a request can be served, else 503 with the reason
POST /reload                  ``ReloadOutcome``: 200, or 409 when the policy was not changed
POST /models/NAME/sleep       ``SleepOutcome``: 200, 404 for no such model, 409 when it cannot sleep now
POST /models/NAME/wake        the same, once the model is awake
/requests, /drain, ...        ``appliance.gateway.telemetry.operator_routes``
GET  /, /console...           the operator's page, where there is one (``appliance.gateway.console``)
GET  /runbooks                what each alert means and what to do
============================  =============================================================
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from appliance.common.json_codec import encode
from appliance.common.operator_calls import LOGIN_HEADER
from appliance.common.shadow_status import ShadowStatus
from appliance.common.sleep_rules import SleepOutcome
from appliance.common.status import ApplianceStatus, KeysStatus, Readiness, ReloadOutcome, TenantTable
from appliance.gateway.telemetry.loopback import LoopbackOnly, problem
from appliance.gateway.telemetry.scrape import Render, metrics_endpoint, ready_endpoint
from appliance.gateway.telemetry.store import MAX_TRACES, TraceList, TraceStore

DEFAULT_LIMIT = 20
"""Traces listed when no limit is asked for: a screen."""

MAX_NAME_CHARS = 128
"""Characters of a model's name."""

MAX_USER_DIGITS = 10
"""Digits of a user's number, which has 32 bits."""

MAX_ID_CHARS = 64
"""Characters of a trace's name; a trace id has 32."""


def _no_model(name: str) -> SleepOutcome:
    """Answer of a listener without models."""
    return SleepOutcome(ok=False, found=False, state="", message=f"no model {name} is served")


async def _no_model_soon(name: str) -> SleepOutcome:
    return _no_model(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminParts:
    """Sources of the admin listener's answers. The callables are quick; ``reload`` may wait."""

    traces: TraceStore
    metrics: Render
    """Called in a thread, after ``refresh``."""
    refresh: Callable[[], None]
    """Sets gauges and counters as of now."""
    status: Callable[[], ApplianceStatus]
    tenants: Callable[[], TenantTable]
    keys: Callable[[], KeysStatus]
    ready: Callable[[], Readiness]
    reload: Callable[[str], Awaitable[ReloadOutcome]]
    """Is told who asks, in words (``asked_by``)."""
    shadow: Callable[[], ShadowStatus]
    sleep: Callable[[str], SleepOutcome] = _no_model
    wake: Callable[[str], Awaitable[SleepOutcome]] = _no_model_soon
    """May wait."""


def admin_app(parts: AdminParts, console: Sequence[Route] = ()) -> ASGIApp:
    """Return the ASGI application of the admin listener of this machine, with the routes of the console."""
    return loopback_app(admin_routes(parts, console))


def loopback_app(routes: Sequence[Route]) -> ASGIApp:
    """Return the ASGI application that answers these routes on loopback alone."""
    return LoopbackOnly(Starlette(routes=list(routes)))


def admin_routes(parts: AdminParts, console: Sequence[Route] = ()) -> list[Route]:
    """Return the routes of the admin listener, with those of the console."""

    async def status(_: Request) -> Response:
        return JSONResponse(encode(parts.status()))

    async def tenants(_: Request) -> Response:
        # A policy may name thousands: the table is made here, where requests are counted, its text elsewhere.
        return await run_in_threadpool(lambda table: JSONResponse(encode(table)), parts.tenants())

    async def keys(_: Request) -> Response:
        return JSONResponse(encode(parts.keys()))

    async def traces(request: Request) -> Response:
        text = request.query_params.get("limit", str(DEFAULT_LIMIT))
        if not (text.isascii() and text.isdigit() and len(text) <= 6):
            return problem(400, "limit must be a whole number")
        return JSONResponse(encode(parts.traces.newest(min(int(text), MAX_TRACES))))

    async def trace(request: Request) -> Response:
        return _trace(parts.traces, str(request.path_params["wanted"]))

    async def live(_: Request) -> Response:
        return JSONResponse({"live": True})

    async def shadow(_: Request) -> Response:
        return JSONResponse(encode(parts.shadow()))

    async def reload(request: Request) -> Response:
        if "origin" in request.headers:
            return problem(403, "a reload is not taken from a web page")
        outcome = await parts.reload(asked_by(request))
        return JSONResponse(encode(outcome), status_code=200 if outcome.ok else 409)

    return [
        Route("/metrics", metrics_endpoint(parts.metrics, parts.refresh)),
        Route("/status", status),
        Route("/tenants", tenants),
        Route("/policy/shadow", shadow),
        Route("/keys", keys),
        Route("/traces", traces),
        Route("/traces/{wanted}", trace),
        Route("/health/live", live),
        Route("/health/ready", ready_endpoint(parts.ready)),
        Route("/reload", reload, methods=["POST"]),
        _rest_route(parts),
        *console,
    ]


def asked_by(request: Request) -> str:
    """Return who asks, for the audit log: the user at the other end of a Unix socket by the kernel's word, and the user
    who had logged in, where that is another, by the command's; an operator elsewhere by the proved credential."""
    if remote := getattr(request.state, "asked_by", ""):
        return str(remote)
    peer = getattr(request.state, "peer", None)
    words = "over an address" if peer is None else f"user {peer}"
    login = request.headers.get(LOGIN_HEADER, "")
    told = login.isascii() and login.isdigit() and len(login) <= MAX_USER_DIGITS and login != str(peer)
    return f"{words}, logged in as {login}" if told else words


def _rest_route(parts: AdminParts) -> Route:
    """Route of orders to sleep and to wake."""

    async def rest(request: Request) -> Response:
        if "origin" in request.headers:
            return problem(403, "a model is not put to sleep or woken from a web page")
        name, order = str(request.path_params["name"])[:MAX_NAME_CHARS], str(request.path_params["order"])
        if order not in ("sleep", "wake"):
            return problem(404, "a model can be told to sleep or to wake")
        outcome = parts.sleep(name) if order == "sleep" else await parts.wake(name)
        return JSONResponse(encode(outcome), status_code=200 if outcome.ok else 409 if outcome.found else 404)

    return Route("/models/{name}/{order}", rest, methods=["POST"])


def _trace(store: TraceStore, wanted: str) -> Response:
    found = store.find(wanted) if len(wanted) <= MAX_ID_CHARS else ()
    if not found:
        return problem(404, "no such request among the last ones; an id needs at least 6 digits")
    if len(found) == 1:
        return JSONResponse(encode(found[0]))
    several = TraceList(tuple(one.summary for one in found), len(found), MAX_TRACES)
    return JSONResponse(encode(several), status_code=300)
