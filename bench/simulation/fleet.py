"""The simulated fleet, event by event: hosts, a router before them, arrivals, deaths, and prefill apart from decode.

Events are ordered by their time and then by the order in which they were made, and everything drawn comes from seeds:
one configuration gives the same run, bit by bit. What is modelled and what is not stands in ``docs/fleet.md``.
"""

from __future__ import annotations

import gc
import heapq
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from appliance.gateway.front.affinity import SessionAffinity
from bench.simulation.host import Fate, Machine, Record, Rules, SimulatedHost
from bench.simulation.ring import BALANCE, Picker, Ring
from bench.simulation.tally import Tally
from bench.simulation.traffic import Arrival

RETRY_S = 10.0
"""Seconds after which a router gives a request to no other host (``proxy_next_upstream_timeout`` of the recipe)."""

MOST_TRIES = 2
"""Hosts that one request is given to (``proxy_next_upstream_tries``)."""

FALLBACK_S = 0.25
"""Silence of a prefill host after which the decode host computes the prompt itself."""

LOCAL_TOKENS = 512
"""Prompt tokens that are not cached up to which a decode host computes them itself: one step's worth."""

SEND_BYTES_PER_S = 5e9
"""Sealed KV that one host sends: eight of its cores at 0.62 GB a second each, as measured (the sealer with a store,
``bench/RESULTS.md``), on a network that takes it."""

MANY_HOSTS = 100
"""Hosts from which on the collector is spared what exists before a run: to look at all of it once takes half a second,
which a small fleet's run does not take."""

AFFINITY_KEY = bytes(range(32))


class Routing(Enum):
    """How the router chooses."""

    NAMED = "named"
    """Ring by the name that the client gives its session, from the first request on."""
    TAG = "tag"
    """Ring by the tag of the last answer, which the client sends back: the first request of a session goes anywhere."""
    SPREAD = "spread"
    """No session is named: each request goes anywhere (nginx's ``$request_id``)."""
    BOUNDED = "bounded"
    """As ``NAMED``, but a host with too many requests is passed over."""
    LEAST = "least"
    """The host with the fewest requests, which the router counts itself."""
    PICKER = "picker"
    """An endpoint picker's default, by gauges that are up to 50 ms old."""
    PICKER_FRESH = "picker-fresh"
    """The same with gauges as they are."""


class Kind(Enum):
    """Kind of an event."""

    STEP = auto()
    ARRIVE = auto()
    MOVED = auto()
    """Blocks of a prompt have come from a prefill host."""
    ALONE = auto()
    """A decode host computes a prompt itself after all."""
    DEATH = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run."""

    hosts: int
    machine: Machine
    routing: Routing = Routing.NAMED
    window: tuple[float, float]
    """Seconds between which distributions are counted."""
    until: float
    """Simulated seconds after which nothing more is done; what is live then is counted as such."""
    deaths: int = 0
    dying: tuple[int, ...] = ()
    """Hosts that die; none: as many as ``deaths`` says, drawn."""
    death_at: float = 0.0
    prefill_hosts: int = 0
    """Hosts that prefill only, the first ones; 0: all hosts do both."""
    send_bytes_per_s: float = SEND_BYTES_PER_S
    seed: int = 1


@dataclass(slots=True)
class Losses:
    """What deaths of hosts cost."""

    hosts: int = 0
    streams: int = 0
    """Requests whose stream had begun: their clients get an error."""
    retried: int = 0
    """Requests that had not begun and went to another host."""
    failed: int = 0
    """Requests that had not begun and were given to no other host."""
    alone: int = 0
    """Prompts of live decode hosts that a dead prefill host was computing."""
    tokens: int = 0
    """Tokens computed for all of these."""
    output_tokens: int = 0
    """Output tokens that rows of the dead hosts had sent to clients, whose streams broke."""
    kv_tokens: int = 0
    """Tokens of KV in the dead hosts' caches and tables."""


