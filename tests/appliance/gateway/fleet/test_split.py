"""A decode host asks a prefill host over real TLS; engines and misbehaving hosts are scripted."""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
import time
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from appliance.common.external_config import EXTERNAL
from appliance.common.kv_store_state import FleetKeyState
from appliance.common.split_config import PrefillHost, SplitConfig, SplitTlsConfig
from appliance.gateway.fleet import prefill_asking as asking_module
from appliance.gateway.fleet import prefill_call, prefill_service
from appliance.gateway.fleet.generated import fleet_pb2 as pb
from appliance.gateway.fleet.prefill_asking import OUTCOMES, Asking
from appliance.gateway.fleet.prefill_run import PrefillRuns
from appliance.gateway.fleet.prefill_service import MAX_MESSAGE_BYTES, STRANGER_MESSAGE_BYTES, PrefillService
from appliance.gateway.fleet.served_entries import ServedEntries
from appliance.gateway.front.allowance import StrangersAllowances
from appliance.gateway.front.operator_door import OperatorDoor, bind_port
from appliance.gateway.generate_request import Finished, TokenPrompt
from appliance.gateway.grpc.connection import STRANGER, GrpcConnection, GrpcShared
from appliance.gateway.request.audit_feed import NoAuditFeed
from appliance.gateway.request.operator_drain import OperatorDrain
from appliance.gateway.request.splitting import SplitPrompt, may_split
from appliance.gateway.telemetry import split_names as names
from isolation.ipc.engine import Abort, RequestFailure, StepOutput, Submit
from isolation.ipc.messages import MAX_TOKENS_PER_REQUEST, FailureCode, Finish, Priority
from isolation.ipc.sampling import Sampling
from tests.appliance.gateway.front.pki import Authority
from tests.appliance.gateway.pairs import Pair
from tests.appliance.gateway.request.test_session import Stage, hear, say, stage

__all__ = ["stage"]

TERMS = "kv_export: true, kv_fleet: true"
SPIFFE = "spiffe://fleet.example/"
IDS = array("I", range(1, 101))


class Kept(NoAuditFeed):
    """Entries as they were added."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[dict[str, Any]] = []
        self.summed: Counter[tuple[tuple[str, str | int], ...]] = Counter()

    def add(self, kind: str, **fields: str | int) -> None:
        """Keep it."""
        self.entries.append({"kind": kind, **fields})

    def count(self, _kind: str, **fields: str | int) -> None:
        """Add it to others of its fields."""
        self.summed[tuple(fields.items())] += 1


@dataclass
class Hosts:
    """Certificates of hosts of one authority."""

    folder: Path
    authority: Authority = field(default_factory=lambda: Authority.create("fleet"))

    def tls(self, name: str, authority: Authority | None = None) -> SplitTlsConfig:
        """Files of a host."""
        key, chain = (authority or self.authority).issue(x509.UniformResourceIdentifier(f"{SPIFFE}{name}"))
        files = SplitTlsConfig(
            certificate=self.folder / f"{name}.pem", key=self.folder / f"{name}.key", ca=self.folder / "ca.pem"
        )
        files.certificate.write_bytes(chain)
        files.key.write_bytes(key)
        files.ca.write_bytes(self.authority.pem)
        return files


@dataclass
class Prefilling:
    """A prefill host."""

    stage: Stage
    hosts: Hosts
    port: int
    audit: Kept
    counts: Counter[str]
    service: PrefillService

    def asking(self, name: str = "decode", *, port: int = 0, identity: str = "prefill", **more: Any) -> Asking:
        """A decode host with this name in its certificate."""
        host = PrefillHost(host="p", address=f"127.0.0.1:{port or self.port}", identity=f"{SPIFFE}{identity}")
        config = SplitConfig(role="decode", tls=self.hosts.tls(name, **more), prefill_hosts=(host,))
        return Asking(config, Kept(), counter_of(self.asked), lambda: FleetKeyState.HELD, least_blocks=4)

    asked: Counter[str] = field(default_factory=Counter)

    def prompt(self, **changes: Any) -> SplitPrompt:
        """A prompt of the tenant under the stage's policy."""
        found = SplitPrompt(
            request_id="req_1",
            tenant="alpha",
            model="m",
            alias="",
            model_digest="",
            policy_digest=self.stage.dependencies.ledger.policy.digest,
            namespace=b"k" * 32,
            token_ids=IDS,
            block_size=16,
            priority=Priority.NORMAL,
            until=time.monotonic() + 20,
            traceparent="00-" + "1" * 32 + "-" + "2" * 16 + "-01",
        )
        return replace(found, **changes)


