"""One host of the simulated fleet: the appliance's ledger and policy, and an engine with its scheduler, fair service,
KV pool and prefix cache; a simulated card in place of a backend, and no sockets, processes or text."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from math import inf

from appliance.common.errors import ApplianceError
from appliance.gateway.request.ledger import Ledger, Reservation, first_access
from bench.simulation.card import TOKEN, SimulatedCard
from bench.simulation.step_times import StepTimes
from bench.simulation.tally import Tally
from bench.simulation.traffic import VOCABULARY, Arrival
from engine.core.engine import Engine
from engine.core.fairness.tenancy import Fairness
from engine.core.kv.block_pool import BlockPool
from engine.core.kv.layout import KvLayout
from engine.core.kv.prefix_cache import PrefixCache
from engine.core.scheduler.limits import SchedulerLimits
from engine.core.scheduler.scheduler import Scheduler
from isolation.ipc.engine import StepOutput, Submit
from isolation.ipc.sampling import Sampling
from policy.decision import Decision
from policy.model import PolicySet

GREEDY = Sampling(temperature=0.0)
MODEL = "llama-8b"
EVERYBODY = b"\xff" * 32
"""Namespace that is charged for all tenants, where the control without fair service is asked for."""


class Fate(Enum):
    """What became of a request; each has exactly one in the end."""

    LIVE = "live"
    DONE = "done"
    REFUSED = "refused"
    """The policy denied it on its host."""
    FAILED = "failed"
    """It had not begun when its host died, and the router gave it to no other."""
    LOST = "lost"
    """Its stream had begun when its host died."""


@dataclass(slots=True, eq=False)
class Record:
    """One request on its way."""

    number: int
    arrival: Arrival
    fate: Fate = Fate.LIVE
    host: int = -1
    tries: int = 0
    sent_at: float = 0.0
    """When the router first sent it."""
    first_at: float = -1.0
    """When its first token came; -1 before."""
    last_at: float = -1.0
    """When the last token before a pause came; -1 without a pause."""
    ended_at: float = inf
    tokens: int = 0
    """Output tokens of a request that has ended."""
    cached: int = -1
    """Prompt tokens found in the cache; -1 until it is scheduled."""
    reservation: Reservation | None = None
    moved: list[bytes] = field(default_factory=list)
    """Ids of the blocks that go from a prefill host to its own host."""
    helper: int = -1
    """Prefill host that works for it; -1: none."""
    missing: int = 0
    """Prompt tokens that the prefill host was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What every host is."""

    times: StepTimes
    rows: int = 256
    budget: int = 2_048
    """Tokens of a step."""
    block: int = 256
    """Tokens of a KV block."""
    kv_tokens: int = 0
    """Tokens of KV; 0: what the card's memory holds."""
    waiting: int = 8_192
    fair: bool = True
    """Whether tenants are served fairly; without, all are one namespace's requests in the order of arrival, with block
    ids of their own."""

    @property
    def blocks(self) -> int:
        """KV blocks of the pool."""
        return (self.kv_tokens or self.times.kv_tokens) // self.block

    @property
    def limits(self) -> SchedulerLimits:
        """Bounds of the scheduler."""
        return SchedulerLimits(
            max_num_seqs=self.rows,
            max_num_batched_tokens=self.budget,
            max_waiting=self.waiting,
            max_context=min(131_072, self.blocks * self.block),
            block_size=self.block,
            vocab_size=VOCABULARY,
        )


@dataclass(frozen=True, slots=True)
class Rules:
    """What all hosts have a copy of: the policy, and each tenant's namespace key."""

    policy: PolicySet
    namespaces: Mapping[str, bytes]
    names: tuple[str, ...]
    """Tenants by number."""


