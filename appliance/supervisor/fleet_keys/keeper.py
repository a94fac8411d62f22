"""Keeps this host's part in the exchange of keys going: a thread that takes turns, sees changes, and follows shreds.

A change of a tenant's generation is carried out before the next turn: the engines are told to forget what was computed
under the old one. The question of the next turn says that this host holds the old generation no more, so who calls a
shred complete knows that engines were told as well. A lease that ends is seen within ``LOOK_S``; the server counts
``leases.DRIFT_S`` longer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import structlog

from appliance.supervisor.fleet_keys.exchange import TURN_S, KeyExchange
from appliance.supervisor.fleet_keys.leases import DRIFT_S, FLEET, LEASE_S, MAX_TENANTS
from isolation.keys.fleet_seal import Generation

log = structlog.get_logger()

LOOK_S = 1.0
"""Seconds between two looks at what changed: a tenth of the time that the server counts longer."""

FOLLOW_S = 2 * (LEASE_S + DRIFT_S)
"""Seconds for which a shred is followed: twice as long as one may take with the key server at work."""

Changes = Mapping[str, Generation | None]
"""Account to its generation from now on; None: this host holds none."""


@dataclass(frozen=True, slots=True)
class ShredEnd:
    """How a shred among the hosts of a fleet ended, as far as this host knows."""

    account: str
    seconds: float
    complete: bool
    """Whether no member holds an older generation; else nobody said so in ``FOLLOW_S``."""


class FleetKeys:
    """Generations of the tenants that share, and shreds on their way. All methods may be called from any thread."""

    def __init__(
        self,
        exchange: KeyExchange,
        carry_out: Callable[[Changes, Callable[[], None]], None],
        ended: Callable[[ShredEnd], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``carry_out`` takes changes and what to call when all of them are carried out, ``ended`` the end of a shred;
        both are called from the thread and do not wait."""
        self._exchange = exchange
        self._carry_out, self._ended = carry_out, ended
        self._clock = clock
        self._lock = threading.Lock()
        self._accounts: frozenset[str] = frozenset()
        self._known: dict[str, int] = {}
        """Number of the generation that was told last, by account."""
        self._spaces: dict[bytes, Generation] = {}
        """Generations by the namespace keys that follow from them."""
        self._owed: set[str] = set()
        """Accounts whose generations are to end and for which no order was taken yet."""
        self._shreds: dict[str, float] = {}
        """Begin of shreds that are not complete yet."""
        self._carried = threading.Event()
        """Whether all changes so far are carried out."""
        self._carried.set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fleet keys", daemon=True)

    def start(self) -> None:
        """Begin to take turns."""
        self._thread.start()

    def close(self) -> None:
        """End the thread; blocks for a turn at most."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def share(self, accounts: Iterable[str]) -> None:
        """Set the tenants that share, the first ``MAX_TENANTS - 1`` by name; keys of others are erased here."""
        chosen = sorted(accounts)[: MAX_TENANTS - 1]
        with self._lock:
            self._accounts = frozenset(chosen)
            self._exchange.share(chosen)

    def current(self, namespace: bytes) -> Generation | None:
        """Return the generation from which a namespace key follows, while this host may use it."""
        found = self._spaces.get(namespace)
        if (
            found is None
            or found.account in self._owed
            or self._exchange.key(found.account) != (found.number, found.key)
        ):
            return None
        return found

    @property
    def fleet_key(self) -> bytes | None:
        """Key under which names are made, while this host may use it."""
        found = self._exchange.key(FLEET)
        return None if found is None else found[1]

    @property
    def namespaces(self) -> list[bytes]:
        """Namespace keys that follow from generations now."""
        return [namespace for namespace in list(self._spaces) if self.current(namespace) is not None]

    def shred(self, account: str) -> bool:
        """Stop to use an account's key here and have another drawn (``end``); False where the account does not share,
        so that there is nothing to end."""
        with self._lock:
            shares = account in self._accounts
        if shares:
            self.end((account,))
        return shares

    def end(self, accounts: Iterable[str]) -> None:
        """Have the generations of these accounts end, whether they still share or not. None of them is used here from
        now on; those for which too many orders wait are ordered as soon as there is room."""
        with self._lock:
            self._owed.update(accounts)
            self._order_owed()

    @property
    def waiting(self) -> int:
        """Shreds that are not complete yet."""
        with self._lock:
            return len(self._owed | self._shreds.keys())

    @property
    def holds_keys(self) -> bool:
        """Whether this host may use the fleet's key now: it is the key server, or has a lease."""
        return self.fleet_key is not None

    def turn(self) -> None:
        """Take a turn of the exchange, unless changes are still to be carried out here."""
        if self._carried.is_set():
            self._exchange.turn()

    def look(self) -> None:
        """Find out what changed and have it carried out; end shreds that are complete."""
        if not self._carried.is_set():
            return
        with self._lock:  # An order that comes in between is of another shred than the one that is told of.
            self._order_owed()
            changes = self._changes()
            over = () if changes else self._over()
        if changes:
            self._carried.clear()
            self._carry_out(changes, self._carried.set)
        for one in over:
            self._ended(one)

    def _order_owed(self) -> None:
        for account in sorted(self._owed):
            if not self._exchange.shred(account):
                return
            self._owed.discard(account)
            self._shreds.setdefault(account, self._clock())

    def _changes(self) -> Changes:
        found = dict[str, Generation | None]()
        for account in self._accounts | self._known.keys():
            key = self._exchange.key(account)
            if key is None and account in self._known:
                found[account] = None
            elif key is not None and key[0] != self._known.get(account):
                found[account] = Generation(account, *key)
        for account, generation in found.items():
            self._known.pop(account, None)
            for namespace in [space for space, one in self._spaces.items() if one.account == account]:
                del self._spaces[namespace]
            if generation is not None:
                self._known[account] = generation.number
                self._spaces[generation.namespace()] = generation
        return found

    def _over(self) -> list[ShredEnd]:
        """Return the shreds that are complete, and those that nobody has called so in time."""
        found = list[ShredEnd]()
        for account, began in list(self._shreds.items()):
            seconds, complete = self._clock() - began, self._exchange.settled(account)
            if account in self._owed:
                continue  # What is settled is an earlier shred.
            if complete or seconds > FOLLOW_S:
                del self._shreds[account]
                found.append(ShredEnd(account, seconds, complete))
        return found

    def _run(self) -> None:
        turned = -TURN_S
        while not self._closing.wait(LOOK_S):
            if time.monotonic() - turned >= TURN_S:
                turned = time.monotonic()
                self.turn()
            self.look()
