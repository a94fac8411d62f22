"""Red team, G1 and G2: what an end user of a tenant left in the cache gives another end user no cached tokens."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from appliance.gateway.front.end_user import end_user
from appliance.gateway.request.ledger import Ledger, Reservation, first_access
from appliance.gateway.request.user_keys import user_key_of
from appliance.selftest.g1_reuse import leave, request_of
from appliance.selftest.simulation import BLOCK
from engine.core.kv.block_pool import BlockPool
from engine.core.kv.prefix_cache import PrefixCache
from isolation.ipc.messages import NAMESPACE_KEY_BYTES
from policy.loader import Source, load_policy

PROMPT = array("I", range(3 * BLOCK + 1))
"""Three whole blocks, and the token that is always computed."""

KEYS = {"apart": b"a" * NAMESPACE_KEY_BYTES, "together": b"t" * NAMESPACE_KEY_BYTES}
POLICY = """
version: 1
tenants:
  apart: {credentials: ["key:apart"], models: ["m"], namespace: user}
  together: {credentials: ["key:together"], models: ["m"]}
"""


def admitted(tenant: str, name: str, keys: dict[str, bytes] = KEYS) -> Reservation:
    """Admit a request of a tenant for one of its users, as the gateway does."""
    ledger = Ledger(load_policy([Source("p.yaml", POLICY)]), keys)
    access = replace(first_access(tenant, "m", 1, 1, None), end_user=end_user(name, "user"))
    found = ledger.try_admit(access)
    assert isinstance(found, Reservation)
    return found


class Room:
    """One engine's pool and cache."""

    def __init__(self) -> None:
        self.pool = BlockPool(64)
        self.cache = PrefixCache(self.pool, root=bytes(16), block_size=BLOCK)

    def leaves(self, one: Reservation) -> None:
        """Compute the prompt for this request, and end it."""
        request = request_of(one.namespace, PROMPT, user=one.user.key)
        leave(self.pool, self.cache, request)

    def cached(self, one: Reservation) -> int:
        """Tokens of the prompt that this request finds."""
        return self.cache.match(request_of(one.namespace, PROMPT, user=one.user.key)).num_tokens


def test_another_end_user_finds_nothing() -> None:
    """With ``namespace: user`` one end user's blocks are found by its own next request and by no other's; the control
    is the tenant without the key, where the same two users share them."""
    room = Room()
    room.leaves(admitted("apart", "ann"))
    assert room.cached(admitted("apart", "ann")) == 3 * BLOCK
    assert room.cached(admitted("apart", "bob")) == 0
    room.leaves(admitted("together", "ann"))
    assert room.cached(admitted("together", "bob")) == 3 * BLOCK


def test_a_request_without_an_end_user_is_alone() -> None:
    """Two requests that name nobody have two keys, keep nothing, and find neither each other's blocks nor a user's."""
    one, two = admitted("apart", ""), admitted("apart", "")
    assert one.user.key != two.user.key
    assert not one.keeps
    assert admitted("apart", "ann").keeps
    room = Room()
    room.leaves(admitted("apart", "ann"))
    room.leaves(one)
    assert room.cached(two) == 0


def test_an_end_users_name_reaches_no_other_namespace() -> None:
    """Whatever text names the end user, the account stays the tenant's; users of one name of two tenants never meet."""
    names = ["ann", "", "../together", KEYS["together"].hex(), "together", "\0", "a" * 512]
    found = [admitted("apart", name) for name in names]
    assert {one.namespace for one in found} == {KEYS["apart"]}
    assert len({one.user.key for one in found} | set(KEYS.values())) == len(names) + len(KEYS)
    assert user_key_of(KEYS["apart"], "ann").key != user_key_of(KEYS["together"], "ann").key


def test_forgetting_the_tenant_forgets_all_of_its_end_users() -> None:
    """Disowning the tenant's key, as a shred does, makes every end user's blocks unfindable, and another tenant's stay;
    with the tenant's new key every end user has a new namespace."""
    room = Room()
    names = ["ann", "bob", "cid"]
    for name in names:
        room.leaves(admitted("apart", name))
    room.leaves(admitted("together", "ann"))
    assert [room.cached(admitted("apart", name)) for name in names] == [3 * BLOCK] * 3
    room.pool.disown(KEYS["apart"])
    assert [room.cached(admitted("apart", name)) for name in names] == [0] * 3
    assert room.cached(admitted("together", "ann")) == 3 * BLOCK
    renewed = KEYS | {"apart": b"n" * NAMESPACE_KEY_BYTES}
    assert not {admitted("apart", name).user.key for name in names} & {
        admitted("apart", name, renewed).user.key for name in names
    }


@pytest.mark.parametrize("bit", [0, 100, 255])
def test_a_guessed_key_is_another(bit: int) -> None:
    """A key that differs from an end user's by one bit finds nothing of it."""
    room, one = Room(), admitted("apart", "ann")
    room.leaves(one)
    near = (int.from_bytes(one.user.key) ^ 1 << bit).to_bytes(NAMESPACE_KEY_BYTES)
    assert room.cache.match(request_of(one.namespace, PROMPT, user=near)).num_tokens == 0
    assert room.cached(one) == 3 * BLOCK
