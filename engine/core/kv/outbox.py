"""Blocks of KV on their way out of the engine: copies that are made, messages that are sent, ids of what was sent.

A block may take a while to leave its memory (a GPU's copies are started and over later): it is sent at the first look
that finds it there, and counts as not sent until then. Nothing here waits: a ring that is full means no.

A store that hosts have in common forgets a block after a time (``Share.lasts_s``). Of a namespace with such a time,
what was sent counts as not sent when the time is over, and so leaves once more.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.core.kv.backlog import Backlog
from engine.core.kv.leaving import Contents, Leaving, SpillChannel
from isolation.ipc.errors import PeerGoneError, RingFull
from isolation.ipc.messages import NAMESPACE_KEY_BYTES
from isolation.ipc.spill import Fetch, Keep, Unwanted, Withdraw, mark_of

MAX_INDEX = 1 << 18
"""Blocks that are remembered as sent away: 4 Mi tokens in blocks of 16, some 40 MiB of memory."""

MAX_FOUND = 1 << 16
"""Blocks that are remembered as found on other hosts: 1 Mi tokens in blocks of 16, some 8 MiB of memory."""

FOUND_PART = 2
"""One part in so many of a block's time in the store for which one counts as there that another host has written: how
long it was there when it was found is not known."""

_S = 1_000_000_000


@dataclass(slots=True)
class SpillCounts:
    """What became of blocks."""

    sent: int = 0
    dropped: int = 0
    """Evicted without having been sent: the ring, the step's share or the places for copies were full."""
    restored: int = 0
    late: int = 0
    """Fetches given up."""
    withdrawn: int = 0
    """Sent, or taken from other hosts, and wrong."""


@dataclass(slots=True)
class _Departure:
    """A block that is being copied out."""

    block_id: bytes
    owner: bytes
    copy: Leaving
    evicted: bool
    """Whether it has lost its place in the pool, so that it is lost if it cannot be sent."""
    noted: bool
    """Whether it leaves because it was computed."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A block that was sent away, or came from another host."""

    owner: bytes
    lasts_until_ns: int | None
    """Time from which on other hosts do not find it; None: never."""
    sent_ns: int = 0


