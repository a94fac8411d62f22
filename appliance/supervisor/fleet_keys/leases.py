"""How a key server gives tenants' keys to the members of a fleet, for a time. Pure: times and random bytes are given.

One member, which the signed list names, draws the keys: a *generation* for each tenant, and one of the fleet, under
which names are made. All others ask, and get all that they may have in one answer.

* A question has a *challenge* that was drawn for it. An answer is bound to it, is taken once, and begins a lease of
  ``LEASE_S`` at the moment of the question by the asker's own clock. So an answer that is late, repeated or somebody
  else's extends nothing, and no clock of another host is believed.
* The server counts the same lease from the later moment of its answer, and ``DRIFT_S`` longer. What it counts as ended
  has ended.
* A shred draws the next generation and erases the one before. A generation is *settled* when none before it is held by
  anybody: each life of a member that got one has said that it holds none below (which stays true, however often it is
  repeated), or the lease of the last answer has ended.
* Numbers of generations only grow: over all tenants, and over restarts of the server, whose lives are counted on disk.
  A member takes none below the one that it had. Keys are in memory alone, so those of an earlier life of the server
  are gone there, and count as given until ``LEASE_S`` after its start.

Messages cross a store that may lose, delay, repeat and mix up what it has. ``envelopes`` makes sure that it can do no
more than that. Clocks count while the machine sleeps (CLOCK_BOOTTIME).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

LEASE_S = 300.0
"""Seconds for which a member may use keys, counted from its question: how long a host without the store goes on."""

DRIFT_S = 10.0
"""Seconds that the server counts longer: two clocks that differ by less than 1.6 % agree that a lease has ended."""

RENEW_S = 30.0
"""Seconds between two questions of a member: within them it gets to know of a shred."""

FRESH_S = 30.0
"""Seconds for which a question waits for its answer; another one is drawn then."""

FLEET = "*"
"""Account of the fleet's own key, which no tenant can be named."""

MAX_TENANTS = 512
"""Accounts of one question, that of the fleet among them: what fits one message. Further tenants share nothing."""

MAX_ORDERS = 64
"""Shreds of one member that the server has not carried out yet."""

MAX_ORDERED = 16_384
"""Accounts for which one life of a member may have ordered a shred: more than a policy has."""

MAX_LIVES = 16
"""Lives of one member with leases that have not ended. One that restarts more often gets none for a while."""

MAX_UNSETTLED = 64
"""Generations of one account that one life of a member may hold; it gets no more until one is settled."""

GENERATION_BITS = 32
"""Bits of a generation's number that count within one life of the server."""

KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class AccountState:
    """What a member says of one account."""

    floor: int = 0
    """It holds no generation below this number, and takes none."""
    orders: int = 0
    """Shreds that this life of the member has ordered so far."""


@dataclass(frozen=True, slots=True)
class KeyQuestion:
    """What a member asks the server."""

    life: bytes
    """Random number of the member's process."""
    challenge: bytes
    """Public key that was drawn for this question."""
    server: int
    """Life of the server that gave the last answer; 0: none has. Orders are for that life alone."""
    accounts: Mapping[str, AccountState]


@dataclass(frozen=True, slots=True)
class GivenKey:
    """Key of one account in an answer."""

    generation: int
    settled: int
    """No generation below this number is held by anybody, as far as the server knows."""
    orders: int
    """Shreds of this life of the member that were carried out before the key was drawn."""
    key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class KeyAnswer:
    """What the server gives a member: all that it may have."""

    life: bytes
    challenge: bytes
    server: int
    keys: Mapping[str, GivenKey]


@dataclass(frozen=True, slots=True)
class HeldKey:
    """Key that a member may use until a moment of its own clock."""

    generation: int
    key: bytes
    until: float

    def __repr__(self) -> str:
        return f"<HeldKey of generation {self.generation:#x}>"


