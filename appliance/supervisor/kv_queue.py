"""What waits for the carrier of sealed KV: objects to write, and names to drop. No IO; the owner holds a lock.

Objects and names are in one order, so that an object is never dropped before it is written. No owner of objects takes
all of the room: each gets more while it has less than is free, so half of it where it is alone, and some is left for
who has none.

Names that were not taken are told again, some behind each request that the store serves. One under which an object is
written meanwhile is not: the object would be dropped that has just come. Where that object is not written after all,
the name is told: the store still has what was to be dropped, which may be a block that an engine called wrong.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from appliance.common.carrier_wire import MAX_OBJECTS, NAME_BYTES, ObjectStatus
from appliance.supervisor.store_tier import MAX_STORE_OBJECTS

QUEUE_BYTES = 64 << 20
"""Bytes that wait to be written."""

MAX_PUTS = 16_384
"""Objects that wait to be written: tiny ones, which a hostile engine can send, would be millions in those bytes."""

BATCH_BYTES = 8 << 20
"""Bytes of one request."""

MAX_DROPS = MAX_STORE_OBJECTS + MAX_PUTS
"""Names that wait to be dropped: all that the books of the store have, which a policy can withdraw at once, and what is
written meanwhile; some 25 MB of this process's memory. A name beyond that is left to the end of its time."""

NOT_TAKEN = frozenset({ObjectStatus.AWAY, ObjectStatus.REFUSED})
"""Answers to a name that the store has not forgotten: nobody was there, or the store refuses it, as one does that has
begun anew and reads its memory back."""


@dataclass(slots=True)
class Put:
    """An object that waits to be written."""

    name: bytes
    body: memoryview | None
    """None: dropped before it was written."""
    done: Callable[[ObjectStatus], None]
    wanted: Callable[[], bool]
    owner: str
    """Whose it is."""
    number: int = 0
    """Number among all that were taken; the queue sets it."""


@dataclass(slots=True)
class _Part:
    """What one owner has of the queue."""

    bytes: int = 0
    puts: int = 0


Batch = tuple[list[tuple[Put, memoryview]], tuple[bytes, ...]]
"""Objects of one request that writes, or names of one that drops."""


