"""The gateway process: reloads one at a time, and a start that one broken model does not hold up."""

from __future__ import annotations

import asyncio
import json
import re
import time
from pathlib import Path

import pytest

from appliance.common import notify
from appliance.common.clocks import Clocks
from appliance.common.config_loader import load_config
from appliance.common.errors import StartError
from appliance.common.listen_config import TlsConfig
from appliance.common.status import MAX_SUMMARY_CHARS, ReloadOutcome
from appliance.gateway.process import Gateway
from appliance.gateway.sandboxes import attached
from appliance.gateway.sandboxes.attached import FirstStart
from appliance.gateway.sandboxes.engine_link import EngineLink
from appliance.gateway.watch.gauges import Gauges, Increases
from appliance.operator import demo
from appliance.operator.demo import DemoOptions, choose_models, claim, prepare_keys, prepare_policy, write_config
from isolation.ipc.kv import KvQuotas, KvUsage, KvUse
from tests.appliance.gateway.front.pki import Pki
from tests.appliance.gateway.pairs import ENGINE_READY, Pair


@pytest.fixture
async def gateway(tmp_path: Path) -> Gateway:
    """A gateway of the demo's files; nothing listens."""
    claim(tmp_path)
    prepare_keys(tmp_path)
    prepare_policy(tmp_path)
    options = DemoOptions(http_port=0, grpc_port=0, admin_port=0)
    return Gateway(load_config(write_config(tmp_path, options, choose_models(()))))


