"""Blocks of a prompt that another host computes at this moment: taken as they come, bounded, and of nobody else."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import suppress

import pytest

from engine.core.engine import Engine
from engine.core.kv import prefetch, spill
from engine.core.kv.block_pool import BlockPool
from engine.core.kv.outbox import Sent
from engine.core.kv.prefetch import AGAIN_NS, ANSWER_NS, LIFE_NS, MAX_CLAIMED, MAX_PREFETCHES, Prefetches
from isolation.ipc.errors import RingFull
from isolation.ipc.kv import WHOLE_POOL, KvQuota, KvQuotas
from isolation.ipc.messages import Role
from isolation.ipc.prefetch import Prefetch
from isolation.ipc.spill import Fetch, Fetched, Forget, KvTier, Miss, Withdraw, mark_of
from tests.engine.core.kv.spilled import Spilling, kv_of, prompt
from tests.engine.core.kv.test_computed import LONG, chain, engine_on, fill, run, shares, told
from tests.engine.support import namespace, submit
from tests.isolation.ipc.wire import Wire, connect

IDLE = (lambda _ids: None, lambda _number: None)
"""Nothing is touched and no fetch is left."""

TAKING = 900
"""Id of a prompt that is taken."""


@pytest.fixture
def wire() -> Iterator[Wire]:
    """A spill channel whose end at the supervisor the test holds."""
    found = connect(Role.SPILL)
    yield found
    found.close()


def taken(number: int = TAKING, tenant: int = 1, token_ids: list[int] = LONG) -> Prefetch:
    """The gateway's word that another host computes a prompt."""
    return Prefetch(number, namespace(tenant), array("I", token_ids))


def asked(wire: Wire) -> list[Fetch]:
    """The fetches that the engine has sent."""
    return [one for one in told(wire) if isinstance(one, Fetch)]


def later(engine: Engine, clock: list[int], ns: int = AGAIN_NS) -> None:
    """Look again after this time."""
    clock[0] += ns
    engine.look()


def computed(token_ids: list[int], output: int) -> tuple[list[bytes], list[int]]:
    """Contents of a prompt's blocks, and its answer, by an engine that computes all of it."""
    wire = connect(Role.SPILL)
    engine, _ = engine_on(wire)
    found = Spilling(engine, wire, None, None, {}, {}, {})  # type: ignore[arg-type]
    found.run(submit(1, token_ids, output))
    contents = kv_of(engine, token_ids)
    wire.close()
    return contents, found.outputs[1]


def answer(wire: Wire, fetch: Fetch, contents: list[bytes], ids: list[bytes]) -> None:
    """Send what a store has of a fetch when it has this many contents of the prompt."""
    first = ids.index(fetch.blocks[0])
    for index in range(len(fetch.blocks)):
        there = first + index < len(contents)
        wire.host.send(
            Fetched(fetch.request, index, contents[first + index] if there else b"", KvTier.STORE, Miss.LACKED)
        )
        if not there:
            return


def test_blocks_are_taken_while_another_host_computes_them(wire: Wire) -> None:
    """The engine asks for the first block until it is there, then for what follows; with each part that the store has
    more is taken, while a request of another tenant is decoded. The prompt's request then asks for the last block
    alone, its answer is that of an engine that computed, and it says that all of it came from the store."""
    contents, expected = computed(LONG, 8)
    engine, clock = engine_on(wire, shares())
    ids = chain(engine, LONG)
    one = Spilling(engine, wire, None, None, {}, {}, {})  # type: ignore[arg-type]
    engine.add(submit(1, prompt(9, 20), 60, tenant=2))
    engine.prefetch(taken())
    sizes, there = list[int](), (0, 0, 3, 3, 9, 16)
    for count in there:
        clock[0] += AGAIN_NS
        for _ in range(4):
            if (output := engine.step()) is not None:
                one.take(output)
            for fetch in asked(wire):
                assert (fetch.coming, fetch.ahead, fetch.namespace) == (False, True, namespace(1))
                sizes.append(len(fetch.blocks))
                answer(wire, fetch, contents[:count], ids)
    assert sizes[:3] == [1, 1, 1], "one block, until it is there"
    assert max(sizes) == 16 and len(sizes) < 14
    engine.add(submit(2, LONG, 8, coming=True))
    (last,) = asked(wire)
    assert (list(last.blocks), last.coming, last.ahead) == (ids[16:], True, False)
    answer(wire, last, contents, ids)
    one.run()
    assert (one.outputs[2], one.cached[2], one.restored[2]) == (expected, 68, (0, 0, 68))
    assert engine.spill is not None and len(engine.spill.prefetches) == 0
    assert len(one.outputs[1]) == 60


