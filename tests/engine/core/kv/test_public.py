"""Public prefixes: found by whom the host names and nobody else, there for good, and no way to what is private."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from engine.core.kv.layout import FULL, KvGroup, Reach
from engine.core.kv.public import common_blocks
from engine.core.offline import generate
from engine.core.public_prefixes import Publisher
from engine.core.scheduler.plan import FAILED
from engine.core.specification import SILENT_ID
from isolation.ipc.engine import Submit
from isolation.ipc.kv import WHOLE_POOL, KvQuota
from isolation.ipc.messages import FailureCode
from isolation.ipc.public import PublicPrefix, PublicPrefixes, PublicState, PublicUse
from isolation.ipc.sampling import Sampling
from tests.engine.core.simulation import SimulatedRunner
from tests.engine.support import make_engine, make_scheduler, model_config, namespace, random_model, submit

BLOCK = 4
A, B = 1, 2
KEY, OTHER = namespace(61), namespace(62)
PREFIX = list(range(50, 50 + 5 * BLOCK))


def prefix(key: bytes = KEY, token_ids: list[int] = PREFIX) -> PublicPrefix:
    """One prefix of a table."""
    return PublicPrefix(key, array("I", token_ids))


class Box:
    """A scheduler with a publisher, and checks around every step."""

    def __init__(self, num_blocks: int = 40, **fields: object) -> None:
        settings = {"max_num_seqs": 8, "max_num_batched_tokens": 160, **fields}
        self.scheduler, self.pool = make_scheduler(num_blocks=num_blocks, block_size=BLOCK, **settings)
        self.cache = self.scheduler._live._cache
        self.publisher = Publisher(self.scheduler, self.pool, self.cache, exact=lambda: False)
        self.runner = SimulatedRunner(self.scheduler, BLOCK)
        self.cached: dict[int, int] = {}
        self.ended: list[int] = []
        self.zeroed: list[int] = []

    def publish(self, *table: PublicPrefix) -> list[PublicState]:
        """Put a table in force and let the engine come to rest; gives what became of each."""
        self.publisher.set(table)
        self.finish()
        return self.states()

    def states(self) -> list[PublicState]:
        """What the host would be told."""
        return [use.state for use in self.uses()]

    def uses(self) -> tuple[PublicUse, ...]:
        """The whole report."""
        self.publisher._news = True
        usage = self.publisher.take_usage(0)
        return usage.uses if usage else ()

    def ask(self, number: int, token_ids: list[int], output: int = 1, *, tenant: int = A, **fields: object) -> None:
        """A request that may begin with the prefix unless it says otherwise."""
        fields = {"public": KEY, **fields}
        self.scheduler.add(submit(number, token_ids, output, tenant=tenant, **fields), now_ns=0)

    def found(self, number: int, token_ids: list[int], **fields: object) -> int:
        """Tokens that a request finds, from its start to its end."""
        self.ask(number, token_ids, **fields)
        self.finish()
        return self.cached[number]

    def step(self, choose: dict[int, int] | None = None, *, foreign: frozenset[int] = frozenset()) -> None:
        """One step."""
        self.publisher.before_schedule(0)
        plan = self.scheduler.schedule(now_ns=0)
        if plan is None:
            return
        self.zeroed += plan.zero_blocks
        result = self.scheduler.commit(plan, self.runner.execute(plan, choose), foreign)
        self.publisher.after_commit(result)
        self.cached |= {started.request: started.cached_tokens for started in result.starts}
        self.ended += [number for number, finish in zip(result.requests, result.finishes, strict=True) if finish]
        self.ended += [-failure.request for failure in result.failures]
        assert SILENT_ID not in (*result.requests, *self.cached), "the host hears of the engine's own request"
        self.scheduler.check_integrity()

    def finish(self) -> None:
        """Steps until nothing is left."""
        for _ in range(5_000):
            if not (self.scheduler.has_work or self.publisher.has_work):
                return
            self.step()
        raise AssertionError("somebody starves")


def test_whom_the_host_names_finds_the_prefix_and_nobody_else_does() -> None:
    """Two tenants, one of which keeps nothing, and a group find it at their first request; others do not."""
    box = Box()
    assert box.publish(prefix()) == [PublicState.RESIDENT]
    assert box.found(1, [*PREFIX, 1, 2, 3], tenant=A) == len(PREFIX)
    assert box.found(2, [*PREFIX, 1, 2, 3], tenant=B, retain=False) == len(PREFIX)
    assert box.found(3, [*PREFIX, 1, 2, 3], tenant=B, group=namespace(9)) == len(PREFIX)
    assert box.found(4, [*PREFIX, 1, 2, 3], tenant=3, public=b"") == 0
    assert box.found(5, [*PREFIX, 1, 2, 3], tenant=4, public=OTHER) == 0
    assert box.found(6, [*PREFIX, 1, 2, 3], tenant=3, prompt_logprobs=0) == 0, "its whole prompt has to be computed"
    assert [use.hits for use in box.uses()] == [3]


def test_what_follows_a_public_prefix_is_its_owners_alone() -> None:
    """Blocks behind a public parent are found by their owner, and by no other tenant, group or class with the same ids;
    and they are other blocks than the owner's own of the same ids without the prefix."""
    box = Box(num_blocks=200)
    box.publish(prefix())
    asked = [*PREFIX, *range(200, 200 + 3 * BLOCK), 9]
    assert box.found(1, asked, tenant=A) == len(PREFIX)
    assert box.found(2, asked, tenant=A) == len(asked) - 1, "control: the owner finds it"
    assert box.found(3, asked, tenant=B) == len(PREFIX)
    assert box.found(4, asked, tenant=A, group=namespace(9)) == len(PREFIX)
    assert box.found(5, asked, tenant=A, public=b"") == 0
    assert box.found(6, asked[len(PREFIX) :], tenant=A) == 0
    assert box.found(7, asked, tenant=B, retain=False) == len(PREFIX)