class WriteQueue:
    """Objects and names that wait."""

    def __init__(self, *, names_recur: bool) -> None:
        """``names_recur``: whether the store may have an earlier object under the name of one that waits."""
        self._names_recur = names_recur
        self._queue: deque[Put | bytes] = deque()
        self._waiting: dict[bytes, Put] = {}
        """Objects of the queue that are still to be written, by name."""
        self._all = _Part()
        """All owners' parts: bytes that wait or are on their way, and objects in the queue, those that were dropped
        meanwhile included."""
        self._parts: dict[str, _Part] = {}
        """By owner; one that has nothing here has none."""
        self._named = 0
        """Names to drop in the queue and on their way."""
        self.untold = OrderedDict[bytes, None]()
        """Names to drop that are told behind requests that the store serves, in this order."""
        self._taken = 0
        """Objects that were taken so far."""
        self._owed: dict[bytes, int] = {}
        """Names to drop under which an object waits or is on its way: told where that is not written. With each the
        number of the first object behind the word: one of an earlier number may be what is to be dropped."""
        self._leaving = set[bytes]()
        """Names of the objects that are on their way."""
        self._probe = b""
        """Name that was made up for the last probe: nothing is to be dropped under it."""

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def num_drops(self) -> int:
        """Names to drop: in the queue, on their way, those to be told again, and those that may have to be."""
        return self._named + len(self.untold) + len(self._owed)

    def offer(self, put: Put) -> bool:
        """Take an object; False where there is no room, or its owner has its part of it."""
        assert put.body is not None, "an object has bytes"
        part, size = self._parts.get(put.owner, _Part()), len(put.body)
        if part.bytes + size > QUEUE_BYTES - self._all.bytes or part.puts >= MAX_PUTS - self._all.puts:
            return False
        self._taken += 1
        put.number = self._taken
        if put.name in self.untold:
            del self.untold[put.name]
            self._owed[put.name] = put.number
        self._waiting[put.name] = put
        self._queue.append(put)
        self._count(put.owner, size, 1)
        return True

    def drop(self, name: bytes, *, later: bool) -> None:
        """Take a name to drop. An object under it that is not on its way is not written, and its ``done`` is not
        called. ``later``: it is told behind requests that the store serves, so that what is written does not wait."""
        self._owed.pop(name, None)
        put = self._waiting.pop(name, None)
        if put is not None and put.body is not None:
            self._count(put.owner, -len(put.body), 0)
            put.body = None
            if not self._names_recur:
                return
        if self.num_drops >= MAX_DROPS:
            return
        if later:
            self.untold[name] = None
        else:
            self._named += 1
            self._queue.append(name)

    def probe(self) -> None:
        """Have a name dropped that nobody has, to see whether the store serves."""
        self._probe = secrets.token_bytes(NAME_BYTES)
        self._named += 1
        self._queue.append(self._probe)

    def batch(self) -> Batch:
        """Take what one request writes, or what one drops; neither where all that waited was dropped meanwhile."""
        puts, drops, size = list[tuple[Put, memoryview]](), list[bytes](), 0
        while self._queue and len(puts) + len(drops) < MAX_OBJECTS:
            one = self._queue[0]
            if isinstance(one, bytes):
                if puts:
                    break
                drops.append(one)
            else:
                if one.body is not None and not one.wanted():
                    self._forget(one)
                    self._tell_owed(one.name)
                    self._count(one.owner, -len(one.body), 0)
                    one.body = None
                if one.body is not None:
                    if drops or (puts and size + len(one.body) > BATCH_BYTES):
                        break
                    puts.append((one, one.body))
                    size += len(one.body)
                    self._forget(one)
                    self._leaving.add(one.name)
                self._count(one.owner, 0, -1)
            self._queue.popleft()
        return puts, tuple(drops)

    def over(self, batch: Batch, statuses: Sequence[ObjectStatus]) -> None:
        """Note the answers to a request. Names that were not taken are kept; where the store served it, as many of
        those kept before are queued as one request has: a store that serves some requests and not others is not told
        all of them each time. It takes drops while it refuses objects, as one whose memory is full does."""
        puts, drops = batch
        self._leaving.clear()
        lost = dict[bytes, None]()
        for (one, body), status in zip(puts, statuses if puts else (), strict=True):
            self._count(one.owner, -len(body), 0)
            if status is not ObjectStatus.OK:
                lost[one.name] = None
            elif one.number >= self._owed.get(one.name, 0):
                self._owed.pop(one.name, None)
        for name in lost:  # Behind all of them: another one of the name may have been written.
            self._tell_owed(name)
        missed = [
            name
            for name, status in zip(drops, statuses if drops else (), strict=True)
            if status in NOT_TAKEN and name != self._probe
        ]
        # All that waits stood behind these.
        self._owed.update((name, 0) for name in missed if name in self._waiting)
        untold = [name for name in missed if name not in self._waiting]
        self._named -= len(drops)
        if not (ObjectStatus.AWAY in statuses or (drops and ObjectStatus.REFUSED in statuses)):
            for name in list(islice(self.untold, MAX_OBJECTS)):
                del self.untold[name]
                self._named += 1
                self._queue.append(name)
        self.untold |= dict.fromkeys(untold)

    def _forget(self, put: Put) -> None:
        """Let nobody drop an object before it is written any more, unless another of its name waits."""
        if self._waiting.get(put.name) is put:
            del self._waiting[put.name]

    def _tell_owed(self, name: bytes) -> None:
        """An object was not written: what was to be dropped under its name is, unless another one may be."""
        if name in self._owed and name not in self._waiting and name not in self._leaving:
            del self._owed[name]
            self.untold[name] = None

    def _count(self, owner: str, size: int, puts: int) -> None:
        part = self._parts.setdefault(owner, _Part())
        for one in (part, self._all):
            one.bytes += size
            one.puts += puts
        if not (part.bytes or part.puts):
            del self._parts[owner]
