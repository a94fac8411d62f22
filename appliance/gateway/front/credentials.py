"""Credentials in force, put together: keys and their files, last uses, and the end of what runs without one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from appliance.common.clocks import Clocks
from appliance.common.status import IssuerStatus, KeysStatus
from appliance.common.token_config import TokenIssuerConfig
from appliance.gateway.front.auth import Resolver, holds
from appliance.gateway.front.folder_bell import FolderBell
from appliance.gateway.front.key_file import LOOK_S, KeyFile
from appliance.gateway.front.key_uses import Send, UnsentKeyUses
from appliance.gateway.front.tokens import TokenVerifier
from appliance.gateway.generate_request import Principal
from appliance.gateway.service import Service

EndUnproved = Callable[[Callable[[Principal], bool]], None]
"""Ends every running request of a caller whose credential does not hold."""


class Credentials:
    """What the gateway knows of its callers' proofs. All methods run in one event loop."""

    def __init__(self, keys: KeyFile, send: Send, issuers: Sequence[TokenIssuerConfig] = ()) -> None:
        """``send`` sends last uses of keys to the supervisor; ``issuers`` are those of tokens."""
        self._keys = keys
        self.tokens = TokenVerifier(issuers)
        self.uses = UnsentKeyUses(send)

    def resolver(self, service: Service) -> Resolver:
        """Return what turns proofs into principals."""
        return Resolver(
            service, lambda: self._keys.keys, used=self.uses.note, tokens=self.tokens if self.tokens.issuers else None
        )

    def holding(self) -> Callable[[Principal], bool]:
        """Return what says whether the credential of a running request is in force now."""
        now, keys = datetime.now(UTC), self._keys.keys
        return lambda caller: holds(caller, keys, now, self.tokens)

    def status(self) -> KeysStatus:
        """Return the state of keys and issuers."""
        found, table = self._keys, self._keys.keys
        issuers = (
            IssuerStatus(name=one.config.name, keys=tuple(sorted(one.keys)), problem=one.problem)
            for one in self.tokens.in_force
        )
        return KeysStatus(
            file=str(found.path),
            digest=table.digest,
            keys=len(table.records),
            loaded_at=Clocks().unix(found.since),
            problem=found.problem,
            issuers=tuple(issuers),
        )

    async def run(self, end_unproved: EndUnproved) -> None:
        """Put changed keys in force, and end requests whose credential has expired or was revoked, within a second;
        until cancelled. A changed file is read at once, ``LOOK_S`` is for what no folder tells."""
        with FolderBell() as bell:
            while True:
                bell.watch(self._keys.folders)
                await bell.sleep(LOOK_S)
                await self._keys.look()
                end_unproved(self.holding())