def test_a_tenant_cannot_leave_blocks_under_a_public_id() -> None:
    """While the prefix is not resident its beginning is computed by each tenant under that tenant's key, whatever the
    host has named; what becomes resident later holds what the engine itself computed."""
    box = Box()
    assert box.found(1, [*PREFIX, 1], tenant=A) == 0
    assert box.found(2, [*PREFIX, 1], tenant=B) == 0
    box.publish(prefix())
    resident = box.cache.public.by_key[KEY]
    assert {box.pool.owner(block) for block in resident.blocks} == {KEY}
    assert box.found(3, [*PREFIX, 1], tenant=3) == len(PREFIX)
    box.publish()
    assert box.found(4, [*PREFIX, 1], tenant=4) == 0
    assert box.pool.contents.known_of(KEY) == []


def test_own_blocks_from_before_a_publication_are_still_found() -> None:
    """A longer chain of the tenant's own is taken instead of the public one."""
    box = Box()
    asked = [*PREFIX, *range(200, 200 + 2 * BLOCK), 9]
    assert box.found(1, asked, public=b"") == 0
    box.publish(prefix())
    assert box.found(2, asked) == len(asked) - 1
    assert box.found(3, asked, tenant=B) == len(PREFIX)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ([*PREFIX[:-1], 7, 1], len(PREFIX) - BLOCK),
        ([7, *PREFIX[1:], 1], 0),
        (PREFIX, len(PREFIX) - BLOCK),
        (PREFIX[: 2 * BLOCK + 1], 2 * BLOCK),
        (PREFIX[: 2 * BLOCK], BLOCK),
        (PREFIX[: BLOCK - 1], 0),
        ([*PREFIX[:BLOCK], *PREFIX], BLOCK),
    ],
)
def test_as_many_whole_blocks_are_shared_as_are_the_same(asked: list[int], found: int) -> None:
    """A prompt that differs in the prefix's last token, in its first, is cut inside of a block, or is the prefix."""
    box = Box()
    box.publish(prefix(token_ids=[*PREFIX, 99]))
    assert box.found(1, asked) == found
    assert common_blocks(array("I", PREFIX), array("I", asked), BLOCK) == found // BLOCK


def test_no_flood_takes_a_block_of_a_public_prefix() -> None:
    """Prompts of many times the pool leave the prefix where it is; nothing of it is evicted, or offered to a spill."""
    box = Box()
    box.pool.evicted = []
    box.publish(prefix())
    blocks = box.cache.public.by_key[KEY].blocks
    for number in range(1, 60):
        box.ask(number, [100 + number] * 60, 20, tenant=number % 5 + 2)
        box.step()
        assert KEY not in {owner for _, _, owner in box.pool.coldest(100)}
    box.finish()
    assert box.found(99, [*PREFIX, 1]) == len(PREFIX)
    assert box.cache.public.by_key[KEY].blocks == blocks
    box.publish()
    assert box.pool.evicted and KEY not in {owner for _, _, owner in box.pool.evicted}


