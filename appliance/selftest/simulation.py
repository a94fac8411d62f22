"""Simulated engine: a real scheduler, pool and prefix cache without a model, on a clock that counts work; guarantees
about KV and service are measured in it.

A step takes a fixed time plus a time for each of its tokens, like a step that reads all weights once; the two numbers
are those of a small model on one core. Ids matter only through shared prefixes. Outputs end at the requested length.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.core.fairness.tenancy import Fairness
from engine.core.kv.block_pool import BlockPool
from engine.core.kv.prefix_cache import PrefixCache
from engine.core.kv.quota import KvAccount
from engine.core.scheduler.limits import SchedulerLimits
from engine.core.scheduler.scheduler import Scheduler
from engine.errors import RequestRejectedError
from isolation.ipc.engine import Submit
from isolation.ipc.kv import WHOLE_POOL, KvQuota
from isolation.ipc.sampling import Sampling

BLOCK = 16
STEP_S = 0.001
"""Seconds of a step besides its tokens."""
TOKEN_S = 0.00001
"""Seconds of each token."""
VOCABULARY = 32_000
GREEDY = Sampling(temperature=0.0)


@dataclass(slots=True)
class RequestTimes:
    """Times of one request, in simulated seconds."""

    tenant: int
    prompt: int
    asked: float
    first: float | None = None
    ended: bool = False
    cached: int = 0


@dataclass(frozen=True, slots=True)
class Size:
    """Dimensions of the simulated engine."""

    blocks: int = 512
    rows: int = 32
    budget: int = 256
    waiting: int = 4_096


class SimulatedEngine:
    """One engine's scheduling, step by step. Defects raise."""

    def __init__(self, size: Size | None = None, quotas: Iterable[KvQuota] = ()) -> None:
        size = size or Size()
        limits = SchedulerLimits(
            max_num_seqs=size.rows,
            max_num_batched_tokens=size.budget,
            max_waiting=size.waiting,
            max_context=size.blocks * BLOCK,
            block_size=BLOCK,
            vocab_size=VOCABULARY,
        )
        self.pool = BlockPool(size.blocks)
        cache = PrefixCache(self.pool, root=bytes(16), block_size=BLOCK)
        self.scheduler = Scheduler(limits, self.pool, cache, Fairness(limits, self.pool, raise_defects=True))
        self.scheduler.set_quotas(list(quotas))
        self.now = 0.0
        self.steps = 0
        self.seen: dict[int, RequestTimes] = {}
        self.tokens: dict[int, int] = {}
        """Tokens computed, by tenant."""
        self.refused = 0
        self._leaving: dict[int, list[int]] = {}
        """Requests to abort, by step."""
        self._numbers = itertools.count(1)

    def ask(
        self, tenant: int, prompt: array[int], output: int, *, came: float | None = None, **fields: object
    ) -> int | None:
        """Queue a request that arrived at ``came`` or now; return its number, or None when the engine refuses it."""
        number = next(self._numbers)
        choices = int(str(fields.get("choices", 1)))
        for _ in range(choices - 1):
            next(self._numbers)
        message = Submit(
            number,
            key(tenant),
            prompt,
            output,
            GREEDY,
            ignore_eos=True,
            **fields,  # type: ignore[arg-type]
        )
        try:
            self.scheduler.add(message, now_ns=int(self.now * 1e9))
        except RequestRejectedError:
            self.refused += 1
            return None
        for index in range(choices):
            self.seen[number + index] = RequestTimes(tenant, len(prompt), self.now if came is None else came)
        return number

    def leave_at(self, number: int, step: int) -> None:
        """Abort the request before this step, if it is live then."""
        self._leaving.setdefault(step, []).append(number)

    def step(self) -> list[int]:
        """Run one step; return the requests that ended. Without work the clock advances by one step's time."""
        for number in self._leaving.pop(self.steps, ()):
            self.scheduler.abort(number)
        plan = self.scheduler.schedule(now_ns=int(self.now * 1e9))
        if plan is None:
            self.now += STEP_S
            self.steps += 1
            return []
        running = self.scheduler.running_ids
        for row in plan.decode_rows:
            self._count(running[row], 1)
        for chunk in plan.prefills:
            self._count(running[chunk.row], chunk.length)
        self.steps += 1
        self.now += STEP_S + TOKEN_S * plan.num_tokens
        result = self.scheduler.commit(plan, [1] * len(plan.sample_rows))
        for started in result.starts:
            self.seen[started.request].cached = started.cached_tokens
        ended = []
        for number, finish in zip(result.requests, result.finishes, strict=True):
            one = self.seen[number]
            if one.first is None:
                one.first = self.now
            if finish:
                one.ended = True
                ended.append(number)
        return ended

    def finish(self, number: int | None) -> RequestTimes:
        """Run steps until a request has ended."""
        assert number is not None, "the request was refused"
        while not self.seen[number].ended:
            self.step()
        return self.seen[number]

    def account(self, tenant: int) -> KvAccount:
        """Return the tenant's account of blocks."""
        return self.pool.accounts.of(key(tenant))

    def live(self, tenant: int) -> int:
        """Return the number of the tenant's waiting and running requests."""
        return self.account(tenant).num_requests

    def ttfts(self, tenant: int) -> list[float]:
        """Return the seconds to the first token of the tenant's requests, sorted."""
        return sorted(
            one.first - one.asked for one in self.seen.values() if one.tenant == tenant and one.first is not None
        )

    def _count(self, number: int, tokens: int) -> None:
        tenant = self.seen[number].tenant
        self.tokens[tenant] = self.tokens.get(tenant, 0) + tokens


@dataclass(slots=True)
class Prompts:
    """Generates prompts that share only their given prefix."""

    fresh: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def make(self, length: int, prefix: array[int] | None = None) -> array[int]:
        """Make a prompt of ``length`` tokens that begins with ``prefix`` and has a unique continuation."""
        prompt = prefix[:] if prefix is not None else array("I")
        number = next(self.fresh)
        marks = array("I", [number % VOCABULARY, number // VOCABULARY % VOCABULARY])
        prompt += marks[: max(0, length - len(prompt))]
        prompt += array("I", [7]) * (length - len(prompt))
        return prompt


def key(tenant: int) -> bytes:
    """Return the tenant's namespace key."""
    return tenant.to_bytes(32, "little")


def quota(tenant: int, reserved: int, cap: int = 100, *, lends: bool = True) -> KvQuota:
    """Build a quota in percent."""
    return KvQuota(key(tenant), reserved * WHOLE_POOL // 100, cap * WHOLE_POOL // 100, lends)


def quantile(values: list[float], part: float) -> float:
    """Return the value below which the given fraction of the sorted values lies."""
    return values[min(len(values) - 1, math.ceil(len(values) * part) - 1)] if values else math.nan


def jain(values: Iterable[float]) -> float:
    """Return Jain's index of fairness: 1 when all are equal, 1/n when one has everything."""
    taken = list(values)
    return sum(taken) ** 2 / (len(taken) * sum(value * value for value in taken))


def area(low: list[float], high: list[float]) -> float:
    """Return the probability that a sample of ``high`` exceeds one of ``low``, ties counted half: the AUC of telling
    them apart by this number (Mann and Whitney)."""
    wins = sum((b > a) + 0.5 * (a == b) for a in low for b in high)
    return wins / (len(low) * len(high))
