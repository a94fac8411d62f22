"""G1, in the tiers outside the engine: no block spilled for one namespace returns to another.

Pairs as in ``g1_reuse`` pass through the engine's end of the spill channel, its codec, the supervisor's end and the
real sealed store: in memory, on a disk, and in a store outside of the machine.
One tenant's blocks are evicted from the pool; then a correct
engine looks for them on another tenant's behalf, and a compromised engine requests them by name: under another tenant's
key, under an unassigned key, in a later engine run, or after storing its own bytes under their name. An *attach* is a
block of the owner's that was returned, or foreign bytes that were returned to the owner. The control is the owner, who
gets all blocks, byte for byte.

A store outside is asked over a network, which takes time. ``G1.store.asked`` counts what it is asked for while a
correct or compromised engine looks for another tenant's blocks: nothing, so how long an
answer takes tells nothing about what another tenant has there. The control is the owner, for whom it is asked each
time.
"""

from __future__ import annotations

import os
import random
import tempfile
from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from pathlib import Path

from appliance.common.figures import counted
from appliance.gateway.request.user_keys import user_key_of
from appliance.selftest.g1_reuse import KINDS, OF_USERS, group_of, leave, other_request, request_of
from appliance.selftest.result import Result, judged
from appliance.selftest.simulation import BLOCK, GREEDY
from appliance.selftest.spread import spread
from appliance.selftest.store_outside import StoreOutside
from appliance.supervisor.spill_port import SpillPort
from appliance.supervisor.spill_store import SpillStore
from appliance.supervisor.spill_tiers import SpillLimits
from engine.core.kv.block_pool import BlockPool
from engine.core.kv.leaving import ENOUGH, ReadContent
from engine.core.kv.prefix_cache import PrefixCache
from engine.core.kv.spill import SpillTier
from engine.core.request import Request
from isolation.ipc.codec import Message, decode, encode
from isolation.ipc.engine import Submit
from isolation.ipc.messages import NAMESPACE_KEY_BYTES
from isolation.ipc.spill import Fetch, Fetched, Keep
from isolation.keys.keyring import Keyring
from isolation.keys.seal import OVERHEAD_BYTES, Binding

SHORT, FULL = 3_000, 1_000_000
"""Number of pairs in each tier, in the short and the full form."""
POOL = 4
CONTENT_BYTES = 64
TIER_BYTES = 1 << 16
"""Bytes of the tier in use: some pairs' blocks, so that old ones are evicted."""
TENANTS = 64
"""Owners of namespaces: each has its own key in the keyring, and creates another namespace for each pair."""
COMMAND = "athanor selftest"
TIERS = ("spill", "disk", "store")
"""Tiers by the names of their rows; ``spill`` is memory."""
STAYS = "stays"
"""Tenant whose blocks do not leave the machine: one of them takes the place of those that do."""
FORGED = ("another's key", "nobody's key", "a later life", "its own bytes under the same name")


@dataclass
class SpillWire:
    """Both ends of one engine's spill channel, connected without a ring; every message passes the codec."""

    port: SpillPort | None = None
    answers: deque[Message] = field(default_factory=deque)

    def send(self, message: Message, *, urgent: bool = True) -> None:
        """Send from either end: the engine's messages are served at once, messages to it are queued."""
        heard = decode(encode(message))
        if isinstance(heard, Fetched):
            self.answers.append(heard)
        else:
            assert self.port is not None, "an engine without a supervisor"
            self.port.serve(heard)

    def receive(self, limit: int) -> list[Message]:
        """Return the messages queued for the engine."""
        return [self.answers.popleft() for _ in range(min(limit, len(self.answers)))]

    def close(self) -> None:
        """Do nothing: no resource is held."""


@dataclass
class Bytes:
    """Contents of the engine's blocks."""

    blocks: list[bytes]
    size: int = CONTENT_BYTES

    def read(self, block: int) -> bytes:
        """Read one block."""
        return self.blocks[block]

    def start(self, block: int) -> ReadContent:
        """Read one block at once."""
        return ReadContent(self.blocks[block])

    def make_room(self) -> int:
        """Return how many blocks can be written: any number."""
        return ENOUGH

    def write(self, block: int, content: bytes) -> None:
        """Overwrite one block."""
        self.blocks[block] = content

    def wipe(self) -> None:
        """Do nothing: there is no buffer."""


