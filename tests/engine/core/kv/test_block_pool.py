"""Block pool: states, owners, eviction order, and what must be zeroed."""

from __future__ import annotations

import pytest

from engine.core.kv.block_pool import BlockPool
from engine.core.kv.contents import CLEAN, TRANSIENT

A, B = b"a" * 32, b"b" * 32


def test_a_taken_block_is_zeroed_before_use_whoever_had_it() -> None:
    """Every block given out is on the list once, also on its first use and for its last owner."""
    pool = BlockPool(3)
    first = pool.take(2, A)
    assert sorted(pool.contents.drain_dirty()) == sorted(first)
    assert pool.contents.drain_dirty() == []
    pool.release(first)
    again = pool.take(3, B)
    assert sorted(pool.contents.drain_dirty()) == sorted(again) == [1, 2, 3]
    pool.check_integrity()


def test_transient_blocks_are_zeroed_as_soon_as_they_are_free() -> None:
    """A request that keeps nothing leaves zero blocks one step after its end, without anybody taking them."""
    pool = BlockPool(2)
    blocks = pool.take(1, TRANSIENT)
    pool.contents.drain_dirty()
    pool.release(blocks)
    assert pool.contents.has_dirty
    assert pool.contents.drain_dirty() == blocks
    assert pool.owner(blocks[0]) == CLEAN
    pool.check_integrity()


def test_released_blocks_of_a_keeping_request_are_left_to_the_next_taker() -> None:
    """Control of the test above: an ordinary free block is not zeroed before somebody takes it."""
    pool = BlockPool(2)
    blocks = pool.take(1, A)
    pool.contents.drain_dirty()
    pool.release(blocks)
    assert not pool.contents.has_dirty
    assert pool.owner(blocks[0]) == A


def test_registered_blocks_are_found_until_they_are_evicted_oldest_first() -> None:
    """Free blocks go first, then cached ones in the order of their release, a table's tail before its head."""
    pool = BlockPool(4)
    head, tail = pool.take(2, A)
    other = pool.take(1, A)[0]
    for block, block_id in ((head, b"head"), (tail, b"tail"), (other, b"other")):
        pool.register(block, block_id)
    pool.release([head, tail])
    pool.release([other])
    assert (pool.num_cached, pool.num_available) == (3, 4)
    pool.take(1, B)
    assert pool.num_cached == 3
    for evicted, left in ((b"tail", 2), (b"head", 1), (b"other", 0)):
        assert pool.find(evicted) is not None
        pool.take(1, B)
        assert pool.find(evicted) is None
        assert pool.num_cached == left
    pool.check_integrity()


def test_holding_a_cached_block_protects_it() -> None:
    """A block taken up again is not evicted, and its holders are counted."""
    pool = BlockPool(2)
    (block,) = pool.take(1, A)
    pool.register(block, b"id")
    pool.release([block])
    pool.hold(block)
    pool.hold(block)
    assert (pool.refs(block), pool.num_available) == (2, 1)
    pool.release([block])
    assert pool.num_available == 1
    pool.release([block])
    assert (pool.num_available, pool.find(b"id")) == (2, block)
    pool.check_integrity()


def test_the_first_block_registered_under_an_id_stays() -> None:
    """A second block with the same content is not findable and becomes free at its end."""
    pool = BlockPool(2)
    first, second = pool.take(2, A)
    pool.register(first, b"id")
    pool.register(second, b"id")
    pool.release([first, second])
    assert pool.find(b"id") == first
    assert pool.num_cached == 1
    pool.check_integrity()


def test_discarded_content_is_forgotten_and_zeroed() -> None:
    """Blocks of a failed request cannot be found, and are zeroed once nobody holds them."""
    pool = BlockPool(3)
    shared, own = pool.take(2, A)
    pool.register(shared, b"shared")
    pool.register(own, b"own")
    pool.hold(shared)
    pool.contents.drain_dirty()
    pool.discard([shared, own])
    assert pool.find(b"shared") is None
    assert pool.find(b"own") is None
    assert pool.contents.drain_dirty() == [own]
    pool.release([shared])
    assert pool.contents.drain_dirty() == [shared]
    pool.check_integrity()


@pytest.mark.parametrize("misuse", ["take", "release", "register"])
def test_misuse_is_caught(misuse: str) -> None:
    """What the scheduler promises to the pool is asserted."""
    pool = BlockPool(1)
    with pytest.raises(AssertionError):
        if misuse == "take":
            pool.take(2, A)
        elif misuse == "release":
            pool.release([1])
        else:
            pool.register(1, b"id")


def test_integrity_check_sees_a_lost_block() -> None:
    """Positive control: the check that runs after every step does fail."""
    pool = BlockPool(3)
    pool._free.pop()
    with pytest.raises(AssertionError, match="lost"):
        pool.check_integrity()
