"""What is simulated: each scenario is one or several runs of a fleet that differ in one thing, and their figures.

Traffic, policy and tenants are made once for all runs of a command. Scenarios whose hosts do not depend on each other
(a ring gives each host its own part) run on a tenth of hosts and tenants where the name of the run says so.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.simulation import traffic
from bench.simulation.fleet import Fleet, Plan, Routing
from bench.simulation.host import MODEL, Fate, Machine, Record, Rules
from bench.simulation.step_times import H200, StepTimes
from bench.simulation.tally import jain, quantile
from bench.simulation.traffic import Arrival
from policy.loader import Source, load_policy

CONCURRENCY = 32
"""Requests of a tenant that one host takes at once, in the policy of all runs."""

NOISY_PROMPT, NOISY_OUTPUT = 4_096, 64
NOISY_RATE = 12.0
"""Requests a second and host of the noisy tenant: more than a host computes if it computes nothing else."""

FRESH = 1 << 48
"""First number of blocks that no trace has."""

HEAVY = 16
"""Tenants with more work than there is, half of them on all hosts and half on one host in ``NARROW``."""

NARROW = 8
HEAVY_LIVE = 8
"""Requests that each of them keeps on each of its hosts."""

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Sizes of all runs of a command."""

    hosts: int = 1_000
    tenants: int = 10_000
    requests_per_s: float = 1.0
    """Requests a second and host."""
    ramp_s: float = 3.0
    """Simulated seconds that are left out, while the first requests begin."""
    window_s: float = 4.0
    before_s: float = 60.0
    """Seconds of traffic before the simulation, which the caches are warmed with."""
    trace: str = "mooncake"
    folder: Path = Path("../shared/data/traces")
    times: StepTimes = H200
    prefill_share: float = 0.6
    dead_share: float = 0.05
    seed: int = 1

    @property
    def until_s(self) -> float:
        """Simulated seconds of a run."""
        return self.ramp_s + self.window_s

    def tenth(self) -> Settings:
        """Return the same with a tenth of hosts and tenants, at least two of each."""
        return replace(self, hosts=max(2, self.hosts // 10), tenants=max(2, self.tenants // 10))


class World:
    """Traces, traffic and rules of a command, each made once."""

    def __init__(self) -> None:
        self._arrivals: dict[Settings, list[Arrival]] = {}
        self._rules: dict[object, Rules] = {}
        self.traces: dict[str, str] = {}
        """What each trace really is, by its name."""

    def arrivals(self, settings: Settings) -> list[Arrival]:
        """Return the requests of a run."""
        if settings not in self._arrivals:
            # One at a time: those of a thousand hosts take half a gigabyte.
            self._arrivals.clear()
            found, self.traces[settings.trace] = traffic.load(settings.trace, settings.folder)
            shape = traffic.Shape(
                requests_per_s=settings.requests_per_s * settings.hosts,
                tenants=settings.tenants,
                before_s=settings.before_s,
                seconds=settings.until_s,
                seed=settings.seed,
                longest=min(131_072, settings.times.kv_tokens),
            )
            self._arrivals[settings] = traffic.arrivals(found, shape)
        return self._arrivals[settings]

    def rules(self, tenants: int, extra: str = "") -> Rules:
        """Return the policy of so many tenants, and of some more whose lines are given."""
        if (tenants, extra) not in self._rules:
            self._rules[tenants, extra] = rules_of(tenants, extra)
        return self._rules[tenants, extra]


def rules_of(tenants: int, extra: str = "") -> Rules:
    """Make a policy as an operator would write it; ``extra`` has more tenants, a line each, which are the last ones."""
    limits = (
        f"{{requests_per_minute: 60000, tokens_per_minute: 100000000, concurrency: {CONCURRENCY}, "
        f"max_context_tokens: 131072, max_output_tokens: 65536}}"
    )
    lines = [
        f'  t{number:05}: {{credentials: ["key:k{number:05}"], models: ["{MODEL}"]}}\n' for number in range(tenants)
    ]
    text = f"version: 1\ndefaults: {{limits: {limits}}}\ntenants:\n{''.join(lines)}{extra}"
    policy = load_policy([Source("policy.yaml", text)])
    names = tuple(f"t{number:05}" for number in range(tenants))
    names += tuple(name for name in policy.tenants if name not in set(names))
    return Rules(policy, {name: number.to_bytes(32, "little") for number, name in enumerate(names)}, names)


def plan_of(settings: Settings, **changes: Any) -> Plan:
    """Return the plan of a run."""
    machine = changes.pop("machine", None) or Machine(times=settings.times)
    window = settings.ramp_s, settings.until_s
    return Plan(
        hosts=settings.hosts, machine=machine, window=window, until=settings.until_s, seed=settings.seed, **changes
    )


def figures_of(fleet: Fleet, seconds: float, arrivals: list[Arrival]) -> Figures:
    """Return the figures that every run has; ``seconds`` of the processor were taken."""
    tally, plan = fleet.tally, fleet.plan
    ttfts = [took for at, took in tally.ttfts if tally.within(at)]
    roles = [range(plan.hosts)] if not plan.prefill_hosts else [range(plan.prefill_hosts, plan.hosts)]
    used = [tally.utilisation([host for host in role if host not in fleet.dead]) for role in roles]
    found: Figures = {
        "hosts": plan.hosts,
        "routing": plan.routing.value,
        "requests": {fate.value: fleet.fates[fate] for fate in Fate},
        "ttft_s": spread(ttfts),
        "itl_s": {name: tally.gap_quantile(part) for name, part in PARTS.items()},
        "prompt_tokens": tally.prompt_tokens,
        "cached_share": tally.cached_tokens / max(1, tally.prompt_tokens),
        "cached_bound": bound(arrivals, *plan.window),
        "later_turns_cached": tally.repeats[0] / max(1, tally.repeats[1]),
        "output_tokens_per_s": tally.output_tokens / (plan.window[1] - plan.window[0]),
        "utilisation": spread(used[0], least=True),
        "preempted": sum(host.engine.scheduler.num_preempted for host in fleet.hosts),
        "steps": sum(host.card.steps for host in fleet.hosts),
        "events": fleet.events,
        "processor_s": seconds,
        "processor_s_a_simulated_s": seconds / plan.until,
    }
    if plan.prefill_hosts:
        prefill = [host for host in range(plan.prefill_hosts) if host not in fleet.dead]
        found["prefill_hosts"] = plan.prefill_hosts
        found["prefill_utilisation"] = spread(tally.utilisation(prefill), least=True)
        found["moved_gb"] = fleet.moved_bytes / 1e9
        found["hand_over_s"] = spread(tally.hand_overs)
    if plan.deaths:
        found["losses"] = asdict(fleet.losses)
    return found


PARTS = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def spread(values: list[float], *, least: bool = False) -> Figures:
    """Return quantiles and mean of some values."""
    found: Figures = {name: quantile(values, part) for name, part in PARTS.items()}
    found |= {"mean": sum(values) / len(values) if values else 0.0, "count": len(values)}
    return found | ({"least": min(values), "most": max(values)} if least and values else {})


def bound(arrivals: list[Arrival], begin: float, end: float) -> float:
    """Return the share of prompt tokens that one cache for all hosts would have that never forgets, of the traffic
    from before the simulation on."""
    seen: set[tuple[int, int]] = set()
    known_tokens = tokens = 0
    for one in arrivals:
        known = 0
        for block in one.blocks:
            if (one.tenant, block) not in seen:
                break
            known += 1
        seen.update((one.tenant, block) for block in one.blocks)
        if begin <= one.at < end:
            known_tokens += min(known * one.block_tokens, one.prompt_tokens - 1)
            tokens += one.prompt_tokens
    return known_tokens / max(1, tokens)


def simulate(world: World, settings: Settings, **changes: Any) -> tuple[Fleet, Figures]:
    """Run a fleet under the trace's traffic."""
    arrivals = world.arrivals(settings)
    more, rules = changes.pop("more", None), changes.pop("rules", None) or world.rules(settings.tenants)
    return run(
        settings, arrivals if more is None else sorted(arrivals + more, key=lambda one: one.at), rules, **changes
    )


def run(settings: Settings, arrivals: list[Arrival], rules: Rules, **changes: Any) -> tuple[Fleet, Figures]:
    """Run a fleet under some traffic."""
    began = time.process_time()
    fleet = Fleet(plan_of(settings, **changes), rules)
    fleet.run(arrivals)
    return fleet, figures_of(fleet, time.process_time() - began, arrivals)


def routed(routing: Routing) -> Callable[[World, Settings], Iterator[tuple[str, Figures]]]:
    """Return the scenario of one rule of routing."""

    def scenario(world: World, settings: Settings) -> Iterator[tuple[str, Figures]]:
        yield routing.value, simulate(world, settings, routing=routing)[1]

    scenario.__doc__ = f"Route by the rule {routing.value!r}."
    return scenario


def azure(world: World, settings: Settings) -> Iterator[tuple[str, Figures]]:
    """Serve Azure's conversations, which tell lengths only and are short: nothing is cached, many rows decode."""
    other = replace(settings, trace="azure", requests_per_s=settings.requests_per_s * AZURE_PACE).tenth()
    yield "azure, a tenth", simulate(world, other)[1]
    share = max(1, round(other.hosts * 0.3))
    yield "azure, a tenth, split", simulate(world, other, prefill_hosts=share)[1]


AZURE_PACE = 9.0
"""Requests of Azure's trace for one of Mooncake's: its prompts have a tenth of the tokens."""


def deaths(world: World, settings: Settings) -> Iterator[tuple[str, Figures]]:
    """Kill some hosts at once, a third into the window; sessions of the others stay where they are."""
    at = settings.ramp_s + settings.window_s / 3
    dead = max(1, round(settings.hosts * settings.dead_share))
    fleet, found = simulate(world, settings, deaths=dead, death_at=at)
    found["by_second"], found["death_at"] = by_second(fleet), at
    live = [record for record in fleet.records if record.sent_at < at]
    found["live_at_death"] = sum(record.fate is not Fate.REFUSED and record.ended_at >= at for record in live)
    yield "deaths", found


def by_second(fleet: Fleet) -> list[Figures]:
    """Return what each simulated second had: 99th percentile of first tokens that came in it, and the cached share."""
    rows = []
    for second in range(int(fleet.plan.until)):
        ttfts = [took for at, took in fleet.tally.ttfts if second <= at < second + 1]
        hits = [(cached, prompt) for at, cached, prompt in fleet.tally.hits if second <= at < second + 1]
        cached, prompt = sum(one for one, _ in hits), sum(two for _, two in hits)
        rows.append({"second": second, "ttft_s": spread(ttfts), "cached_share": cached / max(1, prompt)})
    return rows


def split(world: World, settings: Settings) -> Iterator[tuple[str, Figures]]:
    """Have some hosts compute prompts and the others outputs."""
    share = max(1, round(settings.hosts * settings.prefill_share))
    yield f"split, {settings.prefill_share:.0%} prefill", simulate(world, settings, prefill_hosts=share)[1]


def shares(world: World, settings: Settings) -> Iterator[tuple[str, Figures]]:
    """Split a tenth of the fleet at other shares of prefill hosts."""
    tenth = settings.tenth()
    yield "mixed, a tenth", simulate(world, tenth)[1]
    for part in (0.5, 0.6, 0.7):
        count = max(1, round(tenth.hosts * part))
        yield f"split, a tenth, {part:.0%} prefill", simulate(world, tenth, prefill_hosts=count)[1]


def tier(world: World, settings: Settings) -> Iterator[tuple[str, Figures]]:
    """Give each host of a tenth of the fleet six times the KV, as a tier of host memory would; reading it costs nothing
    here."""
    tenth = replace(settings.tenth(), before_s=6 * settings.before_s)
    machine = Machine(times=settings.times)
    yield "named, a tenth, six minutes before", simulate(world, tenth)[1]
    larger = replace(machine, kv_tokens=6 * settings.times.kv_tokens)
    yield "named, a tenth, 6 x KV", simulate(world, tenth, machine=larger)[1]
    yield "spread, a tenth, 6 x KV", simulate(world, tenth, machine=larger, routing=Routing.SPREAD)[1]


def noisy(world: World, settings: Settings) -> Iterator[tuple[str, Figures]]:
    """Have one tenant flood a tenth of the fleet beside the others: with fair service, without, and without a limit of
    its concurrency."""
    tenth = replace(settings.tenth(), requests_per_s=settings.requests_per_s / 2)
    noise = flood(tenth)
    unlimited = '  noisy: {credentials: ["key:noisy"], models: ["*"], limits: {concurrency: 4000}}\n'
    limited = '  noisy: {credentials: ["key:noisy"], models: ["*"]}\n'
    runs: list[tuple[str, str, bool, list[Arrival]]] = [
        ("quiet", limited, True, []),
        ("noisy, fair service and a limit", limited, True, noise),
        ("noisy, fair service alone", unlimited, True, noise),
        ("noisy, in order of arrival", unlimited, False, noise),
    ]
    for name, line, fair, more in runs:
        rules = world.rules(tenth.tenants, line)
        machine = Machine(times=settings.times, fair=fair)
        fleet, found = simulate(world, tenth, machine=machine, more=more, rules=rules)
        yield f"{name}, a tenth", found | {"tenants": apart(fleet, tenth.tenants)}


def flood(settings: Settings) -> list[Arrival]:
    """Return the requests of the noisy tenant: all sessions new, so that they reach every host."""
    rng = random.Random(f"noise {settings.seed}")
    made, at = [], 0.0
    while (at := at + rng.expovariate(NOISY_RATE * settings.hosts)) < settings.until_s:
        number = FRESH + len(made)
        made.append(Arrival(at, settings.tenants, number, 0, NOISY_PROMPT, NOISY_OUTPUT, (number,), NOISY_PROMPT))
    return made


def apart(fleet: Fleet, noisy_tenant: int) -> Figures:
    """Return what the noisy tenant got, and what the others did."""
    tenants = dict(fleet.tally.tenants)
    noise = tenants.pop(noisy_tenant, None)
    ttfts = [took for one in tenants.values() for took in one.ttfts]
    return {
        "others_ttft_s": spread(ttfts),
        "others_refused": sum(one.refused for one in tenants.values()),
        "noisy_ttft_s": spread(list(noise.ttfts)) if noise else None,
        "noisy_refused": noise.refused if noise else 0,
        "noisy_requests": noise.requests if noise else 0,
    }


def heavy(world: World, settings: Settings) -> Iterator[tuple[str, Figures]]:
    """Give sixteen tenants of equal weight more work than a tenth of the fleet can do, eight of them on all hosts and
    eight on one host in eight: each host is fair, the fleet is not."""
    tenth = replace(settings.tenth(), tenants=HEAVY)
    rules = world.rules(HEAVY)
    began = time.process_time()
    where = {tenant: [host for host in range(tenth.hosts) if wide(tenant, host)] for tenant in range(HEAVY)}
    clients = Closed()
    fleet = Fleet(plan_of(tenth), rules, clients.next)
    fleet.run(clients.first(fleet, where))
    by_host = [host.engine.scheduler.services() for host in fleet.hosts]
    keys = [rules.namespaces[name] for name in rules.names]
    total = [sum(one.get(key, 0.0) for one in by_host) for key in keys]
    found = figures_of(fleet, time.process_time() - began, [])
    found["jain_on_hosts"] = sum(jain(one.values()) for one in by_host if one) / max(1, sum(map(bool, by_host)))
    found["jain_over_fleet"] = jain(total)
    found["wide_over_narrow"] = sum(total[: HEAVY // 2]) / max(1.0, sum(total[HEAVY // 2 :]))
    yield "heavy, a tenth", found


def wide(tenant: int, host: int) -> bool:
    """Return whether a heavy tenant has sessions on a host."""
    return tenant < HEAVY // 2 or host % NARROW == 0


class Closed:
    """Clients that send their next request when the last one has ended, in the same session."""

    def __init__(self) -> None:
        self._fresh = FRESH

    def first(self, fleet: Fleet, where: dict[int, list[int]]) -> list[Arrival]:
        """Return the first requests: as many sessions for each tenant and host as it keeps requests there."""
        wanted = {(tenant, host): HEAVY_LIVE for tenant, hosts in where.items() for host in hosts}
        made, session = [], 0
        while wanted:
            host = fleet.host_of(session)
            for tenant in range(HEAVY):
                if (tenant, host) in wanted:
                    wanted[tenant, host] -= 1
                    if not wanted[tenant, host]:
                        del wanted[tenant, host]
                    made.append(self._arrival(0.0, tenant, session))
                    break
            session += 1
        return made

    def next(self, record: Record, now: float) -> Arrival | None:
        """Return the request that follows one that has ended."""
        return self._arrival(now, record.arrival.tenant, record.arrival.session)

    def _arrival(self, at: float, tenant: int, session: int) -> Arrival:
        self._fresh += 1
        return Arrival(at, tenant, session, 0, 1_024, 64, (self._fresh,), 1_024)


def limits(world: World, settings: Settings) -> Iterator[tuple[str, Figures]]:
    """Send a tenant's requests ten times as fast as its rate allows, in one session and in many: each host counts for
    itself."""
    tenth = settings.tenth()
    most = 60
    line = f'  bound: {{credentials: ["key:bound"], models: ["*"], limits: {{requests_per_minute: {most}}}}}\n'
    rules = world.rules(tenth.tenants, line)
    count = int(10 * most / 60 * tenth.until_s * 10)
    for name, sessions in (("one session", 1), ("many sessions", count)):
        sent = [
            Arrival(place * tenth.until_s / count, tenth.tenants, place % sessions, 0, 64, 4, (FRESH + place,), 64)
            for place in range(count)
        ]
        fleet, found = run(tenth, sent, rules)
        allowed = most + most * tenth.until_s / 60
        found["limit"] = {"sent": count, "admitted": count - fleet.fates[Fate.REFUSED], "allowed": allowed}
        yield f"limit, a tenth, {name}", found


SCENARIOS: dict[str, Callable[[World, Settings], Iterator[tuple[str, Figures]]]] = {
    "named": routed(Routing.NAMED),
    "spread": routed(Routing.SPREAD),
    "split": split,
    "deaths": deaths,
    "picker": routed(Routing.PICKER),
    "bounded": routed(Routing.BOUNDED),
    "tag": routed(Routing.TAG),
    "noisy": noisy,
    "heavy": heavy,
    "limits": limits,
    "shares": shares,
    "tier": tier,
    "azure": azure,
    "least": routed(Routing.LEAST),
    "picker-fresh": routed(Routing.PICKER_FRESH),
}
"""Scenarios by name, the most telling ones first."""