def test_a_request_for_which_all_has_come_does_not_wait(wire: Wire) -> None:
    """Where every whole block was taken before, the request asks for nothing, and still says what came for it. Control:
    an equal request that does not say that its prompt is coming claims nothing."""
    contents, expected = computed(LONG, 4)
    engine, clock = engine_on(wire, shares())
    ids = chain(engine, LONG)
    engine.prefetch(taken())
    for _ in range(3):
        later(engine, clock)
        for fetch in asked(wire):
            answer(wire, fetch, contents, ids)
    assert engine.spill is not None
    one = Spilling(engine, wire, None, None, {}, {}, {})  # type: ignore[arg-type]
    one.run(submit(1, LONG, 4))
    assert (one.cached[1], one.restored[1], len(engine.spill.prefetches)) == (68, (0, 0, 0), 1)
    one.run(submit(2, LONG, 4, coming=True))
    assert (one.outputs[2], one.cached[2], one.restored[2]) == (expected, 68, (0, 0, 68))
    assert (asked(wire), len(engine.spill.prefetches)) == ([], 0)


def test_nothing_is_taken_for_who_does_not_share_or_any_more(wire: Wire) -> None:
    """A prompt of a namespace that the host has not named, or that it has had forgotten, is not asked for; what was on
    its way is not taken. Controls: before the word it was."""
    engine, clock = engine_on(wire, shares())
    assert engine.spill is not None
    engine.prefetch(taken(1, tenant=2))
    later(engine, clock)
    assert asked(wire) == []
    engine.prefetch(taken())
    later(engine, clock)
    (fetch,) = asked(wire)
    wire.host.send(Forget(mark_of(namespace(1))))
    wire.host.send(Fetched(fetch.request, 0, bytes(engine.spill.contents.size), KvTier.STORE))
    later(engine, clock)
    assert (asked(wire), len(engine.spill.prefetches), engine.spill.counts.restored) == ([], 0, 0)


@pytest.mark.parametrize("how", ["abort", "life"])
def test_a_prompt_that_is_given_up_is_not_taken_any_more(wire: Wire, how: str) -> None:
    """The gateway ends it, or nobody does for longer than a host may compute: it is asked for no more, what still comes
    is dropped, and an idle engine sleeps again. Control: before, it looks every 50 ms."""
    engine, clock = engine_on(wire, shares())
    assert engine.spill is not None and engine.idle_wait_s(1.0) == 1.0
    engine.prefetch(taken())
    later(engine, clock)
    (fetch,) = asked(wire)
    assert engine.idle_wait_s(1.0) == AGAIN_NS / 1e9
    if how == "abort":
        engine.abort(TAKING)
    else:
        later(engine, clock, LIFE_NS)
    wire.host.send(Fetched(fetch.request, 0, bytes(engine.spill.contents.size), KvTier.STORE))
    later(engine, clock)
    assert (asked(wire), engine.spill.counts.restored, engine.idle_wait_s(1.0)) == ([], 0, 1.0)
    assert not engine.has_work, "nobody is answered"


