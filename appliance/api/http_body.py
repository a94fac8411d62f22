"""Reading a request's body: capped, timed, and given up politely.

A server that answers and closes while the client still sends makes the kernel reset the connection, and the client may
lose the answer. ``drain`` therefore goes on reading for a moment, within bounds, and throws away what it reads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.datastructures import Headers

from appliance.api.body_budget import Account
from appliance.errors import InvalidRequestError, PayloadTooLargeError

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

DRAIN_BYTES = 1 << 20
"""Bytes read and thrown away after an early answer; a faster sender is cut off."""

DRAIN_S = 0.5
"""Seconds spent on that."""


class ClientGoneError(Exception):
    """The client closed its connection; there is nobody to answer."""


def has_body(headers: Headers) -> bool:
    """Whether the request announces a body (RFC 9112, section 6.3)."""
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


async def read_body(receive: Receive, headers: Headers, account: Account, *, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body; its bytes are counted to ``account`` as they arrive.

    Raises:
        PayloadTooLargeError: announced or found larger than ``max_bytes``; the rest is not read.
        InvalidRequestError: it did not arrive in time, or is compressed.
        RateLimitedError, UnavailableError: too many bodies are being read at once.
        ClientGoneError: the connection closed first.
    """
    if headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise InvalidRequestError("a compressed body is not taken; send it as it is", param="content-encoding")
    announced = headers.get("content-length")
    # The HTTP parser has refused anything but digits.
    if announced is not None and int(announced) > max_bytes:
        raise _too_large(max_bytes)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            more = True
            while more:
                message = await receive()
                if message["type"] != "http.request":
                    raise ClientGoneError
                account.take(len(message["body"]))
                parts.append(message["body"])
                size += len(message["body"])
                if size > max_bytes:
                    raise _too_large(max_bytes)
                more = message["more_body"]
    except TimeoutError:
        raise InvalidRequestError(f"the body did not arrive within {timeout_s:g} s") from None
    return b"".join(parts)


async def drain(receive: Receive) -> None:
    """Read on until the body ends, the client leaves, or ``DRAIN_BYTES`` or ``DRAIN_S`` are used up."""
    size = 0
    try:
        async with asyncio.timeout(DRAIN_S):
            while size <= DRAIN_BYTES:
                message = await receive()
                if message["type"] != "http.request" or not message["more_body"]:
                    return
                size += len(message["body"])
    except TimeoutError:
        return


async def wait_disconnect(receive: Receive) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _too_large(max_bytes: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(
        f"the body is larger than {max_bytes} bytes; shorten the prompt",
        details={"limit_bytes": str(max_bytes)},
    )