def counter_of(counts: Counter[str]) -> Callable[..., None]:
    """What adds to counters, by name and outcome."""

    def count(name: str, amount: float = 1, **labels: str) -> None:
        counts[f"{name}:{labels.get('outcome', '')}"] += amount

    return count


@pytest.fixture
async def prefilling(stage: Stage, tmp_path: Path) -> AsyncIterator[Prefilling]:
    """A prefill host whose tenant shares its KV, with a scripted engine."""
    stage.grant(TERMS)
    hosts = Hosts(tmp_path)
    tls = hosts.tls("prefill")
    config = SplitConfig(role="prefill", listen="127.0.0.1:0", tls=tls, decode_hosts=(f"{SPIFFE}decode",))
    runs = PrefillRuns(stage.dependencies, OperatorDrain(), lambda: FleetKeyState.HELD)
    audit, counts = Kept(), Counter[str]()
    service = PrefillService(config, runs, ServedEntries(audit), counter_of(counts), lambda *_args: None)
    strangers = StrangersAllowances(STRANGER, time.monotonic)
    bound = bind_port("127.0.0.1:0", "split.listen")
    door = OperatorDoor(
        bound,
        tls.files,
        lambda contexts: contexts.grpc,
        lambda opened, slot: GrpcConnection(
            GrpcShared(opened, service.serve, strangers, STRANGER_MESSAGE_BYTES, 5.0), slot
        ),
    )
    running = asyncio.create_task(door.run())
    yield Prefilling(stage, hosts, bound.getsockname()[1], audit, counts, service)
    running.cancel()
    door.close()


def submitted(pair: Pair) -> list[Submit]:
    """Requests that an engine has been sent and nobody has heard yet."""
    return [one for one in pair.guest.receive(10) if isinstance(one, Submit)]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine's hosts are not silent; tests of silence have the real bound."""
    monkeypatch.setattr(prefill_call, "SILENCE_S", 10.0)


async def until(holds: Callable[[], bool]) -> None:
    """Wait for what other tasks do."""
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.01)


async def answered(pair: Pair, asked: Awaitable[str]) -> tuple[str, Submit]:
    """The outcome of a prompt that the scripted engine computes, and what the engine was told."""
    task = asyncio.ensure_future(asked)
    submit: Submit = await hear(pair, Submit)
    say(pair, submit.request, 7, finish=Finish.LENGTH, started=True)
    return await task, submit


async def test_a_prompt_is_computed_for_another_host(prefilling: Prefilling) -> None:
    """The prefill host's engine gets the prompt as a request of the tenant for one token, and the asker hears that it
    is computed. Both audit logs name the other and the request, and
    the prefill host charges nothing."""
    pair, asking = prefilling.stage.boot(), prefilling.asking()
    outcome, submit = await answered(pair, asking.compute(prefilling.prompt(priority=Priority.LOW)))
    assert (outcome, submit.max_tokens, submit.token_ids) == ("computed", 1, IDS)
    assert (submit.namespace, submit.priority, submit.retain) == (b"k" * 32, Priority.LOW, True)
    await until(lambda: prefilling.service.running == 0)
    (served,), (told,) = prefilling.audit.entries, asking.audit.entries  # type: ignore[attr-defined]
    assert (served["what"], served["host"], served["request"]) == ("served", f"{SPIFFE}decode", "req_1")
    assert (told["what"], told["host"], told["outcome"], told["tokens"]) == ("asked", "p", "computed", 100)
    counts, total = prefilling.stage.dependencies.tenant_counts.now()
    assert (counts, total.input_tokens) == ({}, 0)


@pytest.mark.parametrize(
    ("changes", "terms"),
    [
        ({"policy_digest": "0" * 64}, TERMS),
        ({"tenant": "beta"}, TERMS),
        ({"model": "other"}, TERMS),
        ({"model_digest": "f" * 64}, TERMS),
        ({"token_ids": array("I", [9999] * 80)}, TERMS),
        ({"token_ids": array("I", [1] * 256)}, TERMS),
        ({}, "kv_export: true"),
        ({}, f"{TERMS}, class: strict, kv: {{reservation: 20%}}"),
        ({}, f"{TERMS}, class: dedicated"),
        ({}, f"{TERMS}, namespace: user"),
        ({}, f"{TERMS}, limits: {{max_context_tokens: 50}}"),
    ],
    ids=[
        *("policy", "tenant", "model", "files", "ids", "context"),
        *("not-shared", "strict", "dedicated", "user", "limit"),
    ],
)
async def test_the_prefill_host_decides_by_its_own_policy(
    prefilling: Prefilling, changes: dict[str, Any], terms: str
) -> None:
    """What its policy, its files or its model do not allow is refused, and the engine hears of none of it (the first
    test is the control). The host is asked again at once: a refusal is of the prompt."""
    prefilling.stage.grant(terms)
    pair, asking = prefilling.stage.boot(), prefilling.asking()
    prompt = prefilling.prompt(**{"policy_digest": prefilling.stage.dependencies.ledger.policy.digest, **changes})
    assert await asking.compute(prompt) == "refused"
    assert prefilling.counts == {f"{names.SPLIT_SERVED}:refused": 1}
    assert submitted(pair) == []
    assert await asking.compute(prompt) == "refused"


