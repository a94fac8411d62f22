"""Credentials in force, put together: keys and their files, last uses, and the end of what runs without one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime

from appliance.gateway.front.auth import Resolver, holds
from appliance.gateway.front.key_file import LOOK_S, KeyFile
from appliance.gateway.front.key_uses import Send, UnsentKeyUses
from appliance.gateway.generate_request import Principal, Service

EndUnproved = Callable[[Callable[[Principal], bool]], None]
"""Ends every running request of a caller whose credential does not hold."""


class Credentials:
    """What the gateway knows of its callers' proofs. All methods run in one event loop."""

    def __init__(self, keys: KeyFile, send: Send) -> None:
        """``send`` sends last uses of keys to the supervisor."""
        self._keys = keys
        self.uses = UnsentKeyUses(send)

    def resolver(self, service: Service) -> Resolver:
        """Return what turns proofs into principals."""
        return Resolver(service, lambda: self._keys.keys, used=self.uses.note)

    def holding(self) -> Callable[[Principal], bool]:
        """Return what says whether the credential of a running request is in force now."""
        now, keys = datetime.now(UTC), self._keys.keys
        return lambda caller: holds(caller, keys, now)

    async def run(self, end_unproved: EndUnproved) -> None:
        """Put changed keys in force, and end requests whose credential has expired or was revoked, within a second;
        until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self._keys.look()
            end_unproved(self.holding())
