"""The requests that hold a row, with their blocks; who must give way when there are too few of either."""

from __future__ import annotations

from engine.kv.block_pool import TRANSIENT, BlockPool
from engine.request import NO_ROW, Request, Status
from engine.scheduler.fairness import Account, Accounts
from engine.scheduler.limits import SchedulerLimits
from engine.scheduler.plan import Admission


class Running:
    """Rows ``0 .. max_num_seqs`` and the block tables of their requests."""

    def __init__(self, limits: SchedulerLimits, pool: BlockPool) -> None:
        self._limits = limits
        self._pool = pool
        self._free_rows = list(range(limits.max_num_seqs - 1, -1, -1))
        self.rows: list[Request | None] = [None] * limits.max_num_seqs
        """By row; None where it is free."""
        self.decoding: list[Request] = []
        """Requests with exactly one token to compute, in the order they began to decode."""
        self.num_prefilling = 0
        """Requests whose known tokens are not all planned yet."""

    def __len__(self) -> int:
        return self._limits.max_num_seqs - len(self._free_rows)

    @property
    def has_free_row(self) -> bool:
        """Whether a request can be admitted."""
        return bool(self._free_rows)

    def at(self, row: int) -> Request:
        """The request of a planned row."""
        request = self.rows[row]
        assert request is not None, "a planned row is empty"
        return request

    def occupy(self, request: Request, blocks: list[int], num_shared: int) -> None:
        """Give a row, and a table whose first ``num_shared`` blocks are computed already."""
        size = self._limits.block_size
        request.blocks = blocks
        request.capacity = len(blocks) * size
        request.num_computed = num_shared * size
        request.num_registered = num_shared
        request.row = self._free_rows.pop()
        request.status = Status.RUNNING
        self.rows[request.row] = request
        request.account.num_running += 1
        request.account.prefilling = request
        self.num_prefilling += 1

    def end_prefill(self, request: Request) -> None:
        """The rest of the request's known tokens is in the plan: its account may prefill another."""
        request.account.prefilling = None
        self.num_prefilling -= 1

    def grow(self, request: Request) -> int:
        """Append one block to the request's table; one is available."""
        (block,) = self._pool.take(1, owner_of(request))
        request.blocks.append(block)
        request.capacity += self._limits.block_size
        return block

    def vacate(self, request: Request, status: Status, *, poisoned: bool = False) -> None:
        """Take row and blocks away. Blocks of a poisoned request cannot be found again."""
        if poisoned:
            self._pool.discard(request.blocks)
        else:
            self._pool.release(request.blocks)
        request.blocks = []
        request.capacity = 0
        request.num_computed = 0
        request.num_registered = 0
        self.rows[request.row] = None
        self._free_rows.append(request.row)
        request.row = NO_ROW
        request.status = status
        request.account.num_running -= 1
        if request.account.prefilling is request:
            self.end_prefill(request)

    def sweep(self) -> None:
        """Drop requests that run no longer from the list of decoding ones."""
        self.decoding = [request for request in self.decoding if request.status is Status.RUNNING]

    def choose_for_blocks(self) -> Request:
        """Whom to preempt when a block is missing: the youngest request of the account with the most service, and
        never the oldest running request of all."""
        held = self._held()
        oldest = min(held, key=age)
        assert len(held) > 1, "the oldest request fits the pool alone"
        return max(
            (request for request in held if request is not oldest),
            key=lambda request: (request.account.service, request.order),
        )

    def choose_for_seat(self, accounts: Accounts) -> Request | None:
        """Whom to preempt so that an account below its share of rows gets one: the youngest request of an account
        that is above its own share and was served more. None when nobody has to."""
        total = accounts.total_weight
        poor = accounts.least_served(waiting=True)
        if poor is None or not poor.waiting or poor.num_running >= self._share(poor, total):
            return None
        rich = [
            account
            for account in accounts
            if account.num_running > self._share(account, total) and account.service > poor.service
        ]
        if not rich:
            return None
        most = max(rich, key=lambda account: account.service)
        return max((request for request in self._held() if request.account is most), key=age)

    def check_integrity(self) -> None:
        """Assert that rows, tables and pool agree; linear in the pool."""
        self._pool.check_integrity()
        holders = [0] * (self._pool.num_blocks + 1)
        held = self._held()
        for request in held:
            assert request.status is Status.RUNNING, "a row of a request that does not run"
            assert len(request.blocks) * self._limits.block_size == request.capacity
            assert request.num_computed <= request.capacity, "tokens computed without a block"
            for block in request.blocks:
                holders[block] += 1
                owner = self._pool.owner(block)
                assert owner in (owner_of(request), TRANSIENT), "a block in another namespace's table"
        for block in range(1, self._pool.num_blocks + 1):
            assert self._pool.refs(block) == holders[block], "reference counts and tables disagree"
        assert len(held) == len(self) == len(self.decoding) + self.num_prefilling

    def _held(self) -> list[Request]:
        return [request for request in self.rows if request is not None]

    def _share(self, account: Account, total_weight: int) -> int:
        """Rows that an account may count on; at least one."""
        return max(1, self._limits.max_num_seqs * account.weight // total_weight)


def age(request: Request) -> int:
    """Rank of arrival: lower is older."""
    return request.order


def owner_of(request: Request) -> bytes:
    """Whose a request's blocks are."""
    return request.namespace if request.retain else TRANSIENT


def admission_of(request: Request) -> Admission:
    """What the runner has to know of a request that has just got its row."""
    submit = request.submit
    return Admission(
        row=request.row,
        token_ids=request.token_ids[:],
        num_prompt=request.num_prompt,
        sampling=submit.sampling,
        logprobs=submit.logprobs,
        blocks=tuple(request.blocks),
    )