def test_a_withdrawn_prefix_is_zeroed_when_the_last_request_lets_go() -> None:
    """A running request goes on with it; nobody new finds it; afterwards every block of it is zeroed and its account
    is closed."""
    box = Box()
    box.publish(prefix())
    blocks = set(box.cache.public.by_key[KEY].blocks)
    box.ask(1, [*PREFIX, 1], 30)
    box.step()
    box.zeroed.clear()
    box.publisher.set([])
    box.ask(2, [*PREFIX, 1], tenant=B)
    box.step()
    box.step()
    assert box.cached[2] == 0
    assert not blocks & set(box.zeroed)
    assert box.pool.accounts.by_key[KEY].held == len(blocks)
    box.finish()
    assert box.ended == [2, 1]
    assert blocks <= set(box.zeroed)
    box.publisher.before_schedule(0)
    assert KEY not in box.pool.accounts.by_key


def test_a_preempted_request_goes_on_without_a_withdrawn_prefix() -> None:
    """It computes the beginning again under its own key, and leaves nothing under the prefix's."""
    box = Box()
    box.publish(prefix())
    box.ask(1, [*PREFIX, 1], 30)
    box.step()
    request = box.scheduler._live.by_id[1]
    assert request.kv.num_public == 5
    box.scheduler._live.preempt(request, request)
    box.publisher.set([])
    box.finish()
    assert request.kv.num_public == 0
    assert box.pool.contents.known_of(KEY) == []
    assert box.ended == [1]


def test_the_new_prefix_is_there_before_the_old_one_goes() -> None:
    """Between two tables there is no moment without either, where both fit."""
    box = Box()
    box.publish(prefix())
    box.publisher.set([prefix(OTHER, [*PREFIX, *PREFIX])])
    seen = []
    while box.scheduler.has_work or box.publisher.has_work:
        seen.append(set(box.cache.public.by_key))
        box.step()
    seen.append(set(box.cache.public.by_key))
    assert all(seen)
    assert seen[0] == {KEY}
    assert seen[-1] == {OTHER}


