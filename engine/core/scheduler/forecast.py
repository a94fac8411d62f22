"""How much KV memory the running requests will want, simulated to their ends.

A request's footprint grows by one token a step until it ends, and is then given back whole. So the largest need comes
just before one of the ends, and the simulation is a sum for each of them: the requests that are still there then, each
with the tokens it will have (as Tokasaurus and LightLLM's "past-future" scheduler do). Ends are expected, not known:
a request that has not stopped at its expected end is expected to go on (``Account.expected``), and when all goes wrong
there is still preemption.

Everything is in tokens. A request counts its private tokens (blocks that it found in the cache are counted once, by
the pool), without the newest, which is not computed yet, and half a block, since its last is half full on average.
Where layers keep a window only, a request counts what its windows will hold at its end from the start, in tokens of
the layers that keep everything. That is more than it holds, as is the growth where no layer keeps everything: what is
forecast is meant to be enough.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import accumulate, count
from operator import add, mul

from engine.core.request import Request
from engine.core.scheduler.tables import RequestTables


class Forecast:
    """The expected ends and footprints of the running requests."""

    def __init__(self, tables: RequestTables) -> None:
        self._tables = tables
        self._block_size = tables.unit
        self._windowed = bool(tables.local)
        self._entries: list[tuple[int, int]] = []
        """By expected end: (step of the end, private tokens less the step at which they were counted)."""
        self._private = 0
        """Sum of the second numbers."""
        self._final = 0
        """Sum of all numbers: private tokens when each is at its end."""

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: Request, step: int) -> None:
        """Count a running request that has its blocks, as it is at this step."""
        entry = self._entry(request, step)
        request.forecast = entry
        insort(self._entries, entry)
        self._private += entry[1]
        self._final += entry[0] + entry[1]

    def remove(self, request: Request) -> None:
        """Forget a request."""
        place = bisect_left(self._entries, request.forecast)
        assert self._entries[place] == request.forecast, "a request is not in the forecast"
        del self._entries[place]
        self._private -= request.forecast[1]
        self._final -= sum(request.forecast)

    def renew(self, request: Request, step: int) -> None:
        """Count a request as it is now: it has begun to decode, or has outlived its expected end."""
        self.remove(request)
        self.add(request, step)

    def fits(self, request: Request, num_shared: int, rights: int, *, step: int, room: int) -> bool:
        """Whether ``room`` private tokens are expected to be enough at all times if this request is admitted with so
        many shared blocks and rights to blocks of windows."""
        new = self._expect(request, num_shared, rights, step)
        if self._final + new[0] + new[1] <= room:
            return True  # even if no request gave anything back before all have ended
        return self._peak(new) <= room

    def _peak(self, new: tuple[int, int]) -> int:
        """The largest number of private tokens at once."""
        entries = self._entries.copy()
        insort(entries, new)
        entries.reverse()
        ends = [end for end, _ in entries]
        present = accumulate([base for _, base in entries])
        # Just before the i-th latest end there are i + 1 requests, each one token longer for every step until then.
        peak: int = max(map(add, present, map(mul, ends, count(1))))
        return peak

    def private(self, step: int) -> int:
        """Private tokens now, as the forecast counts them."""
        return self._private + step * len(self._entries)

    def _entry(self, request: Request, step: int) -> tuple[int, int]:
        return self._expect(request, request.kv.num_shared, request.kv.rights, step)

    def _expect(self, request: Request, num_shared: int, rights: int, step: int) -> tuple[int, int]:
        left = request.expected
        size = self._block_size
        private = len(request.token_ids) - 1 - num_shared * size + (size - 1) // 2
        if self._windowed:
            blocks = max(rights, self._tables.local_blocks(request.num_tokens + left))
            private = (private if self._tables.keeps_all else 0) + blocks * size
        return step + left, private - step