@pytest.mark.parametrize("case", ["other-name", "other-authority", "other-server"])
async def test_both_sides_prove_who_they_are(prefilling: Prefilling, case: str) -> None:
    """A host that is not on the list, a certificate of another authority, and a server with another identity than the
    configured one: no prompt is computed, and in the last case none is sent."""
    pair = prefilling.stage.boot()
    asking = {
        "other-name": lambda: prefilling.asking("stranger"),
        "other-authority": lambda: prefilling.asking(authority=Authority.create("another")),
        "other-server": lambda: prefilling.asking(identity="another"),
    }[case]()
    outcome = await asking.compute(prefilling.prompt())
    assert outcome in {"other-name": {"refused"}, "other-server": {"stranger"}}.get(case, {"away", "broken"})
    assert submitted(pair) == []
    assert prefilling.audit.entries == []


@pytest.mark.parametrize(("runner", "wanted"), [("model", "computed"), (EXTERNAL, "refused")])
async def test_no_prompt_of_an_external_model_is_computed_elsewhere(
    prefilling: Prefilling, stage: Stage, runner: str, wanted: str
) -> None:
    """A model that a cluster outside computes leaves no KV, so neither side splits its prompts: the prefill host would
    have the prompt computed there a second time, uncharged. A model of the appliance is the control."""
    prefilling.stage.model.runner = runner
    pair, asking = prefilling.stage.boot(), prefilling.asking()
    task = asyncio.ensure_future(asking.compute(prefilling.prompt()))
    if wanted == "computed":
        submit = await hear(pair, Submit)
        say(pair, submit.request, 7, finish=Finish.LENGTH, started=True)
    assert await task == wanted
    plain = Submit(1, b"k" * 32, IDS, 1, Sampling(temperature=0.0))
    assert may_split(stage.dependencies.ledger, "alpha", plain, external=runner == EXTERNAL) is (wanted == "computed")


