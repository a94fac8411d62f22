"""Blocks of prompts that other hosts shall have as soon as they are computed, until they are sent.

The host names the namespaces (``isolation.ipc.spill.Share``). After each chunk of a prompt the ids of the blocks that
it filled are noted here, in the order of the prompt, and the blocks stay where they are: in the pool, in use, and as
likely to be evicted as others. A full block does not change any more, and what is noted has been computed: notes come
from the commit of a step. Nothing is copied here. ``engine.core.kv.spill`` copies between steps, of each namespace in
turn, what is still in the pool then.

Bounds. ``TURN_BYTES`` and ``BYTES_PER_S`` say how much is copied, so how long a step waits; the number of ids is
bounded, for all namespaces and for one. What is noted beyond that, or waits while nothing at all can be sent for
``STALE_NS``, is left out and counted: who asks for it computes it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

from isolation.ipc.spill import MAX_FETCH_BLOCKS, MAX_LEFT_OUT, mark_of

TURN_BYTES = 4 << 20
"""Bytes copied between two steps at the most, and one block more: some milliseconds."""

BYTES_PER_S = 64 << 20
"""Bytes copied in a second at the most, beside what a turn may have saved up: a sixth of a core's time where blocks are
as small as 20 KiB, of which the loop copies 0.43 GB in a second (``bench.kv_computed``, a busy core), and less where
they are larger. So much KV is computed by 500 tokens a second of a model with 128 KiB a token."""

MAX_OF_ONE = MAX_FETCH_BLOCKS
"""Ids of one namespace that wait: those of a prompt of 128 Ki tokens in blocks of 16."""

MAX_NOTED = 2 * MAX_OF_ONE
"""Ids that wait in all. A namespace takes more while it has less than is free: half of them where it is alone, and some
are left for one that has none."""

STALE_NS = 2_000_000_000
"""Time without anything that could be sent after which the supervisor lags too far: an engine that waits for a prefix
waits no longer (``engine.core.kv.spill.LONGEST_NS``)."""

LOOKS = 1_024
"""Ids that are looked at in one turn: most of a long prompt may have been sent before."""


class Backlog:
    """Ids of blocks that wait to be sent, and how many bytes may be copied now."""

    def __init__(self) -> None:
        self.left_out = 0
        """Blocks that were left out, and of which the supervisor has not been told yet."""
        self._marks: set[bytes] = set()
        self._waiting: OrderedDict[bytes, deque[bytes]] = OrderedDict()
        """Ids in the order of their prompts, by namespace; whose turn is next comes first."""
        self._count = 0
        self._credit = 0
        """Bytes that may be copied now; below 0 where the last block had more."""
        self._turn_ns = 0
        self._stuck_ns: int | None = None
        """Time of the first turn since which nothing could be sent."""

    def __len__(self) -> int:
        """Ids that wait."""
        return self._count

    @property
    def wanted(self) -> bool:
        """Whether any namespace's blocks are to be noted."""
        return bool(self._marks)

    def begin(self, mark: bytes) -> None:
        """Take what is noted of the namespace with this mark from now on."""
        self._marks.add(mark)

    def end(self, mark: bytes) -> None:
        """Take nothing of the namespace with this mark any more, and forget what waits."""
        self._marks.discard(mark)
        for namespace in [one for one in self._waiting if mark_of(one) == mark]:
            self._count -= len(self._waiting.pop(namespace))

    def note(self, namespace: bytes, block_ids: Sequence[bytes]) -> None:
        """Have blocks sent that were computed, if their namespace is one of those named; in the order of the prompt."""
        if not block_ids or mark_of(namespace) not in self._marks:
            return
        queue = self._waiting.setdefault(namespace, deque())
        room = max(0, (MAX_NOTED - self._count - len(queue) + 1) // 2)
        # The first ones: what follows a gap is of no use to who reads a prompt from its beginning.
        queue.extend(block_ids[:room])
        self._count += min(room, len(block_ids))
        self._leave_out(len(block_ids) - room)
        if not queue:
            del self._waiting[namespace]

    def begin_turn(self, now_ns: int) -> None:
        """Note the time: more bytes may be copied."""
        elapsed_ns = max(0, now_ns - self._turn_ns)
        self._turn_ns = now_ns
        self._credit = min(TURN_BYTES, self._credit + elapsed_ns * BYTES_PER_S // 1_000_000_000)

    def first(self) -> tuple[bytes, bytes] | None:
        """Namespace and id of the block that is next, where one may be copied now; it stays until ``drop_first``."""
        if self._credit <= 0 or not self._waiting:
            return None
        namespace, queue = next(iter(self._waiting.items()))
        return namespace, queue[0]

    def drop_first(self, num_bytes: int = 0) -> None:
        """Take the next block out: it was copied, and has so many bytes, or need not be."""
        namespace, queue = next(iter(self._waiting.items()))
        queue.popleft()
        self._count -= 1
        if not queue:
            del self._waiting[namespace]
        elif num_bytes:
            self._waiting.move_to_end(namespace)
        if num_bytes:
            self._credit -= num_bytes
            self._stuck_ns = None

    def delay(self) -> None:
        """The next block cannot be sent now; where that lasts, all that waits is left out."""
        if self._stuck_ns is None:
            self._stuck_ns = self._turn_ns
        elif self._turn_ns - self._stuck_ns >= STALE_NS:
            self._leave_out(self._count)
            self._waiting.clear()
            self._count, self._stuck_ns = 0, None

    def lose(self) -> None:
        """Count a block that was taken out and not sent."""
        self._leave_out(1)

    def take_left_out(self) -> int:
        """Blocks left out since the last call, for the supervisor; who cannot tell it gives them back."""
        taken = min(self.left_out, MAX_LEFT_OUT)
        self.left_out -= taken
        return taken

    def give_back(self, left_out: int) -> None:
        """Count blocks again of which the supervisor could not be told."""
        self.left_out += left_out

    def _leave_out(self, count: int) -> None:
        self.left_out += max(0, count)
