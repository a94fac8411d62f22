"""Shares of the calls of the operator's API: how many there are at once, in all and of one caller.

A caller that may only read would otherwise take every place, with calls that send no message, and nobody could take its
role away by this API. Single-threaded, as the event loop is.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from appliance.common.account_roles import Identity
from appliance.common.errors import RateLimitedError

MAX_CALLS = 64
"""Calls at once; one more is refused."""

MAX_OF_CALLER = 24
"""Calls of one caller at once. Two that take all of theirs leave a quarter for the others."""

MAX_READERS = 4
"""Messages that are read at once: a policy may have tens of megabytes. Of these each caller has one."""

CALLS_RETRY_S = 1.0
"""When a caller may try again that was refused for the number of calls."""

Key = tuple[int, str]
"""User id of a caller, and its credential where it is on another machine."""


@dataclass(slots=True)
class _CallerCalls:
    """What one caller has now."""

    calls: int = 0
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)


class Shares:
    """Counts calls. It has one entry for each caller that has a call."""

    def __init__(self) -> None:
        self._calls = 0
        self._held: dict[Key, _CallerCalls] = {}
        self.readers = asyncio.Semaphore(MAX_READERS)
        """Taken behind the caller's own turn (``reading``)."""

    def enter(self, caller: Identity) -> Key:
        """Count a call; ``leave`` counts it out.

        Raises:
            RateLimitedError: there are as many as may be, in all or of this caller.
        """
        key = caller.user, caller.who
        held = self._held.get(key)
        if self._calls >= MAX_CALLS or (held is not None and held.calls >= MAX_OF_CALLER):
            whose = "of all callers" if self._calls >= MAX_CALLS else "of this caller"
            raise RateLimitedError(f"too many calls {whose} at once; end some first", retry_after_s=CALLS_RETRY_S)
        self._calls += 1
        self._held.setdefault(key, _CallerCalls()).calls += 1
        return key

    def leave(self, key: Key) -> None:
        """Count a call out."""
        self._calls -= 1
        held = self._held[key]
        held.calls -= 1
        if not held.calls:
            del self._held[key]

    def reading(self, key: Key) -> asyncio.Lock:
        """The turn of a caller's calls to read their messages; for one that was counted in."""
        return self._held[key].reading