class SimulatedHost:
    """One host, driven by ``fleet``. Times are seconds of the simulated clock."""

    def __init__(self, number: int, machine: Machine, rules: Rules, tally: Tally) -> None:
        self.number = number
        self.now = 0.0
        self.alive = True
        self.live: dict[int, Record] = {}
        """Requests in the engine."""
        self.admitted = 0
        """Requests that this host answers, in its engine or not yet: what a router counts."""
        self.in_flight = 0
        """Prompt tokens that a router has sent and that are not computed."""
        self.link_free = 0.0
        """When what is to be sent to other hosts is sent."""
        self._machine, self._rules, self._tally = machine, rules, tally
        limits = machine.limits
        self.pool = BlockPool(machine.blocks)
        self.cache = PrefixCache(self.pool, root=bytes(16), block_size=machine.block)
        layout = KvLayout(layers=(), block_size=machine.block, dtype="bfloat16", num_blocks=machine.blocks)
        self.card = SimulatedCard(limits, layout, machine.times)
        scheduler = Scheduler(limits, self.pool, self.cache, Fairness(limits, self.pool, raise_defects=True))
        self.engine = Engine(scheduler, self.card, clock_ns=lambda: int(self.now * 1e9))
        self.ledger = Ledger(rules.policy, rules.namespaces, clock=lambda: self.now)
        self._output: StepOutput | None = None
        self._before = 0.0
        """When the step before the last ended."""
        self.busy = False
        self._preempted = 0

    def gauges(self) -> tuple[float, float]:
        """Return queued requests and the used share of KV, as ``picker_page`` does."""
        scheduler = self.engine.scheduler
        return self.admitted - scheduler.num_running, 1 - self.pool.num_unheld / self.pool.num_blocks

    def admit(self, record: Record, now: float) -> bool:
        """Have the policy decide on a request: on its name, then with its count. Says whether it may be served."""
        self.now = max(self.now, now)
        arrival = record.arrival
        try:
            found = self.ledger.try_admit(
                first_access(self._rules.names[arrival.tenant], MODEL, arrival.output, 1, None)
            )
            if isinstance(found, Decision):
                return False
            record.reservation = found
            found.reserve(arrival.prompt_tokens, arrival.output, self._machine.limits.max_context)
        except ApplianceError:
            if record.reservation is not None:
                record.reservation.settle(0, 0)
            return False
        self.admitted += 1
        record.host = self.number
        return True

    def submission(self, record: Record, output: int, more: int = 0) -> Submit:
        """Return what the engine is asked for: the prompt, with so many tokens behind it."""
        arrival = record.arrival
        key = self._rules.namespaces[self._rules.names[arrival.tenant]]
        prompt = arrival.prompt()
        if more:
            prompt += array("I", [TOKEN]) * more
        owner, user = (key, b"") if self._machine.fair else (EVERYBODY, key)
        return Submit(record.number, owner, prompt, output, GREEDY, ignore_eos=True, user=user)

    def enter(self, record: Record, submit: Submit, now: float) -> None:
        """Give a request to the engine."""
        self.now = max(self.now, now)
        self.live[record.number] = record
        self.engine.add(submit)

    def begin(self, now: float) -> float | None:
        """Begin the next step, if there is work; returns when it ends."""
        self.now = now
        if not self.engine.has_work:
            self.busy = False
            return None
        self.card.seconds = 0.0
        self._output = self.engine.step()
        if self.engine.scheduler.num_preempted > self._preempted:
            self._note_preempted(now)
        taken = self.card.seconds
        self.busy = taken > 0 or self._output is not None
        if not self.busy:
            return None
        self._tally.busy(self.number, now, taken)
        return now + taken

    def end(self, now: float) -> tuple[list[Record], list[Record]]:
        """End the step: returns the requests whose first token came, and those that ended."""
        firsts: list[Record] = []
        ended: list[Record] = []
        output, before = self._output, self._before
        self._output, self._before, self.now = None, now, now
        if output is None:
            return firsts, ended
        live, numbers, finishes = self.live, output.requests, output.finishes
        for started in output.starts:
            if (begun := live.get(started.request)) is not None and begun.cached < 0:
                begun.cached = started.cached_tokens
        decodes = self.card.decodes
        if decodes:
            self._tally.gap(now, now - before, decodes)
        for place in range(decodes, len(numbers)):
            record = live.get(numbers[place])
            if record is None:
                continue  # aborted while the step ran
            if record.first_at < 0:
                record.first_at = now
                firsts.append(record)
            else:
                self._tally.gap(now, now - record.last_at, 1)
                if record.moved:
                    self._tally.hand_over(now, now - record.last_at)
                    record.moved = []
                record.last_at = -1.0
        if any(finishes):
            over = [number for number, finish in zip(numbers, finishes, strict=True) if finish]
            ended = [live.pop(number) for number in over if number in live]
        for failure in output.failures:
            if (refused := live.pop(failure.request, None)) is not None:
                refused.fate = Fate.FAILED
                ended.append(refused)
        return firsts, ended

    def _note_preempted(self, now: float) -> None:
        """Remember when the streams of preempted requests stopped."""
        self._preempted = self.engine.scheduler.num_preempted
        running = set(self.engine.scheduler.running_ids.values())
        for number, record in self.live.items():
            if record.first_at >= 0 and record.last_at < 0 and number not in running:
                record.last_at = now

    def settle(self, record: Record, tokens: int, now: float) -> None:
        """End a request with the tenant's account on this host."""
        self.now = max(self.now, now)
        self.admitted -= 1
        record.tokens = tokens
        assert record.reservation is not None, "a request that was not admitted"
        record.reservation.settle(record.arrival.prompt_tokens, tokens, cached_tokens=max(0, record.cached))

    def warm(self, record: Record) -> None:
        """Leave in the cache what a request before the simulation would have left."""
        submit = self.submission(record, 1)
        self.take_blocks(list(self.cache.chain(submit)), submit)

    def take_blocks(self, ids: list[bytes], submit: Submit) -> int:
        """Take blocks that were computed before or elsewhere, as far as there is room; returns the new ones."""
        kept: list[int] = []
        new, last = 0, b""
        for block_id in ids:
            behind, last = last, block_id
            block = self.pool.find(block_id)
            if block is None:
                block = self.pool.adopt(block_id, submit.namespace, behind)
                new += 1
            if block is None:
                new -= 1
                break
            self.pool.hold(block)
            kept.append(block)
        # Together, so that the end of the prefix goes first when room is needed.
        self.pool.release(kept)
        return new

    def known(self, ids: list[bytes]) -> int:
        """Return how many leading blocks of a chain are here."""
        for place, block_id in enumerate(ids):
            if self.pool.find(block_id) is None:
                return place
        return len(ids)

    @property
    def held_tokens(self) -> int:
        """Tokens of KV in the pool, of running requests and cached."""
        return (self.pool.num_blocks - self.pool.num_free) * self._machine.block

    def delivered(self) -> dict[int, int]:
        """Return the output tokens that each request in a row has sent, by number; those of the step under way are not
        sent yet."""
        return {
            number: sent
            for row, number in self.engine.scheduler.running_ids.items()
            if (record := self.live.get(number)) is not None
            and (sent := self.card.length(row) - record.arrival.prompt_tokens - 1) > 0
        }

    @property
    def lost_tokens(self) -> int:
        """Tokens computed, or being computed, for requests that have not ended: what is lost with the host."""
        return self.card.computed - self.card.closed + self.card.closing
