"""Blocks of prompts that another host computes at this moment, taken from the store before their requests come.

The store alone says how far a prompt is: its first missing block is asked for again and again, and when that has come,
more at once. So nothing that another host says about its progress has to be believed. What comes is cached content
like any other: it is found by the request, and may be evicted before. Nothing waits for it, and its loss costs a
second fetch or the computing. Until the request starts no other prompt's blocks are taken in their place.

Bounds: so many prompts at a time, of all tenants and of one; one fetch of each, of a bounded size, behind which others
have their turn; no more blocks than the pool has for them all, which would put each other out; a life that ends.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from isolation.ipc.spill import KvTier

MAX_PREFETCHES = 16
"""Prompts at a time: with the requests that wait for other hosts' blocks (``spill.MAX_SEEKING``) three quarters of the
fetches that the supervisor takes. One more of a namespace is taken while it has fewer than are free: half of them where
it is alone, as many as a host asks another for at once (``prefill_choice.MAX_CALLS``), and a place is left for who has
none."""

MAX_BLOCKS = 256
"""Blocks of one fetch: 4,096 tokens in blocks of 16."""

MAX_BYTES = 8 << 20
"""Bytes of one fetch, but always one block: some tens of milliseconds of the supervisor, in which others wait."""

AGAIN_NS = 50_000_000
"""Time from a fetch that did not bring all to the next one: half of the time between two words of the other host. A
store is asked for one block then."""

ANSWER_NS = 250_000_000
"""Time without a block after which the rest of a fetch is not expected any more, as for a request
(``spill.PATIENCE_NS``)."""

TOUCH_NS = 1_000_000_000
"""Time between two moments at which all blocks of a prompt that are here are made as young as what was released last:
they are used soon. Between them they are as old as the first of them (``engine.core.kv.cached``)."""

MAX_CLAIMED = 64
"""Requests that have not started whose blocks are counted: as many as may wait for their prefixes
(``spill.MAX_WAITING``). The blocks of one more are not, and may be put out."""

LIFE_NS = 65_000_000_000
"""Time after which nobody can be computing the prompt: a gateway waits for 60 s (``prefill_asking.ASK_S``)."""


@dataclass(slots=True, kw_only=True)
class Fetching:
    """Blocks that were asked for, and how many of them have come."""

    key: bytes
    """Key of the blocks' account."""
    blocks: tuple[bytes, ...]
    """Ids of those asked for, in the order of the prompt."""
    behind: tuple[bytes, ...] = ()
    """For each the id of the block that it continues; empty for the first one of a prompt."""
    heard_ns: int
    seeks: bool
    """Whether what other hosts computed will do."""
    come: int = 0
    tiers: list[int] = field(default_factory=lambda: [0] * len(KvTier))
    """Blocks that came and were put into the pool, by the tier where they were."""


@dataclass(slots=True, kw_only=True)
class _Prompt(Fetching):
    request: int
    chain: tuple[bytes, ...]
    """Ids of all its blocks."""
    began_ns: int
    due_ns: int
    touched_ns: int
    number: int = 0
    """Number of the fetch that is under way; 0: none."""
    place: int = 0
    """Block of the chain before which all have been here."""


@dataclass(frozen=True, slots=True)
class _Claimed:
    """Blocks that came for a request which is there and has not started."""

    key: bytes
    """Key of the blocks' account."""
    ids: range
    """Ids of its outputs."""
    blocks: int


