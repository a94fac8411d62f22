"""Pages of other origins: which of them browsers let call the API (the Fetch standard, section 3.3); pure.

A browser asks first, by a preflight (``OPTIONS``) that carries no credential and says nothing but the page's origin. So
the answer is of the listener, the same for every path: it tells no path and no tenant. Cookies do not exist here, and
``access-control-allow-credentials`` is never sent: a page has to have a key.
"""

from __future__ import annotations

from dataclasses import dataclass

from appliance.gateway.front.affinity import HEADER
from appliance.gateway.http.head import RequestHead
from appliance.gateway.http.header_fields import Headers

MAX_AGE_S = 600
"""Seconds for which a browser need not ask again: one preflight for a conversation, and an origin that the operator
takes away is asked about again soon. Its answers are kept from the page at once."""

METHODS = ("GET", "POST", "DELETE")
"""Those of the routes; HEAD needs no leave."""

REQUEST_HEADERS = ("authorization", "x-api-key", "content-type", "traceparent", "x-request-timeout-ms", HEADER, "*")
"""Headers that a page may send. The star is for what clients add of their own and nothing here reads
(``x-stainless-os``, ``anthropic-version``); it does not stand for ``authorization``."""

ANSWER_HEADERS = (
    "x-request-id",
    "openai-processing-ms",
    *(f"x-ratelimit-{what}-{unit}" for what in ("limit", "remaining", "reset") for unit in ("requests", "tokens")),
    "retry-after",
    "retry-after-ms",
    "x-should-retry",
    "x-athanor-ignored",
    "x-athanor-rule",
    "x-athanor-policy",
    HEADER,
)
"""Headers of answers that a page may read, besides those that every page may."""

_VARY: Headers = [("vary", "origin")]
_LEAVE: Headers = [
    ("access-control-allow-methods", ", ".join(METHODS)),
    ("access-control-allow-headers", ", ".join(REQUEST_HEADERS)),
    ("access-control-max-age", str(MAX_AGE_S)),
]


@dataclass(frozen=True, slots=True)
class CrossOrigin:
    """What one listener lets pages of other origins do."""

    origins: frozenset[str] = frozenset()
    """Origins of pages that may call; empty: none, and answers say nothing about it."""

    def rows(self, head: RequestHead) -> Headers:
        """Return the headers that every answer to a request has on account of this."""
        if not self.origins:
            return []
        if not self.allows(head):
            # A cache that keeps this answer must not give it to a page that may have it, nor the other way round.
            return _VARY
        allowed = ("access-control-allow-origin", head.values("origin")[0])
        return [*_VARY, allowed, ("access-control-expose-headers", ", ".join(ANSWER_HEADERS))]

    def asks(self, head: RequestHead) -> bool:
        """Return whether a request is a preflight that is answered here; while no origin is listed, none is."""
        asked = head.method == "OPTIONS" and head.values("access-control-request-method") and head.values("origin")
        return bool(self.origins and asked)

    def allows(self, head: RequestHead) -> bool:
        """Return whether the page that a request comes from may call."""
        found = head.values("origin")
        return len(found) == 1 and found[0] in self.origins

    @staticmethod
    def leave() -> Headers:
        """Return what the answer to a preflight of such a page says besides."""
        return _LEAVE
