"""Numbers of the HTTP front end that an operator or a test may set."""

from __future__ import annotations

from dataclasses import dataclass, field

from appliance.gateway.front.affinity import SessionAffinity
from appliance.gateway.front.padding import Padding
from appliance.gateway.front.request_builder import MAX_BODY_BYTES
from appliance.gateway.http.cross_origin import CrossOrigin


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """Limits and timeouts; ``_s`` is seconds."""

    max_body_bytes: int = MAX_BODY_BYTES
    max_connections: int = 1_024
    """Open connections; one more is closed at once where none is a stranger's."""
    max_strangers: int = 256
    """Open connections without a credential; with one more, the oldest of the address that holds most is closed. With
    TLS each takes 320 KiB: however many knock, the two ports together stay within 160 MiB."""
    max_connections_each: int = 512
    """Open connections of one address, and of one tenant. A proxy in front that is not trusted is one address: its pool
    must be smaller."""
    head_timeout_s: float = 10.0
    """From a connection's opening, or from a request's first byte, to the end of its headers."""
    body_timeout_s: float = 30.0
    """For the whole body: 4 MiB at 1.1 Mbit/s."""
    keep_alive_s: int = 75
    """Between two requests on a connection; longer than the pools of common clients keep one."""
    sse_keepalive_s: float = 15.0
    """Silence in a stream after which a comment is sent; common proxies cut at 30 to 60."""
    stall_s: float = 30.0
    """For how long a client may take nothing of what was sent before the kernel ends its connection."""
    padding: Padding = field(default_factory=Padding)
    """How the answers of tenants are padded whose class asks for it; gRPC takes it from here too."""
    allowed_hosts: frozenset[str] = frozenset()
    """Names (with port, as sent) that the Host header must be one of; empty: any. Guards against DNS rebinding."""
    cross_origin: CrossOrigin = field(default_factory=CrossOrigin)
    """Pages of other origins that may call."""
    affinity: SessionAffinity | None = None
    """Makes the tags of sessions; None where the appliance is in no fleet. gRPC takes it from here too."""
    demands_certificate: bool = False
    """Whether callers without a client certificate are refused, but for health."""
