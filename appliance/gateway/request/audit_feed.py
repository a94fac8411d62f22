"""The gateway's end of the audit log: entries in a bounded list, sent to the supervisor twice a second while some come.

A request costs an append. What needs no entry of its own is counted: denials by principal and rule, refused credentials
and integrity failures. So a flood of bad calls can neither fill the log nor push a request's entry out.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable

from appliance.common.audit.entry import Entry, entry, to_wire
from appliance.common.control import Audited, AuditState
from appliance.common.usage.open_charges import NO_CHARGE, OpenCharge, OpenCharges

FLUSH_S = 0.5
"""Seconds between two hand-overs of entries, and from the first entry after a rest to its hand-over."""

MAX_PENDING = 8_192
"""Most entries that wait to be handed on; further ones are counted as lost."""

MAX_COUNTED = 1_024
"""Different denials, or kinds of refusals, that are counted apart in one moment; further ones are counted as lost."""

HURRY_S = 0.02
"""Seconds until the next hand-over while more waits than the supervisor takes at once: some 5,000 entries a second."""

MAX_BYTES = 24 << 10
"""Bytes of the entries of one message, which leave room in the socket for all other messages. JSON
within JSON grows by its quotes, which the length that is counted has twice."""

MESSAGES_A_TURN = 16
"""Messages sent in one turn of the event loop, so that a long list holds up nothing."""

Counted = tuple[str, tuple[tuple[str, str | int], ...]]
"""Kind and fields of what is counted, without the count."""

Send = Callable[[Audited], bool]
"""Sends a message to the supervisor; False when the supervisor does not take it now."""


class AuditFeed:
    """Collects entries; ``run`` hands them on. All methods run in one event loop."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._pending: deque[tuple[Entry, OpenCharge]] = deque()
        self._counts: Counter[Counted] = Counter()
        self._dropped = 0
        self._some = asyncio.Event()
        """Set by what is to be handed on."""
        self.problem = ""
        """Why the supervisor does not write the log now, in its own words; empty while it does."""
        self.refuses = False
        """Whether no request may be taken meanwhile."""
        self.witness = ""
        """What is wrong with the witnesses of the log's checkpoints."""
        self.charges = OpenCharges()
        """What requests without an entry are to be charged, should this process end."""

    @property
    def behind(self) -> bool:
        """Whether entries wait that the supervisor has not taken."""
        return bool(self._pending or self._dropped)

    def take(self, state: AuditState) -> None:
        """Take the supervisor's word on whether the log is written."""
        self.problem, self.refuses, self.witness = state.problem, bool(state.refuses), state.witness

    def add(self, kind: str, **fields: str | int) -> None:
        """Add an entry."""
        self._some.set()
        if len(self._pending) >= MAX_PENDING:
            self._dropped += 1
            return
        self._pending.append((entry(kind, **fields), NO_CHARGE))

    def end(self, one: Entry, charge: OpenCharge) -> None:
        """Add the entry of a request, whose charge is kept until the entry was sent."""
        self._some.set()
        if len(self._pending) >= MAX_PENDING:
            self._dropped += 1
            charge.release()
            return
        self._pending.append((one, charge))

    def count(self, kind: str, **fields: str | int) -> None:
        """Count an event: the next hand-over has one entry with the ``count``."""
        self._some.set()
        key = kind, tuple(fields.items())
        if key not in self._counts and len(self._counts) >= MAX_COUNTED:
            self._dropped += 1
            return
        self._counts[key] += 1

    async def run(self) -> None:
        """Hand on until cancelled."""
        while True:
            await self._some.wait()
            await asyncio.sleep(FLUSH_S)
            moved = self.flush()
            while self.behind:
                await asyncio.sleep(HURRY_S if moved and self._pending else FLUSH_S)
                moved = self.flush()
            self._some.clear()

    def flush(self) -> bool:
        """Hand on waiting entries, as far as the supervisor takes them; returns whether it took any."""
        for (kind, fields), count in self._counts.items():
            self.add(kind, **dict(fields), count=count)
        self._counts.clear()
        for number in range(MESSAGES_A_TURN):
            if not self._pending and not self._dropped:
                return number > 0
            texts, size = [], 0
            for one, _ in self._pending:
                text = to_wire(one)
                size += len(text) + text.count('"') + len('"", ')
                if size > MAX_BYTES:
                    break
                texts.append(text)
            if not self._send(Audited(texts, self._dropped)):
                return number > 0
            self._dropped = 0
            for _ in texts:
                # The socket keeps what was sent, whatever becomes of this process.
                self._pending.popleft()[1].release()
        return True


class LineFeed(AuditFeed):
    """Feed of one line of a batch: the request's entry goes to its caller, everything else where it always goes."""

    def __init__(self, feed: AuditFeed, charge: Callable[[Entry], None]) -> None:
        super().__init__(lambda _message: True)
        self._feed, self._charge = feed, charge
        self.problem, self.refuses = feed.problem, feed.refuses

    def add(self, kind: str, **fields: str | int) -> None:
        """Add where all are added."""
        self._feed.add(kind, **fields)

    def end(self, one: Entry, _charge: OpenCharge) -> None:
        """Give the caller the entry of its request."""
        self._charge(one)

    def count(self, kind: str, **fields: str | int) -> None:
        """Count where all are counted."""
        self._feed.count(kind, **fields)


class NoAuditFeed(AuditFeed):
    """Feed of an appliance that keeps no audit log."""

    def __init__(self) -> None:
        super().__init__(lambda _message: True)

    def add(self, kind: str, **fields: str | int) -> None:
        """Keep nothing."""

    def end(self, one: Entry, charge: OpenCharge) -> None:
        """Keep nothing."""

    def count(self, kind: str, **fields: str | int) -> None:
        """Keep nothing."""

    async def run(self) -> None:
        """Return at once: there is nothing to hand on."""
