"""What the gateway tells the operator's console: of real rooms, a real ledger and a scripted engine."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from appliance.common.clocks import Clocks
from appliance.common.control import CONTROL_VERSION, Welcome
from appliance.common.errors import RateLimitedError
from appliance.common.json_codec import encode
from appliance.common.status import Rates
from appliance.common.tenant_order import busiest_first
from appliance.gateway.console.look import MAX_ACCOUNTS, MAX_TENANT_ROWS, MAX_TRACE_ROWS, Question
from appliance.gateway.policy_file import PolicyFile
from appliance.gateway.request.ledger import Ledger
from appliance.gateway.request.service import GatewayService
from appliance.gateway.request.tenant_counts import Tokens
from appliance.gateway.sandboxes.attached import Sandboxes
from appliance.gateway.sandboxes.engine_link import EngineLink
from appliance.gateway.sandboxes.model_sandboxes import ModelSandboxes
from appliance.gateway.sandboxes.supervisor_link import SupervisorLink
from appliance.gateway.telemetry.tracer import TelemetrySettings, open_telemetry
from appliance.gateway.watch.state import ApplianceState
from isolation.ipc.engine import StepOutput, Submit
from isolation.ipc.kv import KvQuotas, KvUsage, KvUse
from isolation.ipc.messages import Finish
from isolation.ipc.sampling import Sampling
from policy.loader import Source, load_policy
from tests.appliance.gateway.pairs import ENGINE_READY, Pair
from tests.appliance.gateway.request.test_session import hear
from tests.appliance.gateway.telemetry import samples

NUM_TENANTS = 1_000
MAX_LOOK_BYTES = 64 << 10
"""Of one look's JSON, however many tenants there are: what the page takes once a second."""


class House:
    """A feed with everything that it reads, and a clock of its own."""

    def __init__(self, pair: Pair, folder: Path) -> None:
        self.now, self.wall = 5_000.0, 1_795_263_200.0
        names = [f"t{number:04}" for number in range(NUM_TENANTS)]
        tenants = "".join(f'  {name}: {{credentials: ["key:{name}"], models: ["m"]}}\n' for name in names)
        text = f"version: 1\ntenants:\n{tenants}sharing_groups:\n  team: {{tenants: [t0001, t0002]}}\n"
        self.policy = load_policy([Source("p.yaml", text)])
        self.keys = {name: name.encode().ljust(32, b"k") for name in (*self.policy.tenants, "group/team")}
        self.model = ModelSandboxes("m")
        self.telemetry = open_telemetry(TelemetrySettings(version="0"))
        ledger = Ledger(self.policy, self.keys, lambda: 0.0)  # no rate refills while a test runs
        self.service = GatewayService({"m": self.model}, ledger, self.telemetry)
        link = SupervisorLink(folder / "none")
        self.sandboxes = Sandboxes(link, {"m": self.model}, self.service.tenant_sandboxes, self.service, {})
        self.sandboxes.take(Welcome(CONTROL_VERSION, "gvisor/systrap", "limits", ["m"]), ())
        for record in self.model.records.values():
            record.become("ready")
        files = PolicyFile(folder / "p.yaml", folder / "c.json", folder / "pepper", ["m"])
        clocks = Clocks(lambda: self.now, lambda: self.wall + self.now)
        self.telemetry.store._clock = clocks.monotonic
        self.feed = ApplianceState(self.service, self.sandboxes, files, self.telemetry.store, clocks)
        self.link = EngineLink(pair.host, ENGINE_READY, 1, lambda *_: None)
        self.pair = pair

    def use(self, account: str, held: int, cached: int) -> KvUse:
        """What the engine says of an account."""
        return KvUse(self.keys[account], held + cached, held, 0, 64, 0, 0, 0)

    async def say(self, message: KvUsage | StepOutput) -> None:
        """The engine says it, and the gateway has heard it."""
        self.pair.guest.send(message, urgent=True)
        await asyncio.sleep(0.05)


@pytest.fixture
async def house(engine_pair: Pair, tmp_path: Path) -> AsyncIterator[House]:
    """A gateway with a thousand tenants and one engine."""
    made = House(engine_pair, tmp_path)
    made.model.set_engine(made.link)
    yield made
    made.link.close()


async def test_an_engine_is_asked_for_its_accounts_without_quotas_too(house: House, engine_pair: Pair) -> None:
    """The console shows whose KV memory is whose also where the policy says nothing of it: a table is sent, be it
    empty."""
    assert await hear(engine_pair, KvQuotas) == KvQuotas()


