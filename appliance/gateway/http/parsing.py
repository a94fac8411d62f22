"""Parsing of large bodies beside the event loop: a few MiB of JSON take a hundred milliseconds and more.

The parser holds the interpreter's lock for most of its time, so one thread is enough, and the loop still gets its turns
between the pieces (measured with 4 MiB: the loop waits 20 to 90 ms at worst in place of 60 to 380). Bodies of one
tenant go one after the other, so that many of them do not hold up another tenant's one. How many may wait is bounded by
``BodyBudget``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from appliance.gateway.front.request_builder import Stamp
from isolation.ipc.sweeping import overwrite_cached

T = TypeVar("T")

INLINE_BYTES = 64 << 10
"""Bytes up to which a body is parsed at once: at most some milliseconds, and a thread costs a tenth of one."""


def and_forget(work: Callable[..., T], *given: Any) -> T:
    """Return what ``work`` makes of what it is given, and overwrite what the C library keeps for this thread of what
    was freed meanwhile: for work on tenants' texts beside the event loop's thread, which overwrites only its own."""
    try:
        return work(*given)
    finally:
        overwrite_cached()


class Parser:
    """Parses the bodies of one front end."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="parse")
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Locks by tenant, as long as bodies of the tenant are parsed or wait for it."""

    async def parse(self, tenant: str, parse: Callable[[bytes, Stamp], T], body: bytes, stamp: Stamp) -> T:
        """Return what ``parse`` makes of the body.

        Raises:
            InvalidRequestError: as ``parse``.
        """
        if len(body) <= INLINE_BYTES:
            return parse(body, stamp)
        async with self._turns.setdefault(tenant, asyncio.Lock()):
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, and_forget, parse, body, stamp)
