"""The simulator of a fleet: it repeats itself, loses no request, and each of its claims has a control."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.operator.bench.traces import TraceRequest
from bench.simulation import __main__ as command
from bench.simulation import traffic
from bench.simulation.fleet import Fleet, Plan, Routing
from bench.simulation.host import Fate, Machine, Record
from bench.simulation.report import write
from bench.simulation.ring import SCRAPE_S, Picker, Ring
from bench.simulation.scenarios import SCENARIOS, Settings, World, plan_of, rules_of, simulate
from bench.simulation.step_times import CARDS, H200, StepTimes
from bench.simulation.tally import jain, quantile
from bench.simulation.traffic import Arrival, Shape, arrivals, invented, sessions_of

TINY = Settings(
    hosts=6, tenants=40, requests_per_s=1.0, ramp_s=0.5, window_s=2.5, before_s=4.0, trace="invented", folder=Path()
)
NEVER = 10_000.0


@pytest.fixture(scope="module")
def world() -> World:
    """Traffic and rules that tests of this file share."""
    return World()


def drained(traffic_: list[Arrival], *, hosts: int = 4, tenants: int = 40, **changes: object) -> Fleet:
    """A fleet that has run until nothing was left."""
    plan = replace(plan_of(replace(TINY, hosts=hosts)), until=NEVER, window=(0.0, NEVER), **changes)  # type: ignore[arg-type]
    fleet = Fleet(plan, rules_of(tenants))
    fleet.run(traffic_)
    return fleet


def requests(
    count: int, *, tenants: int = 40, prompt: int = 3_000, output: int = 40, over_s: float = 2.0
) -> list[Arrival]:
    """Requests of sessions of their own, drawn from a seed."""
    rng = random.Random(7)
    return [
        Arrival(
            at=over_s * place / count,
            tenant=rng.randrange(tenants),
            session=place,
            turn=0,
            prompt_tokens=rng.randint(prompt // 2, prompt),
            output=rng.randint(1, output),
            blocks=tuple(1_000 * place + block for block in range(-(-prompt // 512))),
            block_tokens=512,
        )
        for place in range(count)
    ]


@pytest.mark.parametrize("card", CARDS.values(), ids=list(CARDS))
def test_the_model_gives_what_was_timed(card: StepTimes) -> None:
    """Each card's model is within 11 % of every step that was timed, and within 5 % of every published rate."""
    assert card.points or card.rates
    for one in card.points:
        modelled = card.seconds(one.rows, one.rows * one.context, one.prompt, one.prompt**2 / 2)
        assert modelled == pytest.approx(one.seconds, rel=0.11), one
    for rate in card.rates:
        assert card.saturated(rate.prompt, rate.output) == pytest.approx(rate.tokens_per_s, rel=0.05), rate


def test_one_seed_gives_one_run(tmp_path: Path) -> None:
    """The figures of two runs are equal byte for byte, and those of another seed are not."""
    written = []
    for place, seed in enumerate((1, 1, 2)):
        settings = replace(TINY, seed=seed, hosts=4, before_s=1.0, window_s=1.5)
        _, found = simulate(World(), settings, deaths=1, death_at=1.0, routing=Routing.PICKER)
        found = {name: value for name, value in found.items() if not name.startswith("processor")}
        write(tmp_path / str(place), {"runs": {"one": found}})
        written.append((tmp_path / str(place)).read_bytes())
    assert written[0] == written[1]
    assert written[0] != written[2]


def test_every_request_ends_once() -> None:
    """Beside deaths and refusals every request has one end, and hosts that live hold nothing of it afterwards."""
    sent = requests(60) + [replace(one, tenant=0, session=900) for one in requests(60, over_s=0.2)]
    sent.sort(key=lambda one: one.at)
    ends: list[Record] = []
    plan = replace(plan_of(replace(TINY, hosts=4)), until=NEVER, deaths=1, death_at=0.5)
    fleet = Fleet(plan, rules_of(40), lambda record, _now: ends.append(record))
    fleet.run(sent)
    assert fleet.fates.total() == len(sent) == len(ends) == len(set(map(id, ends)))
    assert not fleet.fates[Fate.LIVE]
    assert min(fleet.fates[Fate.DONE], fleet.fates[Fate.REFUSED], fleet.fates[Fate.LOST], fleet.losses.retried) > 0
    assert all(record.tokens == record.arrival.output for record in fleet.records if record.fate is Fate.DONE)
    for host in fleet.hosts:
        if host.alive:
            assert (host.admitted, host.live, host.ledger.at_work) == (0, {}, [])
            host.engine.scheduler.check_integrity()
            assert host.card.computed == host.card.closed


