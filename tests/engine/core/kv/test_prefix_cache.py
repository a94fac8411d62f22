"""Prefix cache: block ids, and what a request may find."""

from __future__ import annotations

from array import array
from hashlib import blake2b

from hypothesis import given
from hypothesis import strategies as st

from engine.core.kv.block_pool import BlockPool
from engine.core.kv.prefix_cache import PrefixCache, block_id
from engine.core.request import Request
from tests.engine.support import namespace, submit

SIZE = 4
ROOT = bytes(range(16))


def make_request(token_ids: list[int], *, tenant: int = 1) -> Request:
    """A request that the cache can look at."""
    return Request.of(submit(1, token_ids, tenant=tenant), order=0, limit=100, stop_ids=frozenset(), arrival_ns=0)


def store(cache: PrefixCache, pool: BlockPool, token_ids: list[int], *, tenant: int = 1) -> list[int]:
    """Compute a request, register its blocks, end it; gives its blocks."""
    request = make_request(token_ids, tenant=tenant)
    request.kv.blocks = pool.take(-(-len(token_ids) // SIZE), namespace(tenant))
    request.num_prefilled = len(token_ids)
    cache.register(request)
    pool.release(request.kv.blocks)
    return request.kv.blocks


def test_block_id_is_the_documented_hash() -> None:
    """The id can be computed from its description, by anybody who has the key."""
    tokens = array("I", [1, 2, 70_000])
    data = ROOT + (3).to_bytes(4, "little") + b"".join(t.to_bytes(4, "little") for t in tokens)
    expected = blake2b(data, key=namespace(7), digest_size=16, person=b"athanor-kv-block").digest()
    assert block_id(namespace(7), ROOT, tokens) == expected


@given(
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=6),
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=6),
    st.binary(min_size=32, max_size=32),
    st.binary(min_size=32, max_size=32),
)
def test_block_ids_differ_when_anything_differs(one: list[int], two: list[int], key_one: bytes, key_two: bytes) -> None:
    """Key, parent, and tokens all separate ids."""
    ids = {
        (key, parent, tuple(tokens)): block_id(key, parent, array("I", tokens))
        for key in (key_one, key_two)
        for parent in (ROOT, bytes(16))
        for tokens in (one, two)
    }
    assert len(set(ids.values())) == len(ids)


def test_a_prefix_is_found_up_to_the_first_difference() -> None:
    """Full blocks are reused from the start until the tokens differ; at least one token stays to be computed."""
    pool = BlockPool(16)
    cache = PrefixCache(pool, root=ROOT, block_size=SIZE)
    blocks = store(cache, pool, list(range(10)))
    assert cache.match(make_request([*range(10), 77])).blocks == blocks[:2]
    assert cache.match(make_request([*range(8)])).blocks == blocks[:1]
    assert cache.match(make_request([*range(9)])).blocks == blocks[:2]
    assert cache.match(make_request([*range(6), 99, 99, 99, 99])).blocks == blocks[:1]
    assert cache.match(make_request([99, *range(1, 10)])).blocks == []
    assert cache.match(make_request([0])).blocks == []


def test_nothing_is_found_from_another_namespace() -> None:
    """The same tokens under another key have other ids."""
    pool = BlockPool(16)
    cache = PrefixCache(pool, root=ROOT, block_size=SIZE)
    store(cache, pool, list(range(12)), tenant=1)
    assert cache.match(make_request(list(range(12)), tenant=2)).blocks == []
    assert len(cache.match(make_request(list(range(12)), tenant=1)).blocks) == 2


def test_only_computed_full_blocks_are_registered() -> None:
    """A block counts when all its tokens are computed, and is offered once."""
    pool = BlockPool(16)
    cache = PrefixCache(pool, root=ROOT, block_size=SIZE)
    request = make_request(list(range(12)))
    request.kv.blocks = pool.take(3, namespace(1))
    for computed, registered in ((3, 0), (4, 1), (7, 1), (11, 2), (12, 3)):
        request.num_prefilled = computed
        cache.register(request)
        assert request.kv.num_registered == registered
        assert len(cache.match(make_request([*range(12), 1])).blocks) == registered


def test_a_middle_block_that_was_evicted_ends_the_match() -> None:
    """Blocks behind a gap are not used although they are still there."""
    pool = BlockPool(3)
    cache = PrefixCache(pool, root=ROOT, block_size=SIZE)
    blocks = store(cache, pool, list(range(12)))
    pool.hold(blocks[0])
    pool.hold(blocks[2])
    pool.take(1, namespace(2))
    assert cache.match(make_request([*range(12), 1])).blocks == blocks[:1]