def test_a_fetch_without_an_answer_is_sent_again_and_its_late_answer_dropped(wire: Wire) -> None:
    """A supervisor that says nothing for a while is asked again; blocks under the old number are not taken, those under
    the new one are. A ring that is full is tried again too."""
    contents, _ = computed(LONG, 1)
    engine, clock = engine_on(wire, shares())
    assert engine.spill is not None
    engine.prefetch(taken())
    fill(wire)
    with suppress(RingFull):
        while True:
            wire.guest.send(Withdraw(namespace(1), b"x"))
    later(engine, clock)
    assert asked(wire) == []
    later(engine, clock)
    (lost,) = asked(wire)
    later(engine, clock, ANSWER_NS)
    later(engine, clock)
    (again,) = asked(wire)
    assert again.request != lost.request and again.blocks == lost.blocks
    wire.host.send(Fetched(lost.request, 0, contents[0], KvTier.STORE))
    engine.look()
    assert engine.spill.counts.restored == 0
    wire.host.send(Fetched(again.request, 0, contents[0], KvTier.STORE))
    engine.look()
    assert engine.spill.counts.restored == 1


def test_content_of_another_length_ends_its_fetch(wire: Wire) -> None:
    """A block that is shorter than this engine's is not taken; the engine asks again later, and serves."""
    engine, clock = engine_on(wire, shares())
    assert engine.spill is not None
    engine.prefetch(taken())
    later(engine, clock)
    (fetch,) = asked(wire)
    wire.host.send(Fetched(fetch.request, 0, b"short", KvTier.STORE))
    engine.look()
    assert engine.spill.counts.restored == 0 and asked(wire) == []
    later(engine, clock)
    assert len(asked(wire)) == 1
    engine.add(submit(1, prompt(3, 20), 2, tenant=2))
    run(engine)


def test_a_pool_that_is_in_use_ends_it(wire: Wire) -> None:
    """Where running requests come to hold all blocks, the first one that comes ends the taking, and no request loses
    any; where they hold them before, nothing is asked for."""
    contents, _ = computed(LONG, 1)
    engine, clock = engine_on(wire, shares(), num_blocks=9)
    assert engine.spill is not None
    engine.add(submit(1, prompt(3, 30), 2, tenant=2))
    engine.step()
    engine.prefetch(taken())
    later(engine, clock)
    (fetch,) = asked(wire)
    while engine.scheduler.num_available_blocks:
        engine.spill.pool.take_one(namespace(3), engine.spill.pool.accounts.of(namespace(3)))
    wire.host.send(Fetched(fetch.request, 0, contents[0], KvTier.STORE))
    engine.look()
    assert (len(engine.spill.prefetches), engine.spill.counts.restored) == (0, 0)
    engine.prefetch(taken())
    later(engine, clock)
    assert (len(engine.spill.prefetches), asked(wire)) == (1, [])