class Prefetches:
    """Prompts whose blocks are taken; the oldest first."""

    def __init__(
        self,
        block_bytes: int,
        is_here: Callable[[bytes], bool],
        ask: Callable[[Fetching], int],
        room: Callable[[bytes, Mapping[bytes, int]], int],
        touch: Callable[[Sequence[bytes]], None],
        leave: Callable[[int], object],
    ) -> None:
        """``is_here``: whether the pool has a block. ``ask`` sends a fetch and gives its number; 0: there is no room
        for it now. ``room``: blocks that the account with this key can take, cached ones included, beside those that
        came or are on their way, of which each account has so many. ``touch``: the blocks with these ids, the first
        ones of a prompt, are the youngest, as far as they are here. ``leave``: nobody waits for the fetch with this
        number any more."""
        self._most = max(1, min(MAX_BLOCKS, MAX_BYTES // block_bytes))
        self._is_here = is_here
        self._ask = ask
        self._room = room
        self._touch = touch
        self._leave = leave
        self._prompts: OrderedDict[int, _Prompt] = OrderedDict()
        """By id."""
        self._fetching: dict[int, _Prompt] = {}
        """By number of the fetch."""
        self._claimed: OrderedDict[int, _Claimed] = OrderedDict()
        """By the first id of the request; the newest last."""

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def keys(self) -> set[bytes]:
        """Keys of the accounts whose blocks are taken, or wait for their requests."""
        return {one.key for one in self._prompts.values()} | {one.key for one in self._claimed.values()}

    def begin(self, request: int, key: bytes, chain: Iterator[bytes], now_ns: int) -> None:
        """Take the blocks of a prompt from now on, where there is a place for it."""
        of_one = sum(one.key == key for one in self._prompts.values())
        if request in self._prompts or of_one >= MAX_PREFETCHES - len(self):
            return
        if ids := tuple(chain):
            self._prompts[request] = _Prompt(
                key=key,
                blocks=(),
                heard_ns=now_ns,
                seeks=True,
                request=request,
                chain=ids,
                began_ns=now_ns,
                due_ns=now_ns,
                touched_ns=now_ns,
            )
            self._touch(ids)

    def ask(self, now_ns: int) -> None:
        """Send the fetches that are due."""
        for one in list(self._prompts.values()):
            if now_ns - one.began_ns >= LIFE_NS:
                self.end(one.request)
            elif one.number and now_ns - one.heard_ns >= ANSWER_NS:
                self._leave(one.number)
                self.over(one.number, now_ns)
            elif not one.number and now_ns >= one.due_ns:
                self._fetch(one, now_ns)

    def fetching(self, number: int) -> Fetching | None:
        """The prompt with this fetch."""
        return self._fetching.get(number)

    def over(self, number: int, now_ns: int, *, room: bool = True) -> None:
        """A fetch is over: it has brought what it could. Where the account has no more ``room``, nothing follows."""
        one = self._fetching.pop(number)
        if not room:
            del self._prompts[one.request]
            return
        one.number = 0
        one.due_ns = now_ns if one.come == len(one.blocks) else now_ns + AGAIN_NS

    def end(self, request: int) -> None:
        """Take nothing more of a prompt; an unknown id is ignored."""
        one = self._prompts.pop(request, None)
        if one is not None and self._fetching.pop(one.number, None) is not None:
            self._leave(one.number)

    def claim(self, key: bytes, chain: Iterator[bytes], outputs: range) -> tuple[int, ...]:
        """Take nothing more of the prompt with this chain, whose request is there; gives the blocks that came for it,
        by tier, or nothing. They are counted until one of its ``outputs`` starts or ends (``settle``)."""
        if not any(one.key == key for one in self._prompts.values()):
            return ()
        ids = tuple(chain)
        found = next((one for one in self._prompts.values() if one.key == key and one.chain == ids), None)
        if found is None:
            return ()
        self.end(found.request)
        self._claimed[outputs.start] = _Claimed(key, outputs, sum(found.tiers))
        if len(self._claimed) > MAX_CLAIMED:
            self._claimed.popitem(last=False)
        return tuple(found.tiers)

    def settle(self, requests: Iterator[int]) -> None:
        """These outputs have started or ended: what came for them is held now, or of no use."""
        if self._claimed:
            for request in requests:
                for one in [one for one in self._claimed.values() if request in one.ids]:
                    del self._claimed[one.ids.start]

    def forget(self, key: bytes) -> None:
        """Take nothing more for an account."""
        for request in [one.request for one in self._prompts.values() if one.key == key]:
            self.end(request)
        for claimed in [one for one in self._claimed.values() if one.key == key]:
            del self._claimed[claimed.ids.start]

    @property
    def _taken(self) -> Counter[bytes]:
        """Blocks of all prompts that came, which the pool counts as free until requests hold them, and that are on
        their way, by the key of their account."""
        taken = Counter[bytes]()
        for one in self._fetching.values():
            taken[one.key] += len(one.blocks) - one.come
        for prompt in self._prompts.values():
            taken[prompt.key] += sum(prompt.tiers)
        for claimed in self._claimed.values():
            taken[claimed.key] += claimed.blocks
        return taken

    def _fetch(self, one: _Prompt, now_ns: int) -> None:
        """Ask for the next blocks: for one, where the last fetch brought nothing."""
        while one.place < len(one.chain) and self._is_here(one.chain[one.place]):
            one.place += 1
        if now_ns - one.touched_ns >= TOUCH_NS:
            one.touched_ns = now_ns
            self._touch(one.chain[: one.place])
        count = self._most if one.come else 1
        left = self._room(one.key, self._taken)
        if left <= 0:  # What came would put out what has come, for this prompt or another.
            one.due_ns = now_ns + AGAIN_NS
            return
        blocks, come = one.chain[one.place : one.place + min(count, left)], one.come
        one.blocks, one.come, one.heard_ns, one.due_ns = blocks, 0, now_ns, now_ns + AGAIN_NS
        one.behind = one.chain[one.place - 1 : one.place + len(blocks) - 1] if one.place else (b"", *blocks[:-1])
        if not blocks:
            return
        one.number = self._ask(one)
        if one.number:
            self._fetching[one.number] = one
        else:
            one.come = come
