"""Order of eviction: of a prompt its last block first, wherever its blocks came from, and in whatever order."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise

import pytest

from engine.core.kv.block_pool import BlockPool
from engine.core.kv.prefetch import TOUCH_NS
from isolation.ipc.kv import WHOLE_POOL, KvQuota
from isolation.ipc.messages import Role
from tests.engine.core.kv.spilled import Spilling, prompt
from tests.engine.core.kv.test_computed import LONG, chain, engine_on, shares
from tests.engine.core.kv.test_prefetch import answer, asked, computed, later, taken
from tests.engine.support import namespace, submit
from tests.isolation.ipc.wire import Wire, connect

OWNERS = (b"a" * 32, b"b" * 32)


@pytest.fixture
def wire() -> Iterator[Wire]:
    """A spill channel whose end at the supervisor the test holds."""
    found = connect(Role.SPILL)
    yield found
    found.close()


def came(pool: BlockPool, ids: list[bytes], owner: bytes = OWNERS[0]) -> None:
    """Have the blocks of a prompt come from outside, in its order."""
    for behind, block_id in zip([b"", *ids[:-1]], ids, strict=True):
        assert pool.adopt(block_id, owner, behind) is not None


def test_what_came_from_outside_is_evicted_from_its_end() -> None:
    """Of four blocks that came, and of four more that came behind them after another's release, the last is evicted
    first. Control: blocks that are not said to continue each other go in the order in which they came."""
    pool = BlockPool(10)
    pool.evicted = []
    ids = [b"%d" % place for place in range(8)]
    came(pool, ids[:4])
    other = pool.take(1, OWNERS[0])
    pool.register(other[0], b"other")
    pool.release(other)
    for behind, block_id in pairwise(ids[3:]):
        assert pool.adopt(block_id, OWNERS[0], behind) is not None
    pool.check_integrity()
    assert [block_id for _, block_id, _ in pool.coldest(9)] == [*reversed(ids), b"other"]
    pool.take(10, OWNERS[1])
    assert [block_id for _, block_id, _ in pool.evicted] == [*reversed(ids), b"other"]
    plain = BlockPool(4)
    plain.evicted = []
    for block_id in ids[:4]:
        plain.adopt(block_id, OWNERS[0])
    plain.take(4, OWNERS[1])
    assert [block_id for _, block_id, _ in plain.evicted] == ids[:4]


def test_nothing_comes_in_the_place_of_what_it_continues() -> None:
    """In a full pool a block is not taken where only its own prompt could make room for it; one of another's is."""
    pool = BlockPool(4)
    ids = [b"%d" % place for place in range(6)]
    came(pool, ids[:4])
    assert pool.adopt(ids[4], OWNERS[0], ids[3]) is None
    pool.check_integrity()
    assert [pool.find(one) is not None for one in ids[:4]] == [True, True, True, False]
    assert pool.adopt(ids[3], OWNERS[0], ids[2]) is not None
    held = [block for one in ids[:4] if (block := pool.find(one)) is not None]
    pool.touch(held[:2])
    assert pool.adopt(b"another's", OWNERS[0]) is not None
    assert [pool.find(one) is not None for one in ids[:4]] == [True, True, True, False]


def test_a_part_of_what_came_may_be_held_and_the_rest_goes_first() -> None:
    """A request holds the first half; the other half, which continues it, is evicted from its end, then what is
    released. Blocks of a fork go before the block that both continue."""
    pool = BlockPool(8)
    pool.evicted = []
    ids = [b"%d" % place for place in range(6)]
    came(pool, ids)
    assert pool.adopt(b"fork", OWNERS[0], ids[2]) is not None
    half = [block for one in ids[:3] if (block := pool.find(one)) is not None]
    for block in half:
        pool.hold(block)
    pool.check_integrity()
    pool.release(half)
    pool.take(8, OWNERS[1])
    assert [one for _, one, _ in pool.evicted] == [b"fork", *reversed(ids[3:]), *reversed(ids[:3])]