async def test_a_host_leaves_places_to_others(prefilling: Prefilling, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that has as many prompts here as it may is told so, though there is room for prompts of others; when one
    of its own has ended, the next is computed."""
    monkeypatch.setattr(prefill_service, "MAX_RUNS_OF_ONE", 1)
    pair, asking = prefilling.stage.boot(), prefilling.asking()
    first = asyncio.ensure_future(asking.compute(prefilling.prompt()))
    submit = await hear(pair, Submit)
    assert await asking.compute(prefilling.prompt()) == "busy"
    say(pair, submit.request, 7, finish=Finish.LENGTH, started=True)
    assert await first == "computed"
    assert (await answered(pair, asking.compute(prefilling.prompt())))[0] == "computed"


def test_a_prompt_of_more_tokens_than_any_engine_takes_is_not_read() -> None:
    """Ids of one byte: a message that is small enough has eight million of them, and a loop over these would stop the
    gateway for half a second. The most tokens that there may be are taken (control)."""
    most = MAX_TOKENS_PER_REQUEST
    few, many = (pb.ComputeRequest(token_ids=array("I", [1]) * count) for count in (most, most + 1))
    assert many.ByteSize() < MAX_MESSAGE_BYTES
    large = pb.ComputeRequest(token_ids=array("I", [(1 << 21) - 1]) * most)
    assert large.ByteSize() < MAX_MESSAGE_BYTES, "ids of the largest vocabularies have three bytes"
    assert MAX_MESSAGE_BYTES * prefill_service.MAX_READING <= 128 << 20
    assert len(prefill_service._asked(few, 1.0).token_ids) == most
    with pytest.raises(ValueError, match="tokens"):
        prefill_service._asked(many, 1.0)


@pytest.mark.parametrize("field", ["request_id", "tenant", "model", "alias", "model_digest", "policy_digest"])
def test_a_name_that_cannot_be_one_is_not_read(field: str) -> None:
    """A name of megabytes would stand in errors, spans and audit entries. One of the most characters is taken, and
    decided on later (control)."""
    most = prefill_service.MAX_NAME_CHARS
    few, many = pb.ComputeRequest(token_ids=[1]), pb.ComputeRequest(token_ids=[1])
    setattr(few, field, "x" * most)
    setattr(many, field, "x" * (most + 1))
    assert len(getattr(prefill_service._asked(few, 1.0), field)) == most
    with pytest.raises(ValueError, match="name"):
        prefill_service._asked(many, 1.0)


async def test_a_model_that_computes_for_others_is_not_idle(prefilling: Prefilling) -> None:
    """A prompt that is computed begins the model's rest anew; one that is refused does not (control)."""
    pair, asking, sleep = prefilling.stage.boot(), prefilling.asking(), prefilling.stage.model.sleep_state
    sleep.used_at = 0.0
    assert await asking.compute(prefilling.prompt(policy_digest="0" * 64)) == "refused"
    assert sleep.used_at == 0.0
    assert (await answered(pair, asking.compute(prefilling.prompt())))[0] == "computed"
    assert time.monotonic() - sleep.used_at < 10


async def test_the_audit_log_names_no_tenant_that_there_is_not(prefilling: Prefilling) -> None:
    """Another host may send any name, and the log keeps a key for each tenant that it names: names of no tenant and no
    model here are left out. A refused prompt of a tenant is told with its name (control)."""
    prefilling.stage.boot()
    asking = prefilling.asking()
    for changes in ({"tenant": "made-up-1", "model": "none"}, {"policy_digest": "0" * 64}):
        assert await asking.compute(prefilling.prompt(**changes)) == "refused"
    assert [(one["tenant"], one["model"]) for one in prefilling.audit.entries] == [("", ""), ("alpha", "m")]


async def test_progress_keeps_a_call_alive(prefilling: Prefilling, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that takes longer than a silence may be is computed, since the host says that it works on it."""
    monkeypatch.setattr(prefill_call, "SILENCE_S", 2.0)
    pair, asking = prefilling.stage.boot(), prefilling.asking()
    task = asyncio.ensure_future(asking.compute(prefilling.prompt()))
    submit = await hear(pair, Submit)
    await asyncio.sleep(3)
    say(pair, submit.request, 7, finish=Finish.LENGTH, started=True)
    assert await task == "computed"


async def test_a_client_that_leaves_ends_the_prompt(prefilling: Prefilling) -> None:
    """The asker's cancelled task closes its connection, upon which the prefill host's engine is told to abort."""
    pair, asking = prefilling.stage.boot(), prefilling.asking()
    task = asyncio.ensure_future(asking.compute(prefilling.prompt()))
    submit = await hear(pair, Submit)
    task.cancel()
    assert (await hear(pair, Abort)).request == submit.request
    await until(lambda: prefilling.counts[f"{names.SPLIT_SERVED}:left"] == 1)
    assert prefilling.asked[f"{names.SPLIT_ASKED}:left"] == 1


async def test_an_engine_that_ends_is_no_answer(prefilling: Prefilling) -> None:
    """Where the prefill host's engine dies under the prompt, the asker computes it."""
    pair, asking = prefilling.stage.boot(), prefilling.asking()
    task = asyncio.ensure_future(asking.compute(prefilling.prompt()))
    await hear(pair, Submit)
    pair.close()
    assert await task == "away"


@pytest.mark.parametrize(
    ("code", "wanted", "next_one"),
    [(FailureCode.DEADLINE, "late", "late"), (FailureCode.OVERLOADED, "away", "busy")],
    ids=["deadline", "full"],
)
async def test_a_prompt_s_deadline_rests_no_host(
    prefilling: Prefilling, code: FailureCode, wanted: str, next_one: str
) -> None:
    """An engine that ends a prompt at its deadline, before the asker's clock says so, says nothing of the host, which
    is asked again at once. One whose queue is full is left alone for a while (control)."""
    pair, asking = prefilling.stage.boot(), prefilling.asking()
    for outcome in (wanted, next_one):
        task = asyncio.ensure_future(asking.compute(prefilling.prompt()))
        if outcome != "busy":
            submit = await hear(pair, Submit)
            pair.guest.send(StepOutput(failures=(RequestFailure(submit.request, code),)))
        assert await task == outcome


async def test_a_policy_that_comes_meanwhile_ends_the_prompt(prefilling: Prefilling) -> None:
    """A tenant that may share no more has nothing computed from the next progress on."""
    pair, asking = prefilling.stage.boot(), prefilling.asking()
    task = asyncio.ensure_future(asking.compute(prefilling.prompt()))
    await hear(pair, Submit)
    prefilling.stage.grant("kv_export: true")
    assert await task == "refused"
    await hear(pair, Abort)


@contextlib.asynccontextmanager
async def fake(hosts: Hosts, say: bytes | None, *, tls: bool = True) -> AsyncIterator[int]:
    """A host that says only this, after the handshake, and keeps the connection; gives its port."""
    files = hosts.tls("prefill")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=files.ca)
    context.load_cert_chain(files.certificate, files.key)

    async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if say is not None:
            writer.write(say)
        await asyncio.sleep(5)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context if tls else None)
    yield server.sockets[0].getsockname()[1]
    server.close()


