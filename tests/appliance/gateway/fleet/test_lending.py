"""Limits of a fleet over simulated hosts, clocks and stores: what all hosts admit together stays within the policy.

The real ledger, parts, messages and lender of each host run; time, demand, deaths and the store are simulated.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from appliance.common.control import Spent
from appliance.common.errors import ApplianceError
from appliance.common.usage.periods import period_of
from appliance.gateway.fleet.lending import (
    FRESH_S,
    KINDS,
    SPEND,
    Lender,
    LimitAmount,
    LoanAnswer,
    LoanQuestion,
    Message,
)
from appliance.gateway.fleet.message import MAX_BYTES, MessageError, Sealer
from appliance.gateway.fleet.own_parts import LEASE, OwnParts
from appliance.gateway.request.ledger import Ledger
from appliance.gateway.request.spend import Spends
from policy.host_part import host_part
from policy.loader import Source, load_policy
from policy.model import PolicySet

TEXT = """
version: 1
prices: {{currency: EUR, rules: [{{models: ["*"], input: 1000, output: 1000}}]}}
tenants:
  acme:
    credentials: ["key:a"]
    models: ["m"]
    limits: {{requests_per_minute: {rpm}, tokens_per_minute: 6000000, concurrency: 400, max_context_tokens: 100,
              max_output_tokens: 50{more}}}
"""
TURN_S, STEP_S = 0.25, 0.05
NOON = 1_700_049_600.0
TOKENS_EACH = 40
COST = 1_000_000 * TOKENS_EACH
"""Billionths that one request of the simulation costs."""


def policy(rpm: int = 1_200, more: str = "") -> PolicySet:
    """A policy with one tenant."""
    return load_policy([Source("p.yaml", TEXT.format(rpm=rpm, more=more))])


@dataclass
class Store:
    """Loses, delays, repeats and mixes up values; or is down."""

    draw: random.Random
    hostile: bool = False
    down: bool = False
    values: dict[str, list[bytes]] = field(default_factory=dict)

    def put(self, name: str, value: bytes) -> bool:
        """Keep a value, as it seems."""
        if self.down:
            return False
        kept = self.values.setdefault(name, [])
        if not self.hostile or self.draw.random() < 0.8:
            kept.append(value)
            del kept[:-20]
        return True

    def get(self, name: str) -> bytes | None:
        """Give the value, an old one, or another host's."""
        kept = self.values.get(name, [])
        if self.hostile and self.draw.random() < 0.4:
            every = [value for values in self.values.values() for value in values]
            return self.draw.choice(every) if every else None
        return kept[-1] if kept else None


@dataclass
class Disk:
    """What a host's supervisor keeps of its spend."""

    spent: int = 0
    reserved: int = 0


class Host:
    """One host's gateway, which may be restarted."""

    def __init__(self, name: str, names: list[str], world: World) -> None:
        self.name, self.names, self.world = name, names, world
        draw = world.draw
        self.skew, self.pace = draw.uniform(-1e6, 1e6), 1 + draw.uniform(-world.drift, world.drift)
        self.disk, self.cut_off, self.due = Disk(), False, draw.random() * TURN_S
        self.start()

    def clock(self) -> float:
        """Monotonic seconds of this host."""
        return self.skew + self.world.now * self.pace

    def start(self) -> None:
        """Begin anew, with what is on disk."""
        world = self.world
        spends = Spends(lambda: NOON + world.now)
        period = period_of(NOON)
        amounts = [self.disk.spent, self.disk.spent, self.disk.reserved, 0]
        spends.take(Spent(period.day, period.month, ["acme"], {"acme": amounts}))
        self.ledger = Ledger(world.part, {"acme": b"k" * 32}, self.clock, spends)
        self.parts = OwnParts(self.ledger, spends, self.clock)
        self.ledger.on_used = self.parts.note
        peers = tuple(one for one in self.names if one != self.name)
        self.lender = Lender(self.name, peers, str(world.draw.random()), self.parts, self.borrowed)
        self.sealer = Sealer(b"f" * 32)

    def borrowed(self, _peer: str, loan: LimitAmount) -> None:
        """Note on disk; the note may be lost with the process."""
        if loan.kind == SPEND and self.world.draw.random() < 0.9:
            self.disk.spent -= loan.amount
        self.world.moved += 1

    def turn(self) -> None:
        """One exchange with the store."""
        store, now = self.world.store, self.clock()
        if self.cut_off or not store.put(self.name, self.sealer.write(self.lender.write(now))):
            return
        messages = []
        for peer in self.lender.peers:
            if (value := store.get(peer)) is not None:
                with suppress(MessageError):
                    messages.append(self.sealer.read(value, peer, {self.sealer.tag("acme"): "acme"}.get))
        for peer, loan in self.lender.read(messages, now):
            if loan.kind == SPEND:
                if self.world.draw.random() < 0.1:
                    self.lender.withhold(peer, loan)  # the disk did not take it
                else:
                    self.disk.spent += loan.amount

    def ask(self) -> bool:
        """Try to have one request served."""
        try:
            held = self.ledger.admit("acme", "m", TOKENS_EACH)
        except ApplianceError:
            return False
        try:
            held.reserve(1, TOKENS_EACH - 1, 1_000)
        except ApplianceError:
            held.settle(0, 0)
            return False
        held.settle(1, TOKENS_EACH - 1)
        self.disk.spent += COST if self.ledger.limits("acme").bounds_spend else 0
        return True