@dataclass(slots=True)
class KeyClient:
    """One member that is not the server. ``draw`` gives the challenge of a new question."""

    life: bytes
    draw: Callable[[], bytes]
    _wanted: frozenset[str] = frozenset()
    _held: dict[str, HeldKey] = field(default_factory=dict)
    _floors: dict[str, int] = field(default_factory=dict)
    _settled: dict[str, int] = field(default_factory=dict)
    _orders: dict[str, int] = field(default_factory=dict)
    _pending: set[str] = field(default_factory=set)
    """Accounts with a shred that no answer has confirmed."""
    _following: set[str] = field(default_factory=set)
    """Accounts with a shred that no answer has called settled. They are asked for, though this member may want their
    keys no more; it holds none of these then."""
    _server: int = 0
    _question: KeyQuestion | None = None
    _asked_at: float = 0.0
    _told_at: float | None = None
    """When the question of the last answer was asked."""
    _hurry: bool = False
    """Whether something changed that the next question should say before ``RENEW_S`` are over."""

    def want(self, accounts: Sequence[str]) -> None:
        """Set the accounts whose keys are asked for, the first ``MAX_TENANTS`` of them; keys of others are erased."""
        wanted = frozenset(accounts[:MAX_TENANTS])
        self._hurry |= not wanted <= self._wanted
        for account in self._wanted - wanted:
            self._held.pop(account, None)
            if account not in self._following:
                self._floors.pop(account, None)
                self._settled.pop(account, None)
        self._wanted = wanted

    def key(self, account: str, now: float) -> HeldKey | None:
        """Return an account's key while its lease lasts."""
        found = self._held.get(account)
        if found is not None and now >= found.until:
            del self._held[account]
            return None
        return found

    def expire(self, now: float) -> None:
        """Erase keys whose leases have ended."""
        for account in list(self._held):
            self.key(account, now)

    def shred(self, account: str) -> bool:
        """Erase an account's key and order the next generation; none is taken before that is drawn. False where
        ``MAX_ORDERS`` wait already: order it again later."""
        if account not in self._pending and len(self._pending) >= MAX_ORDERS:
            return False
        if account not in self._orders and len(self._orders) >= MAX_ORDERED:
            return False
        self._held.pop(account, None)
        self._orders[account] = self._orders.get(account, 0) + 1
        self._pending.add(account)
        self._following.add(account)
        self._hurry = True
        return True

    def settled(self, account: str) -> bool:
        """Return whether no generation before the one that this member last took is held by anybody, and no order
        waits."""
        floor = self._floors.get(account, 0)
        return account not in self._pending and 0 < floor <= self._settled.get(account, 0)

    def question(self, now: float) -> KeyQuestion | None:
        """Return a question to ask now, with a challenge of its own; None while one waits or nothing is due."""
        self.expire(now)
        if self._question is not None and now - self._asked_at <= FRESH_S:
            return None
        self._question = None
        due = self._told_at is None or self._hurry or now - self._told_at >= RENEW_S
        further = sorted(self._wanted - self._pending), sorted(self._following - self._wanted - self._pending)
        accounts = [*self._pending, *further[0], *further[1]][:MAX_TENANTS]
        if not due or not accounts:
            return None
        told = {one: AccountState(self._floors.get(one, 0), self._orders.get(one, 0)) for one in accounts}
        self._question = KeyQuestion(self.life, self.draw(), self._server, told)
        self._asked_at, self._hurry = now, False
        return self._question

    def take(self, answer: KeyAnswer, now: float) -> bool:
        """Take the answer to the question that waits; False, and nothing has changed, where it is none."""
        asked = self._question
        if asked is None or (answer.life, answer.challenge) != (asked.life, asked.challenge):
            return False
        if now - self._asked_at > FRESH_S or answer.server < self._server:
            return False
        self._question, self._server, self._told_at = None, answer.server, self._asked_at
        for account, told in asked.accounts.items():
            if (
                account not in answer.keys
                and asked.server == answer.server
                and told.orders == self._orders.get(account)
            ):
                # The order came to the life for which it was meant: it was carried out, or there is no key to renew
                # because the server shares the account no more. Who holds the last one nobody tells this member.
                self._pending.discard(account)
                self._following.discard(account)
                self._settled.pop(account, None)
            self._take(account, answer.keys.get(account), self._asked_at + LEASE_S)
        return True

    def _take(self, account: str, given: GivenKey | None, until: float) -> None:
        """Replace an account's key by what an answer has, or erase it."""
        held = self._held.pop(account, None)
        if given is None or given.generation < self._floors.get(account, 0):
            return
        if given.orders < self._orders.get(account, 0):
            self._hurry = True
            return
        self._pending.discard(account)
        if account not in self._wanted and account not in self._following:
            return
        if held is not None and held.generation == given.generation and held.key != given.key:
            # A server that gives one generation two keys was copied: neither is used, now or by a later answer.
            self._floors[account] = given.generation + 1
            return
        # The server learns at once that the generation before is gone here.
        self._hurry |= given.generation > self._floors.get(account, 0)
        self._floors[account], self._settled[account] = given.generation, given.settled
        if self.settled(account):
            self._following.discard(account)
        if account in self._wanted:
            self._held[account] = HeldKey(given.generation, given.key, until)


