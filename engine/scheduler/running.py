"""The requests that hold a row, with their blocks: who gets both, who gives them back."""

from __future__ import annotations

from engine.kv.block_pool import BlockPool
from engine.kv.contents import TRANSIENT
from engine.kv.prefix_cache import Hit
from engine.request import NO_ROW, Request, Status
from engine.scheduler.decoding import Decoding
from engine.scheduler.forecast import Forecast
from engine.scheduler.limits import SchedulerLimits
from engine.scheduler.plan import Admission
from engine.scheduler.tables import Growth, Tables


class Running:
    """Rows ``0 .. max_num_seqs`` and the block tables of their requests."""

    def __init__(self, limits: SchedulerLimits, pool: BlockPool) -> None:
        self._limits = limits
        self._pool = pool
        self._free_rows = list(range(limits.max_num_seqs - 1, -1, -1))
        self.rows: list[Request | None] = [None] * limits.max_num_seqs
        """By row; None where it is free."""
        self.vacated: dict[int, None] = {}
        """Free rows of which the runner has to forget what it keeps."""
        self.decoding = Decoding(limits.block_size)
        self.tables = Tables(limits, pool)
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
    def held(self) -> list[Request]:
        """All requests with a row."""
        return [request for request in self.rows if request is not None]

    def at(self, row: int) -> Request:
        """The request of a planned row."""
        request = self.rows[row]
        assert request is not None, "a planned row is empty"
        return request

    def occupy(self, request: Request, hit: Hit, blocks: list[int]) -> None:
        """Give a row, and a table that begins with the blocks of the hit; tables of windows are open already."""
        size = self._limits.block_size
        request.blocks = blocks
        request.capacity = len(blocks) * self.tables.unit
        request.num_prefilled = hit.num_tokens
        request.num_registered = hit.num_tokens // size
        request.num_shared = len(hit.blocks)
        request.row = self._free_rows.pop()
        self.vacated.pop(request.row, None)
        request.status = Status.PREFILLING
        self.rows[request.row] = request
        account = request.account
        account.line.begin_running(account)
        account.num_blocks += len(blocks) + request.rights
        account.pledged += request.pledge
        account.prefilling = request
        self.num_prefilling += 1
        self.forecast.add(request, self.decoding.step)

    def end_prefill(self, request: Request) -> None:
        """The rest of the request's known tokens is in the plan: its account may prefill another."""
        request.account.prefilling = None
        self.num_prefilling -= 1

    def begin_decoding(self, request: Request) -> None:
        """All known tokens of the request but the newest are computed."""
        self.decoding.add(request)
        request.account.begin_decoding(request)
        self.forecast.renew(request, self.decoding.step)

    def pause(self, request: Request) -> None:
        """A decoding request has its token and takes part in no step until ``resume``; it keeps row and blocks."""
        self.decoding.remove(request)
        request.account.end_decoding(request)
        request.num_prefilled = request.num_tokens - 1
        request.status = Status.PAUSED
        self.num_paused += 1

    def resume(self, request: Request) -> None:
        """A paused request takes part in the next step."""
        self.num_paused -= 1
        self.decoding.add(request, at_once=True)
        request.account.begin_decoding(request)
        self.forecast.renew(request, self.decoding.step)

    def grow(self, request: Request) -> int:
        """Append one block to the table of a decoding request; one is available."""
        block = self._pool.take_one(owner_of(request), request.kv)
        request.blocks.append(block)
        request.capacity += self._limits.block_size
        request.account.add_decoding_blocks(1)
        if request.forecast[0] <= self.decoding.step:
            self.forecast.renew(request, self.decoding.step)
        return block

    def cover(self, request: Request, end: int) -> list[Growth]:
        """Make room in the windows for the request's prompt up to ``end``."""
        return self.tables.cover(request, end)

    def settle(self, request: Request) -> None:
        """All known tokens of a request are computed: its windows shrink to what the next one sees."""
        request.account.num_blocks -= self.tables.settle(request)

    def trim(self, request: Request) -> None:
        """Give back what the next token of a decoding request does not see."""
        trimmed = self.tables.trim(request)
        if trimmed:
            request.account.add_decoding_blocks(-trimmed)

    def extend(self, request: Request) -> list[Growth]:
        """Give a decoding request in a model with windows the blocks that its next token needs; all are available."""
        grown = self.tables.extend(request)
        if grown:
            request.account.add_decoding_blocks(len(grown))
        if request.forecast[0] <= self.decoding.step:
            self.forecast.renew(request, self.decoding.step)
        return grown

    def stamps_of(self, rows: list[int], blocks: list[int]) -> list[int]:
        """What these rows' requests expect of the blocks that they got, one each."""
        stamps = self._pool.contents.stamps
        return [stamps((block,), owner_of(self.at(row)))[0] for row, block in zip(rows, blocks, strict=True)]

    def vacate(self, request: Request, status: Status, *, poisoned: bool = False) -> None:
        """Take row and blocks away. Blocks of a poisoned request cannot be found again."""
        account = request.account
        if request.status is Status.DECODING:
            self.decoding.remove(request)
            account.end_decoding(request)
            # The newest token is not computed: what is computed are all before it.
            request.num_prefilled = request.num_tokens - 1
        elif request.status is Status.PAUSED:
            self.num_paused -= 1
        self.forecast.remove(request)
        account.num_blocks -= len(request.blocks) + request.rights
        if poisoned:
            # A public prefix is not this request's to spoil.
            self._pool.release(request.blocks[: request.num_public])
            self._pool.discard(request.blocks[request.num_public :])
        else:
            self._pool.release(request.blocks)
        if self.windowed:
            self.tables.close(request, poisoned=poisoned)
        if account.prefilling is request:
            self.end_prefill(request)
        account.pledged -= request.pledge
        account.line.end_running(account)
        request.blocks = []
        request.capacity = 0
        request.num_prefilled = 0
        request.num_registered = 0
        request.num_shared = 0
        self.rows[request.row] = None
        self._free_rows.append(request.row)
        self.vacated[request.row] = None
        request.row = NO_ROW
        request.status = status

    def check_integrity(self) -> None:
        """Assert that rows, tables, pool, forecast and counters agree; linear in the pool."""
        self._pool.check_integrity()
        holders = [0] * (self._pool.num_blocks + 1)
        held = self.held
        granted: set[int] = set()
        for request in held:
            running = (Status.PREFILLING, Status.DECODING, Status.PAUSED)
            assert request.status in running, "a row of a request that does not run"
            assert request.held == (request.status is Status.PAUSED), "a request that waits for a mask runs"
            assert len(request.blocks) * self.tables.unit == request.capacity
            assert not request.blocks or request.num_computed <= request.capacity, "tokens computed without a block"
            local = self.tables.held(request)
            assert len(local) <= request.rights, "more blocks held than there are rights to"
            settled = request.status is not Status.PREFILLING
            assert not settled or len(local) == request.rights, "rights to more than is held"
            granted.update(local)
            for place, block in enumerate(request.blocks + local):
                holders[block] += 1
                owner = owner_of(request) if place >= request.num_public else request.submit.public
                assert self._pool.owner(block) in (owner, TRANSIENT), "a block in another namespace's table"
        for block in range(1, self._pool.num_blocks + 1):
            held_for_good = block in self._pool.pinned
            assert self._pool.refs(block) == holders[block] + held_for_good, "reference counts and tables disagree"
        rights = sum(request.rights for request in held)
        assert self._pool.rights.count == rights - len(granted), "rights and tables disagree"
        assert len(held) == len(self) == len(self.forecast)
        assert len(held) == len(self.decoding) + self.num_prefilling + self.num_paused
        for account in {request.account for request in held}:
            own = [request for request in held if request.account is account]
            decoding = [request for request in own if request.status is Status.DECODING]
            assert account.num_running == len(own)
            assert account.num_blocks == sum(request.num_blocks for request in own)
            assert account.num_decoding == len(decoding)
            assert account.num_decoding_blocks == sum(request.num_blocks for request in decoding)


def age(request: Request) -> int:
    """Rank of arrival: lower is older."""
    return request.order


def owner_of(request: Request) -> bytes:
    """Whose a request's blocks are."""
    return request.kv_key if request.retain else TRANSIENT


def admission_of(request: Request, pool: BlockPool) -> Admission:
    """What the runner has to know of a request that has just got its row."""
    submit, owner, shared = request.submit, owner_of(request), request.num_public
    stamps = pool.contents.stamps
    assert len(request.blocks) >= shared, "a public prefix is not whole"
    return Admission(
        row=request.row,
        token_ids=request.token_ids[:],
        num_prompt=request.num_prompt,
        sampling=submit.sampling,
        logprobs=submit.logprobs,
        blocks=tuple(request.blocks),
        local=tuple(map(tuple, request.local)) if request.local else (),
        stamps=stamps(request.blocks[:shared], submit.public) + stamps(request.blocks[shared:], owner),
        local_stamps=tuple([stamps(table, owner) for table in request.local]),
        deterministic=request.deterministic,
        prompt_logprobs=submit.prompt_logprobs,
        limit=request.limit,
        stop_ids=request.stop_ids,
    )