async def test_a_start_without_a_supervisor_ends(
    gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone and with nobody listening the gateway fails with a reason; beside a launcher, which would see the
    supervisor end, it goes on waiting."""
    monkeypatch.setattr(attached, "ABSENT_S", 0.1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(gateway.run(), 1.0)
    alone = Gateway(load_config(tmp_path / "athanor.yaml"), alone=True)
    alone._models["athanor-mini"].record("engine").cause = "the weights are cut off"
    async with asyncio.timeout(20):
        with pytest.raises(StartError, match=r"no supervisor has listened for 0.1 s: the weights are cut off"):
            await alone.run()


async def test_a_gateway_ends_with_what_it_is_no_use_without(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect in attaching must not leave a gateway that answers for ever that its models are starting: it ends with
    the cause, and whoever keeps it starts another."""

    async def broken() -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(gateway._sandboxes, "run", broken)
    async with asyncio.timeout(20):
        with pytest.raises(StartError, match="attaching to the supervisor failed: RuntimeError\\('a defect'\\)"):
            await gateway.run()


def test_hope_ends_with_the_third_supervisor_or_a_minute_without_one() -> None:
    """While one is there, however long it boots, there is hope."""
    first = FirstStart(0.0)
    assert first.look(59.0, present=False) == ""
    assert first.look(60.0, present=True) == first.look(599.0, present=True) == ""
    assert first.look(600.0, present=False) == first.look(659.0, present=False) == ""
    assert "no supervisor has listened for 60 s" in first.look(661.0, present=False)
    for now in (700.0, 710.0):
        assert first.look(now, present=True) == ""
        problem = first.look(now + 5, present=False)
    assert problem == "3 supervisors have ended before anything was served"


async def test_the_later_of_two_reloads_wins(gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow reload of the file before does not overwrite what a later one put in force."""
    policy = tmp_path / "policy.yaml"
    first = asyncio.Event()

    async def slowly(tenants: list[str], timeout_s: float = 0.0) -> dict[str, bytes]:
        if not first.is_set():
            first.set()
            await asyncio.sleep(0.1)
        return dict.fromkeys(tenants, b"k" * 32)

    monkeypatch.setattr(gateway._namespaces, "fetch", slowly)
    early = asyncio.create_task(gateway.reload())
    await first.wait()
    policy.write_text(policy.read_text() + demo.TENANT.format(name="gamma", key="gamma-1"))
    late = await gateway.reload()
    await early
    assert late.ok and "gamma" in gateway._service.ledger.policy.tenants
    assert gateway._service.ledger.policy.digest == late.digest


async def test_a_reload_says_who_asked(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers that share a run are all in its audit entry, each once; the next run's names its own alone."""
    told: list[object] = []
    monkeypatch.setattr(gateway, "_audit_policy", lambda _outcome, _digest, by: told.append(by))

    async def fetch(tenants: list[str], timeout_s: float = 0.0) -> dict[str, bytes]:
        return dict.fromkeys(tenants, b"k" * 32)

    monkeypatch.setattr(gateway._namespaces, "fetch", fetch)
    await asyncio.gather(*(gateway.reload(by) for by in ("user 0", "signal", "user 0")))
    await gateway.reload("user 7")
    assert told == ["user 0; signal", "user 7"]


async def test_a_reload_reads_the_configuration_too(
    gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Live keys are in force with the reload and others are told, until they are taken back; with a wrong file, or with
    a policy that cannot be used, neither changes."""
    path, policy = tmp_path / "athanor.yaml", tmp_path / "policy.yaml"
    good, digest = path.read_text(), gateway._service.ledger.policy.digest
    gateway = Gateway(load_config(path), reread=lambda: load_config(path))

    async def fetch(tenants: list[str], timeout_s: float = 0.0) -> dict[str, bytes]:
        return dict.fromkeys(tenants, b"k" * 32)

    monkeypatch.setattr(gateway._namespaces, "fetch", fetch)
    plain = await gateway.reload()
    assert (plain.ok, plain.applied, plain.restart, plain.restart_command) == (True, (), (), "")
    values = json.loads(good.partition("\n")[2])
    values["sandbox"] = {**values.get("sandbox", {}), "freeze_after_s": 7.0, "step_timeout_s": 9.0, "own_texts": 2}
    values["credentials"] = str(tmp_path / "moved.json")
    path.write_text(json.dumps(values))
    refused = await gateway.reload()
    assert not refused.ok and "moved.json" in refused.problems[0]
    assert (gateway._freezer.after_s, gateway._step_timeout_s()) == (30.0, 300.0)
    (tmp_path / "credentials.json").rename(tmp_path / "moved.json")
    outcome = await gateway.reload()
    assert outcome.ok, outcome.problems
    assert {line.partition(" ")[0] for line in outcome.applied} == {
        "credentials",
        "sandbox.freeze_after_s",
        "sandbox.step_timeout_s",
    }
    assert outcome.restart == ("sandbox.own_texts (4 -> 2)",)
    assert (gateway._freezer.after_s, gateway._step_timeout_s()) == (7.0, 9.0)
    path.write_text(path.read_text().replace("own_texts", "own_text"))
    policy.write_text(policy.read_text() + demo.TENANT.format(name="gamma", key="gamma-1"))
    refused = await gateway.reload()
    assert not refused.ok and refused.problems[0].startswith(f"{path}:")
    assert gateway._service.ledger.policy.digest == digest == refused.digest
    assert refused.problems[0] == gateway._file.status(gateway._service.ledger.policy, Clocks()).last_error


async def test_gauges_of_an_account_that_is_gone_fall(gateway: Gateway, engine_pair: Pair) -> None:
    """An account whose last block was evicted is told of no more: its gauges are gone, and so are an engine's."""
    ledger, telemetry = gateway._service.ledger, gateway._telemetry
    ledger.replace(ledger.policy, {tenant: tenant.encode().ljust(32) for tenant in ledger.policy.tenants})
    telemetry.metrics.know(tenants=ledger.policy.tenants, models=gateway._models)
    link = EngineLink(engine_pair.host, ENGINE_READY, 1, lambda *_: None)
    gauges = Gauges(gateway._service, gateway._sandboxes, gateway._spill, telemetry)
    rooms = gateway._models["athanor-mini"]

    def seen(metric: str) -> list[float]:
        gauges.refresh()
        lines = telemetry.metrics.render()[1].decode().splitlines()
        return [float(line.rpartition(" ")[2]) for line in lines if line.startswith(metric + "{")]

    link.kv = KvUsage((KvUse(ledger.namespaces["alpha"], 7, 3, 0, 64, 0, 0, 0),))
    rooms.engine = link
    assert seen("athanor_kv_resident_blocks") == [7]
    link.kv = KvUsage()
    assert seen("athanor_kv_resident_blocks") == []
    assert len(seen("athanor_engine_kv_blocks")) == 1
    rooms.engine = None
    assert seen("athanor_engine_kv_blocks") == []
    link.close()


async def test_the_certificate_in_use_is_watched(gateway: Gateway, tmp_path: Path) -> None:
    """Its end, a day away, is an alert of the console and of status, and a metric; without one there is neither."""

    def seen(one: Gateway) -> tuple[list[str], float]:
        Gauges(one._service, one._sandboxes, one._spill, one._telemetry, one._certificate).refresh()
        text = one._telemetry.metrics.render()[1].decode()
        ends = re.search(r"^athanor_certificate_end_seconds (\S+)$", text, re.MULTILINE)
        keys = [alert.key for alert in one._state.status().alerts]
        return [key for key in keys if key == "certificate"], float(ends[1]) if ends else 0.0

    assert seen(gateway) == ([], 0.0)
    files = Pki.create(tmp_path).files
    config = load_config(tmp_path / "athanor.yaml")
    listen = config.listen.model_copy(update={"tls": TlsConfig(certificate=files.certificate, key=files.key)})
    alerts, ends = seen(Gateway(config.model_copy(update={"listen": listen})))
    assert alerts == ["certificate"]
    assert 0 < ends - time.time() < 86_401


async def test_shares_follow_their_tenants_to_new_keys(
    gateway: Gateway, tmp_path: Path, engine_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a tenant's key was renewed, or a supervisor that came anew has drawn others, engines are told what accounts
    may keep under the keys of now: under the old ones a reservation, a cap or a partition would be nobody's."""
    policy = tmp_path / "policy.yaml"
    policy.write_text(policy.read_text() + demo.TENANT.format(name="gamma", key="gamma-1") + "    kv: {cap: 50%}\n")

    async def keys(tenants: list[str], timeout_s: float = 0.0) -> dict[str, bytes]:
        return dict.fromkeys(tenants, b"k" * 32)

    monkeypatch.setattr(gateway._namespaces, "fetch", keys)
    assert (await gateway.reload()).ok
    rooms = gateway._models["athanor-mini"]
    rooms.set_engine(EngineLink(engine_pair.host, ENGINE_READY, 1, lambda *_: None))
    service = gateway._service
    service.use_namespaces({**dict.fromkeys(service.ledger.policy.tenants, b"k" * 32), "gamma": b"n" * 32})
    told = [message for message in engine_pair.guest.receive() if isinstance(message, KvQuotas)]
    assert [[quota.namespace for quota in one.quotas] for one in told] == [[b"k" * 32], [b"n" * 32]]
    assert gateway._service.ledger.namespaces["gamma"] == b"n" * 32
    rooms.set_engine(None)


async def test_the_services_status_says_why_a_reload_was_refused(
    gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What systemctl status shows of a refused reload is its first problem with file, line and column, on one line; of
    one that was applied, the policy in force. Control: the next good reload takes the problem back."""
    said: list[str] = []
    monkeypatch.setattr(notify, "notify", lambda *lines: said.extend(lines))

    async def at_once(tenants: list[str], timeout_s: float = 0.0) -> dict[str, bytes]:
        return dict.fromkeys(tenants, b"k" * 32)

    monkeypatch.setattr(gateway._namespaces, "fetch", at_once)
    gateway._announced = True
    policy = tmp_path / "policy.yaml"
    good = policy.read_text()
    policy.write_text(good.replace("models:", "modles:"))
    refused = await gateway.reload()
    status = [line for line in said if line.startswith("STATUS=")]
    assert len(refused.problems) > 1 and said[-2:] == ["READY=1", status[-1]]
    assert status[-1].startswith(f"STATUS=reload refused, nothing changed: {policy}:")
    assert "tenants.alpha.models" in status[-1] and "(and 3 more problems)" in status[-1]
    assert len(status[-1].splitlines()) == 1
    policy.write_text(good)
    assert (await gateway.reload()).ok
    assert re.fullmatch(r"STATUS=policy [0-9a-f]{12} with 2 tenants is in force", said[-1])


def test_a_status_is_one_line_of_bounded_length() -> None:
    """Whatever a file holds, the service manager gets one line: control characters are replaced, what is too long is
    cut; keys of athanor.yaml that wait for a restart are counted."""
    problems = ("a\nREADY=1" + "x" * 1_000, "b", "c")
    text = ReloadOutcome(ok=False, digest="d", message="m", problems=problems).summary
    assert len(text.splitlines()) == 1 and len(text) == MAX_SUMMARY_CHARS and text.endswith("...")
    assert ReloadOutcome(ok=False, digest="d", message="m", problems=("p", "q")).summary.endswith(
        "p (and 1 more problem)"
    )
    done = ReloadOutcome(ok=True, digest="d", message="in force", restart=("a",)).summary
    assert done == "in force; waiting for a restart: 1 key of athanor.yaml"


async def test_a_reload_while_starting_does_not_say_ready(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """READY is the announcement's word alone: a service manager would take the appliance for started."""
    said: list[str] = []
    monkeypatch.setattr(notify, "notify", lambda *lines: said.extend(lines))

    async def at_once(tenants: list[str], timeout_s: float = 0.0) -> dict[str, bytes]:
        return dict.fromkeys(tenants, b"k" * 32)

    monkeypatch.setattr(gateway._namespaces, "fetch", at_once)
    assert (await gateway.reload()).ok and said == []
    gateway._announced = True
    assert (await gateway.reload()).ok and "READY=1" in said


async def test_a_broken_model_does_not_hold_up_the_others(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one model up and one that failed, the appliance is ready; with none up it is not."""
    from appliance.gateway.sandboxes.model_sandboxes import ModelSandboxes

    said: list[str] = []
    monkeypatch.setattr(notify, "notify", lambda *lines: said.extend(lines))
    broken = gateway._models["broken"] = ModelSandboxes("broken")
    broken.note_failure()

    class Front:
        own = ()

        def refresh(self) -> None:
            """Look at readiness."""

    announcing = asyncio.create_task(gateway._announce(Front(), {}))  # type: ignore[arg-type]
    await asyncio.sleep(0.05)
    assert said == []
    good = gateway._models["athanor-mini"]
    good.engine = good.text = object()  # type: ignore[assignment]
    good._tell()
    began = time.monotonic()
    await announcing
    assert time.monotonic() - began < 20 and "READY=1" in said


def test_restarts_are_counted_once() -> None:
    """Only what has been added since the last look counts; a new supervisor's counts begin at nothing. What a
    supervisor had counted before this gateway looked is not added again, which an alert would take for as many new
    deaths; control: of totals that this process keeps it is."""
    restarts = Increases(ours=False)
    engine, text = ("m", "engine"), ("m", "text")
    assert [restarts.since(engine, total) for total in (0, 2, 2, 5)] == [0, 2, 0, 3]
    assert [restarts.since(text, total) for total in (4, 4, 5)] == [0, 0, 1]
    assert [restarts.since(engine, total) for total in (0, 1)] == [0, 1]
    assert Increases(ours=True).since(text, 4) == 4


async def test_the_event_loop_turns_between_the_parts_that_follow_a_policy(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part looks at every tenant, so each is told in a turn of its own, requests that no longer hold first."""
    turn, told = 0, []

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    def note(owner: object, name: str) -> None:
        real = getattr(type(owner), name)

        def noted(self: object, *args: object, **kwargs: object) -> object:
            told.append((name, turn))
            return real(self, *args, **kwargs)

        monkeypatch.setattr(type(owner), name, noted)

    async def at_once(tenants: list[str], timeout_s: float = 0.0) -> dict[str, bytes]:
        return dict.fromkeys(tenants, b"k" * 32)

    monkeypatch.setattr(gateway._namespaces, "fetch", at_once)
    service = gateway._service
    note(service, "end_withdrawn")
    note(gateway._namespaces, "set_retention")
    note(service.tenant_sandboxes, "reconsider")
    note(gateway._freezer, "apply")
    note(service, "share_out")
    note(gateway._telemetry.metrics, "know")
    turning = asyncio.create_task(count_turns())
    assert (await gateway.reload()).ok
    turning.cancel()
    order = ["end_withdrawn", "set_retention", "reconsider", "apply", "share_out", "know"]
    assert [name for name, _ in told] == order
    assert len({when for _, when in told}) == len(told)


def test_keys_of_tenants_yet_to_come_change_nothing(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a reload fetches namespace keys, each answer brings some: the engines are told of quotas only when a key of
    an account in force has changed. Control: a renewed key is told at once."""
    service, shared = gateway._service, []
    monkeypatch.setattr(service, "share_out", lambda: shared.append(dict(service.ledger.namespaces)))
    keys = dict.fromkeys(service.ledger.policy.tenants, b"k" * 32)
    service.use_namespaces(keys)
    assert shared == [keys]
    for number in range(20):
        service.use_namespaces({**keys, f"new-{number}": b"n" * 32})
    assert shared == [keys]
    renewed = {**keys, next(iter(keys)): b"r" * 32}
    service.use_namespaces(renewed)
    assert shared == [keys, renewed]
