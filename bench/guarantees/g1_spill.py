"""G1, in the tiers outside of the engine: no block that was sent away for one namespace comes back to another.

Pairs as in ``g1_reuse``, by way of the engine's end of the spill channel, its codec, the supervisor's end and the real
sealed store, once in memory and once on a disk. Somebody's blocks are pushed out of the pool; then an engine that
works as it should looks for them on somebody else's behalf, and an engine that was taken over asks for them by name:
under another tenant's key, under a key of nobody, in a later life, or by leaving its own bytes under the same name. An
*attach* is a block of the owner's that came back, or bytes of somebody else's that came back to the owner. The control
is the owner, who gets all of them, byte for byte.
"""

from __future__ import annotations

import os
import random
import tempfile
from array import array
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from appliance.supervisor.spill_port import ModelName, SpillPort
from appliance.supervisor.spill_store import SpillLimits, SpillStore
from bench.guarantees.g1_reuse import KINDS, leave, other_request, request_of
from bench.guarantees.result import Result, judged
from bench.guarantees.simulation import BLOCK
from engine.kv.block_pool import BlockPool
from engine.kv.prefix_cache import PrefixCache
from engine.kv.spill import SpillTier
from engine.request import Request
from isolation.ipc.codec import decode, encode
from isolation.ipc.messages import NAMESPACE_KEY_BYTES, Message
from isolation.ipc.spill_messages import Fetch, Fetched, Keep
from isolation.keys.keyring import Keyring

SHORT, FULL = 10_000, 1_000_000
"""Pairs in each tier."""
POOL = 4
CONTENT_BYTES = 64
TIER_BYTES = 1 << 16
"""Of the tier in use: some pairs' blocks, so that old ones go."""
TENANTS = 64
"""Owners of namespaces: each has a key of its own in the keyring, and makes another namespace for each pair."""
COMMAND = "athanor selftest"
ASKED = tuple(kind for kind in KINDS if kind != "group and member")
"""Blocks of sharing groups are not sent away."""
FORGED = ("another's key", "nobody's key", "a later life", "its own bytes under the same name")


@dataclass
class Wire:
    """Both ends of one engine's spill channel, without a ring between them; every message passes the codec."""

    port: SpillPort | None = None
    answers: deque[Message] = field(default_factory=deque)

    def send(self, message: Message, *, urgent: bool = True) -> None:
        """Either end's: what the engine says is served at once, what it is told waits for it."""
        heard = decode(encode(message))
        if isinstance(heard, Fetched):
            self.answers.append(heard)
        else:
            assert self.port is not None, "an engine without a supervisor"
            self.port.serve(heard)

    def receive(self, limit: int) -> list[Message]:
        """What the engine is told."""
        return [self.answers.popleft() for _ in range(min(limit, len(self.answers)))]

    def close(self) -> None:
        """Nothing is held."""


@dataclass
class Bytes:
    """What stands in the engine's blocks."""

    blocks: list[bytes]
    size: int = CONTENT_BYTES

    def read(self, block: int) -> bytes:
        """A block's."""
        return self.blocks[block]

    def write(self, block: int, content: bytes) -> None:
        """Overwrite a block's."""
        self.blocks[block] = content

    def wipe(self) -> None:
        """There is no buffer."""


