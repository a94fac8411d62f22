"""Any sequence of submissions, aborts and steps keeps every promise of scheduler, pool and prefix cache.

Once for models in which every layer keeps everything, and once for those with windows and chunks.
"""

from __future__ import annotations

from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from engine.core.kv.contents import TRANSIENT
from engine.core.kv.layout import FULL, KvGroup, Reach, most_blocks
from engine.core.public_prefixes import MOST, Publisher
from engine.core.request import Request
from engine.core.scheduler.limits import SCORED_ROWS
from engine.core.scheduler.plan import FAILED, RowMask, StepResult
from engine.core.specification import SILENT_ID
from engine.errors import RequestRejectedError
from isolation.ipc.kv import WHOLE_POOL, KvQuota
from isolation.ipc.messages import FailureCode
from isolation.ipc.public import PublicPrefix
from tests.engine.core.simulation import SimulatedRunner
from tests.engine.support import make_scheduler, namespace, submit

EOS = 7
GROUP = 9
"""Number of the sharing group's namespace."""
BLOCK = 4
PUBLISHED = {namespace(60 + number): [100 + number % 2] * (BLOCK * number + 2) for number in range(1, 7)}
"""Public prefixes by key: beginnings of the tenants' prompts, one longer than the other, and none of whole blocks."""
ANY = RowMask(b"\xff" * 128, accepting=True)
MAX_STEPS_EACH = 400
"""Steps within which a whole backlog of this size must have ended, each request counted."""


TABLES = (
    (KvGroup(FULL, BLOCK), KvGroup(Reach("window", 6), BLOCK)),
    (KvGroup(FULL, 2 * BLOCK), KvGroup(Reach("window", 9), BLOCK)),
    (KvGroup(FULL, 3 * BLOCK), KvGroup(Reach("chunk", 8), BLOCK)),
    (KvGroup(FULL, BLOCK), KvGroup(Reach("chunk", 7), 2 * BLOCK)),
    (KvGroup(Reach("window", 5), BLOCK),),
    (KvGroup(Reach("chunk", 10), BLOCK),),
    (KvGroup(FULL, BLOCK), KvGroup(Reach("window", 1), BLOCK), KvGroup(Reach("chunk", 12), 2 * BLOCK)),
    (KvGroup(Reach("window", 11), 2 * BLOCK), KvGroup(Reach("window", 3), BLOCK)),
)
"""Block tables of models with windows and chunks."""


