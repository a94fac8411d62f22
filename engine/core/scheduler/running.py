"""Requests that hold a row, with their blocks: how they get both, and give them back."""

from __future__ import annotations

from engine.core.kv.block_pool import BlockPool
from engine.core.kv.contents import TRANSIENT
from engine.core.kv.prefix_cache import Hit
from engine.core.request import NO_ROW, Request, Status
from engine.core.scheduler.decoding import Decoding
from engine.core.scheduler.forecast import Forecast
from engine.core.scheduler.limits import SchedulerLimits
from engine.core.scheduler.plan import Admission
from engine.core.scheduler.tables import NewBlock, RequestTables
from engine.core.scheduler.tenancy import Change, Tenancy


class Running:
    """Rows ``0 .. max_num_seqs`` and the block tables of their requests."""

    def __init__(self, limits: SchedulerLimits, pool: BlockPool, tenancy: Tenancy) -> None:
        self._limits = limits
        self._pool = pool
        self._admitted, self._vacated = tenancy.charge(Change.ADMITTED), tenancy.charge(Change.VACATED)
        self._reprice = tenancy.charge(Change.DECODING)
        self._free_rows = list(range(limits.max_num_seqs - 1, -1, -1))
        self.rows: list[Request | None] = [None] * limits.max_num_seqs
        """By row; None where it is free."""
        self.vacated: dict[int, None] = {}
        """Free rows of which the runner has to forget what it keeps."""
        self.decoding = Decoding(limits.block_size, limits.max_row_tokens)
        self.tables = RequestTables(limits, pool)
        self.windowed = bool(self.tables.local)
        """Whether some layers keep a window or a chunk only."""
        self.forecast = Forecast(self.tables)
        self.num_prefilling = 0
        """Requests whose known tokens are not all planned yet."""
        self.num_paused = 0
        """Structured requests between two tokens."""

    def __len__(self) -> int:
        return self._limits.max_num_seqs - len(self._free_rows)

    @property
    def has_free_row(self) -> bool:
        """Whether a request can be admitted."""
        return bool(self._free_rows)

    @property
    def step(self) -> int:
        """Number of the step that is planned."""
        return self.decoding.step

    @property
    def requests(self) -> list[Request]:
        """All requests with a row."""
        return [request for request in self.rows if request is not None]

    def at(self, row: int) -> Request:
        """The request of a planned row."""
        request = self.rows[row]
        assert request is not None, "a planned row is empty"
        return request

    def occupy(self, request: Request, hit: Hit, blocks: list[int]) -> None:
        """Give a row, and a table that begins with the blocks of the hit; tables of windows are open already."""
        kv = request.kv
        kv.blocks = blocks
        kv.capacity = len(blocks) * self.tables.unit
        request.num_prefilled = hit.num_tokens
        kv.num_registered = hit.num_tokens // self._limits.block_size
        kv.num_shared = len(hit.blocks)
        request.row = self._free_rows.pop()
        self.vacated.pop(request.row, None)
        request.status = Status.PREFILLING
        self.rows[request.row] = request
        account = request.account
        account.num_running += 1
        account.num_blocks += kv.num_blocks
        account.prefilling = request
        self.num_prefilling += 1
        self._admitted(request, self.tables.mean_blocks(request))
        self.forecast.add(request, self.decoding.step)

    def end_prefill(self, request: Request) -> None:
        """The rest of the request's known tokens is in the plan: its account may prefill another."""
        request.account.prefilling = None
        self.num_prefilling -= 1

    def begin_decoding(self, request: Request) -> None:
        """All known tokens of the request but the newest are computed."""
        self.decoding.add(request)
        self._count_decoding(request, 1)
        self.forecast.renew(request, self.decoding.step)

    def move(self, request: Request) -> None:
        """A decoding request got another number of tokens than one."""
        self.decoding.move(request)
        self.forecast.renew(request, self.decoding.step)

    def pause(self, request: Request) -> None:
        """A decoding request has its token and takes part in no step until ``resume``; it keeps row and blocks."""
        self.decoding.remove(request)
        self._count_decoding(request, -1)
        request.num_prefilled = request.num_tokens - 1
        request.status = Status.PAUSED
        self.num_paused += 1

    def resume(self, request: Request) -> None:
        """A paused request takes part in the next step."""
        self.num_paused -= 1
        self.decoding.add(request, at_once=True)
        self._count_decoding(request, 1)
        self.forecast.renew(request, self.decoding.step)

    def grow(self, request: Request) -> int:
        """Append one block to the table of a decoding request; one is available."""
        block = self._pool.take_one(request.kv.owner, request.kv.account)
        request.kv.blocks.append(block)
        request.kv.capacity += self._limits.block_size
        self._count_blocks(request, 1)
        return block

    def settle(self, request: Request) -> None:
        """Shrink the windows of a request whose known tokens are all computed to what the next one sees."""
        request.account.num_blocks -= self.tables.settle(request)

    def trim(self, request: Request) -> None:
        """Give back what the next token of a decoding request does not see."""
        account, count = request.account, self.tables.trim(request)
        account.num_blocks -= count
        account.num_decoding_blocks -= count
        self._reprice(request)

    def extend(self, request: Request) -> list[NewBlock]:
        """Give a decoding request in a model with windows the blocks that its next token needs; all are available."""
        grown = self.tables.extend(request)
        self._count_blocks(request, len(grown))
        return grown

    def _count_decoding(self, request: Request, sign: int) -> None:
        """Count a request that begins to decode, or with ``sign`` -1 one that ends and still has its blocks."""
        account = request.account
        account.num_decoding += sign
        account.num_decoding_blocks += sign * request.kv.num_blocks
        self._reprice(request)

    def _count_blocks(self, request: Request, count: int) -> None:
        """Count the blocks that a decoding request got."""
        account = request.account
        account.num_blocks += count
        account.num_decoding_blocks += count
        self._reprice(request)
        if request.forecast[0] <= self.decoding.step:
            self.forecast.renew(request, self.decoding.step)

    def stamps_of(self, rows: list[int], blocks: list[int]) -> list[int]:
        """What these rows' requests expect of the blocks that they got, one each."""
        stamps = self._pool.contents.stamps
        return [stamps((block,), self.at(row).kv.owner)[0] for row, block in zip(rows, blocks, strict=True)]

    def vacate(self, request: Request, *, poisoned: bool = False) -> None:
        """Take row and blocks away; the request waits then. Blocks of a poisoned request cannot be found again."""
        account, kv = request.account, request.kv
        num_blocks = kv.num_blocks
        if request.status is Status.DECODING:
            self.decoding.remove(request)
            account.num_decoding -= 1
            account.num_decoding_blocks -= num_blocks
        elif request.status is Status.PAUSED:
            self.num_paused -= 1
        self.forecast.remove(request)
        account.num_blocks -= num_blocks
        account.num_running -= 1
        if poisoned:
            # A public prefix is not this request's to spoil.
            self._pool.release(kv.blocks[: kv.num_public])
            self._pool.discard(kv.blocks[kv.num_public :])
        else:
            self._pool.release(kv.blocks)
        if self.windowed:
            self.tables.close(request, poisoned=poisoned)
        if account.prefilling is request:
            self.end_prefill(request)
        kv.blocks = []
        kv.capacity = kv.num_registered = kv.num_noted = kv.num_shared = request.num_prefilled = 0
        self.rows[request.row] = None
        self._free_rows.append(request.row)
        self.vacated[request.row] = None
        request.row = NO_ROW
        request.status = Status.WAITING
        self._vacated(request)

    def check_integrity(self) -> None:
        """Assert that rows, tables, pool, forecast and counters agree; linear in the pool."""
        self._pool.check_integrity()
        holders = [0] * (self._pool.num_blocks + 1)
        held = self.requests
        granted: set[int] = set()
        for request in held:
            running = (Status.PREFILLING, Status.DECODING, Status.PAUSED)
            assert request.status in running, "a row of a request that does not run"
            assert request.lacks_mask == (request.status is Status.PAUSED), "a request that waits for a mask runs"
            assert len(request.kv.blocks) * self.tables.unit == request.kv.capacity
            assert not request.kv.blocks or request.num_computed <= request.kv.capacity, (
                "tokens computed without a block"
            )
            local = self.tables.local_held(request)
            assert len(local) <= request.kv.rights, "more blocks held than there are rights to"
            settled = request.status is not Status.PREFILLING
            assert not settled or len(local) == request.kv.rights, "rights to more than is held"
            granted.update(local)
            for place, block in enumerate(request.kv.blocks + local):
                holders[block] += 1
                owner = request.kv.owner if place >= request.kv.num_public else request.spec.public
                assert self._pool.owner(block) in (owner, TRANSIENT), "a block in another namespace's table"
        for block in range(1, self._pool.num_blocks + 1):
            held_for_good = block in self._pool.pinned
            assert self._pool.refs(block) == holders[block] + held_for_good, "reference counts and tables disagree"
        rights = sum(request.kv.rights for request in held)
        assert self._pool.rights.count == rights - len(granted), "rights and tables disagree"
        assert len(held) == len(self) == len(self.forecast)
        assert len(held) == len(self.decoding) + self.num_prefilling + self.num_paused
        for account in {request.account for request in held}:
            own = [request for request in held if request.account is account]
            decoding = [request for request in own if request.status is Status.DECODING]
            assert account.num_running == len(own)
            assert account.num_blocks == sum(request.kv.num_blocks for request in own)
            assert account.num_decoding == len(decoding)
            assert account.num_decoding_blocks == sum(request.kv.num_blocks for request in decoding)


def admission_of(request: Request, pool: BlockPool) -> Admission:
    """What the runner has to know of a request that has just got its row."""
    spec, kv = request.spec, request.kv
    owner, shared, stamps = kv.owner, kv.num_public, pool.contents.stamps
    assert len(kv.blocks) >= shared, "a public prefix is not whole"
    return Admission(
        row=request.row,
        token_ids=request.token_ids[:],
        num_prompt=spec.num_prompt,
        sampling=spec.sampling,
        logprobs=spec.logprobs,
        blocks=tuple(kv.blocks),
        local=tuple(map(tuple, kv.local)),
        stamps=(
            stamps(kv.blocks[:shared], spec.public) + stamps(kv.blocks[shared:], owner)
            if shared
            else stamps(kv.blocks, owner)
        ),
        local_stamps=tuple([stamps(table, owner) for table in kv.local]),
        deterministic=spec.deterministic,
        prompt_logprobs=spec.prompt_logprobs,
        adapter=spec.adapter,
        limit=request.limit,
        stop_ids=spec.stop_ids,
        logit_bias=spec.logit_bias,
    )
