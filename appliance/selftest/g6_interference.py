"""G6: bounded interference between tenants, measured in a real scheduler on a simulated clock.

* The bound on the difference of services that ``engine.core.fairness.fairness`` proves is compared every 256 steps
through bursts shaped like Azure's code trace, with quotas, caps and aborts, and never broken. Tenants with continuous
backlog get equal service (Jain's index).
* Nine attacks, each with as many live requests as permitted, run beside a victim with a light load: its 99th percentile
of time to first token is compared with that beside an ordinary backlogged tenant (prompts of 256, outputs of 32). The
attacker must still get the capacity that the victim leaves: refusing everything would be no isolation.

These figures exclude the host's part (bounds for slow readers, compilation of grammars); they include what such an
attack leaves in the engine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from appliance.common.figures import counted
from appliance.selftest.result import Result, judged
from appliance.selftest.simulation import Prompts, SimulatedEngine, Size, jain, quantile, quota
from engine.core.fairness.tenancy import FairnessBrokenError

VICTIM, ATTACKER = 1, 2
MOST_LIVE = 64
"""Largest number of live requests of one tenant."""
PERIOD_S = 0.02
"""Mean seconds between two requests of the victim."""
MOST_RATIO = 1.25
LEAST_REST = 0.8
COMMAND = "athanor selftest"
FULL_COUNTS, SHORT_COUNTS = (100_000, 1_000), (4_000, 120)
"""Steps of bursts, and requests of the victim beside each attack."""


def run(full: bool) -> Iterator[Result]:
    """Run bursts, equal service, and the victim beside each attack."""
    steps, asks = FULL_COUNTS if full else SHORT_COUNTS
    yield _bursts(steps)
    yield _equals(min(steps, 20_000))
    fair = _victim("in share", asks)
    for attack in ATTACKS:
        yield from _judge(attack, fair, _victim(attack, asks), _alone(attack, fair.seconds))
    yield _control(fair, asks)


def _bursts(steps: int) -> Result:
    """Run bursts of up to 67 requests from eight tenants, two with quotas, one request in eight aborted."""
    rng = random.Random(3)
    machine = SimulatedEngine(Size(blocks=2_048), [quota(1, 20), quota(2, 10, 30), quota(3, 10, 10, lends=False)])
    prompts = Prompts()
    due, broken = 0.0, 0
    while machine.steps < steps:
        while due <= machine.now and machine.scheduler.num_waiting < 2_000:
            due += rng.expovariate(2.0)
            tenant = 1 + rng.randrange(8)
            for _ in range(rng.randint(1, 67)):
                length = min(3_000, max(1, int(rng.lognormvariate(5.2, 0.9))))
                number = machine.ask(tenant, prompts.make(length), min(250, max(1, int(rng.lognormvariate(2.6, 1.1)))))
                if number is not None and rng.random() < 1 / 8:
                    machine.leave_at(number, machine.steps + rng.randrange(200))
        try:
            machine.step()
        except FairnessBrokenError:
            broken += 1
            break
    figure = (
        f"broken {counted(broken, 'time')} in {counted(machine.steps, 'step')}, {counted(len(machine.seen), 'request')}"
    )
    return judged("G6.bound", not broken and machine.steps >= steps, figure=figure, bar="never", command=COMMAND)


def _equals(steps: int) -> Result:
    """Run eight tenants with continuous, different work; return each one's service by the prices of service."""
    rng = random.Random(4)
    machine, prompts = SimulatedEngine(Size(blocks=2_048)), Prompts()
    shapes = [(32, 128), (512, 16), (128, 64), (1_000, 1), (16, 300), (300, 30), (64, 64), (700, 100)]
    while machine.steps < steps:
        for tenant, (prompt, output) in enumerate(shapes, 1):
            while machine.live(tenant) < 40:
                machine.ask(tenant, prompts.make(max(1, rng.randint(prompt // 2, prompt))), output)
        machine.step()
    index = jain(machine.scheduler.services().values())
    return judged(
        "G6.Jain", index >= 0.99, figure=f"{index:.4f} in {counted(steps, 'step')}", bar="0.99 or more", command=COMMAND
    )


@dataclass(frozen=True, slots=True)
class Beside:
    """Results of a victim's run."""

    p99: float
    """99th percentile of the time to first token, in seconds."""
    seconds: float
    rest: float
    """Tokens computed for the attacker, a second."""


def _victim(attack: str, asks: int) -> Beside:
    rng = random.Random(6)
    machine, prompts = SimulatedEngine(), Prompts()
    beginning = prompts.make(64)
    attacker = ServiceAttacker(machine, prompts, attack)
    while machine.now < 0.5:  # the attack has started when the victim arrives
        attacker.act()
        machine.step()
    due, left = machine.now, asks
    begun = machine.tokens.get(ATTACKER, 0), machine.now
    while left or machine.live(VICTIM):
        attacker.act()
        if left and due <= machine.now:
            machine.ask(VICTIM, prompts.make(96, beginning), 8, came=due)
            left -= 1
            due += PERIOD_S * rng.uniform(0.5, 1.5)
        machine.step()
    seconds = machine.now - begun[1]
    return Beside(
        quantile(machine.ttfts(VICTIM), 0.99), seconds, (machine.tokens.get(ATTACKER, 0) - begun[0]) / seconds
    )


def _alone(attack: str, seconds: float) -> float:
    """Return the attacker's tokens a second in an engine of its own."""
    machine = SimulatedEngine()
    attacker = ServiceAttacker(machine, Prompts(), attack)
    while machine.now < 0.5:
        attacker.act()
        machine.step()
    begun = machine.tokens.get(ATTACKER, 0), machine.now
    while machine.now < begun[1] + seconds:
        attacker.act()
        machine.step()
    return (machine.tokens.get(ATTACKER, 0) - begun[0]) / (machine.now - begun[1])


class ServiceAttacker:
    """One tenant's attack, renewed before each step."""

    def __init__(self, machine: SimulatedEngine, prompts: Prompts, attack: str) -> None:
        self._machine = machine
        self._prompts = prompts
        self._act = ATTACKS.get(attack, ServiceAttacker.within_share)

    def act(self) -> None:
        """Run the attack's action for this step."""
        self._act(self)

    def within_share(self) -> None:
        """Keep slightly more work queued than there are rows, like an ordinary tenant: no attack."""
        self._fill(Size().rows + 4, 256, 32)

    def flood(self) -> None:
        """Keep as many short requests live as permitted."""
        self._fill(MOST_LIVE, 32, 32)

    def fill_and_squeeze(self) -> None:
        """Fill the pool with long outputs, then send prompts."""
        self._fill(MOST_LIVE // 2, 16, 600)
        self._fill(MOST_LIVE, 512, 16)

    def long_prompts(self) -> None:
        """Send one long prompt after the other."""
        self._fill(MOST_LIVE, 4_000, 1)

    def one_token(self) -> None:
        """Send requests that end with their first token."""
        self._fill(MOST_LIVE, 16, 1)

    def grammar_bomb(self) -> None:
        """Send structured requests whose masks never arrive, and a flood beside them."""
        self._fill(MOST_LIVE // 2, 64, 64, structured=True)
        self._fill(MOST_LIVE, 32, 32)

    def fan_out(self) -> None:
        """Request sixteen outputs for each prompt."""
        self._fill(MOST_LIVE, 64, 48, choices=16)

    def slow_reader(self) -> None:
        """Send long outputs that the host ends because the client does not read them."""
        self._fill(MOST_LIVE, 32, 1_000, leaves=300)

    def cancel_storm(self) -> None:
        """Cancel requests a few steps after their submission."""
        self._fill(MOST_LIVE, 256, 64, leaves=4)

    def preempt_storm(self) -> None:
        """Let outputs grow until memory runs out, again and again."""
        self._fill(MOST_LIVE, 200, 500)

    def _fill(self, live: int, prompt: int, output: int, *, leaves: int = 0, **fields: Any) -> None:
        machine = self._machine
        while machine.live(ATTACKER) < live:
            number = machine.ask(ATTACKER, self._prompts.make(prompt), output, **fields)
            assert number is not None, "the attack was refused"
            if leaves:
                machine.leave_at(number, machine.steps + leaves)


ATTACKS: dict[str, Callable[[ServiceAttacker], None]] = {
    "flood": ServiceAttacker.flood,
    "fill and squeeze": ServiceAttacker.fill_and_squeeze,
    "long prompts": ServiceAttacker.long_prompts,
    "one token": ServiceAttacker.one_token,
    "grammar bomb": ServiceAttacker.grammar_bomb,
    "fan-out": ServiceAttacker.fan_out,
    "slow reader": ServiceAttacker.slow_reader,
    "cancel storm": ServiceAttacker.cancel_storm,
    "preempt storm": ServiceAttacker.preempt_storm,
}


def _judge(attack: str, fair: Beside, beside: Beside, alone: float) -> list[Result]:
    ratio, rest = beside.p99 / fair.p99, beside.rest / alone
    figure = f"p99 TTFT {ratio:.2f} times that beside an ordinary tenant; attacker keeps {100 * rest:.0f} %"
    passed = ratio <= MOST_RATIO and rest >= LEAST_REST
    bar = f"at most {MOST_RATIO}; at least {100 * LEAST_REST:.0f} %"
    return [judged(f"G6.{attack}", passed, figure=figure, bar=bar, command=COMMAND)]


def _control(fair: Beside, asks: int) -> Result:
    """Send the flood with the victim's own credential: a tenant may harm itself, and the measure must show it."""
    rng = random.Random(6)
    machine, prompts = SimulatedEngine(), Prompts()
    own: list[int] = []
    for _ in range(asks):
        while machine.live(VICTIM) < MOST_LIVE:
            machine.ask(VICTIM, prompts.make(32), 32)
        number = machine.ask(VICTIM, prompts.make(96), 8)
        assert number is not None
        own.append(number)
        for _ in range(rng.randint(20, 40)):
            machine.step()
    firsts = [machine.finish(number) for number in own]
    ratio = quantile(sorted((one.first or 0.0) - one.asked for one in firsts), 0.99) / fair.p99
    return judged("G6.control", ratio > 2, figure=f"{ratio:.1f} times", bar="own flood: above 2 times", command=COMMAND)
