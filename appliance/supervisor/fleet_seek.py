"""Asks the fleet's store for one engine, beside the thread of its spill channel.

The thread of the channel serves all tenants of the engine and must not wait for a store: what it hands on here is
asked by a thread of its own, one question after the other, and comes back to it by its bell. So a tenant that does not
share never waits for one that does. Those that share have turns, of one question each: a prompt of thousands of blocks
does not let others' fetches become too old. What has come and was not sent yet is one answer of the store at most.

Blocks that another host has just computed may still be on their way to the store. A fetch that says so (``coming``) is
asked again after others, until for ``WAIT_S`` nothing of it has come; it counts as absent once. One that another host
still computes (``ahead``) has its turn when no other fetch is due, and what is not there of it counts as nothing: the
engine asks again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from appliance.common.time_share import TimeShare
from appliance.supervisor.fleet_kv import EngineLife, FleetKv
from isolation.ipc.spill import Fetch, Fetched, KvTier, Miss

MAX_ASKED = 64
"""Fetches that wait for the store: as many as an engine has waiting (``engine.core.kv.spill.MAX_WAITING``)."""

SEND_S = 2.0
"""Seconds for which what came waits to be sent, after which the rest of the fetch is given up: as long as an engine
waits for a prefix."""

LINE_S = 0.25
"""Seconds after which a fetch that still waits in line is passed over: its engine waits no longer
(``engine.core.kv.spill.PATIENCE_NS``), and behind fetches that nobody waits for all others would come too late as well.
"""

WAIT_S = 0.2
"""Seconds without a new block after which one that is coming counts as absent: less than ``LINE_S``, so that the engine
is told before it waits no longer."""

AGAIN_S = 0.02
"""Seconds between two questions for a block that is coming."""

SEEK_SHARE = 0.4
"""Part of one processor that the thread may use on and on: half of what the thread of the channel may. Opening what a
store has costs some milliseconds for each 8 MiB."""

SEEK_BURST_S = 0.25
"""Seconds of processor time that the thread may use at once after a quiet time."""


@dataclass(frozen=True, slots=True)
class _Asked:
    fetch: Fetch
    first: int
    """Place of the first block that is still wanted."""
    at: float
    """Monotonic time of the engine's question, or of the last block that came for it."""
    due: float
    """Monotonic time before which the store is not asked."""
    sure: bool = True
    """Whether the store has served each time that it was asked."""


