"""This host's part in the KV of a fleet: keys, objects and what is told of both. There only with ``kv_store.members``.

It has two ways to the carrier of its own. Questions for blocks of other hosts take no place of those for blocks of this
host alone; and keys, without which no tenant shares anything, wait for no blocks: whatever an engine asks for or sends,
leases are renewed.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Callable, Iterable

import structlog

from appliance.common.audit.entry import Entry, entry
from appliance.common.kv_store_state import FLEET_SHREDS, FLEET_STATE, FleetKeyState
from appliance.supervisor.fleet_keys.exchange import KeyExchange
from appliance.supervisor.fleet_keys.keeper import Changes, FleetKeys, ShredEnd
from appliance.supervisor.fleet_keys.membership import Membership
from appliance.supervisor.fleet_kv import EngineLife, FleetKv
from appliance.supervisor.kv_carrier import KvCarrier
from appliance.supervisor.spill_tiers import SpillFigures, SpillLimits
from isolation.keys.fleet_seal import EPOCH_BYTES

log = structlog.get_logger()


class FleetShare:
    """Keys and objects in common. ``start`` is called in the event loop, in which what is told of changes is called."""

    def __init__(
        self,
        membership: Membership,
        carrier: KvCarrier,
        keys_carrier: KvCarrier,
        limits: SpillLimits,
        figures: SpillFigures,
        *,
        writes_computed: bool = False,
    ) -> None:
        """``carrier``: way of blocks, ``keys_carrier`` of keys. ``writes_computed``: whether blocks of prompts are
        written when they are computed, and not when evicted."""
        tags = {one.host: hashlib.sha256(one.line.encode()).digest() for one in membership.members.members}
        self._carrier, self._keys_carrier = carrier, keys_carrier
        self._keys = FleetKeys(KeyExchange(membership, keys_carrier), self._carry_out, self._ended)
        producers = frozenset(tags.values())
        own = tags[membership.host]
        self.kv = FleetKv(self._keys, carrier, own, producers, limits, figures, writes_computed=writes_computed)
        self.on_changes: Callable[[Changes], None] = lambda _changes: None
        """Carries out that accounts have other generations. Set by the owner, called in the event loop."""
        self.on_entry: Callable[[Entry], None] = lambda _entry: None
        """Takes an entry for the audit log. Set by the owner, called in the event loop."""
        self.on_lost: Callable[[Iterable[bytes]], None] = lambda _namespaces: None
        """Tells engines that nothing that they sent of these namespaces is in the store. Set by the owner, called in
        the event loop."""
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Begin to exchange keys: the fleet's own, and those of accounts once they share."""
        self._loop = asyncio.get_running_loop()
        self._carrier.on_look = self._take_look
        self._keys.share(())
        self._keys.start()

    def close(self) -> None:
        """End the exchange and release the ways to the store; blocks for some seconds at most."""
        self._keys.close()
        self._keys_carrier.close()
        self._carrier.close()

    def share(self, accounts: Iterable[str]) -> None:
        """Set the accounts whose KV the fleet may use."""
        self._keys.share(accounts)

    def shred(self, account: str) -> bool:
        """Stop to use an account's key here and order that it ends everywhere; False where the account does not
        share."""
        return self._keys.shred(account)

    @property
    def namespaces(self) -> list[bytes]:
        """Namespace keys of which other hosts may have blocks."""
        return self._keys.namespaces

    @property
    def figures(self) -> dict[str, int]:
        """State of the keys and number of shreds on their way, by name."""
        state = FleetKeyState.HELD if self._keys.holds_keys else FleetKeyState.NONE_HELD
        return {FLEET_STATE: state, FLEET_SHREDS: self._keys.waiting}

    def life(self, model: str, backend: bytes) -> EngineLife:
        """Return a new life of an engine."""
        return EngineLife(secrets.token_bytes(EPOCH_BYTES), model, backend)

    def suspect(self, accounts: Iterable[str], sandbox: str) -> None:
        """End the generations under which an engine has written that died as none should: nobody uses its blocks, or
        what followed from them, any more. May be called from any thread."""
        assert self._loop is not None, "it was started"
        ending = tuple(accounts)
        self._keys.end(ending)
        for account in ending:
            log.warning("a tenant's key in the fleet ends with an engine", tenant=account, sandbox=sandbox)
            told = entry("kv_export", what="suspected", tenant=account, count=0)
            self._loop.call_soon_threadsafe(self.on_entry, told)

    def _take_look(self, lost: bool) -> None:
        """The store serves, and has ``lost`` everything or not. Engines send that once more; otherwise what they sent
        of namespaces of which it did not get all, where what the books still have is not written twice. Namespaces of
        others are not told: what is sent again takes time of engines and of the store. Nor is what the store refused,
        as long as it refuses: one that is full would be sent all of it again and again."""
        assert self._loop is not None, "it was started"
        unwritten = self.kv.take_unwritten(refused=lost or not self._carrier.refuses)
        if lost:
            self.kv.lose()
        told = self._keys.namespaces if lost else unwritten
        if told:
            self._loop.call_soon_threadsafe(self.on_lost, told)

    def _carry_out(self, changes: Changes, done: Callable[[], None]) -> None:
        assert self._loop is not None, "it was started"
        for account in changes:  # Here and not in the event loop: these can be some hundred thousand objects.
            self.kv.drop(account)
        self._loop.call_soon_threadsafe(self._change, changes, done)

    def _change(self, changes: Changes, done: Callable[[], None]) -> None:
        self.on_changes(changes)
        done()

    def _ended(self, shred: ShredEnd) -> None:
        assert self._loop is not None, "it was started"
        self._loop.call_soon_threadsafe(self._tell, shred)

    def _tell(self, shred: ShredEnd) -> None:
        what = "shredded" if shred.complete else "not shredded"
        tell = log.info if shred.complete else log.error
        tell("a shred within the fleet ended", tenant=shred.account, complete=shred.complete, seconds=shred.seconds)
        self.on_entry(entry("kv_export", what=what, tenant=shred.account, count=round(shred.seconds)))
