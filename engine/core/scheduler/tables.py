"""The block tables of requests in models where some layers look back a window or a chunk only.

Such layers need no block that lies wholly behind what the next token sees: it goes back to the pool, and the null
block takes its place in the table. So a table of a window holds at most the window and what is being written.

While a prompt is computed the request has rights (``engine.core.kv.block_pool.Rights``) to as many blocks as it will
hold at the most, and takes and gives back blocks under them, chunk by chunk. When it decodes it has rights to just the
blocks that it holds: a block given back is available to others at once.

Blocks of all tables are alike, so a count of blocks is a count of bytes. ``RequestTables`` holds no state of requests.
"""

from __future__ import annotations

from engine.core.kv.block_pool import BlockPool
from engine.core.kv.layout import FULL, NULL_BLOCK, KvGroup
from engine.core.kv.prefix_cache import Hit
from engine.core.request import Request
from engine.core.scheduler.limits import SchedulerLimits

NewBlock = tuple[int, int, int]
"""A block that a request got: number of the table, place in it, the block."""


class RequestTables:
    """Takes and gives back the blocks of requests."""

    def __init__(self, limits: SchedulerLimits, pool: BlockPool) -> None:
        groups = limits.tables
        self._pool = pool
        self._chunk = limits.max_num_batched_tokens
        self._ahead = limits.max_row_tokens - 1
        self._full = groups[0] if groups[0].reach == FULL else None
        self.local = tuple(group for group in groups if group.reach != FULL)
        """Tables with a bounded reach."""
        self.unit = limits.lasting_block_size

    @property
    def keeps_all(self) -> bool:
        """Whether some layers keep everything."""
        return self._full is not None

    def full_blocks(self, length: int) -> int:
        """Blocks of whole contexts that so many tokens need."""
        return 0 if self._full is None else -(-length // self._full.block_size)

    def rights(self, request: Request, num_cached: int) -> int:
        """Most blocks of its windows that a request holds while what it knows behind a cached prefix is computed."""
        if not self.local:
            return 0
        length = request.num_tokens
        return sum(
            min(-(-length // group.block_size) - group.first_block(num_cached), group.most_blocks(length, self._chunk))
            for group in self.local
        )

    def local_blocks(self, length: int) -> int:
        """Most blocks of its windows that a request holds while it decodes up to so many tokens."""
        return sum(group.most_blocks(length, 1 + self._ahead) for group in self.local)

    def mean_blocks(self, request: Request) -> float:
        """Blocks that a request holds on average while it decodes up to its limit, or fewer: no less is meant."""
        tokens = (request.num_tokens + request.limit) / 2 + self._ahead
        if not self.local:
            return tokens / self.unit + 1
        full = 0.0 if self._full is None else tokens / self._full.block_size + 1
        return full + sum(
            min(tokens / group.block_size + 1, group.most_blocks(request.limit, 1 + self._ahead))
            for group in self.local
        )

    def open(self, request: Request, hit: Hit, rights: int) -> None:
        """Begin the tables of windows with what is cached; ``rights`` are available."""
        self._pool.rights.grant(rights, request.kv.account)
        request.kv.rights = rights
        request.kv.local = [list(table) for table in hit.local] or [[] for _ in self.local]
        for table in request.kv.local:
            for block in table:
                if block != NULL_BLOCK:
                    self._pool.rights.hold(block)

    def cover(self, request: Request, end: int) -> list[NewBlock]:
        """Make room in the windows for the request's prompt up to ``end``: under its rights, so it never fails."""
        self._pool.rights.release(self._cut(request, request.num_prefilled))
        owner = request.kv.owner
        grown = []
        for number, (group, table) in enumerate(self._numbered(request), self._first):
            while len(table) * group.block_size < end:
                grown.append((number, len(table), self._pool.rights.take(owner, request.kv.account)))
                table.append(grown[-1][2])
        return grown

    def settle(self, request: Request) -> int:
        """All its known tokens are computed: give back what the next one does not see, and rights to more. Gives by
        how many blocks it holds less."""
        before = request.kv.rights
        self._pool.rights.release(self._cut(request, request.num_prefilled))
        request.kv.rights = len(self.local_held(request))
        self._pool.rights.grant(request.kv.rights - before, request.kv.account)
        return before - request.kv.rights

    def trim(self, request: Request) -> int:
        """Give back what the next token of a decoding request does not see; gives the number of blocks."""
        behind = self._cut(request, request.num_computed)
        self._pool.rights.release(behind)
        self._pool.rights.grant(-len(behind), request.kv.account)
        request.kv.rights -= len(behind)
        return len(behind)

    def missing(self, request: Request) -> int:
        """Blocks that a decoding request needs for its next tokens."""
        position = self._last_position(request)
        full = self._full is not None and position >= len(request.kv.blocks) * self._full.block_size
        return full + sum(position >= len(table) * group.block_size for group, table in self._numbered(request))

    def extend(self, request: Request) -> list[NewBlock]:
        """Give a decoding request the blocks that it needs for its next tokens; they are available."""
        position = self._last_position(request)
        owner = request.kv.owner
        grown = []
        if self._full is not None and position >= len(request.kv.blocks) * self._full.block_size:
            grown.append((0, len(request.kv.blocks), self._pool.take_one(owner, request.kv.account)))
            request.kv.blocks.append(grown[-1][2])
            request.kv.capacity += self._full.block_size
        for number, (group, table) in enumerate(self._numbered(request), self._first):
            if position >= len(table) * group.block_size:
                self._pool.rights.grant(1, request.kv.account)
                request.kv.rights += 1
                grown.append((number, len(table), self._pool.rights.take(owner, request.kv.account)))
                table.append(grown[-1][2])
        return grown

    def close(self, request: Request, *, poisoned: bool) -> None:
        """Take all blocks of windows away, and the rights to more."""
        held = self.local_held(request)
        if poisoned:
            self._pool.rights.discard(held)
        else:
            self._pool.rights.release(held)
        self._pool.rights.grant(-request.kv.rights, request.kv.account)
        request.kv.rights = 0
        request.kv.local = []

    def local_held(self, request: Request) -> list[int]:
        """The blocks of its windows that are not given back."""
        return [block for table in request.kv.local for block in _held(table)]

    def _last_position(self, request: Request) -> int:
        """The last position that a decoding request's next step may compute. The token at its limit is never
        computed."""
        return min(request.num_computed + self._ahead, request.limit - 2)

    @property
    def _first(self) -> int:
        """Number of the first table of a window."""
        return 0 if self._full is None else 1

    def _numbered(self, request: Request) -> zip[tuple[KvGroup, list[int]]]:
        return zip(self.local, request.kv.local, strict=True)

    def _cut(self, request: Request, position: int) -> list[int]:
        """Take what the token at ``position`` does not see out of the tables."""
        behind: list[int] = []
        for group, table in self._numbered(request):
            stop = index = min(group.first_block(position), len(table))
            while index and table[index - 1] != NULL_BLOCK:
                index -= 1
            behind += table[index:stop]
            table[index:stop] = [NULL_BLOCK] * (stop - index)
        return behind


def _held(table: list[int]) -> list[int]:
    """The blocks of a window's table that are not given back: its end."""
    index = len(table)
    while index and table[index - 1] != NULL_BLOCK:
        index -= 1
    return table[index:]
