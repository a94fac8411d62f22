"""The console's routes on the admin listener: the page, and what it asks for once a second.

The listener itself refuses foreign Host headers. Here browsers are told to load nothing but these files, to show them
in no frame and to give them to no other page, and what a page of another origin asks for is refused.

=============================  ============================================================
GET  /, /console               to the page
GET  /console/                 the page; ``GET /console/NAME`` its files
GET  /console/look             ``Look``; the query is a ``Question``
GET  /console/requests/ID      ``StoredTrace``
GET  /console/usage...         ``appliance.gateway.console.usage_routes``
GET  /console/fleet            ``appliance.gateway.console.fleet_routes``
=============================  ============================================================
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from appliance.common.json_codec import encode
from appliance.common.outcomes import OUTCOMES
from appliance.gateway.console.fleet_routes import FleetSource, fleet_routes
from appliance.gateway.console.headers import HEADERS, foreign, problem
from appliance.gateway.console.look import MAX_FIND_CHARS, Look, Question
from appliance.gateway.console.page_head import with_head
from appliance.gateway.console.usage_routes import UsageSource, usage_routes
from appliance.gateway.telemetry.store import TraceStore

FOLDER = Path(__file__).resolve().parent / "web"

CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Types of the files that are served; other files in the folder are not."""

INDEX = "index.html"

ETAG_CHARS = 32
"""Hex digits of SHA-256 in an ETag."""


@dataclass(frozen=True, slots=True)
class Asset:
    """One file; ``etag`` has its quotes."""

    content_type: str
    body: bytes
    etag: str


def read_assets(folder: Path = FOLDER) -> Mapping[str, Asset]:
    """Return the page's files by name; the folder has no folders.

    Raises:
        OSError: a file cannot be read.
    """
    found = {}
    for path in sorted(folder.iterdir()):
        content_type = CONTENT_TYPES.get(path.suffix)
        if content_type is not None and path.is_file():
            body = path.read_bytes()
            if path.suffix == ".html":
                body = with_head(path.name, body.decode()).encode()
            found[path.name] = Asset(content_type, body, f'"{hashlib.sha256(body).hexdigest()[:ETAG_CHARS]}"')
    return found


def page_digest(assets: Mapping[str, Asset]) -> str:
    """Return one digest of all files: the page's version."""
    return hashlib.sha256("".join(asset.etag for asset in assets.values()).encode()).hexdigest()[:ETAG_CHARS]


PAGE = "/console/"

MAX_WORD_CHARS = 64
"""Characters of an id or a mark."""

MAX_OFFSET_DIGITS = 6
"""Digits of an offset: a policy has at most 10,000 tenants."""


def console_routes(
    looked: Callable[[Question, str], Look], traces: TraceStore, usage: UsageSource, fleet: FleetSource
) -> list[Route]:
    """Return the routes, for the admin listener's application. ``looked`` takes a question and the page's digest, and
    is quick; ``usage`` answers the page of usage, ``fleet`` that of the fleet."""
    assets = read_assets()
    digest = page_digest(assets)

    async def to_page(_: Request) -> Response:
        return RedirectResponse(PAGE, status_code=307, headers=HEADERS)

    async def page(request: Request) -> Response:
        return _asset(assets, str(request.path_params.get("name", INDEX)), request)

    async def look(request: Request) -> Response:
        if foreign(request):
            return problem(403, "the console answers its own page only")
        try:
            question = read_question(request.query_params)
        except ValueError as error:
            return problem(400, str(error))
        return JSONResponse(encode(looked(question, digest)), headers={**HEADERS, "cache-control": "no-store"})

    async def one_request(request: Request) -> Response:
        if foreign(request):
            return problem(403, "the console answers its own page only")
        wanted = str(request.path_params["wanted"])
        found = traces.find(wanted) if len(wanted) <= MAX_WORD_CHARS else ()
        if not found:
            return problem(404, "this request is no longer among the last ones")
        return JSONResponse(encode(found[0]), headers={**HEADERS, "cache-control": "no-store"})

    return [
        Route("/", to_page),
        Route("/console", to_page),
        Route(PAGE, page),
        Route("/console/look", look),
        Route("/console/requests/{wanted}", one_request),
        *usage_routes(usage, digest),
        *fleet_routes(fleet, digest),
        Route("/console/{name}", page),
    ]


def read_question(query: Mapping[str, str]) -> Question:
    """Return the question that a query string asks.

    Raises:
        ValueError: a field is out of range; the message says which.
    """
    after_text, offset, find = query.get("after", "0"), query.get("offset", "0"), query.get("find", "")
    try:
        after = float(after_text[:MAX_WORD_CHARS])
    except ValueError:
        after = math.nan
    if not math.isfinite(after):
        raise ValueError("after must be a moment in seconds since the gateway's start")
    if not (offset.isascii() and offset.isdigit() and len(offset) <= MAX_OFFSET_DIGITS):
        raise ValueError("offset must be a whole number")
    if len(find) > MAX_FIND_CHARS:
        raise ValueError(f"find has more than {MAX_FIND_CHARS} characters")
    outcome, seen = query.get("outcome", ""), query.get("seen", "")
    if outcome not in ("", *OUTCOMES):
        raise ValueError(f"outcome must be one of {', '.join(OUTCOMES)}, or be left out")
    return Question(after=after, seen=seen[:MAX_WORD_CHARS], offset=int(offset), find=find.casefold(), outcome=outcome)


def _asset(assets: Mapping[str, Asset], name: str, request: Request) -> Response:
    asset = assets.get(name)
    if asset is None:
        return problem(404, "the console has no such file")
    headers = {**HEADERS, "etag": asset.etag, "cache-control": "no-cache"}
    known = {word.strip().removeprefix("W/") for word in request.headers.get("if-none-match", "").split(",")}
    if asset.etag in known:
        return Response(status_code=304, headers=headers)
    return Response(asset.body, headers={**headers, "content-type": asset.content_type})
