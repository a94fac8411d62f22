"""Steps that give a row any number of tokens, as a backend that speculates does."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.backend import Samples
from engine.core.fairness.prices import INPUT_COST, OUTPUT_COST
from engine.core.kv.layout import FULL, KvGroup, Reach
from engine.core.scheduler.plan import FAILED, StepPlan
from engine.core.scheduler.scheduler import Scheduler
from isolation.ipc.engine import Submit
from isolation.ipc.kv import WHOLE_POOL, KvQuota
from isolation.ipc.logprob import TokenLogprobs
from isolation.ipc.messages import Finish
from tests.engine.core.simulation import SimulatedRunner
from tests.engine.support import make_scheduler, namespace, submit

MOST = 4
STOP = 7
WINDOWS = (KvGroup(FULL, 4), KvGroup(Reach("window", 6), 4))


class ManyRunner(SimulatedRunner):
    """A simulated runner that gives each decoding row 0 to 4 tokens a step, and the end of a prompt 0 or 1.

    Every token is computed into the row's blocks in the step that gives the token behind it; so a missing block, or one
    that is not the row's, is seen at once. Token ``position`` of a request is ``token_of(request, position)``.
    """

    def __init__(self, scheduler: Scheduler, count: Callable[[], int], token_of: Callable[[int, int], int]) -> None:
        super().__init__(scheduler, 4)
        self._count = count
        self._token_of = token_of
        self.counts: list[int] = []

    def run(self, plan: StepPlan) -> Samples:
        """Check and execute a plan."""
        decodes, plan.decode_rows = plan.decode_rows, []
        planned = self.execute(plan)
        plan.decode_rows = decodes
        token_ids: list[int] = []
        self.counts = []
        for row in decodes:
            before = len(token_ids)
            for _ in range(self._count()):
                token_ids.append(self._next(row))
                if token_ids[-1] == FAILED:
                    break
            self.counts.append(len(token_ids) - before)
        for chunk in plan.prefills:
            if chunk.last:
                self.known[chunk.row].pop()
                self.counts.append(min(1, self._count()))
                # The prompt's last token is computed again where it gave nothing.
                self.computed[chunk.row] -= 1
                token_ids += [self._next(chunk.row) for _ in range(self.counts[-1])]
        assert len(planned) == sum(chunk.last for chunk in plan.prefills)
        logprobs = [TokenLogprobs(place, float(token), (), ()) for place, token in enumerate(token_ids)]
        return Samples(token_ids, logprobs, counts=self.counts)

    def _compute(self, row: int, position: int) -> None:
        # Tokens that this step has already given are not the scheduler's yet.
        tokens, request = self.known[row], self.requests[row]
        given = tokens[len(request.token_ids) :]
        del tokens[len(request.token_ids) :]
        kept, request.token_ids = request.token_ids, request.token_ids[:]
        request.token_ids.extend(given)
        tokens.extend(given)
        super()._compute(row, position)
        request.token_ids = kept

    def _next(self, row: int) -> int:
        position = len(self.known[row])
        if position < self.requests[row].limit:  # The token at the limit is never computed: it needs no block.
            self._compute(row, position - 1)
        token_id = self._token_of(self.requests[row].spec.request_id, position)
        self.known[row].append(token_id)
        return token_id


@dataclass
class Stream:
    """What one request was given."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: int = Finish.NONE
    failed: bool = False