@pytest.mark.parametrize(
    ("said", "tls", "silence_s", "wanted"),
    [
        (b"", True, prefill_call.SILENCE_S, "silent"),
        (b"", False, prefill_call.SILENCE_S, "silent"),
        (b"HTTP/1.1 " + b"x" * (1 << 20), True, 10.0, "broken"),
    ],
    ids=["silent", "no-handshake", "flood"],
)
async def test_a_silent_or_strange_host_costs_a_quarter_second(
    prefilling: Prefilling, monkeypatch: pytest.MonkeyPatch, said: bytes, tls: bool, silence_s: float, wanted: str
) -> None:
    """A host that says nothing, before or after its handshake, or nothing sensible, is given up soon; the next prompt
    does not wait for it at all, and the local computing begins."""
    monkeypatch.setattr(prefill_call, "SILENCE_S", silence_s)
    async with fake(prefilling.hosts, said, tls=tls) as port:
        asking, began = prefilling.asking(port=port), time.monotonic()
        assert await asking.compute(prefilling.prompt()) == wanted
        assert time.monotonic() - began < 5
        assert await asking.compute(prefilling.prompt()) == "busy"


async def test_no_bytes_of_a_host_end_a_request(prefilling: Prefilling, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty hosts that answer random frames: each prompt has an outcome of the list, and nothing is raised."""
    monkeypatch.setattr(prefill_call, "SILENCE_S", 0.1)
    draw = random.Random(7)
    for _ in range(30):
        frames = b""
        for _ in range(draw.randrange(4)):
            body = draw.randbytes(draw.randrange(40))
            kind, flags = draw.choice((0, 1, 3, 4, 6, 7, 8)), draw.choice((0, 1, 4, 5))
            frames += len(body).to_bytes(3) + bytes((kind, flags)) + draw.choice((0, 1)).to_bytes(4) + body
        async with fake(prefilling.hosts, frames) as port:
            outcome = await prefilling.asking(port=port).compute(prefilling.prompt())
            assert outcome in OUTCOMES
            assert outcome != "computed"


async def test_what_cannot_be_asked_is_computed_here(prefilling: Prefilling, monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that nobody listens on, keys of the fleet that are not here, a deadline, and a router that names a host of
    no list (which is counted): each has its outcome."""
    asking = prefilling.asking(port=1)
    assert await asking.compute(prefilling.prompt(chosen="10.9.9.9:1")) == "away"
    assert prefilling.asked[f"{names.SPLIT_IGNORED}:"] == 1
    keyless = replace(prefilling.asking(), keys=lambda: FleetKeyState.NONE_HELD)
    assert await keyless.compute(prefilling.prompt()) == "no_keys"
    prefilling.stage.boot()
    monkeypatch.setattr(asking_module, "ASK_S", 0.4)
    assert await prefilling.asking().compute(prefilling.prompt()) == "late"


async def test_a_request_is_served_whatever_becomes_of_its_prompt(prefilling: Prefilling, stage: Stage) -> None:
    """A session whose prefill host is away runs in the local engine: all of its prompt is charged, once. A second
    request with this prompt asks nobody, since the engine has it; a short prompt asks nobody either."""
    stage.dependencies.prefiller = prefilling.asking(port=1)
    pair = stage.boot()

    async def served(ids: array[int]) -> Finished:
        async def events() -> list[Any]:
            return [one async for one in stage.session(prompt=TokenPrompt(ids), max_tokens=1).run()]

        task = asyncio.ensure_future(events())
        submit = await hear(pair, Submit)
        say(pair, submit.request, 7, finish=Finish.LENGTH, started=True)
        found: Finished = (await task)[-1]
        return found

    long = array("I", [3] * 190)
    assert (await served(long)).input_tokens == 190
    assert prefilling.asked[f"{names.SPLIT_ASKED}:away"] == 1
    assert (await served(long)).input_tokens == 190
    await served(IDS[:40])
    assert sum(prefilling.asked[f"{names.SPLIT_ASKED}:{one}"] for one in OUTCOMES) == 1