class FleetSeeker:
    """Thread of one engine; ``ask`` and ``take`` are called by the thread of its channel."""

    def __init__(self, kv: FleetKv, life: EngineLife, ring: Callable[[], None], name: str) -> None:
        """``ring``: wakes the thread of the channel."""
        self._kv = kv
        self._life = life
        self._ring = ring
        self._changed = threading.Condition()
        self._asked: deque[_Asked] = deque()
        self._turns: dict[bytes, int] = {}
        """Number of the last turn of each of the last ``MAX_ASKED`` namespaces that had one, the oldest first."""
        self._turn = 0
        self._found: list[Fetched] = []
        self._seeking = 0
        """Number of the fetch that is asked for now; 0: none."""
        self._wanted = False
        """Whether somebody waits for it."""
        self._closing = False
        self._share, self._used = TimeShare(time.monotonic(), SEEK_SHARE, SEEK_BURST_S), 0.0
        self._thread = threading.Thread(target=self._run, name=f"fleet {name}", daemon=True)

    def start(self) -> None:
        """Begin to ask.

        Raises:
            RuntimeError: the machine gives no thread.
        """
        self._thread.start()

    def ask(self, fetch: Fetch, first: int) -> bool:
        """Have the blocks of a fetch from this place on asked for; False where as many wait as may."""
        with self._changed:
            if len(self._asked) >= MAX_ASKED:
                return False
            now = time.monotonic()
            self._asked.append(_Asked(fetch, first, now, now))
            self._changed.notify_all()
        return True

    def end(self, request: int) -> None:
        """Ask nothing more for a fetch, and send nothing of it that was not taken: nobody waits for it. A question that
        is under way ends with the block that is on its way."""
        with self._changed:
            self._asked = deque(asked for asked in self._asked if asked.fetch.request != request)
            self._found = [one for one in self._found if one.request != request]
            if self._seeking == request:
                self._wanted = False
            self._changed.notify_all()

    def take(self) -> list[Fetched]:
        """Take what is to be sent to the engine."""
        with self._changed:
            found, self._found = self._found, []
            self._changed.notify_all()
        return found

    def close(self) -> None:
        """End the thread; blocks while it waits for an answer."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        self._share, self._used = TimeShare(time.monotonic(), SEEK_SHARE, SEEK_BURST_S), time.thread_time()
        while (asked := self._next()) is not None:
            if time.monotonic() - asked.at < LINE_S:
                self._seek(asked)
            with self._changed:
                self._seeking = 0

    def _next(self) -> _Asked | None:
        """Wait for a fetch that is due, of those that requests wait for if there is one, and of the namespace whose
        last turn was longest ago; None: the thread is to end."""
        with self._changed:
            while not self._closing:
                now = time.monotonic()
                due = [asked for asked in self._asked if asked.due <= now]
                if due:
                    first = min(due, key=lambda one: (one.fetch.ahead, self._turns.get(one.fetch.namespace, 0)))
                    self._asked.remove(first)
                    self._note_turn(first.fetch.namespace)
                    self._seeking, self._wanted = first.fetch.request, True
                    return first
                soonest = min((asked.due for asked in self._asked), default=None)
                self._changed.wait(None if soonest is None else soonest - now)
        return None

    def _note_turn(self, namespace: bytes) -> None:
        self._turn += 1
        self._turns.pop(namespace, None)
        self._turns[namespace] = self._turn
        if len(self._turns) > MAX_ASKED:
            del self._turns[next(iter(self._turns))]

    def _pace(self) -> None:
        """Rest where the thread has used more than its share."""
        before, self._used = self._used, time.thread_time()
        if pause_s := self._share.spend(self._used - before, time.monotonic()):
            with self._changed:
                self._changed.wait_for(lambda: self._closing, pause_s)

    def _seek(self, asked: _Asked) -> None:
        """Put one question for a fetch, which waits for its next turn where more of it may come."""
        fetch, at = asked.fetch, asked.first
        self._pace()
        brought = self._kv.find(fetch.namespace, fetch.blocks[at:], self._life, fetch.size, self._is_wanted)
        if not self._is_wanted():
            return
        found = [Fetched(fetch.request, at + place, one, KvTier.STORE) for place, one in enumerate(brought.contents)]
        now = time.monotonic()
        sure = asked.sure and (bool(found) or brought.lacks)
        if not found and fetch.coming and now + AGAIN_S < asked.at + WAIT_S:
            self._ask_again(_Asked(fetch, at, asked.at, now + AGAIN_S, sure))
            return
        given = self._give(found or [self._missed(fetch, at, brought.lacks, sure)])
        if given and found and at + len(found) < len(fetch.blocks):
            self._ask_again(_Asked(fetch, at + len(found), now, now, sure))

    def _ask_again(self, asked: _Asked) -> None:
        with self._changed:
            if self._wanted:
                self._asked.append(asked)

    def _is_wanted(self) -> bool:
        """Return whether somebody waits for what is asked for. The lock need not be held."""
        return self._wanted and not self._closing

    def _missed(self, fetch: Fetch, at: int, lacks: bool, sure: bool) -> Fetched:
        """Say that a block does not come, and what is known of it: whether the store ``lacks`` it, and served all the
        time (``sure``)."""
        if not fetch.ahead:
            self._kv.absent(fetch.namespace, fetch.blocks[at:], self._life, lacks=lacks)
        miss = Miss.UNKNOWN
        if lacks:
            miss = Miss.LACKED if sure else Miss.LOST
        return Fetched(fetch.request, at, b"", miss=miss)

    def _give(self, found: list[Fetched]) -> bool:
        """Leave what is to be sent for the thread of the channel; False where it did not take what was left before."""
        with self._changed:
            over = self._changed.wait_for(lambda: not (self._found and self._is_wanted()), SEND_S)
            if not (over and self._is_wanted()):
                return False
            self._found = found
        self._ring()
        return True
