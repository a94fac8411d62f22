"""Parts of an engine with work of their own around each step: prefixes on their way back, public prefixes, vectors,
usage of KV. An engine has those that it was given; a stage that does nothing stands in for each of the others."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from engine.core.backend import VectorSource
from engine.core.kv.prefetch import AGAIN_NS
from engine.core.kv.spill import LOOK_S, SpillTier
from engine.core.scheduler.plan import RowMask, StepResult
from engine.core.scheduler.scheduler import Scheduler
from engine.errors import RequestRejectedError
from isolation.ipc.embed import Embed, Embedding
from isolation.ipc.engine import RequestFailure, Started, Submit
from isolation.ipc.kv import KvQuota, KvUsage
from isolation.ipc.messages import FailureCode
from isolation.ipc.prefetch import Prefetch
from isolation.ipc.public import PublicPrefix, PublicUsage
from isolation.ipc.sampling import Sampling
from isolation.ipc.wiping import wipe

USAGE_PERIOD_NS = 1_000_000_000
"""Time between two reports of what accounts of KV have: as often as a gauge is read."""


MAX_RESTORED = 1_024
"""Outputs of requests whose prefix came back and that have not started yet of which the tokens are remembered, to be
told."""


@dataclass(frozen=True, slots=True)
class _CameBack:
    """What came back for one submission, whose outputs share their prompt."""

    ids: range
    """Ids of its outputs."""
    tokens: tuple[int, ...]
    """Tokens from memory, disk and store."""
    gap: bool = False
    """Whether the store was asked and lacks a block."""


class Entrance:
    """Queues requests, and collects the failures that answer those which cannot be served."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.failures: list[RequestFailure] = []
        """Failures for the next output."""

    def enter(self, submit: Submit, now_ns: int) -> None:
        """Queue a request, or refuse it."""
        try:
            self.scheduler.add(submit, now_ns=now_ns)
        except RequestRejectedError as error:
            self.refuse_all(submit, error.code)

    def refuse(self, request_id: int, code: FailureCode) -> None:
        """Answer a request by a failure."""
        self.failures.append(RequestFailure(request_id, code))

    def refuse_all(self, message: Submit | Embed, code: FailureCode) -> None:
        """Answer every output that a message asks for by a failure."""
        for index in range(message.choices if isinstance(message, Submit) else 1):
            self.refuse(message.request + index, code)


class Stage:
    """Work around each step; this base does none."""

    @property
    def has_work(self) -> bool:
        """Whether the stage has something to do in a step that computes nothing."""
        return False

    def overrides(self, name: str) -> bool:
        """Whether the stage has a method of its own in place of this base's."""
        return getattr(type(self), name) is not getattr(Stage, name)

    def before_schedule(self, _now_ns: int) -> Sequence[int]:
        """Prepare what the scheduler may plan. Gives requests that have ended because they no longer fit."""
        return ()

    def before_execute(self) -> None:
        """Use KV memory before the plan's step overwrites it."""

    def after_commit(self, result: StepResult) -> None:
        """Take up what the step gave."""


class Spilling(Stage):
    """Requests that wait until their prefix is back from the supervisor. This base has no spill tier."""

    @property
    def longest_sleep_s(self) -> float:
        """Seconds that an idle engine may sleep."""
        return inf

    @property
    def num_waiting(self) -> int:
        """Requests that wait here."""
        return 0

    @property
    def rest_s(self) -> float:
        """Seconds to sleep while every live request waits here."""
        return LOOK_S if self.num_waiting else 0.0

    def add(self, _submit: Submit, _now_ns: int) -> bool:
        """Take a request that has to wait, or refuse one whose id is in use here. Says whether it did either."""
        return False

    def prefetch(self, _message: Prefetch, _now_ns: int) -> None:
        """Take blocks of a prompt that another host computes."""

    def set_mask(self, _request_id: int, _mask: RowMask) -> bool:
        """Keep the first mask of a request that waits here. Says whether it does."""
        return False

    def abort(self, _request_id: int) -> None:
        """End a request that waits here."""

    def note_starts(self, starts: Sequence[Started]) -> tuple[Started, ...]:
        """Return these starts with what came back for each."""
        return tuple(starts)

    def note_failures(self, failures: Sequence[RequestFailure]) -> None:
        """Note that these requests have ended."""


