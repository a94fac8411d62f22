"""Blocks of KV that leave the engine when memory is short, and come back when their prefix is asked for again.

Out. A block that loses its place in the pool, or will soon, is sent to the supervisor, a bounded number of bytes a
step; what does not fit is dropped and counted: to spill is a chance, never a duty. Blocks whose owner lets nothing
be kept are never cached, so they are never here. Where the host says so (``Share.computed``), blocks of prompts are
sent when they are computed (``engine.core.kv.backlog``): their copies are in order, and what is sent then is not sent
again when it loses its place, as long as the store where other hosts look has it (``Share.lasts_s``). A block that
turns out to be wrong after it was sent is withdrawn.

In. A request whose prefix was sent away waits outside the scheduler until it is back, part by part, in the order of the
prefix. Of a namespace that the host has named with ``Share``, blocks are asked for that were never here: another host
may have computed them. Public prefixes never come so. When no part has come for ``PATIENCE_NS``, or all have not after
``LONGEST_NS`` or by the deadline, the request goes on with what it has: the rest is computed, as it would have been.

Nothing here waits. Each turn takes and gives a bounded number of bytes, and a ring that is full means later or never.
A block may take a while to leave its memory (a GPU's copies are started and over later): it is sent at the first turn
that finds it there, and counts as not sent until then.
Content comes from the supervisor, which has authenticated it; one of another length is dropped all the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from engine.core.kv.backlog import LOOKS
from engine.core.kv.block_pool import BlockPool
from engine.core.kv.leaving import Contents, SpillChannel
from engine.core.kv.outbox import Outbox, SpillCounts
from engine.core.kv.prefetch import Fetching, Prefetches
from engine.core.kv.prefix_cache import PrefixCache
from engine.core.specification import kv_key_of
from isolation.ipc.engine import Submit
from isolation.ipc.messages import MAX_FRAME_BYTES
from isolation.ipc.prefetch import Prefetch
from isolation.ipc.sampling import Sampling
from isolation.ipc.spill import (
    MAX_FETCH_BLOCKS,
    SPILL_HEADER_BYTES,
    Fetch,
    Fetched,
    Forget,
    KvTier,
    Lost,
    Miss,
    Share,
    Unwanted,
    mark_of,
)

MAX_BLOCK_BYTES = MAX_FRAME_BYTES - SPILL_HEADER_BYTES
"""Bytes of the largest block that can leave: what one frame carries."""

STEP_BYTES = 4 << 20
"""Bytes copied out, and as many in, in one step at the most, but always one block: some milliseconds."""

LOOK_AHEAD = 64
"""Cached blocks nearest to eviction that are looked at in a step."""

LOW_PART = 4
"""One part in so many of the pool: with fewer blocks free, the coldest cached ones are copied out before they must
go."""

PATIENCE_NS = 250_000_000
"""A fetch from memory takes a millisecond and one from a disk a few; after a quarter of a second nothing comes."""

LONGEST_NS = 2_000_000_000
"""The longest that a request waits for its prefix, however steadily it comes."""

MAX_WAITING = 64
"""Requests that wait for their prefixes at a time; one more computes its own."""

MAX_SEEKING = MAX_WAITING // 2
"""Requests of those that may wait for blocks of other hosts: a store answers later than this machine does, and who
waits for it leaves half of the places to requests whose blocks are here."""

MAX_WAITING_OF_ONE = 8
"""Requests of one namespace that wait at a time, so that its fetches do not delay all others; and no more than are
free, so that a place is left for who has none."""

MAX_SHARED = 1_024
"""Namespaces for whose blocks other hosts are asked: twice as many as a fleet has."""

MAX_WORDS = 256
"""Words of the supervisor about namespaces that are taken in one step: a fleet's lease that ends gives hundreds."""

MAX_SOUGHT = 256
"""Blocks of one request that are asked for without having been sent from here: 4,096 tokens in blocks of 16. A prompt
that nobody has computed costs the wait for one answer, which is that for the first block; ``PATIENCE_NS`` at most. Of
one that another host has just computed (``Submit.coming``) all blocks are asked for; while it computes it,
``engine.core.kv.prefetch`` asks for what is there."""

LOOK_S = 0.002
"""Seconds between two looks while requests wait for their prefixes and nothing else is to be done."""


