"""Routes of the console's page of usage on the admin listener.

==============================  ===========================================================
GET  /console/usage             ``UsageLook``; the query is a ``UsageAsked``
GET  /console/usage/models      ``UsageDetail``: models of one tenant
GET  /console/usage/users       ``UsageDetail``: end users of one tenant, by pseudonyms
GET  /console/usage.csv         tenants of the span, all of them
==============================  ===========================================================
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from appliance.common.errors import UnavailableError
from appliance.common.json_codec import encode
from appliance.common.usage.report import By
from appliance.common.usage.spans import Span
from appliance.gateway.console.headers import HEADERS, foreign, needs_role, problem
from appliance.gateway.console.look import MAX_FIND_CHARS
from appliance.gateway.console.usage_look import UsageAsked, UsageDetail, UsageLook

MAX_TENANT_CHARS = 63
"""Longest name of a tenant (``policy.schema``)."""

MAX_OFFSET_DIGITS = 6

USERS = "/console/usage/users"
"""Route that needs a role on this machine as well."""


class UsageSource(Protocol):
    """Answers the page of usage."""

    async def look(self, asked: UsageAsked, page: str) -> UsageLook:
        """Return what the page shows."""
        ...

    async def detail(self, asked: UsageAsked, by: By) -> UsageDetail:
        """Return the models or end users of one tenant."""
        ...

    async def csv(self, asked: UsageAsked) -> str:
        """Return the table of tenants as comma-separated values."""
        ...


def usage_routes(usage: UsageSource, page: str) -> list[Route]:
    """Return the routes; ``page`` is the digest of the console's files."""

    async def look(asked: UsageAsked) -> Response:
        return _json(await usage.look(asked, page))

    async def models(asked: UsageAsked) -> Response:
        return _json(await usage.detail(asked, By.MODEL))

    async def users(asked: UsageAsked) -> Response:
        return _json(await usage.detail(asked, By.USER))

    async def table(asked: UsageAsked) -> Response:
        name = f"athanor-usage-{asked.span}.csv"
        headers = {**HEADERS, "cache-control": "no-store", "content-disposition": f'attachment; filename="{name}"'}
        return Response(await usage.csv(asked), headers=headers, media_type="text/csv; charset=utf-8")

    return [
        Route("/console/usage", _answering(look)),
        Route("/console/usage/models", _answering(models, of_one=True)),
        Route(USERS, _answering(users, of_one=True, needed=f"GET {USERS}")),
        Route("/console/usage.csv", _answering(table)),
    ]


def read_asked(query: Mapping[str, str]) -> UsageAsked:
    """Return the question that a query string asks.

    Raises:
        ValueError: a field is out of range; the message says which.
    """
    span, find, tenant = query.get("span", Span.TODAY), query.get("find", ""), query.get("tenant", "")
    offset = query.get("offset", "0")
    if span not in tuple(Span):
        raise ValueError(f"span must be one of {', '.join(Span)}")
    if len(find) > MAX_FIND_CHARS:
        raise ValueError(f"find has more than {MAX_FIND_CHARS} characters")
    if len(tenant) > MAX_TENANT_CHARS:
        raise ValueError(f"tenant has more than {MAX_TENANT_CHARS} characters")
    if not (offset.isascii() and offset.isdigit() and len(offset) <= MAX_OFFSET_DIGITS):
        raise ValueError("offset must be a whole number")
    return UsageAsked(span, find, int(offset), tenant)


def _answering(
    answer: Callable[[UsageAsked], Awaitable[Response]], *, of_one: bool = False, needed: str = ""
) -> Callable[[Request], Awaitable[Response]]:
    """Return what takes a request for one of the routes: ``of_one`` asks about a tenant, and ``needed`` names a route
    that needs a role. The request's URL decides neither: its host is what the caller says."""

    async def taken(request: Request) -> Response:
        if foreign(request):
            return problem(403, "the console answers its own page only")
        if needed and (refusal := needs_role(request, needed)) is not None:
            return refusal
        try:
            asked = read_asked(request.query_params)
            if of_one and not asked.tenant:
                raise ValueError("tenant must name one")
        except ValueError as error:
            return problem(400, str(error))
        try:
            return await answer(asked)
        except UnavailableError as error:
            return problem(503, error.message)

    return taken


def _json(value: UsageLook | UsageDetail) -> Response:
    return JSONResponse(encode(value), headers={**HEADERS, "cache-control": "no-store"})
