"""G1, in the memory tier: no KV block made for one namespace ever serves another.

Adversarial pairs in one pool: somebody leaves a prompt's blocks, somebody else asks for the same ids, for the same
beginning, or under keys that differ in a bit or in how their parts are framed. An *attach* is a block found. The
control asks again as the one who left them, and must find them.
"""

from __future__ import annotations

import random
from array import array

from bench.guarantees.result import Result, judged
from bench.guarantees.simulation import BLOCK, GREEDY
from engine.kv.block_pool import BlockPool
from engine.kv.prefix_cache import PrefixCache, block_id
from engine.request import Request
from isolation.ipc.messages import NAMESPACE_KEY_BYTES, Submit

SHORT, FULL = 100_000, 1_000_000
POOL = 256
COMMAND = "athanor selftest"
KINDS = ("same ids", "same beginning", "one bit of the key", "group and member", "member and group", "deterministic")


def run(full: bool) -> list[Result]:
    """100,000 pairs, or a million of them; and twice as many pairs of framings of the hash."""
    pairs = FULL if full else SHORT
    attached, controls = _attach(pairs)
    same = _framings(2 * pairs)
    return [
        judged("G1.memory", attached == 0, figure=f"{attached} attaches in {pairs} pairs", bar="0", command=COMMAND),
        judged(
            "G1.memory.control", controls == pairs, figure=f"{controls} of {pairs} found by their owner",
            bar="all", command=COMMAND,
        ),
        judged("G1.framing", same == 0, figure=f"{same} equal ids in {2 * pairs} pairs", bar="0", command=COMMAND),
    ]  # fmt: skip


def _attach(pairs: int) -> tuple[int, int]:
    """Attaches across namespaces, and pairs in which the owner found what it left."""
    rng = random.Random(1)
    pool = BlockPool(POOL)
    cache = PrefixCache(pool, root=bytes(16), block_size=BLOCK)
    attached = controls = 0
    for number in range(pairs):
        kind = KINDS[number % len(KINDS)]
        length = BLOCK * rng.randint(1, 6) + rng.randrange(BLOCK)
        prompt = array("I", [rng.randrange(50)]) * (length + 1)
        owner, group = rng.randbytes(NAMESPACE_KEY_BYTES), rng.randbytes(NAMESPACE_KEY_BYTES)
        made = request_of(owner, prompt, group=group if kind == "group and member" else b"")
        leave(pool, cache, made)
        attached += cache.match(other_request(kind, made, group, rng)).num_tokens > 0
        same = request_of(owner, prompt, group=made.submit.group)
        controls += cache.match(same).num_tokens == length // BLOCK * BLOCK
    return attached, controls


def other_request(kind: str, made: Request, group: bytes, rng: random.Random) -> Request:
    """Somebody else's request for what ``made`` has left."""
    namespace, prompt = made.namespace, made.token_ids
    other = rng.randbytes(NAMESPACE_KEY_BYTES)
    if kind == "same beginning":
        return request_of(other, prompt[: BLOCK + 1] + array("I", [60, 61]))
    if kind == "one bit of the key":
        bit = rng.randrange(8 * NAMESPACE_KEY_BYTES)
        return request_of((int.from_bytes(namespace) ^ 1 << bit).to_bytes(NAMESPACE_KEY_BYTES), prompt)
    if kind == "group and member":
        # What a group has left, asked for by a member that is no member any more.
        return request_of(namespace, prompt)
    if kind == "member and group":
        return request_of(namespace, prompt, group=group)
    if kind == "deterministic":
        return request_of(namespace, prompt, deterministic=True)
    return request_of(other, prompt)


def request_of(namespace: bytes, prompt: array[int], *, group: bytes = b"", deterministic: bool = False) -> Request:
    """A request as the scheduler has it."""
    submit = Submit(1, namespace, prompt, 1, GREEDY, group=group, deterministic=deterministic)
    return Request(submit, order=0, limit=len(prompt) + 1, stop_ids=frozenset(), arrival_ns=0)


def leave(pool: BlockPool, cache: PrefixCache, request: Request) -> None:
    """Compute the request's prompt and let it end."""
    request.kv = pool.accounts.of(request.kv_key)
    request.blocks = pool.take(-(-request.num_tokens // BLOCK), request.kv_key, request.kv)
    request.num_prefilled = request.num_tokens
    cache.register(request)
    pool.release(request.blocks)
    pool.contents.drain_dirty()


def _framings(pairs: int) -> int:
    """Pairs of different (parent, tokens) with one id: what moves between the parts, and forged lengths."""
    rng = random.Random(2)
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