class Tier:
    """An engine's pool, its spill tier and the supervisor's store behind it."""

    def __init__(self, folder: Path, owners: dict[bytes, str], *, tier: str, seed: int) -> None:
        """Build all parts; ``owners`` maps a namespace key to its tenant, as the supervisor knows it, and is filled
        here; ``tier`` is one of ``TIERS``."""
        self.draw = random.Random(seed)
        self.owners = owners
        self._keyring = Keyring(folder / "keys", os.urandom(32))
        one = CONTENT_BYTES + OVERHEAD_BYTES
        memory = {"spill": TIER_BYTES, "disk": 0, "store": one}[tier]
        outside = TIER_BYTES if tier == "store" else 0
        limits = SpillLimits(
            memory, TIER_BYTES if tier == "disk" else 0, folder / "spill", store=outside, store_seconds=3_600
        )
        self.outside = StoreOutside() if tier == "store" else None
        self.store = SpillStore(limits, self._keyring, self.outside, lambda tenant: tenant != STAYS)
        self.pool = BlockPool(POOL)
        self.cache = PrefixCache(self.pool, root=bytes(16), block_size=BLOCK)
        self.bytes = Bytes([bytes(CONTENT_BYTES)] * (self.pool.num_blocks + 1))
        self.wire, self.later = self._life(), self._life()
        self.tier = SpillTier(self.wire, self.bytes, self.pool, self.cache, lambda _blocks, _stamps: None)

    def _life(self) -> SpillWire:
        """Build one engine run's channel; both runs have this model, each its own epoch."""
        wire = SpillWire()
        wire.port = SpillPort(wire, "00" * 32, self.store, self.owners.get, "engine")  # type: ignore[arg-type]
        return wire

    def close(self) -> None:
        """Discard everything."""
        self.store.close()
        self._keyring.close()

    def namespace(self, tenant: int) -> bytes:
        """Make a new key of a tenant."""
        key = self.draw.randbytes(NAMESPACE_KEY_BYTES)
        self.owners[key] = f"tenant-{tenant}"
        return key

    def send_away(self, made: Request) -> dict[bytes, bytes]:
        """Compute a request's prompt, fill its blocks and evict them from the pool; return their contents."""
        leave(self.pool, self.cache, made)
        content = {}
        for block_id in self.cache.chain(_submit_of(made)):
            block = self.pool.find(block_id)
            assert block is not None, "what was just computed is cached"
            self.bytes.blocks[block] = content[block_id] = self.draw.randbytes(CONTENT_BYTES)
        self.empty()
        if self.outside is not None:
            self.store.put(Binding(STAYS, "00" * 32, bytes(16), bytes(16)), bytes(CONTENT_BYTES))
            self.outside.settle()
        return content

    @property
    def asked(self) -> int:
        """Objects that the store outside was asked for; 0 where there is none."""
        return 0 if self.outside is None else self.outside.asked

    def empty(self) -> None:
        """Evict everything from the pool."""
        key = bytes(NAMESPACE_KEY_BYTES)
        blocks = self.pool.take(POOL, key, self.pool.accounts.of(key))
        self.tier.save()
        self.pool.release(blocks)
        self.pool.contents.drain_dirty()

    def bring_back(self, asking: Request) -> int:
        """Return the tokens that a request finds once its spilled blocks have returned."""
        if self.tier.await_prefix(_submit_of(asking), now_ns=0):
            while not self.tier.take(now_ns=0):
                pass
        return self.cache.match(asking).num_tokens

    def holds(self, content: dict[bytes, bytes]) -> bool:
        """Return whether the pool has all these blocks with these bytes."""
        found = {block_id: self.pool.find(block_id) for block_id in content}
        return all(block is not None and self.bytes.blocks[block] == content[one] for one, block in found.items())


def run(full: bool) -> Iterator[Result]:
    """Run 3,000 pairs in each tier, or a million."""
    pairs = FULL if full else SHORT
    for name in TIERS:
        yield from _rows(name, pairs)


@dataclass(frozen=True, slots=True)
class Attached:
    """Counts of some pairs."""

    attached: int = 0
    """Pairs in which a block was returned to another, or foreign bytes to the owner."""
    returned: int = 0
    """Pairs in which the owner got all its blocks back."""
    asked: int = 0
    """Objects that the store outside was asked for while another looked for the owner's."""
    owner_asked: int = 0
    """Pairs in which it was asked for the owner's."""
    unsealed: int = 0
    """Blocks that were unsealed."""
    pairs: int = 0