class Fleet:
    """A run; ``run`` does it, and the figures are in ``tally``, ``fates`` and ``losses``."""

    def __init__(
        self, plan: Plan, rules: Rules, ended: Callable[[Record, float], Arrival | None] = lambda _record, _now: None
    ) -> None:
        """``ended`` is called when a request has ended, and gives the request that comes for it, if there is one."""
        self.plan, self.rules = plan, rules
        self.tally = Tally(*plan.window, plan.hosts)
        self.hosts = [SimulatedHost(number, plan.machine, rules, self.tally) for number in range(plan.hosts)]
        self.losses = Losses()
        self.fates: Counter[Fate] = Counter()
        self.records: list[Record] = []
        self.dead: set[int] = set()
        self.moved_bytes = 0
        """KV that went from prefill to decode hosts."""
        self.events = 0
        self._ended = ended
        self._rng = random.Random(f"fleet {plan.seed}")
        self._ring = Ring(range(plan.prefill_hosts, plan.hosts))
        self._prefill = Ring(range(plan.prefill_hosts))
        self._picker = Picker(plan.hosts, lambda host: self.hosts[host].gauges(), self._rng)
        self._affinity = SessionAffinity(AFFINITY_KEY)
        self._heap: list[tuple[float, int, Kind, object]] = []
        self._made = self._numbered = 0
        self._total = 0
        """Requests on all hosts."""
        self._in_flight = 0
        """Prompt tokens on all prefill hosts."""

    def run(self, arrivals: Sequence[Arrival]) -> None:
        """Warm the caches with what came before 0, then simulate."""
        first = next((place for place, one in enumerate(arrivals) if one.at >= 0), len(arrivals))
        for one in arrivals[:first]:
            self._warm(one)
        plan, heap = self.plan, self._heap
        if plan.deaths or plan.dying:
            self._push(plan.death_at, Kind.DEATH, None)
        if freezes := plan.hosts >= MANY_HOSTS:
            gc.collect()
            gc.freeze()
        place, end = first, len(arrivals)
        while True:
            due = arrivals[place].at if place < end else plan.until
            if heap and heap[0][0] <= due:
                now, _, kind, what = heapq.heappop(heap)
                if now >= plan.until:
                    break
                self._happen(now, kind, what)
            elif place < end and due < plan.until:
                self.arrive(arrivals[place], due)
                place += 1
            else:
                break
            self.events += 1
        if freezes:
            gc.unfreeze()
        for record in self.records:
            self.fates[record.fate] += 1

    def host_of(self, session: int) -> int:
        """Return the host of a session that its client names."""
        return self._ring.host(f"s{session}", self.dead)

    def arrive(self, arrival: Arrival, now: float) -> None:
        """Take a new request."""
        record = Record(0, arrival, sent_at=now)
        self.records.append(record)
        if self.tally.within(now):
            self.tally.tenants[arrival.tenant].requests += 1
        self._send(record, now)

    def _happen(self, now: float, kind: Kind, what: object) -> None:
        if kind is Kind.STEP:
            assert isinstance(what, SimulatedHost)
            if what.alive:
                self._step(what, now)
        elif kind is Kind.ARRIVE:
            assert isinstance(what, Arrival)
            self.arrive(what, now)
        elif kind is Kind.DEATH:
            self._die(now)
        else:
            assert isinstance(what, Record)
            self._come_back(what, now)

    def _push(self, at: float, kind: Kind, what: object) -> None:
        self._made += 1
        heapq.heappush(self._heap, (at, self._made, kind, what))

    def _route(self, arrival: Arrival, now: float) -> int:
        """Return the host that the router gives a request to."""
        routing, hosts = self.plan.routing, self.hosts
        name = f"s{arrival.session}"
        if routing is Routing.SPREAD or (routing is Routing.TAG and not arrival.turn):
            return self._ring.host(f"request {self._rng.random()}", self.dead)
        if routing is Routing.NAMED:
            return self._ring.host(name, self.dead)
        if routing is Routing.TAG:
            # A turn's tag is that of the answer before it, which is the same for all turns of a session.
            return self._ring.host(self._affinity.tag(self.rules.names[arrival.tenant], (name,)), self.dead)
        if routing is Routing.BOUNDED:
            alive = self.plan.hosts - self.plan.prefill_hosts - len(self.dead)
            most = BALANCE * (self._total + 1) / alive
            return self._ring.bounded(name, lambda host: hosts[host].admitted + 1, max(1.0, most), self.dead)
        if routing is Routing.LEAST:
            fewest = min(host.admitted for host in hosts if host.alive)
            best = [host.number for host in hosts if host.alive and host.admitted == fewest]
            return best[self._rng.randrange(len(best))]
        return self._picker.pick(arrival.session, now, fresh=routing is Routing.PICKER_FRESH)

    def _warm(self, arrival: Arrival) -> None:
        """Put a request's prompt into the caches of the hosts that would have had it. Rules that look at loads are
        replaced by the one without, since there are no loads yet."""
        routing, name = self.plan.routing, f"s{arrival.session}"
        if routing in (Routing.LEAST, Routing.SPREAD):
            place = self._rng.randrange(self.plan.prefill_hosts, self.plan.hosts)
        elif routing in (Routing.PICKER, Routing.PICKER_FRESH):
            place = self._ring.host(name)
            self._picker.remember(arrival.session, place)
        else:
            place = self._route(arrival, 0.0) if routing is Routing.TAG else self._ring.host(name)
        record = Record(0, arrival)
        self.hosts[place].warm(record)
        if self.plan.prefill_hosts:
            self.hosts[self._prefill.host(name)].warm(record)

    def _send(self, record: Record, now: float) -> None:
        """Give a request to a host, where the policy decides on it."""
        record.tries += 1
        # Another number at each try: an engine that was told to abort the first one may still answer it.
        self._numbered += 1
        record.number = self._numbered
        try:
            host = self.hosts[self._route(record.arrival, now)]
        except LookupError:
            self._finish(record, Fate.FAILED, now)
            return
        if not host.admit(record, now):
            self._finish(record, Fate.REFUSED, now)
            return
        self._total += 1
        if self.plan.prefill_hosts and self._send_apart(record, host, now):
            return
        host.enter(record, host.submission(record, record.arrival.output), now)
        self._wake(host, now)

    def _send_apart(self, record: Record, host: SimulatedHost, now: float) -> bool:
        """Have a prefill host compute a prompt, unless its host has nearly all of it. Says whether one does."""
        submit = host.submission(record, 1)
        chain = list(host.cache.chain(submit))
        known = host.known(chain)
        size, arrival = self.plan.machine.block, record.arrival
        missing = arrival.prompt_tokens - known * size
        if missing <= LOCAL_TOKENS:
            return False
        alive = self.plan.prefill_hosts - sum(place < self.plan.prefill_hosts for place in self.dead)
        if not alive:
            return False
        most = BALANCE * (self._in_flight + missing) / alive
        place = self._prefill.bounded(
            f"s{arrival.session}", lambda number: self.hosts[number].in_flight + missing, most, self.dead
        )
        helper = self.hosts[place]
        record.helper, record.moved = place, chain[known:]
        helper.in_flight += missing
        self._in_flight += missing
        record.missing = missing
        helper.enter(record, submit, now)
        self._wake(helper, now)
        return True

    def _wake(self, host: SimulatedHost, now: float) -> None:
        if not host.busy and (ends := host.begin(now)) is not None:
            self._push(ends, Kind.STEP, host)

    def _step(self, host: SimulatedHost, now: float) -> None:
        firsts, ended = host.end(now)
        for record in firsts:
            self.tally.first(now, record.sent_at, record.arrival.tenant)
            self.tally.began(now, record.arrival.prompt_tokens, record.cached, record.arrival.turn)
        for record in ended:
            if record.helper == host.number:
                self._prefilled(record, host, now)
                continue
            self._total -= 1
            done = record.fate is Fate.LIVE
            host.settle(record, record.arrival.output if done else 0, now)
            self._finish(record, Fate.DONE if done else record.fate, now)
        host.busy = False
        self._wake(host, now)

    def _prefilled(self, record: Record, helper: SimulatedHost, now: float) -> None:
        """A prefill host has the first token: its blocks follow, most of which were sent while it computed."""
        self._release(record, helper)
        size = self.plan.machine.block * self.plan.machine.times.kv_token_bytes
        sent = len(record.moved) * size
        self.moved_bytes += sent
        rate = self.plan.send_bytes_per_s
        # The last step's blocks cannot have left before its end; all the others wait for the link alone.
        last = min(sent, self.plan.machine.budget * self.plan.machine.times.kv_token_bytes)
        begun = max(record.sent_at, helper.link_free)
        helper.link_free = max(now + last / rate, begun + sent / rate)
        record.last_at = now
        if record.arrival.output == 1:
            host = self.hosts[record.host]
            self._total -= 1
            host.settle(record, 1, now)
            self._finish(record, Fate.DONE, now)
        else:
            self._push(helper.link_free, Kind.MOVED, record)

    def _release(self, record: Record, helper: SimulatedHost) -> None:
        helper.in_flight -= record.missing
        self._in_flight -= record.missing
        record.helper = -1

    def _come_back(self, record: Record, now: float) -> None:
        """A request goes on at its decode host: with blocks that have come, or without."""
        host = self.hosts[record.host]
        if record.fate is not Fate.LIVE or not host.alive:
            return
        began = record.first_at >= 0
        submit = host.submission(record, record.arrival.output - began, more=int(began))
        if began:
            host.take_blocks(list(host.cache.chain(submit)), submit)
        host.enter(record, submit, now)
        self._wake(host, now)

    def _finish(self, record: Record, fate: Fate, now: float) -> None:
        assert record.fate is Fate.LIVE or record.fate is fate, "a request ends once"
        record.fate, record.ended_at = fate, now
        if self.tally.within(now):
            self.tally.tenants[record.arrival.tenant].refused += fate is Fate.REFUSED
        if (following := self._ended(record, now)) is not None:
            self._push(following.at, Kind.ARRIVE, following)

    def _die(self, now: float) -> None:
        """Some hosts die at once, connections and all, as processes do that are killed."""
        plan = self.plan
        chosen = plan.dying or sorted(self._rng.sample(range(plan.hosts), plan.deaths))
        losses = self.losses
        for number in chosen:
            host = self.hosts[number]
            host.alive = False
            self.dead.add(number)
            self._picker.lose(number)
            losses.hosts += 1
            losses.tokens += host.lost_tokens
            losses.kv_tokens += host.held_tokens
            losses.output_tokens += sum(host.delivered().values())
        for record in [one for one in self.records if one.fate is Fate.LIVE]:
            if record.host in self.dead:
                self._lose(record, now)
            elif record.helper in self.dead:
                losses.alone += 1
                record.moved = []
                self._release(record, self.hosts[record.helper])
                self._push(now + FALLBACK_S, Kind.ALONE, record)

    def _lose(self, record: Record, now: float) -> None:
        """The request's host is dead: its stream breaks, or the router tries another host."""
        losses = self.losses
        if record.helper >= 0:
            helper = self.hosts[record.helper]
            self._release(record, helper)
            if helper.alive:
                helper.engine.abort(record.number)
                helper.live.pop(record.number, None)
        self._total -= 1
        if record.first_at >= 0:
            losses.streams += 1
            self._finish(record, Fate.LOST, now)
        elif record.tries >= MOST_TRIES or now - record.sent_at > RETRY_S:
            losses.failed += 1
            self._finish(record, Fate.FAILED, now)
        else:
            losses.retried += 1
            record.host, record.cached, record.reservation, record.moved = -1, -1, None, []
            self._send(record, now)