def test_a_dead_host_loses_what_it_had_computed() -> None:
    """The count of lost tokens is that of the live requests in the dead hosts' schedulers, and of those that ended in
    the step under way; without deaths nothing is lost."""
    sent = requests(60)
    counted: list[int] = []

    class Counting(Fleet):
        def _die(self, now: float) -> None:
            before = {host.number: by_request(host) for host in self.hosts}
            super()._die(now)
            counted.append(sum(before[number] for number in self.dead))

    fleet = Counting(replace(plan_of(replace(TINY, hosts=4)), until=NEVER, deaths=2, death_at=0.7), rules_of(40))
    fleet.run(sent)
    assert counted == [fleet.losses.tokens]
    assert fleet.losses.tokens > 1_000
    assert fleet.losses.streams == fleet.fates[Fate.LOST] > 0
    quiet = drained(sent)
    assert (quiet.fates[Fate.DONE], quiet.losses.tokens, quiet.losses.streams) == (len(sent), 0, 0)


def by_request(host: object) -> int:
    """Tokens that a host has computed for its live requests, request by request."""
    total, output = 0, host._output  # type: ignore[attr-defined]
    starts = {one.request: one.cached_tokens for one in output.starts} if output is not None else {}
    for number, record in host.live.items():  # type: ignore[attr-defined]
        request = host.engine.scheduler._live.by_id.get(number)  # type: ignore[attr-defined]
        cached = record.cached if record.cached >= 0 else starts.get(number, 0)
        if request is None:
            total += record.arrival.prompt_tokens + record.arrival.output - 1 - cached
        elif request.row >= 0:
            total += request.num_computed - cached
    return total


def test_affinity_finds_what_turns_left(world: World) -> None:
    """Sessions that stay on a host find nearly all that one cache for the fleet would have; requests that go anywhere
    find little of it."""
    settings = replace(TINY, before_s=30.0)
    _, named = simulate(world, settings, routing=Routing.NAMED)
    _, spread = simulate(world, settings, routing=Routing.SPREAD)
    assert named["cached_bound"] > 0.1
    assert named["cached_share"] > 0.9 * named["cached_bound"]
    assert spread["cached_share"] < 0.5 * named["cached_share"]


def test_the_first_turn_of_a_tag_is_elsewhere() -> None:
    """A session that is named stays on one host from its first request on; one whose client sends tags back does so
    from its second; one that does neither never does."""
    first, *later = [replace(requests(1)[0], turn=turn) for turn in range(12)]

    def hosts(routing: Routing) -> tuple[set[int], set[int]]:
        fleet = Fleet(plan_of(TINY, routing=routing), rules_of(40))
        return {fleet._route(first, 0.0) for _ in later}, {fleet._route(one, 0.0) for one in later}

    (begun,), (gone_on,) = hosts(Routing.NAMED)
    assert begun == gone_on
    begun_anywhere, (_,) = hosts(Routing.TAG)
    assert len(begun_anywhere) > 1
    assert min(map(len, hosts(Routing.SPREAD))) > 1


def test_a_noisy_tenant_beside_fair_service(world: World) -> None:
    """With fair service the others' first tokens come as beside no noise, nearly; in order of arrival they do not."""
    settings = replace(TINY, hosts=40, tenants=200, window_s=2.5)
    found = {
        name.split(",")[1].strip() if "," in name else name: one for name, one in SCENARIOS["noisy"](world, settings)
    }
    p50 = {name: one["tenants"]["others_ttft_s"]["p50"] for name, one in found.items()}
    assert p50["in order of arrival"] > 2 * p50["fair service alone"]
    assert found["fair service and a limit"]["tenants"]["noisy_refused"] > 0
    assert found["fair service alone"]["tenants"]["noisy_refused"] == 0
    assert all(one["tenants"]["others_refused"] == 0 for one in found.values())