@dataclass(slots=True)
class KeyServer:
    """The member that draws keys. ``life`` is the number of this start, from 1 on; ``draw`` gives ``KEY_BYTES``."""

    life: int
    draw: Callable[[], bytes]
    started: float
    _last: int = 0
    _keys: dict[str, tuple[int, bytes]] = field(default_factory=dict, repr=False)
    _given: dict[str, dict[bytes, dict[str, dict[int, float]]]] = field(default_factory=dict)
    """End of the lease, by this host's clock: by member, its life, account and generation."""
    _done: dict[str, OrderedDict[bytes, dict[str, int]]] = field(default_factory=dict)
    """Orders carried out: by member, its life and account."""

    def __post_init__(self) -> None:
        self._last = self.life << GENERATION_BITS

    def key(self, account: str) -> tuple[int, bytes] | None:
        """Return generation and key of an account, drawn at first need; None where there are ``MAX_TENANTS``."""
        if account not in self._keys and len(self._keys) < MAX_TENANTS:
            self._renew(account)
        return self._keys.get(account)

    def withdraw(self, account: str) -> None:
        """Erase an account's key: members get it no more, and hold it until their leases end or they ask."""
        self._keys.pop(account, None)

    def shred(self, account: str) -> int:
        """Erase an account's key and draw the next generation; gives its number."""
        self._keys.pop(account, None)
        return self._renew(account)

    def settled(self, account: str, now: float) -> int:
        """Return the number below which no generation of an account is held by another member; 0: that is not known
        yet after a start."""
        if now < self.started + LEASE_S + DRIFT_S:
            return 0
        current = self._keys.get(account, (self._last + 1, b""))[0]
        return min([current, *(number for _, number, _ in self._leases(account, now))])

    def is_settled(self, account: str, now: float) -> bool:
        """Return whether another member holds no generation before the present one, or none at all where that was
        withdrawn."""
        return now >= self.started + LEASE_S + DRIFT_S and not self.waiting(account, now)

    def waiting(self, account: str, now: float) -> dict[str, float]:
        """Return the members that may hold a generation before the present one, with the seconds until all their leases
        of such have ended."""
        current = self._keys.get(account, (self._last + 1, b""))[0]
        found = dict[str, float]()
        for member, number, until in self._leases(account, now):
            if number < current:
                found[member] = max(found.get(member, 0.0), until - now)
        return found

    def answer(self, member: str, question: KeyQuestion, allowed: Collection[str], now: float) -> KeyAnswer | None:
        """Answer a member's question: keys of the accounts that it asks for and that are allowed. None where too many
        lives of the member hold leases."""
        self._expire(member, now)
        lives = self._given.setdefault(member, {})
        if question.life not in lives and len(lives) >= MAX_LIVES:
            return None
        leases = lives.setdefault(question.life, {})
        keys = dict[str, GivenKey]()
        for account, told in list(question.accounts.items())[:MAX_TENANTS]:
            held = leases.get(account, {})
            for number in [number for number in held if number < told.floor]:
                del held[number]
            if account not in allowed:
                continue
            done = self._carry_out(member, question, account, told.orders)
            current = self.key(account)
            if current is None or current[0] < told.floor or len(held) >= MAX_UNSETTLED:
                continue
            number, key = current
            leases.setdefault(account, held)[number] = now + LEASE_S + DRIFT_S
            keys[account] = GivenKey(number, self.settled(account, now), done, key)
        return KeyAnswer(question.life, question.challenge, self.life, keys)

    def _carry_out(self, member: str, question: KeyQuestion, account: str, orders: int) -> int:
        """Shred an account if a member's life has ordered more than was carried out; gives how many were. Questions of
        another life of the server order nothing: they are repeated, or will be asked anew."""
        lives = self._done.setdefault(member, OrderedDict())
        done = lives.setdefault(question.life, {})
        lives.move_to_end(question.life)
        if len(lives) > MAX_LIVES:
            lives.popitem(last=False)
        if question.server == self.life and orders > done.get(account, 0):
            done[account] = orders
            self.shred(account)
        return done.get(account, 0)

    def _renew(self, account: str) -> int:
        self._last += 1
        self._keys[account] = (self._last, self.draw())
        return self._last

    def _leases(self, account: str, now: float) -> list[tuple[str, int, float]]:
        """Return member, generation and end of each lease of an account that has not ended."""
        return [
            (member, number, until)
            for member, lives in self._given.items()
            for leases in lives.values()
            for number, until in leases.get(account, {}).items()
            if until > now
        ]

    def _expire(self, member: str, now: float) -> None:
        """Forget leases of a member that have ended."""
        lives = self._given.get(member, {})
        for life, leases in list(lives.items()):
            for account, held in list(leases.items()):
                for number in [number for number, until in held.items() if until <= now]:
                    del held[number]
                if not held:
                    del leases[account]
            if not leases:
                del lives[life]
