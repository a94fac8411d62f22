"""Which Host header names this machine's loopback, and the refusal of every other: a page in the operator's own browser
can reach loopback too, under a DNS name that was rebound to 127.0.0.1."""

from __future__ import annotations

import ipaddress

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from appliance.common.json_codec import Json


class LoopbackOnly:
    """Refuses requests whose Host is absent, doubled, or not this machine's own."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, as an ASGI application."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if scope["type"] == "http" and len(hosts) == 1 and is_loopback(hosts[0].decode("latin-1")):
            await self._app(scope, receive, send)
            return
        refusal = problem(403, "this listener answers to localhost and loopback addresses only")
        await refusal(scope, receive, send)


def is_loopback(host: str) -> bool:
    """Return whether a Host header names ``localhost`` or a loopback address, with or without a port."""
    name, _, port = host.rpartition(":") if not host.endswith("]") else (host, "", "")
    if not name or not port.isdigit():
        name = host
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


def problem(status: int, message: str) -> JSONResponse:
    """Return an error as both operators' listeners tell it."""
    body: Json = {"error": {"message": message}}
    return JSONResponse(body, status_code=status)