class TierSpilling(Spilling):
    """Requests that wait for a spill tier."""

    def __init__(self, tier: SpillTier, entrance: Entrance) -> None:
        self.tier = tier
        self._entrance = entrance
        self._masks: dict[int, RowMask] = {}
        """Masks for the first tokens of requests that wait."""
        self._restored: OrderedDict[int, _CameBack] = OrderedDict()
        """What came back for requests that have not started, by the id of each output; at most ``MAX_RESTORED``."""

    @property
    def longest_sleep_s(self) -> float:
        """Seconds that an idle engine may sleep: blocks on their way out are sent as soon as they are there."""
        if self.tier.num_leaving:
            return LOOK_S
        return AGAIN_NS / 1e9 if len(self.tier.prefetches) else inf

    @property
    def num_waiting(self) -> int:
        """Requests that wait here."""
        return self.tier.num_waiting

    @property
    def has_work(self) -> bool:
        """Whether requests wait for what may have come."""
        return self.tier.num_waiting > 0

    def add(self, submit: Submit, now_ns: int) -> bool:
        """Take a request that has to wait, or refuse one whose id is in use here. Says whether it did either."""
        clash = next(filter(None, map(self.tier.holding, _ids_of(submit))), None)
        if clash is None:
            self._note_restored(submit, self.tier.claim(submit))
            return self.tier.await_prefix(submit, now_ns)
        # As in the scheduler: a request that reuses an id ends both.
        self._drop(clash, FailureCode.INVALID)
        self._entrance.refuse_all(submit, FailureCode.INVALID)
        return True

    def set_mask(self, request_id: int, mask: RowMask) -> bool:
        """Keep the first mask of a request that waits here. Says whether it does."""
        waits = self.tier.holding(request_id) is not None
        if waits:
            self._masks[request_id] = mask
        return waits

    def abort(self, request_id: int) -> None:
        """End a request that waits here."""
        waiting = self.tier.holding(request_id)
        if waiting is not None:
            self._drop(waiting, FailureCode.ABORTED)
        else:
            self.tier.prefetches.end(request_id)

    def prefetch(self, message: Prefetch, now_ns: int) -> None:
        """Take blocks of a prompt that another host computes."""
        self.tier.prefetch(message, now_ns)

    def before_schedule(self, now_ns: int) -> Sequence[int]:
        """Take what has come, and queue the requests that need not wait any longer."""
        for one in self.tier.take(now_ns):
            self._entrance.enter(one.submit, one.arrival_ns)
            wipe(one.submit.token_ids)
            self._note_restored(one.submit, one.tiers, gap=one.gap)
            for request_id in _ids_of(one.submit):
                mask = self._masks.pop(request_id, None)
                if mask is not None:
                    self._entrance.scheduler.set_mask(request_id, 0, mask)
        return ()

    def note_starts(self, starts: Sequence[Started]) -> tuple[Started, ...]:
        """Return these starts with what came back for each. What came for several outputs of one prompt is told once,
        with the first of them that starts: the one that was asked for first may have ended before."""
        self.tier.prefetches.settle(one.request for one in starts)
        if not self._restored:
            return tuple(starts)
        return tuple(self._told(one) for one in starts)

    def note_failures(self, failures: Sequence[RequestFailure]) -> None:
        """Note that these requests have ended."""
        self.tier.prefetches.settle(one.request for one in failures)

    def _note_restored(self, submit: Submit, blocks: Sequence[int], *, gap: bool = False) -> None:
        """Remember, until the request starts, how many blocks came for it from each tier, beside those before, and
        whether the store has a ``gap``."""
        if not any(blocks) and not gap:
            return
        ids = _ids_of(submit)
        before = self._restored.pop(ids[0], None)
        more = (count * self.tier.cache.block_size for count in blocks)
        tokens = tuple(map(sum, zip(more, before.tokens if before else (0,) * len(blocks), strict=True)))
        self._restored |= dict.fromkeys(ids, _CameBack(ids, tokens, gap))
        while len(self._restored) > MAX_RESTORED:
            self._restored.popitem(last=False)

    def _told(self, start: Started) -> Started:
        """Take what came back for the submission of an output that starts, and return its start with that."""
        came = self._restored.get(start.request)
        if came is None:
            return start
        for one in came.ids:
            self._restored.pop(one, None)
        memory, disk, store = came.tokens
        return Started(start.request, start.cached_tokens, start.queue_us, memory, disk, store, came.gap)

    def before_execute(self) -> None:
        """Send away what the plan evicts."""
        self.tier.save()

    def _drop(self, submit: Submit, code: FailureCode) -> None:
        self.tier.abort(submit)
        wipe(submit.token_ids)
        for request_id in _ids_of(submit):
            self._masks.pop(request_id, None)
        self._entrance.refuse_all(submit, code)