class SchedulerMachine(RuleBasedStateMachine):
    """Drives a scheduler as host and runner would, in any order."""

    tables: tuple[tuple[KvGroup, ...], ...] = ((),)

    @initialize(
        num_blocks=st.integers(6, 24),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(5, 20),
        caching=st.booleans(),
        data=st.data(),
    )
    def start(self, num_blocks: int, max_num_seqs: int, budget: int, caching: bool, data: st.DataObject) -> None:
        groups = data.draw(st.sampled_from(self.tables))
        if groups:
            # Room for a prompt and for what windows take while a chunk is written.
            num_blocks += most_blocks(groups, 2 * BLOCK, budget)
            room = [length for length in range(100) if most_blocks(groups, length, budget) <= num_blocks]
            self.max_context = room[-1]
        else:
            self.max_context = num_blocks * BLOCK
        self.scheduler, self.pool = make_scheduler(
            groups=groups,
            max_context=self.max_context,
            num_blocks=num_blocks,
            block_size=BLOCK,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_waiting=12,
            prefix_caching=caching,
            eos_ids=frozenset({EOS}),
        )
        self.runner = SimulatedRunner(self.scheduler, BLOCK)
        cache = self.scheduler._live._cache
        self.publisher = Publisher(self.scheduler, self.pool, cache, exact=lambda: False)
        self.resident = cache.public.by_key
        self.next_id = 0
        self.now_ns = 0
        self.grants: dict[int, int] = {}
        self.caching = caching
        self.over: dict[bytes, int] = {}
        """Residents of bounded accounts that may be above their caps."""
        self.siblings: set[int] = set()
        self.unscored: dict[int, tuple[int, int]] = {}
        """Position of the prompt that is to be scored next, and tokens of it, by request."""

    @rule(
        tenant=st.integers(1, 3),
        prompt=st.integers(0, 1),
        length=st.integers(1, 60) | st.sampled_from([BLOCK, 2 * BLOCK, 4 * BLOCK]),
        max_tokens=st.integers(1, 30),
        retain=st.booleans(),
        weight=st.integers(1, 3),
        priority=st.sampled_from([1, 1, 0, 2]),
        deadline_us=st.sampled_from([0, 0, 30]),
        choices=st.sampled_from([1, 1, 1, 2, 5]),
        prompt_logprobs=st.sampled_from([-1, -1, 0]),
        structured=st.sampled_from([False, False, True]),
        group=st.sampled_from([b"", b"", namespace(GROUP)]),
        public=st.sampled_from([b"", *PUBLISHED]),
    )
    def add(
        self,
        tenant: int,
        prompt: int,
        length: int,
        max_tokens: int,
        retain: bool,
        weight: int,
        priority: int,
        deadline_us: int,
        choices: int,
        prompt_logprobs: int,
        structured: bool,
        group: bytes,
        public: bytes,
    ) -> None:
        """A request whose prompt shares its beginning with others, or is refused with a reason."""
        first = self.next_id + 1
        self.next_id += choices
        token_ids = [100 + prompt] * length
        waiting = self.scheduler.num_waiting
        try:
            self.scheduler.add(
                submit(
                    first,
                    token_ids,
                    max_tokens,
                    tenant=tenant,
                    retain=retain,
                    weight=weight,
                    priority=priority,
                    deadline_us=deadline_us,
                    ignore_eos=False,
                    choices=choices,
                    prompt_logprobs=prompt_logprobs,
                    structured=structured,
                    group=group,
                    public=public,
                ),
                now_ns=self.now_ns,
            )
        except RequestRejectedError as error:
            too_long = length >= self.scheduler.limits.max_context
            if not too_long and error.code is FailureCode.TOO_LONG:
                assert self.pool.accounts.bounds
                return
            assert error.code is (FailureCode.TOO_LONG if too_long else FailureCode.OVERLOADED)
            assert too_long or waiting + choices > 12
        else:
            self.grants |= dict.fromkeys(range(first, first + choices), max_tokens)
            if choices > 1:
                self.siblings |= set(range(first, first + choices))
            if prompt_logprobs >= 0:
                self.unscored[first] = (1, length)

    @rule(
        parts=st.lists(st.tuples(st.sampled_from([0, 1_000, 2_500, 5_000]), st.integers(0, 3)), max_size=4),
        lends=st.booleans(),
    )
    def set_quotas(self, parts: list[tuple[int, int]], lends: bool) -> None:
        """Another table of quotas for the tenants and their group; those that no longer fit end, the others live."""
        quotas, left = [], WHOLE_POOL
        for number, (reserved, more) in enumerate(parts, 1):
            reserved = min(reserved, left)
            left -= reserved
            cap = min(WHOLE_POOL, max(1, reserved + more * 2_000))
            quotas.append(KvQuota(namespace(GROUP if number == 4 else number), reserved, cap, lends))
        self.publisher.make_room(quotas)
        for request_id in self.scheduler.set_quotas(quotas):
            self.grants.pop(request_id, None)
        self.over = {account.key: account.resident for account in self.pool.accounts.bounded}

    @rule(keys=st.sets(st.sampled_from(sorted(PUBLISHED)), max_size=3))
    def publish(self, keys: set[bytes]) -> None:
        """Another table of public prefixes."""
        self.publisher.set([PublicPrefix(key, array("I", PUBLISHED[key])) for key in sorted(keys)])

    @rule(back=st.integers(0, 8))
    def abort(self, back: int) -> None:
        """An abort, also of a request that has ended or never was."""
        request_id = self.next_id - back
        assert self.scheduler.abort(request_id) == (self.grants.pop(request_id, None) is not None)

    @rule(token=st.sampled_from([1, 1, 1, 2, EOS, FAILED]), count=st.integers(1, 6))
    def steps(self, token: int, count: int) -> None:
        """Some steps; in the last of them every sampled row gets the drawn token."""
        for left in range(count, 0, -1):
            self.step(token if left == 1 else 1)

    def step(self, token: int) -> None:
        """One step, with what has to hold around it."""
        self.now_ns += 1_000
        for request_id in self.scheduler.expire(now_ns=self.now_ns):
            del self.grants[request_id]
        for request_id in self.publisher.before_schedule(0):
            self.grants.pop(request_id, None)
        oldest = self.oldest_running()
        self.give_masks()
        plan = self.scheduler.schedule(now_ns=self.now_ns)
        if plan is None:
            assert all(request.lacks_mask for request in self.scheduler._live.by_id.values())
            return
        if oldest is not None and oldest.row < 0:
            # One that had been preempted, or an output of an older prompt, may have got a row in this step.
            older = self.oldest_running()
            assert older is not None and older.spec.order < oldest.spec.order, (
                "the oldest running request was preempted"
            )
        scored = [chunk for chunk in plan.prefills if chunk.num_scored]
        assert sum(chunk.num_scored for chunk in scored) <= SCORED_ROWS
        result = self.scheduler.commit(plan, self.runner.execute(plan, default=token))
        self.publisher.after_commit(result)
        for request_id, chunk in zip(result.scored, scored, strict=True):
            place, length = self.unscored[request_id]
            assert chunk.score_from == place, "a gap, or something twice"
            assert chunk.start < chunk.score_from <= chunk.start + chunk.length
            assert place + chunk.num_scored <= length
            self.unscored[request_id] = (place + chunk.num_scored, length)
        self.scheduler._tenancy.check()
        self.check(result)

    def give_masks(self) -> None:
        """Masks for two of three structured requests that wait for one."""
        for request_id, request in list(self.scheduler._live.by_id.items()):
            if request.lacks_mask and (request_id + self.now_ns // 1_000) % 3:
                self.scheduler.set_mask(request_id, request.num_output, ANY)

    def oldest_running(self) -> Request | None:
        """The running request that arrived first."""
        running = [request for request in self.scheduler._live.by_id.values() if request.row >= 0]
        return min(running, key=lambda request: request.spec.order, default=None)

    def check(self, result: StepResult) -> None:
        """Grants are kept, and every answer is for a live request."""
        for request_id, finish in zip(result.requests, result.finishes, strict=True):
            self.grants[request_id] -= 1
            place, length = self.unscored.get(request_id, (0, 0))
            assert place == length, "a token before its prompt was scored"
            assert self.grants[request_id] >= 0, "more tokens than granted"
            if finish:
                del self.grants[request_id]
        for failure in result.failures:
            assert failure.code is FailureCode.INTERNAL
            del self.grants[failure.request]
        for started in result.starts:
            assert started.cached_tokens % BLOCK == 0
            assert self.caching or not started.cached_tokens or started.request in self.siblings
            assert not started.cached_tokens or started.request not in self.unscored

    @invariant()
    def sound(self) -> None:
        """Blocks, tables, rows and queues agree at all times, and all live requests are known."""
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()
            assert set(self.scheduler._live.by_id) - {SILENT_ID} == set(self.grants) - set(self.publisher._ended)
            pinned = [block for one in self.resident.values() for block in one.blocks]
            assert sorted(pinned) == sorted(self.pool.pinned) and len(pinned) * MOST <= self.pool.num_blocks
            assert all(self.pool.owner(block) == one.key for one in self.resident.values() for block in one.blocks)
            for account in self.pool.accounts.bounded:
                # What lay above the cap when that was set may only become less.
                self.over[account.key] = min(self.over[account.key], max(account.resident, account.cap))
                assert account.resident <= max(account.cap, self.over[account.key]), "above a hard cap"

    def teardown(self) -> None:
        """Everything that was admitted ends within a bound: nobody starves, nothing livelocks."""
        if not hasattr(self, "scheduler"):
            return
        wanted = set(self.publisher._table)
        for _ in range(MAX_STEPS_EACH * (len(self.grants) + 1)):
            if not self.grants:
                break
            self.step(1)
            self.scheduler.check_integrity()
        assert not self.grants, "a request starved"
        while self.scheduler.has_work or self.publisher.has_work:
            self.step(1)
        assert set(self.resident) <= wanted
        self.publisher.set([])
        while self.scheduler.has_work:
            self.step(1)
        assert not self.pool.pinned and not any(key in self.pool.accounts.by_key for key in PUBLISHED)
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert self.pool.num_available == self.pool.num_blocks
        assert self.caching or not self.pool.num_cached
        assert all(self.pool.owner(block) != TRANSIENT for block in range(1, self.pool.num_blocks + 1))


class WindowMachine(SchedulerMachine):
    """The same for models with windows and chunks."""

    tables = TABLES


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=100, stateful_step_count=30, deadline=None, derandomize=True)
TestWindows = WindowMachine.TestCase
TestWindows.settings = settings(max_examples=80, stateful_step_count=30, deadline=None, derandomize=True)


@pytest.mark.full
def test_windows_at_length() -> None:
    """The same over many more sequences."""
    chosen = settings(max_examples=2_000, stateful_step_count=50, deadline=None, derandomize=True)
    run_state_machine_as_test(WindowMachine, settings=chosen)