async def test_a_look_is_bounded_whatever_the_policy(house: House) -> None:
    """A thousand tenants, as many accounts and a full store are a page of each."""
    for _ in range(600):
        house.telemetry.store.record(samples.answered())
    await house.say(KvUsage(tuple(house.use(name, 1, 2) for name in list(house.policy.tenants)[:900])))
    look = house.feed.look(Question(), "p")
    assert len(look.tenants.rows) == MAX_TENANT_ROWS
    assert (look.tenants.total, look.tenants.matching, look.tenants.active) == (NUM_TENANTS, NUM_TENANTS, 0)
    assert look.requests is not None and len(look.requests.rows) == MAX_TRACE_ROWS
    (model,) = look.models
    assert model.kv is not None and len(model.kv.accounts) == MAX_ACCOUNTS
    assert (model.kv.other_accounts, model.kv.other_held, model.kv.other_cached) == (892, 892, 1_784)
    assert len(json.dumps(encode(look))) < MAX_LOOK_BYTES


async def test_pages_show_every_tenant_once(house: House) -> None:
    """Going from page to page meets all tenants; beyond the end is the first page again."""
    met: list[str] = []
    for offset in range(0, NUM_TENANTS, MAX_TENANT_ROWS):
        met += [row.id for row in house.feed.look(Question(offset=offset), "p").tenants.rows]
    assert sorted(met) == sorted(house.policy.tenants)
    assert house.feed.look(Question(offset=NUM_TENANTS), "p").tenants.offset == 0
    found = house.feed.look(Question(find="t099"), "p").tenants
    assert [row.id for row in found.rows] == [f"t099{digit}" for digit in range(10)]
    assert house.feed.look(Question(find="nobody"), "p").tenants.rows == ()


async def test_who_is_at_work_comes_first(house: House) -> None:
    """A tenant with a request in flight, and one that was just refused, stand before all others."""
    reservation = house.service.ledger.admit("t0500", "m", 5)
    house.feed.note()
    house.service.tenant_counts.add(Tokens("t0700", "m"), RateLimitedError("no", retry_after_s=1))
    house.now += 5
    tenants = house.feed.look(Question(), "p").tenants
    assert [row.id for row in tenants.rows[:3]] == ["t0500", "t0700", "t0000"]
    assert tenants.active == 2
    busy, refused = tenants.rows[:2]
    assert (busy.in_flight, busy.requests_left) == (1, busy.requests_per_minute - 1)
    assert (refused.refused, refused.refused_per_s) == (1, 0.2)
    reservation.settle(0, 0)


async def test_the_console_sorts_tenants_as_top_does(house: House) -> None:
    """By output tokens a second, then by requests in flight, then by name; each way of sorting has a case."""
    house.feed.note()
    for tenant, output in (("t0300", 10), ("t0301", 90), ("t0302", 10), ("t0303", 0)):
        house.service.tenant_counts.add(Tokens(tenant, "m", 5, 0, output), None)
    reservations = [house.service.ledger.admit(tenant, "m", 5) for tenant in ("t0302", "t0304")]
    house.now += 10
    page = house.feed.look(Question(), "p").tenants
    names = [row.id for row in page.rows]
    assert names[:5] == ["t0301", "t0302", "t0300", "t0304", "t0303"] and page.active == 5
    status = sorted(house.feed.status().tenants, key=busiest_first)
    assert [one.id for one in status[: len(names)]] == names
    for reservation in reservations:
        reservation.settle(0, 0)


async def test_the_engine_is_as_its_last_step_said(house: House) -> None:
    """Requests and KV, in the model's row and in the sum; without an engine there are none."""
    house.link.submit(Submit(7, b"k" * 32, array("I", [1]), 8, Sampling()), b"mark")
    await house.say(KvUsage((house.use("t0001", 4, 9),)))
    await house.say(StepOutput(array("Q", [7]), array("I", [5]), bytes([0]), running=1, free_blocks=60))
    house.now += 1
    house.feed.note()
    look = house.feed.look(Question(), "p")
    (model,) = look.models
    assert (model.running, look.points[-1].running, look.load.running) == (1, 1, 1)
    assert model.kv is not None and (model.kv.free, model.kv.cached) == (60, 9)
    load = look.load
    assert (load.kv_blocks, load.kv_held, load.kv_free, load.kv_cached) == (64, 4, 60, 9)
    await house.say(StepOutput(array("Q", [7]), array("I", [6]), bytes([Finish.STOP]), running=0, free_blocks=64))
    house.model.set_engine(None)
    look = house.feed.look(Question(), "p")
    assert (look.load.running, look.models[0].kv, look.ready) == (0, None, False)


async def test_accounts_have_their_names_and_kinds(house: House) -> None:
    """A tenant's, a group's; what belongs to nobody any more is not shown by name."""
    stranger = KvUse(b"x" * 32, 9, 9, 0, 64, 0, 0, 0)
    await house.say(KvUsage((house.use("t0003", 2, 3), house.use("group/team", 10, 1), stranger)))
    (model,) = house.feed.look(Question(), "p").models
    assert model.kv is not None
    assert [(one.name, one.kind, one.held, one.cached) for one in model.kv.accounts] == [
        ("group/team", "group", 10, 1),
        ("t0003", "tenant", 2, 3),
    ]
    assert (model.kv.other_accounts, model.kv.other_held) == (1, 9)
    rows = house.feed.look(Question(find="t0003"), "p").tenants.rows
    assert [row.kv_blocks for row in rows] == [5]