def test_hosts_are_fair_and_the_fleet_is_not(world: World) -> None:
    """Tenants with more work than there is get equal service on each host; those on more hosts get more in all."""
    ((_, found),) = SCENARIOS["heavy"](world, replace(TINY, hosts=80, ramp_s=0.5, window_s=1.0))
    assert found["jain_on_hosts"] > 0.97
    assert found["jain_over_fleet"] < 0.8
    assert found["wide_over_narrow"] > 3


def test_a_rate_holds_on_each_host(world: World) -> None:
    """One session gets what the policy allows; sessions on two hosts get twice as much."""
    one, many = (figures["limit"] for _, figures in SCENARIOS["limits"](world, replace(TINY, hosts=20)))
    assert one["admitted"] <= one["allowed"] + 1 < one["sent"]
    assert 1.8 * one["admitted"] < many["admitted"] <= 2 * one["allowed"] + 2


def test_prefill_apart_from_decode() -> None:
    """Every answer is whole, decode hosts compute the last block and the first token of a prompt again and no more, and
    gaps are shorter than on hosts that do both, but for the one in which a request changes hosts."""
    sent = requests(60, prompt=12_000, output=60)
    mixed, apart = drained(sent), drained(sent, prefill_hosts=2)
    assert mixed.fates == apart.fates == {Fate.DONE: len(sent)}
    assert apart.tally.gap_quantile(0.9) < 0.5 * mixed.tally.gap_quantile(0.9)
    again = sum(host.card.prompt_computed for host in apart.hosts[2:])
    assert 0 < again <= len(sent) * (apart.plan.machine.block + 1)
    assert apart.moved_bytes > 0
    assert quantile(apart.tally.hand_overs, 0.5) > apart.tally.gap_quantile(0.9)
    assert (mixed.moved_bytes, mixed.tally.hand_overs) == (0, [])


def test_decode_hosts_go_on_without_prefill_hosts() -> None:
    """When prefill hosts die, their prompts are computed where they were to be decoded, and every request ends."""
    sent = requests(60, prompt=12_000)
    plan = replace(plan_of(replace(TINY, hosts=4)), until=NEVER, prefill_hosts=2, dying=(0, 1), death_at=1.0)
    fleet = Fleet(plan, rules_of(40))
    fleet.run(sent)
    assert fleet.losses.alone > 0
    assert fleet.fates == {Fate.DONE: len(sent)}
    assert sum(host.card.prompt_computed for host in fleet.hosts[2:]) > 12_000


def test_a_host_that_goes_moves_its_own_sessions_alone() -> None:
    """A ring gives every other session the host that it had; with bounded loads a full host is passed over."""
    ring = Ring(range(10))
    before = {key: ring.host(str(key)) for key in range(500)}
    after = {key: ring.host(str(key), {3}) for key in before}
    moved = {key for key in before if before[key] != after[key]}
    assert moved == {key for key, host in before.items() if host == 3} != set()
    assert ring.bounded("0", lambda host: float(host == before[0]), 0.5, set()) != before[0]
    assert ring.bounded("0", lambda _host: 0.0, 0.5, set()) == before[0]
    with pytest.raises(LookupError, match="gone"):
        ring.host("0", set(range(10)))


def test_a_picker_with_old_gauges_picks_one_host_again_and_again() -> None:
    """Between two readings all requests go to the host that looked best; with gauges as they are they are spread."""

    def picks(*, fresh: bool) -> list[int]:
        queued = [float(host != 2) for host in range(5)]
        picker = Picker(5, lambda host: (queued[host], 0.0), random.Random(1))
        found = []
        for place in range(20):
            found.append(picker.pick(place, 1.0 + place * SCRAPE_S / 1_000, fresh=fresh))
            queued[found[-1]] += 1
        return found

    assert set(picks(fresh=False)) == {2}
    assert len(set(picks(fresh=True))) == 5


