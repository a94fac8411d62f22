"""Routes of a scrape: metrics and readiness, which change nothing. The admin listener has them among others; the
metrics listener has no others.

============================  =============================================================
GET  /metrics                 Prometheus text, or OpenMetrics with exemplars where asked for
GET  /metrics/picker          gauges for an endpoint picker, of all models (the metrics listener alone)
GET  /metrics/picker/MODEL    those of one model; 404 for no such model
GET  /health/ready            200 when a request can be served, else 503 with the reason
============================  =============================================================

Beside them the metrics listener serves pages that say nothing about the machine, to anybody.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from appliance.common.json_codec import encode
from appliance.common.status import Readiness
from appliance.gateway.telemetry.loopback import LoopbackOnly, problem

FRESH_S = 0.5
FRESH_SHARE = 40
"""Seconds for which a rendered scrape is given again, at least, and as a multiple of the time that it took: with a
hundred tenants it has 2 MB and takes 0.1 s of the interpreter, of which strangers get one part in so many for each of
the two forms."""

SCHEME = b"bearer "

VARIES = {"vary": "accept"}
"""Header of an answer in one of two forms."""

PLAIN = "text/plain; version=0.0.4"
"""Media type of Prometheus' text format."""

MAX_NAME_CHARS = 128
"""Characters of a model's name."""

OPENMETRICS = "application/openmetrics-text"
"""Media type of the form that has exemplars; Prometheus asks for it and takes text too."""

_REFUSES = re.compile(r"q\s*=\s*0(\.0*)?")
"""Weight of what is not taken (RFC 9110, 12.4.2)."""

Scrape = tuple[str, bytes]
"""Content type and body."""

Render = Callable[[bool], Scrape]
"""Renders a scrape, in OpenMetrics if told so."""

Picker = Callable[[str], str | None]
"""Renders the gauges for an endpoint picker of a model, or of all where the name is empty; None for no such model."""

Endpoint = Callable[[Request], Awaitable[Response]]


def no_picker(_model: str) -> str | None:
    """Return no gauges: there are no models."""
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrapeParts:
    """Sources of a scrape's answers."""

    metrics: Render
    """Called in a thread, after ``refresh``."""
    refresh: Callable[[], None]
    """Sets gauges and counters as of now."""
    ready: Callable[[], Readiness]
    """Quick."""
    picker: Picker = no_picker
    """Quick."""


def asks_for_openmetrics(request: Request) -> bool:
    """Return whether a scraper takes OpenMetrics: names it, and not with the weight 0."""
    for one in request.headers.get("accept", "").lower().split(","):
        media, *parameters = (part.strip() for part in one.split(";"))
        if media == OPENMETRICS:
            return not any(map(_REFUSES.fullmatch, parameters))
    return False


def metrics_endpoint(render: Render, refresh: Callable[[], None]) -> Endpoint:
    """Return what answers ``GET /metrics``; ``render`` is called in a thread, after ``refresh``."""

    async def metrics(request: Request) -> Response:
        refresh()
        content_type, body = await run_in_threadpool(render, asks_for_openmetrics(request))
        return Response(body, media_type=content_type, headers=VARIES)

    return metrics


def ready_endpoint(ready: Callable[[], Readiness]) -> Endpoint:
    """Return what answers ``GET /health/ready``."""

    async def answer(_: Request) -> Response:
        readiness = ready()
        return JSONResponse(encode(readiness), status_code=200 if readiness.ready else 503)

    return answer


def picker_endpoint(picker: Picker) -> Endpoint:
    """Return what answers ``GET /metrics/picker`` and ``GET /metrics/picker/MODEL``."""

    async def answer(request: Request) -> Response:
        body = picker(str(request.path_params.get("model", ""))[:MAX_NAME_CHARS])
        if body is None:
            return problem(404, "no such model")
        return Response(body, media_type=PLAIN)

    return answer


def scrape_app(parts: ScrapeParts, pages: Sequence[Route] = (), *, token: bytes = b"", loopback: bool) -> ASGIApp:
    """Return the ASGI application of the metrics listener.

    Args:
        parts: sources of the answers.
        pages: routes that need no token: they answer everybody alike.
        token: what a request must bear; empty: nothing.
        loopback: whether the listener is on loopback or a Unix socket, where a request must name a loopback host
            (``LoopbackOnly``); elsewhere a scraper may know this machine under any name.
    """
    recent = {form: RecentScrape(partial(parts.metrics, form), parts.refresh) for form in (False, True)}

    async def metrics(request: Request) -> Response:
        content_type, body = await recent[asks_for_openmetrics(request)].get()
        return Response(body, media_type=content_type, headers=VARIES)

    picker = picker_endpoint(parts.picker)
    routes = [
        Route("/metrics", metrics),
        Route("/metrics/picker", picker),
        Route("/metrics/picker/{model:path}", picker),
        Route("/health/ready", ready_endpoint(parts.ready)),
        *pages,
    ]
    app: ASGIApp = Starlette(routes=routes)
    if token:
        app = _BearerOnly(app, token, frozenset(page.path for page in pages))
    return LoopbackOnly(app) if loopback else app


class RecentScrape:
    """The last scrape, rendered again once it is older than ``FRESH_S`` and ``FRESH_SHARE`` of its renderings; those
    who ask meanwhile wait for one rendering."""

    def __init__(
        self, render: Callable[[], Scrape], refresh: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._render, self._refresh, self._clock = render, refresh, clock
        self._lock = asyncio.Lock()
        self._last: Scrape | None = None
        self._until = 0.0

    async def get(self) -> Scrape:
        """Return a scrape, a new one or the last."""
        async with self._lock:
            if self._last is None or self._clock() >= self._until:
                began = self._clock()
                self._refresh()
                self._last = await run_in_threadpool(self._render)
                self._until = began + max(FRESH_S, FRESH_SHARE * (self._clock() - began))
            return self._last


class _BearerOnly:
    """Refuses requests without the token (RFC 6750) on all paths but the public ones; one that bears two is refused as
    well."""

    def __init__(self, app: ASGIApp, token: bytes, public: frozenset[str]) -> None:
        self._app, self._token, self._public = app, token, public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not (scope["path"] in self._public or self._bears(scope)):
            refusal = problem(401, "this listener needs a token: authorization: Bearer TOKEN")
            refusal.headers["www-authenticate"] = "Bearer"
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _bears(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1 or given[0][: len(SCHEME)].lower() != SCHEME:
            return False
        return hmac.compare_digest(given[0][len(SCHEME) :].strip(), self._token)