async def test_what_the_page_has_is_not_sent_again(house: House) -> None:
    """Points and requests that the page knows are left out; by outcome only those."""
    house.now += 1
    house.feed.note()
    for trace in (samples.answered(), samples.refused(), samples.failed()):
        house.telemetry.store.record(trace)
    first = house.feed.look(Question(), "p")
    assert first.requests is not None and len(first.requests.rows) == 3
    again = house.feed.look(Question(after=first.points[-1].at, seen=first.requests.mark), "p")
    assert (again.points, again.requests) == ((), None)
    failed = house.feed.look(Question(seen=first.requests.mark, outcome="failed"), "p").requests
    assert failed is not None and [one.outcome for one in failed.rows] == ["failed"]


async def test_a_failed_sandbox_is_an_alert_with_its_cause(house: House) -> None:
    """What the supervisor said of it is what the operator reads."""
    house.model.set_engine(None)
    house.model.record("engine").become("failed", "exit status 137")
    (alert,) = house.feed.look(Question(), "p").alerts
    assert (alert.level, alert.who) == ("broken", "All 1,000 tenants that may use it")
    assert "is down: exit status 137" in alert.what


async def test_status_and_console_have_the_same_numbers(house: House) -> None:
    """Counts, rates, requests in the engine and KV of one moment are the same in both."""
    house.feed.note()
    house.link.submit(Submit(7, b"k" * 32, array("I", [1]), 8, Sampling()), b"mark")
    await house.say(StepOutput(array("Q", [7]), array("I", [5]), bytes([0]), running=3, waiting=2, free_blocks=60))
    house.service.tenant_counts.add(Tokens("t0700", "m", 20, 5, 30), None)
    house.now += 10
    status, look = house.feed.status(), house.feed.look(Question(find="t0700"), "p")
    (row,) = look.tenants.rows
    (tenant,) = [one for one in status.tenants if one.id == "t0700"]
    assert (tenant.tokens, tenant.output_tokens_per_s, tenant.requests_per_s) == (50, 3.0, 0.1)
    assert (row.tokens, row.output_tokens_per_s, row.requests_per_s) == (50, 3.0, 0.1)
    assert status.load == look.load
    assert status.load.rates == Rates(over_s=10.0, requests=0.1, input_tokens=2.0, output_tokens=3.0)
    engine, model = status.models[0].engine, look.models[0]
    assert (engine.running, engine.waiting) == (model.running, model.waiting) == (1, 0)
    assert model.kv is not None and (engine.num_blocks, engine.free_blocks) == (model.kv.blocks, model.kv.free)
    assert (status.latency, status.alerts) == (look.latency, look.alerts)


@pytest.mark.parametrize("step_s", [-3 * 86_400.0, 3 * 86_400.0])
async def test_a_set_clock_moves_labels_alone(house: House, step_s: float) -> None:
    """The machine's clock is set by three days in the middle of a load: rates, chart, latency and ages go on as they
    were, and moments are told at their distance from the new now."""

    def second() -> None:
        house.now += 1
        house.service.tenant_counts.add(Tokens("t0700", "m", 20, 5, 30), None)
        house.telemetry.store.record(samples.answered())
        house.feed.note()

    for _ in range(20):
        second()
    before = house.feed.look(Question(), "p")
    house.wall += step_s
    for _ in range(5):
        second()
    after = house.feed.look(Question(), "p")
    assert after.load.rates == before.load.rates
    assert after.load.rates.output_tokens == 30.0
    assert [point.at for point in after.points] == [float(second) for second in range(1, 26)]
    assert after.latency.requests == before.latency.requests + 5 == 25
    assert after.now - before.now == step_s + 5
    assert after.load.up_s - before.load.up_s == 5
    boxes = [(one.models[0].sandboxes[0].since or 0.0) - one.now for one in (before, after)]
    assert boxes[0] - boxes[1] == pytest.approx(5, abs=1e-3)
    assert after.policy.loaded_at - after.now == pytest.approx(before.policy.loaded_at - before.now - 5, abs=1e-3)
    assert after.alerts == before.alerts == ()


async def test_tenants_with_an_adapter_alone_count_as_users(house: House) -> None:
    """A model is used by those that may use one of its adapters, whatever their lists of models."""
    tenant = '  {}: {{credentials: ["key:{}"], models: ["{}"], adapters: ["{}:x"]}}\n'
    rows = [("a", "m", "n"), ("b", "n", "m"), ("c", "n", "m"), ("d", "n", "n")]
    text = "version: 1\ntenants:\n" + "".join(tenant.format(name, name, *rest) for name, *rest in rows)
    assert house.feed._num_users(load_policy([Source("p.yaml", text)])) == {"m": 3}