@dataclass(slots=True, kw_only=True)
class _Waiting(Fetching):
    """A request that waits for its prefix, with a copy of its tokens, which its next keeper overwrites."""

    submit: Submit
    arrival_ns: int
    gap: bool = False
    """Whether the store was asked, served, and lacks a block."""

    def is_late(self, now_ns: int) -> bool:
        """Whether the request waits no longer."""
        longest_ns = min(LONGEST_NS, self.submit.deadline_us * 1_000 or LONGEST_NS)
        return now_ns - self.heard_ns >= PATIENCE_NS or now_ns - self.arrival_ns >= longest_ns


@dataclass(frozen=True, slots=True)
class Returned:
    """A request that may go on."""

    submit: Submit
    arrival_ns: int
    tiers: tuple[int, ...] = (0, 0, 0)
    """Blocks that came back for it from each ``KvTier``."""
    gap: bool = False
    """Whether the store was asked for it and lacks a block."""


@dataclass(slots=True)
class SpillTier:
    """The engine's end of the spill channel."""

    channel: SpillChannel
    contents: Contents
    pool: BlockPool
    cache: PrefixCache
    adopt: Callable[[list[int], list[int]], None]
    """Tells the runner of blocks that were filled here, and of their stamps (``engine.core.kv.tags``)."""
    counts: SpillCounts = field(default_factory=SpillCounts)
    prefetches: Prefetches = field(init=False)
    """Prompts that other hosts compute."""
    _out: Outbox = field(init=False)
    _shared: set[bytes] = field(default_factory=set)
    """Marks of namespaces of which other hosts may have blocks."""
    _waiting: OrderedDict[int, _Waiting] = field(default_factory=OrderedDict)
    """By number of the fetch."""
    _next: int = 1

    def __post_init__(self) -> None:
        """Ask the pool for what it evicts, and for what was wrong."""
        assert self.contents.size <= MAX_BLOCK_BYTES, "a block fits no frame"
        self.pool.evicted, self.pool.spoiled = [], []
        self._out = Outbox(self.channel, self.contents, self.counts)
        self.prefetches = Prefetches(
            self.contents.size,
            lambda block_id: self.pool.find(block_id) is not None,
            lambda one: self._send_fetch(one, ahead=True),
            self.pool.available_beside,
            lambda ids: self.pool.touch([block for one in ids if (block := self.pool.find(one)) is not None]),
            self._leave,
        )

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their prefixes."""
        return len(self._waiting)

    @property
    def num_leaving(self) -> int:
        """Blocks that are copied out, or to be, and not sent yet; chunks of a prompt just computed count as one."""
        return 0 if self._out.gone else self._out.num_leaving + len(self.cache.noted or ())

    def await_prefix(self, submit: Submit, now_ns: int) -> bool:
        """Whether the request's prefix was sent away, or may be known elsewhere, and has been asked for: it is kept
        here until then."""
        key = kv_key_of(submit)
        shared = bool(self._shared) and mark_of(key) in self._shared
        if not (self._out.known[key] or shared) or not submit.retain or self._out.gone:
            return False
        if submit.prompt_logprobs >= 0 or not self.cache.knows(submit.adapter):  # The scheduler refuses the latter.
            return False
        if self._waiting_of(key) >= min(MAX_WAITING_OF_ONE, MAX_WAITING - len(self._waiting)):
            return False
        # What begins with a public prefix has another chain on each host; deterministic bits are this engine's own.
        seeks = shared and not (submit.public or submit.deterministic) and self._may_seek(key)
        sought = MAX_FETCH_BLOCKS if submit.coming else MAX_SOUGHT
        wanted = self._missing(submit, sought if seeks else 0)
        if not wanted:
            return False
        copied, blocks, behind = replace(submit, token_ids=submit.token_ids[:]), tuple(wanted), tuple(wanted.values())
        one = _Waiting(
            key=key, blocks=blocks, behind=behind, heard_ns=now_ns, seeks=seeks, submit=copied, arrival_ns=now_ns
        )
        number = self._send_fetch(one, coming=seeks and submit.coming)
        if number:
            self._waiting[number] = one
        return bool(number)

    def prefetch(self, message: Prefetch, now_ns: int) -> None:
        """Take blocks of a prompt from the store while another host computes it, where its tenant shares."""
        if mark_of(message.namespace) in self._shared and not self._out.gone:
            # What is not split (``splitting.may_split``) has other chains; this one has those of a plain request.
            plain = Submit(message.request, message.namespace, message.token_ids, 1, Sampling())
            self.prefetches.begin(message.request, message.namespace, self.cache.chain(plain), now_ns)

    def claim(self, submit: Submit) -> tuple[int, ...]:
        """A request has come whose prompt may have been taken while another host computed it: blocks that came for it,
        by tier, or nothing."""
        if not (submit.coming and len(self.prefetches)):
            return ()
        return self.prefetches.claim(
            kv_key_of(submit), self.cache.chain(submit), range(submit.request, submit.request + submit.choices)
        )

    def _send_fetch(self, one: Fetching, *, coming: bool = False, ahead: bool = False) -> int:
        """Ask for blocks; gives the number of the fetch, 0 where the ring has no room."""
        number, size = self._next, self.contents.size if one.seeks else 0
        if not self._out.send(Fetch(number, one.key, one.blocks, size, coming, ahead)):
            return 0
        self._next += 1
        return number

    def _leave(self, number: int) -> None:
        """Have nothing more sent of a fetch; where the ring has no room, what still comes is dropped here."""
        self._out.send(Unwanted(number))

    def holding(self, request_id: int) -> Submit | None:
        """The request that waits here under this id, if one does; a choice of it counts."""
        for one in self._waiting.values():
            if one.submit.request <= request_id < one.submit.request + one.submit.choices:
                return one.submit
        return None

    def abort(self, submit: Submit) -> None:
        """End a request that waits here; what still comes for it is dropped."""
        for number, one in self._waiting.items():
            if one.submit is submit:
                del self._waiting[number]
                self._leave(number)
                return

    def take(self, now_ns: int) -> list[Returned]:
        """Take what has come, put it into its place, and give the requests that need wait no longer."""
        returned: list[Returned] = []
        spoiled = self.pool.spoiled
        assert spoiled is not None, "the pool does not say what was wrong"
        self._out.now_ns = now_ns
        self._out.withdraw(spoiled)
        spoiled.clear()
        self._out.send_away()
        room = min(max(1, STEP_BYTES // self.contents.size), self.contents.make_room())
        self._receive(room, now_ns, returned)
        self._send_computed(now_ns)
        for number, one in list(self._waiting.items()):
            if one.is_late(now_ns):
                self.counts.late += 1
                self._leave(number)
                self._end(number, now_ns, returned)
        self.prefetches.ask(now_ns)
        return returned

    def _receive(self, room: int, now_ns: int, returned: list[Returned]) -> None:
        """Take up to ``room`` blocks, and the words between them: these are small, and hundreds come at once."""
        forgotten, lost, words = set[bytes](), set[bytes](), MAX_WORDS
        while room > 0 and words > 0:
            asked = min(room, words)
            messages = self.channel.receive(asked)
            for message in messages:
                if isinstance(message, Fetched):
                    room -= 1
                    self._forget(forgotten, now_ns, returned)
                    self._place(message, now_ns, returned)
                    continue
                words -= 1
                if isinstance(message, Forget):
                    self._shared.discard(message.mark)
                    self._out.lasts_s.pop(message.mark, None)
                    self._out.backlog.end(message.mark)
                    forgotten.add(message.mark)
                elif isinstance(message, Lost):
                    lost.add(message.mark)
                elif isinstance(message, Share) and len(self._shared) < MAX_SHARED:
                    self._shared.add(message.mark)
                    self._out.lasts_s[message.mark] = message.lasts_s
                    if message.computed:
                        self._out.backlog.begin(message.mark)
            if len(messages) < asked:
                break
        self._out.lose(lost)
        self._forget(forgotten, now_ns, returned)

    def save(self) -> None:
        """Send away what the plan just made evicts, and some of what goes next; before the plan is executed."""
        left = self._save_evicted(max(1, STEP_BYTES // self.contents.size))
        if left and self.pool.num_free * LOW_PART < self.pool.num_blocks:
            for block, block_id, owner in self.pool.coldest(LOOK_AHEAD):
                if not left:
                    break
                if self._out.leaves(block_id, owner):
                    if not self._out.save(block, block_id, owner):
                        break
                    left -= 1

    def _send_computed(self, now_ns: int) -> None:
        """Send away what was computed and is to be sent for that, within the bounds of the backlog."""
        cache, out, backlog = self.cache, self._out, self._out.backlog
        for namespace, block_ids in cache.noted or ():
            backlog.note(namespace, block_ids)
        cache.noted = [] if backlog.wanted else None
        backlog.begin_turn(now_ns)
        for _ in range(LOOKS):
            first = backlog.first()
            if first is None:
                return
            owner, block_id = first
            block = self.pool.find(block_id)
            if out.is_found(block_id) or not out.leaves(block_id, owner):
                backlog.drop_first()  # It is there.
            elif block is None or self.pool.owner(block) != owner:
                backlog.drop_first()
                backlog.lose()
            elif out.save(block, block_id, owner, noted=True):
                backlog.drop_first(self.contents.size)
            else:
                backlog.delay()
                return

    def _save_evicted(self, left: int) -> int:
        """Send away at most ``left`` blocks of those just evicted, and drop the others; gives what is left over."""
        evicted = self.pool.evicted
        assert evicted is not None, "the pool records no evictions"
        for block, block_id, owner in evicted:
            self._out.evict(block_id)
            if not self._out.leaves(block_id, owner):
                continue
            if left and self._out.save(block, block_id, owner, evicted=True):
                left -= 1
            else:
                self.counts.dropped += 1
        evicted.clear()
        return left

    def _missing(self, submit: Submit, sought: int) -> dict[bytes, bytes]:
        """The blocks to ask for, each with the one that it continues: of the leading ones that are known here or there,
        those that are there, and so many behind them that other hosts may have."""
        most = min(MAX_FETCH_BLOCKS, self.pool.num_available)
        wanted, known, last = dict[bytes, bytes](), list[int](), b""
        for block_id in self.cache.chain(submit):
            behind, last = last, block_id
            here = self.pool.find(block_id)
            if here is not None:
                known.append(here)
                continue
            if len(wanted) >= most:
                break
            if block_id not in self._out.index:
                if not sought:
                    break
                sought -= 1
            wanted[block_id] = behind
        self.pool.touch(known)  # What comes shall not take the place of what it follows.
        return wanted

    def _may_seek(self, key: bytes) -> bool:
        seeking = [one.key for one in self._waiting.values() if one.seeks]
        return seeking.count(key) < MAX_SEEKING - len(seeking)

    def _waiting_of(self, key: bytes) -> int:
        return sum(1 for one in self._waiting.values() if one.key == key)

    def _place(self, message: Fetched, now_ns: int, returned: list[Returned]) -> None:
        one = self._waiting.get(message.request) or self.prefetches.fetching(message.request)
        if one is None:
            return
        one.heard_ns = now_ns
        block_id = one.blocks[one.come]
        if message.index != one.come or len(message.content) != self.contents.size:
            # Not there any more, or not what it should be: neither will be asked for again.
            # Where other hosts have not got it either, what is behind the gap is of no use to them: it is computed
            # here, and counts as not sent then, as where a store was started anew.
            # Of a prompt that another host still computes it may be there in a moment: nothing is known by that.
            # Nor is it where the store does not serve: what was sent is not sent to it again.
            if isinstance(one, _Waiting):
                one.gap = one.seeks and message.miss == Miss.LACKED
                unknown = one.seeks and message.miss == Miss.UNKNOWN
                for missed in () if unknown else one.blocks[one.come :] if one.seeks else (block_id,):
                    self._out.unlearn(missed)
            self._end(message.request, now_ns, returned)
            return
        one.come += 1
        if self.pool.find(block_id) is None:
            block = self.pool.adopt(block_id, one.key, one.behind[one.come - 1])
            if block is None:
                self._leave(message.request)
                self._end(message.request, now_ns, returned, room=False)
                return
            self._save_evicted(1)  # Its place is overwritten now.
            self.contents.write(block, message.content)
            self.adopt([block], self.pool.contents.new_stamps([block]))
            self.counts.restored += 1
            if one.seeks and message.tier == KvTier.STORE:
                self._out.found(block_id, one.key)
            one.tiers[message.tier] += 1
        if one.come == len(one.blocks):
            self._end(message.request, now_ns, returned)

    def _end(self, number: int, now_ns: int, returned: list[Returned], *, room: bool = True) -> None:
        """A fetch is over: the request that waited for it goes on. ``room``: whether more of its blocks have places."""
        one = self._waiting.pop(number, None)
        if one is None:
            self.prefetches.over(number, now_ns, room=room)
        else:
            returned.append(Returned(one.submit, one.arrival_ns, tuple(one.tiers), one.gap))

    def _forget(self, marks: set[bytes], now_ns: int, returned: list[Returned]) -> None:
        """Everything of the namespaces with these marks is to go: here, and what is cached. Requests that wait for
        blocks of them go on without: what is still on its way to them is not taken. Empties ``marks``."""
        if not marks:
            return
        waiting = {number: one.key for number, one in self._waiting.items()}
        owners = {*self.pool.contents.owners, *self._out.owners, *waiting.values(), *self.prefetches.keys}
        for namespace in [owner for owner in owners if mark_of(owner) in marks]:
            for number in [number for number, key in waiting.items() if key == namespace]:
                self._end(number, now_ns, returned)
            self.prefetches.forget(namespace)
            self._out.forget(namespace)
            self.pool.disown(namespace)
        self.contents.wipe()
        marks.clear()