def test_prefixes_take_no_more_than_half_of_the_pool_and_nothing_that_is_reserved() -> None:
    """What does not fit is refused by name; when reservations grow, the last of the table gives way."""
    box = Box(num_blocks=24)
    long = list(range(300, 300 + 8 * BLOCK))
    assert box.publish(prefix(), prefix(OTHER, long)) == [PublicState.RESIDENT, PublicState.NO_ROOM]
    quota = [KvQuota(namespace(A), WHOLE_POOL * 21 // 24, WHOLE_POOL)]
    box.publisher.make_room(quota)
    box.scheduler.set_quotas(quota)
    box.finish()
    assert box.states() == [PublicState.NO_ROOM, PublicState.NO_ROOM]
    assert box.found(1, [*PREFIX, 1]) == 0
    box.publisher.make_room([])
    box.scheduler.set_quotas([])
    box.publisher.try_again()
    box.finish()
    assert box.states() == [PublicState.RESIDENT, PublicState.NO_ROOM]
    assert box.publish(prefix(OTHER, long)) == [PublicState.RESIDENT]


def test_a_prefix_waits_where_too_many_requests_do() -> None:
    """Without a turn of its own for each step that gives nothing, and it comes as soon as there is room."""
    box = Box(max_waiting=2, max_num_seqs=1)
    for number in (1, 2):
        box.ask(number, [number] * 9, structured=True)
    box.publisher.set([prefix()])
    box.publisher.before_schedule(0)
    assert not box.publisher.has_work
    assert box.scheduler.schedule(now_ns=0) is None
    box.scheduler.abort(1)
    box.ask(3, [3] * 9)
    box.step()
    box.finish()
    assert box.states() == [PublicState.RESIDENT]


def test_what_cannot_be_published_is_said() -> None:
    """A prefix of less than a block, an id that the model does not have, and a model with windows."""
    box = Box()
    assert box.publish(prefix(token_ids=PREFIX[:3]), prefix(OTHER, [5_000] * 8)) == [PublicState.INVALID] * 2
    groups = (KvGroup(FULL, BLOCK), KvGroup(Reach("window", 8), BLOCK))
    windowed = Box(max_context=64, max_num_batched_tokens=16, groups=groups)
    assert windowed.publish(prefix()) == [PublicState.UNSUPPORTED]


def test_several_outputs_that_keep_nothing_leave_the_prefix_whole() -> None:
    """When the last of a family under a key of its own ends, its blocks are forgotten, and the prefix's are not."""
    box = Box()
    box.publish(prefix())
    asked = [*PREFIX, *range(200, 200 + 2 * BLOCK), 9]
    assert box.found(1, asked, retain=False, choices=3) == len(PREFIX)
    assert box.cached[2] == len(asked) - 1, "control: the others find what the first has computed"
    assert box.found(9, asked, tenant=B) == len(PREFIX)


def test_a_request_that_breaks_spoils_nothing_public() -> None:
    """A row without a finite logit takes its own blocks along, and the prefix stays as it was."""
    box = Box()
    box.publish(prefix())
    blocks = box.cache.public.by_key[KEY].blocks
    box.ask(1, [*PREFIX, 1, 2], 5)
    box.step({1: FAILED})
    assert box.ended == [-1]
    assert box.found(2, [*PREFIX, 1, 2], tenant=B) == len(PREFIX)
    assert box.cache.public.by_key[KEY].blocks == blocks


def test_a_prefix_in_doubt_is_computed_anew() -> None:
    """After a request was stopped because a block of its table was not its own, other blocks hold the prefix."""
    box = Box()
    box.publish(prefix())
    first = box.cache.public.by_key[KEY]
    box.ask(1, [*PREFIX, 1, 2], 5)
    box.step()
    row = box.scheduler._live.by_id[1].row
    plan = box.scheduler.schedule(now_ns=0)
    assert plan is not None
    result = box.scheduler.commit(plan, [FAILED], frozenset({row}))
    box.publisher.after_commit(result)
    assert KEY not in box.cache.public.by_key
    box.finish()
    assert box.cache.public.by_key[KEY] is not first
    assert box.found(2, [*PREFIX, 1, 2], tenant=B) == len(PREFIX)


def test_requests_that_no_longer_fit_beside_a_prefix_are_cut() -> None:
    """What takes memory for good shortens what could have had it, at once and in new requests."""
    box = Box(num_blocks=20)
    box.ask(1, [3] * 30, 50, public=b"")
    box.step()
    box.publish(prefix())
    assert box.ended == [1]
    request = box.scheduler._live.by_id.get(1)
    assert request is None
    box.ask(2, [4] * 30, 50, public=b"")
    assert box.scheduler._live.by_id[2].limit == 15 * BLOCK
    box.finish()


def ask(token_ids: list[int], *, public: bytes = b"", deterministic: bool = True, tenant: int = A) -> Submit:
    """A request of eight tokens with log-probabilities."""
    made = submit(1, token_ids, 8, tenant=tenant, public=public, deterministic=deterministic, logprobs=3)
    return replace(made, sampling=Sampling(temperature=0.9, seed=5), ignore_eos=True)


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_answer_is_the_same_bits_with_a_prefix_and_without(deterministic: bool) -> None:
    """Tokens and log-probabilities of the deterministic class, and tokens of the other, whatever the chunks were in
    which the prefix was computed; and what one class left behind the prefix is not found by the other."""
    model = random_model(model_config(), packed=False)
    token_ids = [number % 90 for number in PREFIX + list(range(200, 213))]
    plain = make_engine(model, max_num_batched_tokens=64)
    (without,) = generate(plain, [ask(token_ids, deterministic=deterministic)]).values()
    engine = make_engine(model, max_num_batched_tokens=19)
    engine.set_public(PublicPrefixes((prefix(token_ids=token_ids[: len(PREFIX)]),)))
    while engine.has_work:
        engine.step()
    usage = engine.take_public()
    assert usage is not None
    assert [use.state for use in usage.uses] == [PublicState.RESIDENT]
    other = ask(token_ids, public=KEY, deterministic=not deterministic)
    (first,) = generate(engine, [replace(other, request=7)]).values()
    assert first.cached_tokens == len(PREFIX)
    (given,) = generate(engine, [ask(token_ids, public=KEY, deterministic=deterministic)]).values()
    assert given.cached_tokens == len(PREFIX)
    assert given.token_ids == without.token_ids
    if deterministic:
        assert given.logprobs == without.logprobs


def test_the_host_cannot_speak_for_the_engines_own_request() -> None:
    """The id of the request that computes a prefix is refused, also as a choice of another."""
    engine = make_engine(random_model(model_config(), packed=False))
    for number, choices in ((SILENT_ID, 1), (SILENT_ID - 1, 2)):
        engine.add(replace(ask([1, 2, 3]), request=number, choices=choices))
        output = engine.step()
        assert output is not None
        assert {failure.code for failure in output.failures} == {FailureCode.INVALID}
        assert len(output.failures) == choices
    assert not engine.has_live_requests