@dataclass(slots=True)
class Outbox:
    """Sends blocks, and knows what was sent."""

    channel: SpillChannel
    contents: Contents
    counts: SpillCounts
    backlog: Backlog = field(default_factory=Backlog)
    """What is to be sent because it was computed."""
    index: OrderedDict[bytes, Sent] = field(default_factory=OrderedDict)
    """By id what was sent away, the oldest first."""
    known: Counter[bytes] = field(default_factory=Counter)
    """Number of blocks that were sent away, by namespace."""
    gone: bool = False
    """Whether the supervisor's end is closed: nothing is sent any more."""
    now_ns: int = 0
    """Time of the turn."""
    lost_ns: dict[bytes, int] = field(default_factory=dict)
    """Time up to which what other hosts could find of a namespace is lost (``isolation.ipc.spill.Lost``), by key; as
    many as there are namespaces of which something was sent or found."""
    lasts_s: dict[bytes, int] = field(default_factory=dict)
    """Seconds for which other hosts find what is sent, by the mark of its namespace; as many as there are namespaces
    that are shared."""
    _leaving: OrderedDict[bytes, _Departure] = field(default_factory=OrderedDict)
    """By id what is being copied out, the oldest first; as many as the contents have places for."""
    _found: OrderedDict[bytes, Sent] = field(default_factory=OrderedDict)
    """Ids of blocks that came from other hosts, the oldest first, and for how long they count as there."""
    _wrong: dict[bytes, bytes] = field(default_factory=dict)
    """Id and owner of blocks that are to be withdrawn: of those in ``index`` or ``_found``, and so bounded as these."""

    @property
    def num_leaving(self) -> int:
        """Blocks that are copied out, or to be, and not sent yet."""
        return 0 if self.gone else len(self._leaving) + len(self.backlog) + len(self._wrong)

    @property
    def owners(self) -> set[bytes]:
        """Namespaces of what was sent or found, of what is being copied out, and of what was lost."""
        leaving = (one.owner for one in self._leaving.values())
        return {*self.known, *leaving, *(one.owner for one in self._found.values()), *self.lost_ns}

    def leaves(self, block_id: bytes, owner: bytes) -> bool:
        """Whether a block may leave and has not yet, or so long ago that other hosts do not find it any more."""
        sent = self.index.get(block_id)
        there = sent is not None and not self._is_over(sent)
        return not there and block_id not in self._leaving and len(owner) == NAMESPACE_KEY_BYTES

    def evict(self, block_id: bytes) -> None:
        """A block has lost its place in the pool: if its copy cannot be sent, it is lost."""
        if block_id in self._leaving:
            self._leaving[block_id].evicted = True

    def save(self, block: int, block_id: bytes, owner: bytes, *, evicted: bool = False, noted: bool = False) -> bool:
        """Begin to copy a block out, and send it where it is there at once; whether it may be sent."""
        if self.gone:
            return False
        copy = self.contents.start(block)
        if copy is None:
            return False
        departure = _Departure(block_id, owner, copy, evicted, noted)
        if copy.over:
            return self._depart(departure)
        self._leaving[block_id] = departure
        return True

    def send_away(self) -> None:
        """Send the blocks whose copies are over; what does not fit into the ring is dropped."""
        while self._leaving:
            departure = next(iter(self._leaving.values()))
            if not departure.copy.over:
                return
            del self._leaving[departure.block_id]
            if not self._depart(departure):
                self.counts.dropped += departure.evicted
                if departure.noted:
                    self.backlog.lose()

    def found(self, block_id: bytes, owner: bytes) -> None:
        """Remember that another host had a block."""
        self._found[block_id] = Sent(owner, self._until(owner, FOUND_PART), self.now_ns)
        if len(self._found) > MAX_FOUND:
            self._found.popitem(last=False)

    def is_found(self, block_id: bytes) -> bool:
        """Whether another host is remembered to have had a block: so it is where other hosts find it."""
        return block_id in self._found and not self._is_over(self._found[block_id])

    def lose(self, marks: set[bytes]) -> None:
        """Count nothing that was sent or found of the namespaces with these marks as there any more."""
        if not marks:
            return
        owners = {*self.known, *(one.owner for one in self._found.values())}
        self.lost_ns |= {owner: self.now_ns for owner in owners if mark_of(owner) in marks}

    def withdraw(self, spoiled: Iterable[tuple[bytes, bytes]]) -> None:
        """Have the supervisor drop what it has of blocks that turned out to be wrong, given by id and owner. What finds
        no room in the ring is told at a later call."""
        for block_id, owner in spoiled:
            departure = self._leaving.pop(block_id, None)
            if departure is not None:
                departure.copy.drop()
            sent = self.index.get(block_id)
            key = owner if sent is None else sent.owner
            if len(key) == NAMESPACE_KEY_BYTES and (block_id in self.index or block_id in self._found):
                self._wrong[block_id] = key
                self.unlearn(block_id)
        while self._wrong:
            block_id = next(iter(self._wrong))
            if not self.send(Withdraw(self._wrong[block_id], block_id)):
                return
            del self._wrong[block_id]
            self.counts.withdrawn += 1

    def unlearn(self, block_id: bytes) -> None:
        """Ask for a block no more."""
        self._found.pop(block_id, None)
        sent = self.index.pop(block_id, None)
        if sent is not None:
            self.known[sent.owner] -= 1
            if not self.known[sent.owner]:
                del self.known[sent.owner]

    def forget(self, owner: bytes) -> None:
        """Forget what was sent for an owner, and overwrite what is being copied out."""
        for block_id in [block_id for block_id, one in self.index.items() if one.owner == owner]:
            self.unlearn(block_id)
        for block_id in [block_id for block_id, one in self._found.items() if one.owner == owner]:
            del self._found[block_id]
        self.lost_ns.pop(owner, None)
        for departure in [one for one in self._leaving.values() if one.owner == owner]:
            del self._leaving[departure.block_id]
            departure.copy.drop()

    def send(self, message: Keep | Withdraw | Fetch | Unwanted) -> bool:
        """Send a message, if there is room for it; whether it was sent."""
        if self.gone:
            return False
        try:
            self.channel.send(message)
        except RingFull:
            return False
        except PeerGoneError:
            self.gone = True
            return False
        return True

    def _depart(self, departure: _Departure) -> bool:
        """Send a block whose copy is over and overwrite the copy; whether it was sent."""
        block_id, owner = departure.block_id, departure.owner
        left_out = self.backlog.take_left_out()
        sent = self.send(Keep(owner, block_id, departure.copy.content(), left_out))
        departure.copy.drop()
        if not sent:
            self.backlog.give_back(left_out)
            return False
        self.counts.sent += 1
        self.unlearn(block_id)  # It may have been sent before, and comes last now.
        self.index[block_id] = Sent(owner, self._until(owner), self.now_ns)
        self.known[owner] += 1
        if len(self.index) > MAX_INDEX:
            self.unlearn(next(iter(self.index)))
        return True

    def _until(self, owner: bytes, part: int = 1) -> int | None:
        """Time until which what is sent now for an owner, or one part in ``part`` of that time, lasts."""
        lasts_s = self.lasts_s.get(mark_of(owner), 0) if self.lasts_s else 0
        return self.now_ns + lasts_s * _S // part if lasts_s else None

    def _is_over(self, one: Sent) -> bool:
        until_ns = one.lasts_until_ns
        return until_ns is not None and (self.now_ns >= until_ns or one.sent_ns <= self.lost_ns.get(one.owner, -1))