class Tier:
    """An engine's pool, its spill tier and the supervisor's store behind it."""

    def __init__(self, folder: Path, owners: dict[bytes, str], *, disk: bool, seed: int) -> None:
        """``owners``: whose a namespace key is, as the supervisor knows it; filled here."""
        self.draw = random.Random(seed)
        self.owners = owners
        self._keyring = Keyring(folder / "keys", os.urandom(32))
        limits = SpillLimits(0 if disk else TIER_BYTES, TIER_BYTES if disk else 0, folder / "spill")
        self.store = SpillStore(limits, self._keyring)
        self.pool = BlockPool(POOL)
        self.cache = PrefixCache(self.pool, root=bytes(16), block_size=BLOCK)
        self.bytes = Bytes([bytes(CONTENT_BYTES)] * (self.pool.num_blocks + 1))
        self.wire, self.later = self._life(), self._life()
        self.tier = SpillTier(self.wire, self.bytes, self.pool, self.cache, lambda _blocks, _stamps: None)

    def _life(self) -> Wire:
        """One engine's channel; both lives are of the same model, with an epoch each."""
        wire = Wire()
        wire.port = SpillPort(wire, ModelName("00" * 32), self.store, self.owners.get, "engine")  # type: ignore[arg-type]
        return wire

    def close(self) -> None:
        """Forget everything."""
        self.store.close()
        self._keyring.close()

    def namespace(self, tenant: int) -> bytes:
        """A new key of a tenant's."""
        key = self.draw.randbytes(NAMESPACE_KEY_BYTES)
        self.owners[key] = f"tenant-{tenant}"
        return key

    def send_away(self, made: Request) -> dict[bytes, bytes]:
        """Compute a request's prompt, fill its blocks and push them out of the pool; gives what was in them."""
        leave(self.pool, self.cache, made)
        content = {}
        for block_id in self.cache.chain(made.submit):
            block = self.pool.find(block_id)
            assert block is not None, "what was just computed is cached"
            self.bytes.blocks[block] = content[block_id] = self.draw.randbytes(CONTENT_BYTES)
        self.empty()
        return content

    def empty(self) -> None:
        """Push everything out of the pool."""
        key = bytes(NAMESPACE_KEY_BYTES)
        blocks = self.pool.take(POOL, key, self.pool.accounts.of(key))
        self.tier.save()
        self.pool.release(blocks)
        self.pool.contents.drain_dirty()

    def bring_back(self, asking: Request) -> int:
        """Tokens that a request finds once whatever was sent away for it is back."""
        if self.tier.park(asking.submit, now_ns=0):
            while not self.tier.take(now_ns=0):
                pass
        return self.cache.match(asking).num_tokens

    def holds(self, content: dict[bytes, bytes]) -> bool:
        """Whether the pool has all these blocks with these bytes."""
        found = {block_id: self.pool.find(block_id) for block_id in content}
        return all(block is not None and self.bytes.blocks[block] == content[one] for one, block in found.items())


def run(full: bool) -> list[Result]:
    """10,000 pairs in either tier, or a million."""
    pairs = FULL if full else SHORT
    return [row for name in ("spill", "disk") for row in _rows(name, pairs)]


def _rows(name: str, pairs: int) -> list[Result]:
    """One tier's claim and its control."""
    with tempfile.TemporaryDirectory(prefix="ath-g1-") as folder:
        tier = Tier(Path(folder), {}, disk=name == "disk", seed=3)
        try:
            attached, controls = attach(tier, pairs)
            sealed = tier.store.figures.restored
        finally:
            tier.close()
    return [
        judged(f"G1.{name}", attached == 0, figure=f"{attached} attaches in {pairs} pairs", bar="0", command=COMMAND),
        judged(
            f"G1.{name}.control", controls == pairs <= sealed, bar="all", command=COMMAND,
            figure=f"{controls} of {pairs} came back to their owner, {sealed} blocks unsealed",
        ),
    ]  # fmt: skip


def attach(tier: Tier, pairs: int) -> tuple[int, int]:
    """Attaches, and pairs in which the owner got all its own back."""
    draw = tier.draw
    attached = controls = 0
    for number in range(pairs):
        tier.owners.clear()
        owner, other = draw.sample(range(TENANTS), 2)
        kind = (*ASKED, *FORGED)[number % (len(ASKED) + len(FORGED))]
        prompt = array("I", [draw.randrange(50)]) * (BLOCK * draw.randint(1, 2) + 1 + draw.randrange(BLOCK))
        made = request_of(tier.namespace(owner), prompt)
        content = tier.send_away(made)
        if kind in FORGED:
            attached += _forged(tier, kind, made, content, tier.namespace(other))
        else:
            asking = other_request(kind, made, tier.namespace(other), draw)
            tier.owners.setdefault(asking.namespace, f"tenant-{other}")
            attached += tier.bring_back(asking) > 0
        again = request_of(made.namespace, prompt)
        came = tier.bring_back(again) == len(content) * BLOCK
        controls += came and tier.holds(content)
        tier.empty()
    return attached, controls


def _forged(tier: Tier, kind: str, made: Request, content: dict[bytes, bytes], other: bytes) -> bool:
    """Whether an engine that was taken over got a block by its name, or had the owner take its bytes."""
    wire = tier.later if kind == "a later life" else tier.wire
    namespace = {"another's key": other, "nobody's key": tier.draw.randbytes(NAMESPACE_KEY_BYTES)}.get(
        kind, made.namespace
    )
    if kind == FORGED[-1]:
        for block_id in content:
            wire.send(Keep(other, block_id, b"x" * CONTENT_BYTES))
        namespace = made.namespace
    wire.send(Fetch(1 << 40, namespace, tuple(content)))
    told = [message.content for message in wire.receive(len(content)) if isinstance(message, Fetched)]
    if kind == FORGED[-1]:
        return told != list(content.values())
    return any(told)
