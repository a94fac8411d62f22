"""A runner without tensors that remembers, for every slot of KV memory, what was computed into it.

Each slot holds ``(table, namespace, tokens up to and including this one)``. Before a token is computed, every slot that
its attention would read is compared with the request's own tokens. So a wrong block table, a block shared across
namespaces, a stale prefix or a forgotten recomputation is seen at once. With several block tables each is read as far
as its layers look back, and holds no more blocks than they need.
"""

from __future__ import annotations

from engine.core.kv.layout import FULL, NULL_BLOCK, KvGroup
from engine.core.request import Request, Status
from engine.core.scheduler.plan import FAILED, StepPlan
from engine.core.scheduler.scheduler import Scheduler

Slot = tuple[int, tuple[object, ...], tuple[int, ...]]


class SimulatedRunner:
    """Executes plans against a memory of tuples."""

    def __init__(self, scheduler: Scheduler, block_size: int) -> None:
        self.scheduler = scheduler
        self.groups = scheduler.limits.groups or (KvGroup(FULL, block_size),)
        self.memory: dict[int, list[Slot | None]] = {}
        self.tables: dict[int, list[list[int]]] = {}
        self.known: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.requests: dict[int, Request] = {}

    def execute(self, plan: StepPlan, choose: dict[int, int] | None = None, default: int = 1) -> list[int]:
        """Check and execute a plan; gives for each sampled row ``choose[request id]`` or the default token."""
        limits = self.scheduler.limits
        assert plan.num_tokens <= limits.max_num_batched_tokens, "the token budget was exceeded"
        rows = plan.decode_rows + [chunk.row for chunk in plan.prefills]
        assert len(set(rows)) == len(rows) <= limits.max_num_seqs, "a row is planned twice"
        for block in plan.zero_blocks:
            self.memory[block] = [None] * max(group.block_size for group in self.groups)
        for admission in plan.admissions:
            full = [admission.blocks] if self.groups[0].reach == FULL else []
            self.tables[admission.row] = [list(table) for table in (*full, *admission.local)]
            self.known[admission.row] = list(admission.token_ids)
            self.computed[admission.row] = -1
            self.requests[admission.row] = self.scheduler._running.at(admission.row)
        numbers = plan.grown_tables or [0] * len(plan.grown_rows)
        for number, row, index, block in zip(
            numbers, plan.grown_rows, plan.grown_indices, plan.grown_blocks, strict=True
        ):
            if index == len(self.tables[row][number]):
                self.tables[row][number].append(block)
        self.check_windows()
        for row in plan.decode_rows:
            assert len(self.known[row]) == self.computed[row] + 1, "a row decodes that has not been prefilled"
            self._compute(row, self.computed[row])
        for chunk in plan.prefills:
            if self.computed[chunk.row] < 0:
                self.computed[chunk.row] = chunk.start
            assert chunk.start == self.computed[chunk.row], "a chunk that does not follow the last one"
            assert chunk.length > 0
            for position in range(chunk.start, chunk.start + chunk.length):
                self._compute(chunk.row, position)
            assert chunk.last == (chunk.start + chunk.length == len(self.known[chunk.row]))
        return [self._sample(row, choose or {}, default) for row in plan.sample_rows]

    def _sample(self, row: int, choose: dict[int, int], default: int) -> int:
        token_id = choose.get(self.requests[row].spec.request_id, default)
        if token_id != FAILED:
            self.known[row].append(token_id)
        return token_id

    def check_windows(self) -> None:
        """No request holds more of a window than its next token sees, with the chunk that is being written and a block:
        nothing behind it, and nothing ahead."""
        chunk = self.scheduler.limits.max_num_batched_tokens
        for request in self.scheduler._running.requests:
            local = [group for group in self.groups if group.reach != FULL]
            for group, table in zip(local, request.kv.local, strict=True):
                held = sum(block != NULL_BLOCK for block in table)
                written = chunk if request.status is Status.PREFILLING else 1
                bound = -(-(group.reach.size - 1 + written) // group.block_size) + 1
                assert held <= bound, "more is held than a window, what is written, and a block"

    def _compute(self, row: int, position: int) -> None:
        """Read what the position sees in every table, then write the position's own slots."""
        request, tokens = self.requests[row], self.known[row]
        assert list(request.token_ids) == tokens
        # What may not be kept is nobody's but the request's, or its family's.
        own = request.spec.request_id if request.kv.family_ids is None else request.kv.key
        key = (request.spec.kv_key,) if request.spec.retain else (request.spec.kv_key, own)
        for number, group in enumerate(self.groups):
            table, size = self.tables[row][number], group.block_size
            for before in range(group.reach.first_seen(position), position):
                slot = self.memory[table[before // size]][before % size]
                assert slot is not None, "a slot is read that was never written"
                assert slot[0] == number, "a slot of another table is read"
                public = before < request.kv.num_public * size
                assert slot[1] == ((request.spec.public,) if public else key), "a slot of another owner is read"
                assert slot[2] == tuple(tokens[: before + 1]), "a slot with other tokens is read"
            block = table[position // size]
            assert block != NULL_BLOCK, "the null block is written"
            self.memory[block][position % size] = (number, key, tuple(tokens[: position + 1]))
        self.computed[row] = position + 1
