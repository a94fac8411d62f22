"""G1, in the memory tier: no KV block made for one namespace, a tenant's or an end user's, ever serves another.

Adversarial pairs share one pool: one request leaves a prompt's blocks, another asks for these ids, for a common prefix,
or under keys that differ in a bit or in the framing of their parts. An *attach* is a cached block that was found. The
control repeats the request as the owner, and must find the blocks.
"""

from __future__ import annotations

import random
from array import array

from appliance.common.figures import counted
from appliance.gateway.request.user_keys import user_key_of
from appliance.selftest.result import Result, judged
from appliance.selftest.simulation import BLOCK, GREEDY
from appliance.selftest.spread import spread
from engine.core.kv.block_pool import BlockPool
from engine.core.kv.prefix_cache import PrefixCache, block_id
from engine.core.request import Request
from isolation.ipc.engine import Submit
from isolation.ipc.messages import NAMESPACE_KEY_BYTES

SHORT, FULL = 20_000, 1_000_000
POOL = 256
COMMAND = "athanor selftest"
KINDS = (
    *("same ids", "same beginning", "one bit of the key", "group and member", "member and group", "deterministic"),
    *("another end user", "end user and tenant", "tenant and end user"),
)
OF_USERS = frozenset({"another end user", "end user and tenant"})
"""Kinds whose blocks an end user's request left."""


def run(full: bool) -> list[Result]:
    """Run 20,000 pairs, or a million; and twice as many pairs of framings of the hash."""
    pairs = FULL if full else SHORT
    parts = spread(_attach, pairs, 1)
    attached, controls, pairs = (sum(column) for column in zip(*parts, strict=True))
    same = sum(spread(_framings, 2 * pairs, 2))
    return [
        judged(
            "G1.memory",
            attached == 0,
            figure=f"{counted(attached, 'attach', 'attaches')} in {counted(pairs, 'pair')}",
            bar="0",
            command=COMMAND,
        ),
        judged(
            "G1.memory.control",
            controls == pairs,
            figure=f"{controls} of {pairs} found by their owner",
            bar="all",
            command=COMMAND,
        ),
        judged("G1.framing", same == 0, figure=f"{same} equal ids in {2 * pairs} pairs", bar="0", command=COMMAND),
    ]


def _attach(pairs: int, seed: int) -> tuple[int, int, int]:
    """Count attaches across namespaces, pairs in which the owner found its blocks, and pairs."""
    rng = random.Random(seed)
    pool = BlockPool(POOL)
    cache = PrefixCache(pool, root=bytes(16), block_size=BLOCK)
    attached = controls = 0
    for number in range(pairs):
        kind = KINDS[number % len(KINDS)]
        length = BLOCK * rng.randint(1, 6) + rng.randrange(BLOCK)
        prompt = array("I", [rng.randrange(50)]) * (length + 1)
        owner, group = rng.randbytes(NAMESPACE_KEY_BYTES), rng.randbytes(NAMESPACE_KEY_BYTES)
        user = user_key_of(owner, "one").key if kind in OF_USERS else b""
        made = request_of(owner, prompt, group=group if kind == "group and member" else b"", user=user)
        leave(pool, cache, made)
        attached += cache.match(other_request(kind, made, group, rng)).num_tokens > 0
        same = request_of(owner, prompt, group=group_of(made), user=made.spec.user)
        controls += cache.match(same).num_tokens == length // BLOCK * BLOCK
    return attached, controls, pairs


def other_request(kind: str, made: Request, group: bytes, rng: random.Random) -> Request:
    """Build another tenant's or end user's request for the blocks that ``made`` has left."""
    namespace, prompt = made.spec.namespace, made.token_ids
    other = rng.randbytes(NAMESPACE_KEY_BYTES)
    if kind == "same beginning":
        return request_of(other, prompt[: BLOCK + 1] + array("I", [60, 61]))
    if kind == "one bit of the key":
        bit = rng.randrange(8 * NAMESPACE_KEY_BYTES)
        return request_of((int.from_bytes(namespace) ^ 1 << bit).to_bytes(NAMESPACE_KEY_BYTES), prompt)
    if kind == "group and member":
        # Blocks left by a group, requested by a former member.
        return request_of(namespace, prompt)
    if kind == "member and group":
        return request_of(namespace, prompt, group=group)
    if kind == "end user and tenant":
        return request_of(namespace, prompt)
    if kind in ("another end user", "tenant and end user"):
        return request_of(namespace, prompt, user=user_key_of(namespace, "two").key)
    if kind == "deterministic":
        return request_of(namespace, prompt, deterministic=True)
    return request_of(other, prompt)


def request_of(
    namespace: bytes, prompt: array[int], *, group: bytes = b"", deterministic: bool = False, user: bytes = b""
) -> Request:
    """Build a request as the scheduler represents it."""
    submit = Submit(1, namespace, prompt, 1, GREEDY, group=group, deterministic=deterministic, user=user)
    return Request.of(submit, order=0, limit=len(prompt) + 1, stop_ids=frozenset(), arrival_ns=0)


def group_of(request: Request) -> bytes:
    """The key of the request's sharing group, or nothing."""
    return request.spec.kv_key if request.spec.kv_key != request.spec.namespace else b""


def leave(pool: BlockPool, cache: PrefixCache, request: Request) -> None:
    """Compute the request's prompt and finish the request."""
    request.kv.account = pool.accounts.of(request.spec.kv_key)
    request.kv.blocks = pool.take(-(-request.num_tokens // BLOCK), request.spec.kv_key, request.kv.account)
    request.num_prefilled = request.num_tokens
    cache.register(request)
    pool.release(request.kv.blocks)
    pool.contents.drain_dirty()


def _framings(pairs: int, seed: int) -> int:
    """Find different (parent, tokens) with equal ids: bytes moved between the parts, and forged lengths."""
    rng = random.Random(seed)
    namespace = rng.randbytes(NAMESPACE_KEY_BYTES)
    same = 0
    for _ in range(pairs):
        parent = rng.randbytes(16)
        tokens = array("I", rng.randbytes(4 * rng.randint(1, BLOCK)))
        whole = parent + len(tokens).to_bytes(4, "little") + tokens.tobytes()
        # As if the first bytes of a longer input were the parent, and its rest the tokens.
        cut = 4 * rng.randint(1, len(tokens) + 1)
        shifted = array("I", whole[16 + cut :])
        same += block_id(namespace, parent, tokens) == block_id(namespace, whole[cut : cut + 16], shifted)
    return same
