"""What every answer of the console tells a browser, and which pages may ask."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from appliance.common.errors import RoleError
from appliance.common.operator_roles import NEEDED, OperatorRole, require

POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
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
"""Headers of every answer of the console."""


ROLES = "roles"
"""Key in a request's state: what gives the roles of the caller."""


def needs_role(request: Request, route: str) -> Response | None:
    """Return the refusal of a caller that has not the role that a route needs; None for one that has it. A listener
    that tells of no roles gives none."""
    roles: Callable[[], Iterable[OperatorRole]] = getattr(request.state, ROLES, tuple)
    try:
        require(roles(), NEEDED[route], route, "operator_api, for users of a Unix socket, or remote_operators")
    except RoleError as error:
        return problem(403, error.message)
    return None


def foreign(request: Request) -> bool:
    """Return whether a page of another origin sent the request; browsers tell, other programs send no such header."""
    site, origin = request.headers.get("sec-fetch-site", "none"), request.headers.get("origin")
    own = f"{request.url.scheme}://{request.headers.get('host', '')}"
    return site not in ("none", "same-origin") or (origin is not None and origin != own)


def problem(status: int, message: str) -> Response:
    """Return an answer that says what is wrong."""
    return JSONResponse({"error": {"message": message}}, status_code=status, headers=HEADERS)