def test_sessions_are_found_by_their_prefixes() -> None:
    """A request goes on with the session that brought most of its beginning; a prompt of the system is no session."""
    prompts = [(0, 1, 2), (0, 5), (0, 1, 2, 3), (0, 5, 6, 7), (0, 1, 2, 3, 4), (9,)]
    trace = [TraceRequest(float(at), 512 * len(ids), 1, ids, 512) for at, ids in enumerate(prompts)]
    assert sessions_of(trace) == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (2, 0)]


def test_a_trace_is_laid_over_itself() -> None:
    """The rate is the one asked for, a session keeps its tenant, tenants differ in how much they send, and blocks of
    two copies are never the same."""
    trace = invented(seconds=200.0)
    made = arrivals(trace, Shape(requests_per_s=100.0, tenants=50, before_s=2.0, seconds=18.0))
    assert len(made) == pytest.approx(2_000, rel=0.2)
    assert made[0].at >= -2.0
    assert made[-1].at < 18.0
    assert len({(one.session, one.tenant) for one in made}) == len({one.session for one in made})
    sent = [sum(one.tenant == tenant for one in made) for tenant in (0, 40)]
    assert sent[0] > 4 * max(1, sent[1])
    owners = {(one.blocks[-1], one.session) for one in made}
    assert len({block for block, _ in owners}) == len(owners)
    prompt = made[0].prompt()
    assert len(prompt) == made[0].prompt_tokens
    assert max(prompt) < traffic.VOCABULARY


def test_quantiles_and_fairness() -> None:
    """The numbers that tables show, by hand."""
    assert [quantile([3.0, 1.0, 2.0, 4.0], part) for part in (0.5, 0.99)] == [2.0, 4.0]
    assert (jain([1, 1, 1, 1]), jain([1, 0, 0, 0])) == (1.0, 0.25)


@pytest.mark.full
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The command says that it simulates, and writes its figures and plots."""
    pytest.importorskip("matplotlib", reason="plots are an extra")
    sizes = "--hosts 3 --tenants 20 --ramp-s 0.5 --window-s 1 --before-s 1 --trace invented"
    out = f"--json {tmp_path / 'f.json'} --plots {tmp_path / 'plots'}"
    monkeypatch.setattr("sys.argv", ["simulation", "named", "deaths", *sizes.split(), *out.split()])
    assert command.main() == 0
    assert capsys.readouterr().out.count("SIMULATION") == 1
    document = json.loads((tmp_path / "f.json").read_text())
    assert document["what"].startswith("SIMULATION")
    assert set(document["runs"]) == {"named", "deaths"}
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {
        f"simulation-{name}.{kind}" for name in ("routing", "deaths") for kind in ("svg", "png")
    }


@pytest.mark.parametrize("name", ["shares", "tier", "azure", "least", "picker-fresh"])
def test_every_scenario_runs(name: str, world: World) -> None:
    """Scenarios that no other test has come to their end, each run with all its requests counted once."""
    settings = replace(TINY, hosts=20, ramp_s=0.2, window_s=0.4, before_s=0.5)
    runs = dict(SCENARIOS[name](world, settings))
    assert len(runs) == {"shares": 4, "tier": 3, "azure": 2}.get(name, 1)
    for found in runs.values():
        assert 0 < sum(found["requests"].values()) == found["requests"]["live"] + found["requests"]["done"]


@pytest.mark.parametrize("tokens", [1, 2, 3, 40])
def test_a_prompt_has_as_many_tokens_as_its_trace_says(tokens: int) -> None:
    """A prompt shorter than the number of its block needs keeps its length: Azure's trace has some of two tokens."""
    made = arrivals(
        [TraceRequest(0.5, tokens, 5, (), 0)], Shape(requests_per_s=2.0, tenants=3, before_s=0.0, seconds=1.0)
    )
    assert made and all(len(one.prompt()) == tokens for one in made)


def test_the_default_is_the_measured_card() -> None:
    """What is simulated without a word is this engine on the card that it was measured on, with 0.84 million tokens of
    KV."""
    assert Settings().times is H200
    assert Plan(hosts=1, machine=Machine(times=H200), window=(0, 1), until=1).machine.blocks * 256 == 839_168
