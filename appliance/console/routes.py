"""The console's routes on the admin listener: the page, and what it asks for once a second.

The listener itself refuses foreign Host headers. Here browsers are told to load nothing but these files, to show them
in no frame and to give them to no other page, and what a page of another origin asks for is refused.

=============================  ============================================================
GET  /, /console               to the page
GET  /console/                 the page; ``GET /console/NAME`` its files
GET  /console/look             ``Picture``; the query is a ``Question``
GET  /console/requests/ID      ``StoredTrace``
=============================  ============================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from appliance.console.assets import INDEX, Asset, page_digest, read_assets
from appliance.console.picture import MAX_FIND_CHARS, OUTCOMES, Picture, Question
from appliance.snapshot import encode
from appliance.telemetry.store import TraceStore

PAGE = "/console/"

MAX_WORD_CHARS = 64
"""Characters of an id or a mark."""

MAX_OFFSET_DIGITS = 6
"""Digits of an offset: a policy has at most 10,000 tenants."""

POLICY = "; ".join([
    "default-src 'none'", "script-src 'self'", "style-src 'self'", "img-src 'self'", "connect-src 'self'",
    "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'",
    "require-trusted-types-for 'script'", "trusted-types 'none'",
])
"""Content-Security-Policy: files of this listener only, nothing inline, no string ever becomes markup or code."""

HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-embedder-policy": "require-corp",
    "permissions-policy": "camera=(), geolocation=(), microphone=(), usb=()",
}
"""Of every answer of the console."""


@dataclass(frozen=True, slots=True)
class ConsoleParts:
    """Where the console gets its answers; ``look`` takes a question and the page's digest, and is quick."""

    look: Callable[[Question, str], Picture]
    traces: TraceStore


def console_routes(parts: ConsoleParts) -> list[Route]:
    """The routes, for the admin listener's application."""
    assets = read_assets()
    digest = page_digest(assets)

    async def to_page(_: Request) -> Response:
        return RedirectResponse(PAGE, status_code=307, headers=HEADERS)

    async def page(request: Request) -> Response:
        return _asset(assets, str(request.path_params.get("name", INDEX)), request)

    async def look(request: Request) -> Response:
        if _foreign(request):
            return _problem(403, "the console answers its own page only")
        try:
            question = read_question(request.query_params)
        except ValueError as error:
            return _problem(400, str(error))
        return JSONResponse(encode(parts.look(question, digest)), headers={**HEADERS, "cache-control": "no-store"})

    async def one_request(request: Request) -> Response:
        if _foreign(request):
            return _problem(403, "the console answers its own page only")
        wanted = str(request.path_params["wanted"])
        found = parts.traces.find(wanted) if len(wanted) <= MAX_WORD_CHARS else ()
        if not found:
            return _problem(404, "this request is no longer among the last ones")
        return JSONResponse(encode(found[0]), headers={**HEADERS, "cache-control": "no-store"})

    return [
        Route("/", to_page),
        Route("/console", to_page),
        Route(PAGE, page),
        Route("/console/look", look),
        Route("/console/requests/{wanted}", one_request),
        Route("/console/{name}", page),
    ]


def read_question(query: Mapping[str, str]) -> Question:
    """A query string's fields as a question.

    Raises:
        ValueError: a field is out of range; the message says which.
    """
    after_text, offset, find = query.get("after", "0"), query.get("offset", "0"), query.get("find", "")
    try:
        after = float(after_text[:MAX_WORD_CHARS])
    except ValueError:
        after = math.nan
    if not math.isfinite(after):
        raise ValueError("after must be a moment in Unix seconds")
    if not (offset.isascii() and offset.isdigit() and len(offset) <= MAX_OFFSET_DIGITS):
        raise ValueError("offset must be a whole number")
    if len(find) > MAX_FIND_CHARS:
        raise ValueError(f"find has more than {MAX_FIND_CHARS} characters")
    outcome, seen = query.get("outcome", ""), query.get("seen", "")
    if outcome not in OUTCOMES:
        raise ValueError(f"outcome must be one of {', '.join(OUTCOMES[1:])}, or be left out")
    return Question(after=after, seen=seen[:MAX_WORD_CHARS], offset=int(offset), find=find.casefold(), outcome=outcome)


def _foreign(request: Request) -> bool:
    """Whether a page of another origin asks; a browser says so, other programs say nothing."""
    site, origin = request.headers.get("sec-fetch-site", "none"), request.headers.get("origin")
    own = f"{request.url.scheme}://{request.headers.get('host', '')}"
    return site not in ("none", "same-origin") or (origin is not None and origin != own)


def _asset(assets: Mapping[str, Asset], name: str, request: Request) -> Response:
    asset = assets.get(name)
    if asset is None:
        return _problem(404, "the console has no such file")
    headers = {**HEADERS, "etag": asset.etag, "cache-control": "no-cache"}
    known = {word.strip().removeprefix("W/") for word in request.headers.get("if-none-match", "").split(",")}
    if asset.etag in known:
        return Response(status_code=304, headers=headers)
    return Response(asset.body, headers={**headers, "content-type": asset.content_type})


def _problem(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message}}, status_code=status, headers=HEADERS)
