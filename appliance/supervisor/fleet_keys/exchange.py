"""One host's part in the exchange of keys: reads and writes envelopes by way of the carrier, a turn at a time.

A turn waits for the carrier as a question of an engine does (``kv_carrier.PATIENCE_S``). What the store gives that no
member has written is counted, said, and changes nothing. Keys and orders may be asked for from any thread.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence

import structlog

from appliance.common.carrier_wire import ObjectStatus
from appliance.common.errors import EnvelopeError, StaleEnvelopeError
from appliance.common.members import FleetMember
from appliance.supervisor.fleet_keys.envelopes import ENVELOPE_BYTES, LIFE_BYTES, EnvelopeKind, Envelopes, check_account
from appliance.supervisor.fleet_keys.leases import FLEET, KEY_BYTES, MAX_TENANTS, KeyClient, KeyServer
from appliance.supervisor.fleet_keys.membership import Membership
from appliance.supervisor.store_tier import ObjectCarrier

log = structlog.get_logger()

TURN_S = 5.0
"""Seconds between two turns: a question is answered after about two of them."""

SAY_EVERY_S = 60.0
"""Seconds between two lines about envelopes that no member has written, and about one member that starts too often."""


def boot_clock() -> float:
    """Return seconds since the machine's boot, those included in which it slept."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class KeyExchange:
    """The fleet's keys on one host. ``turn`` is called by one thread, all else by any."""

    def __init__(self, membership: Membership, carrier: ObjectCarrier, clock: Callable[[], float] = boot_clock) -> None:
        self._membership = membership
        self._carrier = carrier
        self._clock = clock
        self._lock = threading.Lock()
        self._envelopes = Envelopes(membership)
        self._peers = {one.host: one for one in membership.others}
        self._server: KeyServer | None = None
        self._client: KeyClient | None = None
        self._allowed: frozenset[str] = frozenset()
        if membership.is_key_server:
            self._server = KeyServer(membership.life, lambda: secrets.token_bytes(KEY_BYTES), clock())
        else:
            self._client = KeyClient(secrets.token_bytes(LIFE_BYTES), self._envelopes.draw)
        self._seen: dict[str, bytes] = {}
        """Digest of the envelope that was read last from each peer: it is answered once."""
        self._said_at: dict[str, float] = {}
        """Monotonic time of the last line about each member that started too often, and, under no name, about what no
        member has written."""
        self.rejected = 0
        """Envelopes that no member of this list has written to this host."""

    def share(self, accounts: Sequence[str]) -> None:
        """Set the tenants whose keys this host may give and ask for, the first ``MAX_TENANTS - 1`` of them.

        Raises:
            AccountNameError: one is no name of a policy's tenant or sharing group; nothing has changed.
        """
        for account in accounts:
            check_account(account)
        chosen = (FLEET, *accounts[: MAX_TENANTS - 1])
        with self._lock:
            gone, self._allowed = self._allowed - {*chosen}, frozenset(chosen)
            if self._client is not None:
                self._client.want(chosen)
            if self._server is not None:
                for account in gone:
                    self._server.withdraw(account)

    def key(self, account: str) -> tuple[int, bytes] | None:
        """Return generation and key of an account now; None where this host may not use any."""
        with self._lock:
            if account not in self._allowed:
                return None
            if self._server is not None:
                return self._server.key(account)
            assert self._client is not None, "a host is one of the two"
            held = self._client.key(account, self._clock())
            return None if held is None else (held.generation, held.key)

    def shred(self, account: str) -> bool:
        """Erase an account's key here and have the next generation drawn; False where too many such orders wait. What
        the key server shares no more was erased with that.

        Raises:
            AccountNameError: it is no name of a policy's tenant or sharing group.
        """
        check_account(account)
        with self._lock:
            if self._server is not None:
                if account in self._allowed:
                    self._server.shred(account)
                return True
            assert self._client is not None, "a host is one of the two"
            return self._client.shred(account)

    def settled(self, account: str) -> bool:
        """Return whether no generation before the present one is held by any member, as far as this host knows."""
        with self._lock:
            if self._client is not None:
                return self._client.settled(account)
            assert self._server is not None, "a host is one of the two"
            return self._server.is_settled(account, self._clock())

    def waiting(self, account: str) -> Mapping[str, float]:
        """Return, on the key server, the members that may hold an earlier generation, with the seconds until their
        leases have ended; on other hosts nothing."""
        with self._lock:
            return {} if self._server is None else self._server.waiting(account, self._clock())

    def turn(self) -> None:
        """Read what came, and write what is due. Blocks for a bounded time."""
        if self._server is not None:
            self._serve(self._server)
        elif self._client is not None:
            self._ask(self._client)

    def _serve(self, server: KeyServer) -> None:
        for peer, data in self._read(tuple(self._peers.values()), EnvelopeKind.QUESTION):
            digest = hashlib.sha256(data).digest()
            if self._seen.get(peer.host) == digest:
                continue
            self._seen[peer.host] = digest
            try:
                question = self._envelopes.read_question(peer, data)
                with self._lock:
                    answer = server.answer(peer.host, question, self._allowed, self._clock())
                if answer is None:
                    self._say(peer.host, "a member has started too often to get keys now", host=peer.host)
                else:
                    self._write(peer, EnvelopeKind.ANSWER, self._envelopes.write_answer(peer, answer))
            except EnvelopeError as error:
                self._reject(error)

    def _ask(self, client: KeyClient) -> None:
        server = self._peers[self._membership.members.key_server]
        for _, data in self._read((server,), EnvelopeKind.ANSWER):
            try:
                answer = self._envelopes.read_answer(server, data)
            except StaleEnvelopeError:
                break
            except EnvelopeError as error:
                self._reject(error)
                break
            with self._lock:
                if client.take(answer, self._clock()):
                    self._envelopes.forget_challenge()
                    # A question says what is held no more. It waits for the next turn, before which the caller has
                    # engines forget what was computed under a key that has just gone.
                    return
        with self._lock:
            question = client.question(self._clock())
        if question is not None:
            self._write(server, EnvelopeKind.QUESTION, self._envelopes.write_question(server, question))

    def _read(self, peers: Collection[FleetMember], kind: EnvelopeKind) -> list[tuple[FleetMember, bytes]]:
        """Return what the store has of each of these peers."""
        found = list[tuple[FleetMember, bytes]]()
        for peer in peers:
            # One at a time: all together could take longer than a question may, and engines then get no blocks.
            ((status, body),) = self._carrier.get((self._envelopes.of(peer, kind).name,), (ENVELOPE_BYTES,))
            if status is ObjectStatus.OK:
                found.append((peer, bytes(body)))
        return found

    def _write(self, peer: FleetMember, kind: EnvelopeKind, data: bytes) -> None:
        name = self._envelopes.to(peer, kind).name
        # One that is not written is lost like any other: the question is asked anew.
        self._carrier.offer(name, memoryview(data), lambda _status: None, lambda: True, owner="")

    def _reject(self, error: EnvelopeError) -> None:
        self.rejected += 1
        self._say("", "the store has what no member of the fleet has written to this host", problem=error.message)

    def _say(self, about: str, event: str, **fields: str) -> None:
        """Write a line, unless one about the same was written in the last ``SAY_EVERY_S``."""
        now = time.monotonic()
        if now - self._said_at.get(about, -SAY_EVERY_S) >= SAY_EVERY_S:
            self._said_at[about] = now
            log.warning(event, **fields)
