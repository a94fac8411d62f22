"""Runs the lending of limits between the hosts of a fleet: one exchange with the store at a time.

It runs in the gateway, which has the ledger, the fleet's key and a network; the supervisor has none, and a program of
its own would need the first two. While the store is away nothing is lent. One that lies can make no message, but it can
repeat questions, by which hosts give away what they do not use of a budget: it takes from a tenant, and gives nothing.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import structlog

from appliance.common.config import ApplianceConfig
from appliance.common.errors import UnavailableError
from appliance.common.fleet_config import FleetConfig
from appliance.gateway.fleet.lending import SPEND, Lender, LimitAmount, Message
from appliance.gateway.fleet.message import MessageError, Sealer
from appliance.gateway.fleet.own_parts import OwnParts
from appliance.gateway.fleet.store import FleetStoreError, Store
from appliance.gateway.front.affinity import read_fleet_key
from appliance.gateway.request.audit_feed import AuditFeed
from appliance.gateway.request.ledger import Ledger
from appliance.gateway.request.spend import Spends
from appliance.gateway.telemetry import names

log = structlog.get_logger()

TURN_S = 0.25
"""Seconds between two exchanges: a host that runs short has what is lent after about two."""

RECORD_S = 1.0
"""Seconds within which a loan of a budget is to be on disk: with the turns of both hosts, its answer is then fresh."""

AWAY_S = 2.0
"""Seconds between two attempts while the store is away."""

NOT_ASKED = "it was not asked yet"

LIFE_BYTES = 8
"""Random bytes of the number of a process's life, and of a loan."""


@dataclass(slots=True)
class Sharing:
    """Lends and borrows for one host."""

    config: FleetConfig | None
    fleet_key: bytes
    parts: OwnParts
    audit: AuditFeed
    record_spend: Callable[[str, str, int], Awaitable[None]] | None
    """Records a reservation of spend on disk; None where no account is kept."""
    count: Callable[..., None] = lambda *_args, **_labels: None
    """Adds to a counter of ``names``."""
    problem: str = NOT_ASKED
    """Why nothing is lent now; empty while the store answers."""
    strangers: int = 0
    """Values of the store that no host of the fleet has written, since the start."""
    _tags: dict[str, str] = field(default_factory=dict)
    _tagged: object = None
    """Tenants that the tags are of."""

    @property
    def wanted(self) -> bool:
        """Whether there is a store by which hosts lend."""
        return self.config is not None and bool(self.config.store)

    def store_problem(self) -> str | None:
        """Return why the store does not answer, empty while it does; None where there is none."""
        return self.problem if self.wanted else None

    async def run(self, count: Callable[..., None]) -> None:
        """Lend and borrow until cancelled, which without a store is to wait; ``count`` adds to a counter."""
        self.count = count
        if self.config is None or not self.config.store:
            await asyncio.Event().wait()
            return
        await self._run(self.config)

    async def _run(self, config: FleetConfig) -> None:
        store, sealer = Store(config), Sealer(self.fleet_key)
        lender = Lender(config.host, config.peers, secrets.token_hex(LIFE_BYTES), self.parts, self._borrowed)
        keys = [self._key(sealer, name) for name in config.peers]
        try:
            while True:
                mine = lender.write(time.monotonic())
                try:
                    values = await store.exchange(self._key(sealer, config.host), sealer.write(mine), keys)
                except FleetStoreError as error:
                    self._become(str(error))
                    await asyncio.sleep(AWAY_S)
                    continue
                self._become("")
                lent = lender.read(self._messages(sealer, config.peers, values), time.monotonic())
                await asyncio.gather(*(self._lent(lender, peer, loan) for peer, loan in lent))
                await asyncio.sleep(TURN_S)
        finally:
            await store.close()

    def _messages(self, sealer: Sealer, peers: tuple[str, ...], values: list[bytes | None]) -> list[Message]:
        """Return what the other hosts say; what none of them has written is counted and left out."""
        self._tag(sealer)
        found = []
        for name, value in zip(peers, values, strict=True):
            if value is not None:
                try:
                    found.append(sealer.read(value, name, self._tags.get))
                except MessageError as error:
                    self.strangers += 1
                    self.count(names.FLEET_REFUSED)
                    if self.strangers == 1:
                        log.warning("the fleet's store has a value that is not of a host", host=name, cause=str(error))
        return found

    def _tag(self, sealer: Sealer) -> None:
        """Make the tags of all tenants of a policy that is new."""
        tenants = self.parts.ledger.policy.tenants
        if self._tagged is not tenants:
            self._tags, self._tagged = {sealer.tag(name): name for name in tenants}, tenants

    async def _lent(self, lender: Lender, peer: str, loan: LimitAmount) -> None:
        """Note what is lent; a budget is told only once the loan is on disk, so that no restart forgets it. One that is
        not there in time is not lent: nobody was told of it, so this host may spend it."""
        if loan.kind == SPEND:
            lease = f"lease_{secrets.token_hex(LIFE_BYTES)}"
            try:
                if self.record_spend is None:
                    raise UnavailableError("no account of spend is kept")
                async with asyncio.timeout(RECORD_S):
                    await self.record_spend(lease, loan.tenant, loan.amount)
                self.audit.flush()
                if self.audit.behind:
                    raise UnavailableError("the supervisor takes no entry of the audit log now")
            except (UnavailableError, TimeoutError) as error:
                problem = error.message if isinstance(error, UnavailableError) else "it was not recorded in time"
                log.warning("a budget is not lent", tenant=loan.tenant, problem=problem)
                lender.withhold(peer, loan)
                return
            self._tell("lent", peer, loan, lease)
            self.audit.flush()  # It is on its way to the log before anybody is told: a kill leaves no loan without it.
        self.count(names.FLEET_LENT, loan.amount, kind=loan.kind)

    def _borrowed(self, peer: str, loan: LimitAmount) -> None:
        if loan.kind == SPEND:
            self._tell("borrowed", peer, loan, f"lease_{secrets.token_hex(LIFE_BYTES)}")
        self.count(names.FLEET_BORROWED, loan.amount, kind=loan.kind)

    def _tell(self, what: str, peer: str, loan: LimitAmount, lease: str) -> None:
        self.audit.add(
            "lease", what=what, tenant=loan.tenant, host=peer, lease=lease, day=self.parts.day, cost=loan.amount
        )

    def _become(self, problem: str) -> None:
        if problem and self.problem in ("", NOT_ASKED):
            log.warning("the fleet's store is away; this host has its own part of each limit", problem=problem)
        elif self.problem and not problem:
            log.info("the fleet's store answers")
        self.problem = problem

    @staticmethod
    def _key(sealer: Sealer, host: str) -> bytes:
        return f"athanor:limits:{sealer.fleet}:{host}".encode()


def open_sharing(
    config: ApplianceConfig,
    ledger: Ledger,
    spends: Spends,
    audit: AuditFeed,
    record_spend: Callable[[str, str, int], Awaitable[None]],
) -> Sharing:
    """Make what lends limits within the fleet; it does nothing where limits are this host's or there is no store.

    Raises:
        StartError: the fleet's key cannot be used.
    """
    parts, key = OwnParts(ledger, spends), config.listen.fleet_key
    found = Sharing(config.fleet, b"", parts, audit, record_spend if config.audit is not None else None)
    if found.wanted and key is not None:
        found.fleet_key = read_fleet_key(key)
        ledger.on_used = parts.note
    return found