class Publishing(Stage):
    """Public prefixes. This base publishes none."""

    @property
    def supported(self) -> bool:
        """Whether this engine keeps public prefixes."""
        return False

    def make_room(self, _quotas: Sequence[KvQuota]) -> None:
        """Withdraw what would not fit beside these quotas, before they are in force."""

    def try_again(self) -> None:
        """Try prefixes that found no room, after other quotas are in force."""

    def set(self, _table: Sequence[PublicPrefix]) -> None:
        """Put another table of public prefixes in force."""

    def take_usage(self, _now_ns: int) -> PublicUsage | None:
        """What became of the public prefixes, when that has changed."""
        return None


class Embeddings(Stage):
    """Vectors of an engine that embeds. This base collects none: requests get tokens."""

    enabled = False
    """Whether requests get vectors instead of tokens."""

    def take(self) -> list[Embedding]:
        """Vectors of the last step, each once; they go out before its output, which ends their requests."""
        return []


class CollectedEmbeddings(Embeddings):
    """Vectors that a backend leaves."""

    enabled = True

    def __init__(self, source: VectorSource) -> None:
        self._source = source
        self._vectors: list[Embedding] = []

    def take(self) -> list[Embedding]:
        """Vectors of the last step, each once."""
        taken, self._vectors = self._vectors, []
        return taken

    def after_commit(self, result: StepResult) -> None:
        """Pair the vectors of a step with its requests; broken ones have no place in the result's columns."""
        whole: list[array[float]] = [vector for vector in self._source.take_vectors() if vector is not None]
        pairs = zip(result.requests, whole, strict=True)
        self._vectors += [Embedding(request, vector) for request, vector in pairs]


class UsageReports(Stage):
    """Reports of what the accounts of KV have, to a host that has sent a table of quotas."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._wanted = False
        self._stale = False
        """Whether accounts may have changed since the last report."""
        self._next_ns = 0

    def want(self) -> None:
        """Report from now on."""
        self._wanted = self._stale = True

    def before_schedule(self, _now_ns: int) -> Sequence[int]:
        """Note that a step may change what accounts have."""
        self._stale = self._wanted
        return ()

    def take(self, now_ns: int) -> KvUsage | None:
        """A report, every ``USAGE_PERIOD_NS`` while steps change it, the last one included."""
        if not self._stale or now_ns < self._next_ns:
            return None
        self._stale = False
        self._next_ns = now_ns + USAGE_PERIOD_NS
        return self._scheduler.kv_usage()

    def due_s(self, now_ns: int) -> float:
        """Seconds until a report is due."""
        return max(0, self._next_ns - now_ns) / 1e9 if self._stale else inf


def as_submit(message: Embed) -> Submit:
    """The request for a text's vector: a prompt with room for one token, of which nothing is kept."""
    return Submit(
        request=message.request,
        namespace=message.namespace,
        token_ids=message.token_ids,
        max_tokens=1,
        sampling=Sampling(temperature=0.0),
        ignore_eos=True,
        retain=False,
        weight=message.weight,
        priority=message.priority,
        deadline_us=message.deadline_us,
    )


def _ids_of(submit: Submit) -> range:
    """Ids of all outputs that a message asks for."""
    return range(submit.request, submit.request + submit.choices)