def _rows(name: str, pairs: int) -> list[Result]:
    """Build one tier's claims and their controls."""
    parts = spread(partial(_attach_in, name), pairs, 3)
    found = Attached(*(sum(column) for column in zip(*map(astuple, parts), strict=True)))
    pairs, owner = found.pairs, f"{found.returned} of {found.pairs} came back to their owner"
    rows = [
        judged(
            f"G1.{name}",
            found.attached == 0,
            figure=f"{counted(found.attached, 'attach', 'attaches')} in {counted(pairs, 'pair')}",
            bar="0",
            command=COMMAND,
        ),
        judged(
            f"G1.{name}.control",
            found.returned == pairs <= found.unsealed,
            bar="all",
            command=COMMAND,
            figure=f"{owner}, {counted(found.unsealed, 'block')} unsealed",
        ),
    ]
    if name != "store":
        return rows
    asked = f"asked for {counted(found.asked, 'object')} while another looked, in {counted(pairs, 'pair')}"
    control = f"asked for the owner's in {found.owner_asked} of {pairs}"
    return [
        *rows,
        judged("G1.store.asked", found.asked == 0, figure=asked, bar="0", command=COMMAND),
        judged("G1.store.asked.control", found.owner_asked == pairs, figure=control, bar="all", command=COMMAND),
    ]


def _attach_in(name: str, pairs: int, seed: int) -> Attached:
    """Count, in a tier of its own, what ``attach`` does, and unsealed blocks."""
    with tempfile.TemporaryDirectory(prefix="ath-g1-") as folder:
        tier = Tier(Path(folder), {}, tier=name, seed=seed)
        try:
            return replace(attach(tier, pairs), unsealed=tier.store.figures.restored)
        finally:
            tier.close()


def attach(tier: Tier, pairs: int) -> Attached:
    """Count what happens in so many pairs; unsealed blocks are left out."""
    draw = tier.draw
    attached = returned = asked = owner_asked = 0
    for number in range(pairs):
        tier.owners.clear()
        owner, other = draw.sample(range(TENANTS), 2)
        kind = (*KINDS, *FORGED)[number % (len(KINDS) + len(FORGED))]
        prompt = array("I", [draw.randrange(50)]) * (BLOCK * draw.randint(1, 2) + 1 + draw.randrange(BLOCK))
        group = tier.namespace(owner) if kind == "group and member" else b""
        key = tier.namespace(owner)
        made = request_of(key, prompt, group=group, user=user_key_of(key, "one").key if kind in OF_USERS else b"")
        content, before = tier.send_away(made), tier.asked
        if kind in FORGED:
            attached += _forged(tier, kind, made, content, tier.namespace(other))
        else:
            asking = other_request(kind, made, tier.namespace(other), draw)
            tier.owners.setdefault(asking.spec.kv_key, f"tenant-{other}")
            attached += tier.bring_back(asking) > 0
        if kind != FORGED[-1]:  # There it is the owner who asks, after another has stored bytes under its names.
            asked += tier.asked - before
            before = tier.asked
        again = request_of(key, prompt, group=group, user=made.spec.user)
        came = tier.bring_back(again) == len(content) * BLOCK
        returned += came and tier.holds(content)
        owner_asked += tier.asked > before
        if kind not in FORGED:
            # What is back in the pool serves nobody else either.
            attached += tier.cache.match(asking).num_tokens > 0
        tier.empty()
    return Attached(attached, returned, asked, owner_asked, pairs=pairs)


def _submit_of(request: Request) -> Submit:
    """The submission that a request was made of."""
    spec = request.spec
    return Submit(
        *(1, spec.namespace, request.token_ids, 1, GREEDY),
        group=group_of(request),
        deterministic=spec.deterministic,
        user=spec.user,
    )


def _forged(tier: Tier, kind: str, made: Request, content: dict[bytes, bytes], other: bytes) -> bool:
    """Return whether a compromised engine got a block by its name, or made the owner accept its bytes."""
    wire = tier.later if kind == "a later life" else tier.wire
    namespace = {"another's key": other, "nobody's key": tier.draw.randbytes(NAMESPACE_KEY_BYTES)}.get(
        kind, made.spec.namespace
    )
    if kind == FORGED[-1]:
        for block_id in content:
            wire.send(Keep(other, block_id, b"x" * CONTENT_BYTES))
        namespace = made.spec.namespace
    wire.send(Fetch(1 << 40, namespace, tuple(content)))
    told = [message.content for message in wire.receive(len(content)) if isinstance(message, Fetched)]
    if kind == FORGED[-1]:
        return told != list(content.values())
    return any(told)