def test_prompts_that_are_taken_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more at a time than the bounds say, of one account and of all; one that ends leaves its place. A fetch has no
    more blocks than fit its bytes, and at least one."""
    sent = list[int]()

    def send(one: prefetch.Fetching) -> int:
        sent.append(len(one.blocks))
        return len(sent)

    def begun(prefetches: Prefetches, key: bytes, first: int) -> int:
        before = len(prefetches)
        for number in range(first, first + 40):
            prefetches.begin(number, key, iter([b"%d-%d" % (number, place) for place in range(40)]), 0)
        return len(prefetches) - before

    few = Prefetches(1 << 10, lambda _id: False, send, lambda _key, _taken: 1_000, *IDLE)
    assert [begun(few, key, 100 * place) for place, key in enumerate((b"a", b"b", b"c"))] == [
        MAX_PREFETCHES // 2,
        MAX_PREFETCHES // 4,
        MAX_PREFETCHES // 8,
    ]
    few.end(0)
    few.end(12345)
    assert begun(few, b"c", 500) == 1
    few.begin(600, b"d", iter(()), 0)
    assert len(few) == MAX_PREFETCHES * 7 // 8
    for size, wanted in ((1 << 20, 8), (16 << 20, 1)):
        large = Prefetches(size, lambda _id: False, send, lambda _key, _taken: 1_000, *IDLE)
        large.begin(1, b"a", iter([bytes([place]) for place in range(40)]), 0)
        large.ask(0)
        found = large.fetching(len(sent))
        assert found is not None
        found.come = 1
        large.over(len(sent), 0)
        large.ask(0)
        assert sent[-2:] == [1, wanted]


def test_prompts_take_no_more_than_the_pool_has(wire: Wire) -> None:
    """Two prompts that are taken, each nearly as large as the pool, do not put each other's blocks out: the one that
    finds no room is taken no further, and what came of the other is there for its request. Control: in a pool that has
    room for both, both are taken whole."""
    other = prompt(5, 70)
    (of_one, _), (of_other, _) = computed(LONG, 1), computed(other, 1)
    for num_blocks, whole in ((26, [False, True]), (200, [True, True])):
        end = connect(Role.SPILL)
        engine, clock = engine_on(end, shares(), num_blocks=num_blocks)
        both = (chain(engine, LONG), of_one), (chain(engine, other), of_other)
        engine.prefetch(taken())
        engine.prefetch(taken(TAKING + 1, token_ids=other))
        for _ in range(12):
            later(engine, clock)
            for fetch in asked(end):
                ids, contents = next(found for found in both if fetch.blocks[0] in found[0])
                answer(end, fetch, contents, ids)
        engine.look()
        assert engine.spill is not None
        pool = engine.spill.pool
        here = [sum(pool.find(one) is not None for one in ids) for ids, _ in both]
        assert sorted(count == len(chain(engine, LONG)) for count in here) == whole, here
        assert sum(here) == engine.spill.counts.restored, "nothing that came was put out"
        end.close()


def test_what_is_not_there_yet_stays_known(wire: Wire) -> None:
    """A block that this engine has sent, and that the store has not got while another host computes its prompt, still
    counts as sent: should it turn out to be wrong, it is withdrawn. Control: a request that misses it forgets it."""
    contents, _ = computed(LONG, 1)
    engine, clock = engine_on(wire, shares(computed=False))
    ids = chain(engine, LONG)
    assert engine.spill is not None
    index = engine.spill._out.index
    later(engine, clock, 0)
    index[ids[1]] = Sent(namespace(1), None)
    engine.spill._out.known[namespace(1)] += 1
    engine.prefetch(taken())
    for count in (1, 1):
        later(engine, clock)
        (fetch,) = asked(wire)
        answer(wire, fetch, contents[:count], ids)
    later(engine, clock, 0)
    assert fetch.blocks[0] == ids[1] and ids[1] in index
    engine.abort(TAKING)
    engine.add(submit(1, LONG, 1, coming=True))
    (fetch,) = asked(wire)
    answer(wire, fetch, contents[:1], ids)
    run(engine)
    assert fetch.blocks[0] == ids[1] and not fetch.ahead
    assert ids[1] not in index


def take_all(wire: Wire, engine: Engine, clock: list[int], of: dict[bytes, tuple[list[bytes], list[bytes]]]) -> None:
    """Look again and again, and answer what is asked for from a store that has all; ``of``: ids and contents of each
    prompt, by the key of its namespace."""
    for _ in range(12):
        later(engine, clock)
        for fetch in asked(wire):
            ids, contents = next(found for found in of.values() if fetch.blocks[0] in found[0])
            answer(wire, fetch, contents, ids)
    engine.look()


def num_here(engine: Engine, ids: list[bytes]) -> int:
    """How many of these blocks the pool has."""
    assert engine.spill is not None
    return sum(engine.spill.pool.find(one) is not None for one in ids)


def test_a_tenant_with_a_cap_is_asked_for_beside_others(wire: Wire) -> None:
    """Another tenant's prompt under way, of more blocks than a tenant's cap, keeps nothing from that tenant: as many
    blocks as its cap allows come for it, and none beyond."""
    other = prompt(5, 70)
    (of_one, _), (of_other, _) = computed(LONG, 1), computed(other, 1)
    engine, clock = engine_on(wire, shares(), shares(2))
    engine.set_quotas(KvQuotas((KvQuota(namespace(2), 0, WHOLE_POOL // 20),)))
    ids = chain(engine, LONG), chain(engine, other, tenant=2)
    prompts = {namespace(1): (ids[0], of_one), namespace(2): (ids[1], of_other)}
    engine.prefetch(taken())
    take_all(wire, engine, clock, prompts)
    assert num_here(engine, ids[0]) == len(ids[0]) > 10
    engine.prefetch(taken(TAKING + 1, 2, other))
    take_all(wire, engine, clock, prompts)
    assert (num_here(engine, ids[0]), num_here(engine, ids[1])) == (len(ids[0]), 10)


def test_what_is_taken_counts_for_the_pool_and_for_each_cap() -> None:
    """Beside what others' prompts took a tenant has what is left of the pool, and of its cap only its own count; what a
    reservation protects is not counted twice. The question opens no account, and neither does content without room."""
    pool = BlockPool(100)
    pool.set_quotas([KvQuota(b"capped", 0, WHOLE_POOL // 10), KvQuota(b"kept", WHOLE_POOL // 5, WHOLE_POOL)])
    for number in range(15):
        assert pool.adopt(b"%d" % number, b"kept") is not None
    assert pool.available_beside(b"new", {}) == 85
    assert pool.available_beside(b"new", {b"kept": 15, b"another": 30}) == 55
    assert pool.available_beside(b"new", {b"new": 5, b"another": 30}) == 50
    assert pool.available_beside(b"capped", {b"another": 30}) == 10
    assert pool.available_beside(b"capped", {b"another": 80, b"capped": 4}) == 1
    assert pool.available_beside(b"kept", {b"kept": 15, b"another": 30}) == 55
    taken = pool.take(85, b"busy")
    assert pool.adopt(b"x", b"stranger") is None
    assert set(pool.accounts.by_key) == {b"capped", b"kept", b"busy"}
    pool.release(taken)
    pool.check_integrity()


@pytest.mark.parametrize("ends", ["starts", "aborted"])
def test_what_came_for_a_request_that_waits_is_not_put_out(wire: Wire, ends: str) -> None:
    """Blocks that came for a request which waits for a row stay while another prompt is taken, which gets what is left
    beside them; the request then finds all of them. Once it has started or ended they are counted no more."""
    other = prompt(5, 70)
    (of_one, _), (of_other, _) = computed(LONG, 1), computed(other, 1)
    engine, clock = engine_on(wire, shares(), num_blocks=30, max_num_seqs=1)
    ids = chain(engine, LONG), chain(engine, other)
    prompts = {namespace(1): (ids[0], of_one), b"other": (ids[1], of_other)}
    one = Spilling(engine, wire, None, None, {}, {}, {})  # type: ignore[arg-type]
    engine.add(submit(1, prompt(9, 18), 2, tenant=2))
    engine.step()
    engine.prefetch(taken())
    take_all(wire, engine, clock, prompts)
    engine.add(submit(2, LONG, 1, coming=True))
    engine.prefetch(taken(TAKING + 1, token_ids=other))
    take_all(wire, engine, clock, prompts)
    assert num_here(engine, ids[0]) == len(ids[0]) == 17
    assert 0 < num_here(engine, ids[1]) < 17
    assert engine.spill is not None
    prefetches = engine.spill.prefetches
    assert prefetches._taken[namespace(1)] == 17 + num_here(engine, ids[1])
    engine.abort(TAKING + 1)
    if ends == "aborted":
        engine.abort(2)
    one.run()
    assert one.cached.get(2, 0) == (0 if ends == "aborted" else 68)
    assert not prefetches._taken and not prefetches.keys


def test_requests_that_wait_are_counted_within_a_bound() -> None:
    """No more requests are counted than stated, the newest; any output of one settles it, and what is forgotten counts
    no more."""
    sent = list[int]()

    def send(one: prefetch.Fetching) -> int:
        sent.append(len(one.blocks))
        return len(sent)

    prefetches = Prefetches(1 << 10, lambda _id: False, send, lambda _key, _taken: 1_000, *IDLE)
    for number in range(MAX_CLAIMED + 3):
        prefetches.begin(number, b"key", iter([b"id"]), 0)
        prefetches.ask(0)
        found = prefetches.fetching(len(sent))
        assert found is not None
        found.come, found.tiers[KvTier.STORE] = 1, 1
        assert prefetches.claim(b"key", iter([b"id"]), range(10 * number, 10 * number + 2)) == (0, 0, 1)
    assert prefetches._taken == {b"key": MAX_CLAIMED}
    prefetches.settle(iter([0, 31, 41]))
    assert prefetches._taken == {b"key": MAX_CLAIMED - 2}
    prefetches.forget(b"key")
    assert prefetches._taken == {} and prefetches.keys == set()


def test_a_forgotten_namespace_leaves_no_account(wire: Wire) -> None:
    """The question for how many blocks a prompt has room opens no account: after its namespace is forgotten the engine
    has its key nowhere. Control: that of a request with blocks is there."""
    engine, clock = engine_on(wire, shares())
    assert engine.spill is not None
    engine.prefetch(taken())
    later(engine, clock)
    assert len(asked(wire)) == 1
    wire.host.send(Forget(mark_of(namespace(1))))
    later(engine, clock)
    assert namespace(1) not in engine.spill.pool.accounts.by_key
    engine.add(submit(1, prompt(3, 30), 2, tenant=2))
    engine.step()
    assert namespace(2) in engine.spill.pool.accounts.by_key


@pytest.mark.parametrize(
    ("how", "gap"), [("gap", True), ("all", False), ("silent", False), ("full", False), ("no places", False)]
)
def test_a_start_says_whether_the_store_has_a_gap(
    wire: Wire, monkeypatch: pytest.MonkeyPatch, how: str, gap: bool
) -> None:
    """The store's answer that it lacks a block is told with the start of the request. Controls: all came, nothing
    answered, and nothing was asked, since requests hold the pool or the places of those that ask."""
    contents, _ = computed(LONG, 1)
    engine, clock = engine_on(wire, shares(), num_blocks=30)
    ids, starts, busy = chain(engine, LONG), dict[int, bool](), list[int]()
    assert engine.spill is not None
    if how == "no places":
        monkeypatch.setattr(spill, "MAX_SEEKING", 0)
    if how == "full":
        engine.add(submit(1, prompt(3, 70), 8, tenant=2))
        engine.step()
        pool = engine.spill.pool
        busy = pool.take(pool.num_available, namespace(3))
    engine.add(submit(2, LONG, 1, coming=True))
    fetches = asked(wire)
    assert len(fetches) == (0 if how in {"full", "no places"} else 1)
    for fetch in fetches:
        if how != "silent":
            answer(wire, fetch, contents if how == "all" else [], ids)
    clock[0] += ANSWER_NS
    if how == "full":
        engine.spill.pool.release(busy)
    while engine.has_live_requests or engine.has_work:
        output = engine.step()
        starts |= {one.request: one.store_gap for one in (output.starts if output else ())}
    assert starts[2] is gap


def test_who_comes_behind_greedy_tenants_has_a_place() -> None:
    """Two tenants have as many prompts computed elsewhere as they may, and one that comes behind them still has one
    taken. Control: a tenant that is alone has half of the places."""
    prefetches = Prefetches(1, lambda _id: False, lambda _one: 1, lambda _key, _taken: 1, *IDLE)
    number = 0
    for tenant in (1, 2, 3):
        before = len(prefetches)
        for _ in range(MAX_PREFETCHES):
            number += 1
            prefetches.begin(number, namespace(tenant), iter([b"%d" % number]), 0)
        assert len(prefetches) - before > 0
        assert tenant > 1 or len(prefetches) == MAX_PREFETCHES // 2
    assert len(prefetches) <= MAX_PREFETCHES
