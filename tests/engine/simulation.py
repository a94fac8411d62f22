"""A runner without tensors that remembers, for every slot of KV memory, what was computed into it.

Each slot holds ``(namespace, tokens up to and including this one)``. Before a token is computed, every slot that its
attention would read is compared with the request's own tokens. So a wrong block table, a block shared across
namespaces, a stale prefix or a forgotten recomputation is seen at once.
"""

from __future__ import annotations

from engine.request import Request
from engine.scheduler.plan import FAILED, StepPlan
from engine.scheduler.scheduler import Scheduler

Slot = tuple[bytes, tuple[int, ...]]


class SimulatedRunner:
    """Executes plans against a memory of tuples."""

    def __init__(self, scheduler: Scheduler, block_size: int) -> None:
        self.scheduler = scheduler
        self.block_size = block_size
        self.memory: dict[int, list[Slot | None]] = {}
        self.tables: dict[int, list[int]] = {}
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
            self.memory[block] = [None] * self.block_size
        for admission in plan.admissions:
            self.tables[admission.row] = list(admission.blocks)
            self.known[admission.row] = list(admission.token_ids)
            self.computed[admission.row] = -1
            self.requests[admission.row] = self.scheduler._running.at(admission.row)
        for row, index, block in zip(plan.grown_rows, plan.grown_indices, plan.grown_blocks, strict=True):
            if index == len(self.tables[row]):
                self.tables[row].append(block)
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
        token_id = choose.get(self.requests[row].request_id, default)
        if token_id != FAILED:
            self.known[row].append(token_id)
        return token_id

    def _compute(self, row: int, position: int) -> None:
        """Read everything before the position, then write the position's own slot."""
        request, tokens = self.requests[row], self.known[row]
        assert list(request.token_ids) == tokens
        # What may not be kept is nobody's but the request's, or its family's.
        own = request.request_id if request.family is None else id(request.family)
        key = (request.namespace,) if request.retain else (request.namespace, own)
        for before in range(position):
            slot = self._slot(row, before)
            assert slot is not None, "a slot is read that was never written"
            assert slot[0] == key, "a slot of another owner is read"
            assert slot[1] == tuple(tokens[: before + 1]), "a slot with other tokens is read"
        block = self.tables[row][position // self.block_size]
        assert block != 0, "the null block is written"
        self.memory[block][position % self.block_size] = (key, tuple(tokens[: position + 1]))
        self.computed[row] = position + 1

    def _slot(self, row: int, position: int) -> Slot | None:
        return self.memory[self.tables[row][position // self.block_size]][position % self.block_size]