def expected(one: Submit, token_of: Callable[[int, int], int], limit: int) -> Stream:
    """What a request gets, one token after the other."""
    stream = Stream()
    position = len(one.token_ids)
    while True:
        token_id = token_of(one.request, position)
        if token_id == FAILED:
            stream.failed = True
            return stream
        stream.tokens.append(token_id)
        position += 1
        if token_id == STOP or position >= limit:
            stream.finish = Finish.STOP if token_id == STOP else Finish.LENGTH
            return stream


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 1 << 30),
    st.sampled_from(((), WINDOWS)),
    st.integers(14, 40),
    st.booleans(),
    st.sampled_from((1, MOST)),
)
def test_streams_are_those_of_one_token_a_step(
    seed: int, groups: tuple[KvGroup, ...], num_blocks: int, quotas: bool, most: int
) -> None:
    """Whatever the numbers of tokens, each stream ends at its stop id, its limit or its broken token and has the same
    tokens and log-probabilities as with one token a step, and no row has blocks ahead of its next tokens, also where
    steps give it none; books agree after every step, services stay within the proved bound, quotas hold, and at the end
    the account has paid for each prompt token and each output token once."""
    scheduler, pool = make_scheduler(
        num_blocks=num_blocks,
        groups=groups,
        max_row_tokens=most,
        max_context=24,
        max_num_batched_tokens=16,
        prefix_caching=False,
        eos_ids=frozenset({STOP}),
    )
    if quotas and num_blocks >= 30:
        # Room for one request of either tenant, and no more than 12 blocks for one of them.
        cap = 12 * WHOLE_POOL // num_blocks + 1
        scheduler.set_quotas([KvQuota(namespace(0), 0, cap, True)])
    scheduler._tenancy._prices.hold = 0.0
    draw = random.Random(seed)
    tenants = draw.randint(1, 2)
    odd = {(draw.randint(1, 6), draw.randint(1, 24)): draw.choice((STOP, FAILED)) for _ in range(draw.randint(0, 8))}

    def token_of(request: int, position: int) -> int:
        return odd.get((request, position), 10 + request)

    runner = ManyRunner(scheduler, lambda: draw.randint(0, most), token_of)
    submits = [
        submit(
            number, [number] * draw.randint(1, 12), draw.randint(1, 12), tenant=1 + number % tenants, ignore_eos=False
        )
        for number in range(1, draw.randint(2, 6) + 1)
    ]
    limits = {}
    for one in submits:
        scheduler.add(one, now_ns=0)
        limits[one.request] = scheduler._live.by_id[one.request].limit
    streams = {one.request: Stream() for one in submits}
    steps = 0
    while scheduler.has_work:
        steps += 1
        assert steps < 500, "no progress"
        plan = scheduler.schedule(now_ns=steps)
        assert plan is not None
        samples = runner.run(plan)
        result = scheduler.commit(plan, samples.token_ids, samples.foreign, samples.counts)
        told = samples.placed(result.broken)
        assert [entry.index for entry in told] == list(range(len(result.token_ids)))
        for place, (number, token_id, finish) in enumerate(
            zip(result.requests, result.token_ids, result.finishes, strict=True)
        ):
            assert streams[number].finish == Finish.NONE, "a token after the end"
            streams[number].tokens.append(token_id)
            streams[number].logprobs.append(told[place].logprob)
            streams[number].finish = finish
        for failure in result.failures:
            streams[failure.request].failed = True
        for request in scheduler._running.requests:
            assert len(request.kv.blocks) <= -(-(request.num_tokens + most) // 4)
        scheduler.check_integrity()
        scheduler._tenancy.check()
    for one in submits:
        wanted, stream = expected(one, token_of, limits[one.request]), streams[one.request]
        assert (stream.tokens, stream.finish, stream.failed) == (wanted.tokens, wanted.finish, wanted.failed)
        assert stream.logprobs == [float(token) for token in wanted.tokens]
    assert pool.num_available == num_blocks
    if len({one.namespace for one in submits}) == 1:
        service = sum(paid for line in scheduler._tenancy.classes for paid, _ in line._idle.values())
        prompts = sum(len(one.token_ids) for one in submits)
        outputs = sum(len(stream.tokens) for stream in streams.values())
        recomputed = scheduler.num_preempted
        assert recomputed or service == prompts * INPUT_COST + outputs * OUTPUT_COST
