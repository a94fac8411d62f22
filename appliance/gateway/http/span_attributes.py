"""What a server span has of an HTTP request, by OpenTelemetry's HTTP conventions v1.41 (docs/http/http-spans.md); pure.

A request for a path that is none has its method and its version alone: everything else in it is a stranger's text, and
is not kept.
"""

from __future__ import annotations

from appliance.gateway.http.head import RequestHead

MAX_AGENT = 256
"""Characters of ``user_agent.original`` that are kept: browsers' have some 120, and nobody may fill the store."""

MAX_HOST = 253
"""Characters of ``server.address``: the longest name of the DNS."""

PORTS = {"http": 80, "https": 443}
"""Port of a Host header that names none."""

MAX_PORT = (1 << 16) - 1


def span_attributes(head: RequestHead, scheme: str, client: str, *, known: bool) -> dict[str, str | int]:
    """Return the attributes of a request's server span.

    Args:
        head: the request's head.
        scheme: ``http`` or ``https``.
        client: address of the client.
        known: whether the path is a route's.
    """
    found: dict[str, str | int] = {
        "http.request.method": head.method,
        "client.address": client,
        "url.scheme": scheme,
        "network.protocol.version": "1.1" if head.http_11 else "1.0",
    }
    if not known:
        return found
    found["url.path"] = head.path
    if agents := head.values("user-agent"):
        found["user_agent.original"] = _printable(agents[0][:MAX_AGENT])
    name, port = _server(head.host or "", scheme)
    if name:
        found |= {"server.address": name, "server.port": port}
    return found


def _server(host: str, scheme: str) -> tuple[str, int]:
    """Return name and port of the server as the client has called it; an empty name where that is none."""
    name, colon, port = host.rpartition(":")
    if not colon or "]" in port:  # no port, or the end of an IPv6 address
        name, port = host, ""
    if port and not (port.isascii() and port.isdecimal() and int(port) <= MAX_PORT):
        return "", 0
    return _printable(name.removeprefix("[").removesuffix("]")[:MAX_HOST]), int(port or PORTS.get(scheme, 0))


def _printable(text: str) -> str:
    return "".join(char if char.isascii() and char.isprintable() else "?" for char in text)