class World:
    """All hosts, with one true time."""

    def __init__(self, hosts: int, seed: int, whole: PolicySet, *, divided: bool = True, drift: float = 0.01) -> None:
        self.draw, self.now, self.drift, self.moved = random.Random(seed), 0.0, drift, 0
        self.part = host_part(whole, hosts) if divided else whole
        self.store = Store(self.draw)
        names = [f"h{number}" for number in range(hosts)]
        self.hosts = [Host(name, names, self) for name in names]

    def steps(self, seconds: float) -> Iterator[None]:
        """Let time pass; each host takes its turns."""
        end = self.now + seconds
        while self.now < end:
            self.now += STEP_S
            for host in self.hosts:
                if self.now >= host.due:
                    host.due = self.now + TURN_S * self.draw.uniform(0.8, 1.6)
                    host.turn()
            yield


class FleetBucket:
    """The policy's own rate over all hosts: how far below zero what they admit takes it."""

    def __init__(self, per_minute: int, drift: float) -> None:
        self.most, self.per_s = float(per_minute), per_minute / 60 * (1 + drift)
        self.level, self.lowest, self.at = self.most, 0.0, 0.0

    def take(self, now: float) -> None:
        """One request was admitted."""
        self.level = min(self.most, self.level + (now - self.at) * self.per_s) - 1
        self.lowest, self.at = min(self.lowest, self.level), now


def troubled(world: World, rpm: int, seconds: float) -> float:
    """Demand that moves between hosts while the store fails in all its ways; returns the overshoot in requests."""
    draw, bucket = world.draw, FleetBucket(rpm, world.drift)
    busy, until = {world.hosts[0]}, 25.0  # First without trouble, so that something is lent.
    for _ in world.steps(seconds):
        if world.now >= until:
            until = world.now + draw.uniform(0.5, 12)
            busy = {host for host in world.hosts if draw.random() < 0.6}
            world.store.hostile, world.store.down = draw.random() < 0.3, draw.random() < 0.1
            for host in world.hosts:
                host.cut_off = draw.random() < 0.15
        for host in busy:
            for _ in range(draw.randrange(6)):
                if host.ask():
                    bucket.take(world.now)
    return -bucket.lowest


SEEDS = [*range(3), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(3, 300))]


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: f"seed{seed}")
def test_rates_overshoot_by_one_lease_at_most(seed: int) -> None:
    """Over two to four hosts whose clocks differ by days and 1 %, with a store that is away, cut off from some, late,
    or gives old values and those of others: in no window is more admitted than the rate gives, and one lease or what
    it gives in 2 seconds, whichever is less."""
    hosts, rpm = 2 + seed % 3, 1_200
    world = World(hosts, seed, policy(rpm))
    lease, on_its_way = rpm // hosts // LEASE, rpm / 60 * FRESH_S
    assert troubled(world, rpm, 90) <= min(lease, on_its_way) + hosts
    assert world.moved, "nothing was lent"


