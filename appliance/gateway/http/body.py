"""Reading of request bodies: bounded in bytes and time, counted in memory, and given up politely."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from appliance.common.errors import InvalidRequestError, PayloadTooLargeError, RateLimitedError, UnavailableError
from appliance.gateway.http.head import RequestHead

TENANT_BYTES = 64 << 20
"""Bytes in flight for one tenant: sixteen of the largest bodies at once."""

TOTAL_BYTES = 256 << 20
"""Bytes in flight for all tenants."""

RETRY_S = 1.0
"""Reading and parsing a body takes less."""

HIGH_WATER_BYTES = 64 << 10
"""Bytes of a body that a connection takes before the handler reads them; more stay in the kernel's buffers."""


class BodyBudget:
    """Counts the bytes of bodies in memory at once, for each tenant and for all. Single-threaded, as the event loop is.

    A body is read before policy can count its tokens, so a tenant that opens every connection and sends each the
    largest body would otherwise hold 4 GiB without a single request admitted. Bytes are counted as they arrive and
    given back when the request is parsed or refused.
    """

    def __init__(self, tenant_bytes: int = TENANT_BYTES, total_bytes: int = TOTAL_BYTES) -> None:
        self._tenant_limit = tenant_bytes
        self._total_limit = total_bytes
        self._held: Counter[str] = Counter()

    @contextmanager
    def counting(self, tenant: str) -> Iterator[Callable[[int], None]]:
        """Yield what counts bytes of one body in; they are given back at the end of the block. It raises
        ``RateLimitedError`` when the tenant sends too much at once, ``UnavailableError`` when all tenants do."""
        counted = 0

        def count(size: int) -> None:
            nonlocal counted
            if self._held[tenant] + size > self._tenant_limit:
                raise RateLimitedError(
                    "too many large requests at once; send fewer in parallel",
                    retry_after_s=RETRY_S,
                    details={"limit_bytes": str(self._tenant_limit)},
                )
            if self._held.total() + size > self._total_limit:
                raise UnavailableError("too many large requests are being read; try again", retry_after_s=RETRY_S)
            self._held[tenant] += size
            counted += size

        try:
            yield count
        finally:
            self._held[tenant] -= counted
            if not self._held[tenant]:
                del self._held[tenant]


class ClientGoneError(Exception):
    """The client closed its connection; there is nobody to answer."""


class Body:
    """The part of a body that has arrived and was not read yet. The connection fills it, the handler empties it."""

    __slots__ = ("_arrival", "_ask", "_resume", "complete", "data", "gone", "invalid")

    def __init__(self, ask: Callable[[], None] | None, resume: Callable[[], None]) -> None:
        self.data = bytearray()
        self.complete = False
        """Whether the last byte has arrived."""
        self.invalid = False
        """Whether the framing broke the rules: nothing of it arrives any more."""
        self.gone = False
        """Whether the client has left."""
        self._ask = ask
        self._resume = resume
        self._arrival: asyncio.Event | None = None

    def changed(self) -> None:
        """Wake the handler that waits for more."""
        if self._arrival is not None:
            self._arrival.set()

    async def take(self) -> bytearray:
        """What has arrived, at least one byte or the end; the client is asked for it where it waits to be asked.

        Raises:
            InvalidRequestError: the body is not framed as HTTP demands.
            ClientGoneError: the connection closed first.
        """
        while not (self.data or self.complete or self.invalid or self.gone):
            if self._ask is not None:
                self._ask()
                self._ask = None
            self._arrival = asyncio.Event()
            await self._arrival.wait()
        if self.invalid:
            raise InvalidRequestError("not a valid HTTP request: the body's chunks are malformed, too many or too long")
        if self.gone and not self.complete:
            raise ClientGoneError
        taken, self.data = self.data, bytearray()
        self._resume()
        return taken


def has_body(head: RequestHead) -> bool:
    """Whether the request announces a body (RFC 9112, section 6.3)."""
    return head.length != 0


async def read_body(
    body: Body, head: RequestHead, count: Callable[[int], None], *, max_bytes: int, timeout_s: float
) -> bytes:
    """Return the whole body; its bytes are passed to ``count`` as they arrive.

    Raises:
        PayloadTooLargeError: announced or found larger than ``max_bytes``; the rest is not read.
        InvalidRequestError: it did not arrive in time, is compressed, or is not framed as HTTP demands.
        RateLimitedError, UnavailableError: too many bodies are being read at once.
        ClientGoneError: the connection closed first.
    """
    if any(value.lower() != "identity" for value in head.values("content-encoding")):
        raise InvalidRequestError("a compressed body is not taken; send it as it is", param="content-encoding")
    if head.length is not None and head.length > max_bytes:
        raise _too_large(max_bytes)
    parts: list[bytearray] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                part = await body.take()
                count(len(part))
                parts.append(part)
                size += len(part)
                if size > max_bytes:
                    raise _too_large(max_bytes)
                if body.complete and not body.data:
                    return b"".join(parts)
    except TimeoutError:
        raise InvalidRequestError(f"the body did not arrive within {timeout_s:g} s") from None


def _too_large(max_bytes: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(
        f"the body is larger than {max_bytes} bytes; shorten the prompt", details={"limit_bytes": str(max_bytes)}
    )