@pytest.mark.parametrize("seed", range(12))
def test_no_block_is_evicted_before_one_that_continues_it(seed: int) -> None:
    """Random prompts that fork come from outside, are computed, held in part, touched and evicted, with and without
    quotas: whenever a block is evicted, none that continues it is left, and all sums are exact."""
    draw = random.Random(seed)
    pool = BlockPool(24)
    pool.evicted = []
    parents: dict[bytes, bytes] = {}
    tables: list[tuple[bytes, list[int]]] = []
    evicted = 0

    def prompt_of(owner: bytes) -> list[bytes]:
        """Ids of one of a few prompts of an owner, which have beginnings in common."""
        ids, last = list[bytes](), owner[:1]
        for place in range(draw.randint(1, 9)):
            last = last + b"%d" % (draw.randint(0, 1) if place in (2, 4) else 0)
            ids.append(last)
        parents.update(zip(ids[1:], ids, strict=False))
        return ids

    for _ in range(1_500):
        owner = draw.choice(OWNERS)
        account, ids, step = pool.accounts.of(owner), prompt_of(owner), draw.randint(0, 9)
        here = [block for one in ids if (block := pool.find(one)) is not None]
        known = next((place for place, one in enumerate(ids) if pool.find(one) is None), len(ids))
        if step <= 3:
            for place in range(known, len(ids)):
                if pool.adopt(ids[place], owner, ids[place - 1] if place else b"") is None:
                    break
        elif step <= 5 and len(tables) < 4:
            table = [block for one in ids[:known] if (block := pool.find(one)) is not None]
            for block in table:
                pool.hold(block)
            new = min(len(ids) - known, max(0, pool.available_for(account)))
            fresh = pool.take(new, owner)
            for block, one in zip(fresh, ids[known:], strict=False):
                pool.register(block, one)
            tables.append((owner, table + fresh))
        elif step <= 7 and tables:
            pool.release(tables.pop(draw.randrange(len(tables)))[1])
        elif step == 8:
            pool.touch(here[:known])
        elif step == 9 and draw.random() < 0.2:
            quotas = [KvQuota(OWNERS[0], draw.randint(0, 8), draw.choice((12, WHOLE_POOL)))]
            pool.set_quotas(quotas if draw.random() < 0.7 else [])
        for _, gone, _ in pool.evicted:
            left = [one for one, parent in parents.items() if parent == gone and pool.find(one) is not None]
            if pool.find(gone) is None:
                assert not left, f"{gone!r} was evicted before {left}"
            evicted += 1
        pool.evicted.clear()
        pool.check_integrity()
    assert evicted > 50, "nothing was evicted"


def test_a_growing_request_takes_the_end_of_what_was_taken_ahead(wire: Wire) -> None:
    """The prompt's 17 blocks were taken from the store; a request of another tenant grows into the last ones of them.
    The prompt's request still finds all that are left, and has the answer of an engine that computed all."""
    contents, expected = computed(LONG, 4)
    engine, clock = engine_on(wire, shares(), num_blocks=30)
    ids = chain(engine, LONG)
    one = Spilling(engine, wire, None, None, {}, {}, {})  # type: ignore[arg-type]
    engine.prefetch(taken())
    for _ in range(6):
        later(engine, clock)
        for fetch in asked(wire):
            answer(wire, fetch, contents, ids)
    pool = engine.scheduler._pool
    assert pool.num_cached == 17
    one.run(submit(1, prompt(9, 20), 50, tenant=2))
    left = [pool.find(block_id) is not None for block_id in ids]
    assert left == sorted(left, reverse=True) and 0 < left.count(False) < 12, "the last ones are gone"
    engine.add(submit(2, LONG, 4))
    one.run()
    assert (one.cached[2], one.outputs[2]) == (4 * left.count(True), expected)
    pool.check_integrity()


def test_what_is_taken_ahead_stays_as_young_as_it_is_used(wire: Wire) -> None:
    """Blocks that came over more than a second are made younger than what was released meanwhile, their first one
    included, and still go last one first."""
    contents, _ = computed(LONG, 4)
    engine, clock = engine_on(wire, shares(), num_blocks=60)
    ids = chain(engine, LONG)
    one = Spilling(engine, wire, None, None, {}, {}, {})  # type: ignore[arg-type]
    engine.prefetch(taken())
    pool = engine.scheduler._pool
    for there in (4, 4, 8):
        later(engine, clock)
        for fetch in asked(wire):
            answer(wire, fetch, contents[:there], ids)
        one.run(submit(100 + there + len(one.outputs), prompt(9 + len(one.outputs), 9), 1, tenant=2))
    later(engine, clock, TOUCH_NS)
    order = [block_id for _, block_id, _ in pool.coldest(60) if block_id in ids]
    newest = [block_id for _, block_id, _ in pool.coldest(60)][-len(order) :]
    assert len(order) >= 4 and order == newest == [one for one in reversed(ids) if one in order]
    assert namespace(2) in pool.contents.owners, "something else was cached"
