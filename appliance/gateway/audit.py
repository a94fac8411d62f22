"""The gateway's end of the audit log: what it has to report, in a bounded list, handed on twice a second.

A request costs an append. What needs no entry of its own is counted: denials by principal and rule, refused credentials
and integrity failures. So a flood of bad calls cannot fill the log, and neither can it push a request's entry out.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable

from appliance.audit.entry import Entry, entry, to_wire
from appliance.control import Audited

FLUSH_S = 0.5
"""How often entries are handed on."""

MAX_PENDING = 8_192
"""Requests that wait to be handed on; further ones are counted as lost."""

MAX_COUNTED = 1_024
"""Different denials, or kinds of refusals, that are counted apart in one moment; further ones are counted as lost."""

HURRY_S = 0.02
"""How soon it goes on while more waits than the supervisor takes at once: some five thousand entries a second."""

MAX_BYTES = 24 << 10
"""Of the entries of one message: what is on its way leaves room in the socket for everything else that is said. JSON
within JSON grows by its quotes, which the length that is counted has twice."""

MESSAGES_A_TURN = 16
"""Messages sent in one turn of the event loop, so that a long list holds up nothing."""

Counted = tuple[str, tuple[tuple[str, str | int], ...]]
"""Kind and fields of what is counted, without the count."""

Send = Callable[[Audited], bool]
"""Hands a message to the supervisor; False when it does not take it now."""


class AuditFeed:
    """Collects entries; ``run`` hands them on. All methods run in one event loop."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._pending: deque[Entry] = deque()
        self._counts: Counter[Counted] = Counter()
        self._dropped = 0
        self.problem = ""
        """Why the supervisor does not write the log now, as it said."""
        self.refuses = False
        """Whether no request may be taken meanwhile."""

    def add(self, kind: str, **fields: str | int) -> None:
        """An entry of its own."""
        if len(self._pending) >= MAX_PENDING:
            self._dropped += 1
            return
        self._pending.append(entry(kind, **fields))

    def count(self, kind: str, **fields: str | int) -> None:
        """One more of what is counted: an entry whose ``count`` is told at the next hand-over."""
        key = kind, tuple(fields.items())
        if key not in self._counts and len(self._counts) >= MAX_COUNTED:
            self._dropped += 1
            return
        self._counts[key] += 1

    async def run(self) -> None:
        """Hand on until cancelled."""
        moved = False
        while True:
            await asyncio.sleep(HURRY_S if moved and self._pending else FLUSH_S)
            moved = self.flush()

    def flush(self) -> bool:
        """Hand on what waits, as far as the supervisor takes it; says whether it took anything."""
        for (kind, fields), count in self._counts.items():
            self.add(kind, **dict(fields), count=count)
        self._counts.clear()
        for number in range(MESSAGES_A_TURN):
            if not self._pending and not self._dropped:
                return number > 0
            texts, size = [], 0
            for one in self._pending:
                text = to_wire(one)
                size += len(text) + text.count('"') + len('"", ')
                if size > MAX_BYTES:
                    break
                texts.append(text)
            if not self._send(Audited(texts, self._dropped)):
                return number > 0
            self._dropped = 0
            for _ in texts:
                self._pending.popleft()
        return True