def test_without_parts_rates_overshoot() -> None:
    """Control: where each host has the whole limit, the same world exceeds it by far more than a lease."""
    rpm = 1_200
    world = World(2, 0, policy(rpm), divided=False)
    assert troubled(world, rpm, 90) > 2 * (rpm // 2 // LEASE)


def test_a_clock_that_runs_fast_is_the_only_way_past_a_rate() -> None:
    """Control of the control: hosts whose clocks run 30 % fast admit what 1 % does not explain."""
    rpm = 1_200
    world = World(2, 3, policy(rpm), drift=0.0)
    for host in world.hosts:
        host.pace = 1.3
    bucket = FleetBucket(rpm, 0.01)
    for _ in world.steps(120):
        for host in world.hosts:
            while host.ask():
                bucket.take(world.now)
    assert -bucket.lowest > rpm // 2 // LEASE


def served(*, store: bool, seconds: float = 60) -> int:
    """Requests that one host of two serves beside an idle one, after both bursts are used up."""
    world = World(2, 5, policy(1_200))
    world.store.down = not store
    first, count = world.hosts[0], 0
    for _ in world.steps(60 + seconds):
        while first.ask():
            count += world.now > 60
    return count


def test_an_idle_host_lends_and_a_store_that_is_away_leaves_each_its_part() -> None:
    """A host beside an idle one gets nearly the whole rate; without a store it gets its half, and no more."""
    alone, lent = served(store=False), served(store=True)
    assert 590 <= alone <= 610
    assert 1_100 <= lent <= 1_240


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: f"seed{seed}")
def test_budgets_are_never_exceeded(seed: int) -> None:
    """What all hosts spend in a day stays within the budget, to the billionth, over a store that fails in all its ways,
    gateways that are killed between any two steps, and disks that refuse; and most of it can be spent by one host."""
    hosts, budget = 2 + seed % 3, 400 * COST
    world = World(hosts, seed, policy(60_000, f", spend_per_day: {budget / 1e9}"))
    draw, spent, until = world.draw, 0, 0.0
    for _ in world.steps(60):
        if world.now >= until:
            until = world.now + draw.uniform(1, 10)
            world.store.hostile, world.store.down = draw.random() < 0.3, draw.random() < 0.1
            if draw.random() < 0.5:
                draw.choice(world.hosts).start()
        host = world.hosts[0] if draw.random() < 0.8 else draw.choice(world.hosts)
        for _ in range(draw.randrange(4)):
            spent += COST * host.ask()
            assert spent <= budget
    assert world.moved and spent > budget / hosts


def test_without_parts_budgets_are_exceeded() -> None:
    """Control: two hosts with the whole budget each spend twice as much."""
    budget = 100 * COST
    world = World(2, 0, policy(60_000, f", spend_per_day: {budget / 1e9}"), divided=False)
    assert sum(COST for host in world.hosts for _ in range(200) if host.ask()) == 2 * budget


class Fixed:
    """Parts that lend all that is asked for."""

    def __init__(self, *wanted: LimitAmount) -> None:
        self.wanted, self.taken, self.day = list(wanted), list[LimitAmount](), 3

    def short(self) -> list[LimitAmount]:
        """What is wanted."""
        return self.wanted

    def lend(self, wanted: LimitAmount) -> int:
        """All."""
        return wanted.amount

    def take(self, loan: LimitAmount) -> None:
        """Keep."""
        self.taken.append(loan)


def pair(*wanted: LimitAmount) -> tuple[Lender, Lender, Fixed]:
    """One that asks for these, and one that lends."""
    parts = Fixed(*wanted)
    return Lender("a", ("b",), "life-a", parts), Lender("b", ("a",), "life-b", Fixed()), parts


EIGHT, MONEY = LimitAmount("t", "tokens", 8), LimitAmount("t", SPEND, 5)


