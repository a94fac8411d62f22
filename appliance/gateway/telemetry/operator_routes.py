"""The admin listener's routes for the operator's API: requests that run, the drain, and what is told of its calls.

============================  =============================================================
GET  /requests?tenant=ID      ``LiveRequests``
POST /requests/ID/cancel      ``LiveRequests``: the one that was ended; 404 for none
GET  /drain                   ``DrainStatus``
POST /drain, /resume          the same, as it is then
POST /operator/calls?...      nothing; the query is an ``OperatorCall``
============================  =============================================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from appliance.common.json_codec import encode
from appliance.common.live_requests import DrainStatus, LiveRequests
from appliance.common.operator_calls import OperatorCall
from appliance.gateway.telemetry.loopback import problem

MAX_WORD_CHARS = 128
"""Characters of a request's id, or of a tenant's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorParts:
    """Sources of the answers; quick."""

    requests: Callable[[str], LiveRequests]
    cancel: Callable[[str], LiveRequests | None]
    drain: Callable[[bool | None], DrainStatus]
    called: Callable[[OperatorCall], None]


def operator_routes(parts: OperatorParts) -> list[Route]:
    """Return the routes, for the admin listener's application."""

    async def requests(request: Request) -> Response:
        return JSONResponse(encode(parts.requests(request.query_params.get("tenant", "")[:MAX_WORD_CHARS])))

    async def cancel(request: Request) -> Response:
        if "origin" in request.headers:
            return problem(403, "a request is not ended from a web page")
        found = parts.cancel(str(request.path_params["wanted"])[:MAX_WORD_CHARS])
        return problem(404, "no request of this id waits or runs") if found is None else JSONResponse(encode(found))

    async def state(_: Request) -> Response:
        return JSONResponse(encode(parts.drain(None)))

    async def order(request: Request, draining: bool) -> Response:
        if "origin" in request.headers:
            return problem(403, "a drain is not ordered from a web page")
        return JSONResponse(encode(parts.drain(draining)))

    async def drain(request: Request) -> Response:
        return await order(request, draining=True)

    async def resume(request: Request) -> Response:
        return await order(request, draining=False)

    async def called(request: Request) -> Response:
        if "origin" in request.headers:
            return problem(403, "calls are not told from a web page")
        try:
            parts.called(OperatorCall.of_query(request.query_params))
        except ValueError as error:
            return problem(400, str(error))
        return JSONResponse({})

    return [
        Route("/requests", requests),
        Route("/requests/{wanted}/cancel", cancel, methods=["POST"]),
        Route("/drain", state),
        Route("/drain", drain, methods=["POST"]),
        Route("/resume", resume, methods=["POST"]),
        Route("/operator/calls", called, methods=["POST"]),
    ]