def test_an_answer_is_taken_once_while_it_is_fresh_and_no_larger_than_asked() -> None:
    """Repeated, late, of another life, of another day, or with more than was asked for: nothing more is taken. Budgets
    are of their day, rates of any."""
    asker, lender, parts = pair(EIGHT, MONEY)
    lender.read([asker.write(0.0)], 50.0)
    answer = lender.write(50.0)
    for _ in range(2):
        asker.read([answer], FRESH_S)
    assert parts.taken == [EIGHT, MONEY]
    for other in (LoanAnswer("other", 1, (EIGHT,), 3), LoanAnswer("life-a", 9, (EIGHT,), 3)):
        asker, lender, parts = pair(EIGHT)
        asker.write(0.0)
        asker.read([Message("b", None, {"a": other})], 0.1)
        assert parts.taken == []
    asker, lender, parts = pair(EIGHT, MONEY)
    asker.write(0.0)
    more = LoanAnswer("life-a", 1, (LimitAmount("t", "tokens", 99), MONEY), 4)
    asker.read([Message("b", None, {"a": more})], 0.1)
    assert parts.taken == [EIGHT]
    asker, lender, parts = pair(EIGHT)
    lender.read([asker.write(0.0)], 0.0)
    asker.read([lender.write(0.0)], FRESH_S + 0.1)
    assert parts.taken == []


def test_a_question_is_answered_once_in_each_life() -> None:
    """Repeated by the store, also after another life's, it lends nothing more; a host that is none of the fleet's is
    not heard; what is withheld is in no answer and the lender's again, a budget on its day alone."""
    _, lender, _ = pair()
    old, new = (Message("a", LoanQuestion(life, 1, (EIGHT,)), {}) for life in ("one", "two"))
    assert len(lender.read([old], 0.0)) == 1
    assert lender.read([old], 0.0) == []
    assert len(lender.read([new, old, new], 0.0)) == 1
    assert lender.read([Message("z", old.question, {})], 0.0) == []
    assert lender.write(0.0).answers["a"].amounts == (EIGHT,)
    lender.withhold("a", EIGHT)
    assert lender.write(0.0).answers["a"].amounts == ()
    parts = Fixed()
    lender = Lender("b", ("a",), "life-b", parts)
    lender.read([Message("a", LoanQuestion("one", 1, (EIGHT, MONEY)), {})], 0.0)
    assert parts.taken == []
    lender.withhold("a", MONEY)
    assert parts.taken == [MONEY]
    lender.read([Message("a", LoanQuestion("one", 2, (MONEY,)), {})], 0.0)
    parts.day += 1
    lender.withhold("a", MONEY)
    assert parts.taken == [MONEY]


def test_messages_are_proved_before_they_are_read() -> None:
    """A message comes back as it was written; each changed byte, another sender, another key and another length are
    refused. Tenants stand in it by tags, and those that are not known are left out."""
    sealer, draw = Sealer(b"f" * 32), random.Random(3)
    amounts = tuple(LimitAmount("acme", kind, 5) for kind in KINDS)
    message = Message("a", LoanQuestion("life", 2, amounts), {"b": LoanAnswer("other", 1, amounts, 7)})
    data = sealer.write(message)
    known = {sealer.tag("acme"): "acme"}.get
    assert b"acme" not in data
    assert sealer.read(data, "a", known) == message
    left_out = sealer.read(data, "a", {}.get)
    assert left_out.question == LoanQuestion("life", 2, ())
    for _ in range(300):
        at = draw.randrange(len(data))
        changed = data[:at] + bytes([data[at] ^ (1 << draw.randrange(8))]) + data[at + 1 :]
        with pytest.raises(MessageError):
            sealer.read(changed, "a", known)
    refused = (data, "b", sealer), (data, "a", Sealer(b"g" * 32)), (data[:-1], "a", sealer), (b"", "a", sealer)
    for text, sender, reader in (*refused, (data + b" " * MAX_BYTES, "a", sealer)):
        with pytest.raises(MessageError):
            reader.read(text, sender, known)
    for text in (b"[]", b"{}", b'{"from":"a","asks":[1,2,3],"answers":{}}', b"[" * 2_000):
        with pytest.raises(MessageError):
            sealer.read(sealer._proof(text) + text, "a", known)
