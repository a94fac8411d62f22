"""G2, of prompts that one host computes and another continues: whose namespace they have on either side.

On a decode host: every route with every header, field, query and metadata key that could name a tenant, and those of
routers besides; what would be sent to another host must have the caller's tenant. On a prefill host: calls of a listed
host, of others and of none, for every tenant, with every name elsewhere; the engine must get the namespace of the
tenant that a listed host names, if that tenant shares its KV, and nothing else. So a listed host can have prompts of
sharing tenants computed, and no more. Not covered: the handshake that tells who a host is
(``tests/appliance/gateway/fleet/test_split.py``), and what the other host does with a prompt.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import grpc
from google.protobuf.descriptor import FieldDescriptor

from appliance.common.figures import counted
from appliance.common.kv_store_state import FleetKeyState
from appliance.common.split_config import SplitConfig, SplitTlsConfig
from appliance.gateway.fleet.generated import fleet_pb2 as fleet
from appliance.gateway.fleet.prefill_call import METHOD
from appliance.gateway.fleet.prefill_run import PrefillRuns
from appliance.gateway.fleet.prefill_service import PrefillService
from appliance.gateway.fleet.served_entries import ServedEntries
from appliance.gateway.front.prefiller import PREFILLER
from appliance.gateway.grpc.call import GrpcCall
from appliance.gateway.grpc.generated import inference_pb2 as pb
from appliance.gateway.grpc.servicer import SERVICE
from appliance.gateway.request.audit_feed import NoAuditFeed
from appliance.gateway.request.splitting import SplitPrompt
from appliance.selftest.raw_http import request_bytes, talk
from appliance.selftest.result import Result, judged
from appliance.selftest.scripted_gateway import MODEL, NAMESPACES, TENANTS, ScriptedGateway, scripted_gateway
from appliance.selftest.words import BODIES, FIELDS, HEADERS, QUERIES, values_for

COMMAND = "athanor selftest --only G2"

SHARES = "kv_export: true, kv_fleet: true"
SHY = TENANTS[1]
"""The tenant that does not share its KV in the second half."""

GENERATING = tuple(path for path, body in BODIES.items() if body["model"] == MODEL)
"""Routes whose prompts another host may compute."""

LISTED, OTHER = "spiffe://athanor.test/host/b", "spiffe://athanor.test/host/c"


@dataclass(slots=True)
class NotingPrefiller:
    """Stands for the other hosts: has every prompt asked for, and computes none."""

    asked: list[SplitPrompt] = field(default_factory=list)

    def wants(self, prompt: SplitPrompt) -> bool:
        """Return true: however short it is."""
        return len(prompt.token_ids) > 0

    async def compute(self, prompt: SplitPrompt, begun: Callable[[], None]) -> str:
        """Note the prompt."""
        del begun
        self.asked.append(prompt)
        return "busy"

    def taken(self, prompt: SplitPrompt, store_tokens: int, recomputed_blocks: int, *, gap: bool) -> None:
        """Do nothing."""

    def learn(self, prompt: SplitPrompt) -> None:
        """Do nothing."""


@dataclass(slots=True)
class SplitCount:
    """Counts over the calls."""

    sent: int = 0
    reached: int = 0
    """NotingPrefiller that were asked for, or reached an engine."""
    wrong: int = 0
    """Those of them under a namespace that is not the tenant's, or of a tenant that may have none there."""
    example: str = ""

    def look(self, found: int, wrong: int, what: str) -> None:
        """Add what a call led to."""
        self.sent += 1
        self.reached += found
        self.wrong += wrong
        self.example = self.example or (what if wrong else "")

    def figure(self, what: str) -> str:
        """Return it in words."""
        said = f"{counted(self.wrong, what)} under a wrong namespace, {self.reached} in {counted(self.sent, 'call')}"
        return said + (f"; first: {self.example}" if self.example else "")


def run(full: bool) -> list[Result]:
    """Run every row; long and short forms are the same."""
    del full
    return asyncio.run(_rows())


async def _rows() -> list[Result]:
    asked, mistaken = await _of_clients()
    served, others = await _of_hosts()
    return [
        judged(
            "G2.split",
            not asked.wrong and asked.reached > 0,
            figure=asked.figure("prompt"),
            bar="0; some",
            command=COMMAND,
        ),
        judged(
            "G2.split.control",
            mistaken.wrong == mistaken.reached > 0,
            figure=f"{mistaken.wrong} of {counted(mistaken.reached, 'prompt')} with another key: for that one's tenant",
            bar="all",
            command=COMMAND,
        ),
        judged(
            "G2.prefill",
            not served.wrong and served.reached > 0,
            figure=served.figure("prompt"),
            bar="0; some",
            command=COMMAND,
        ),
        judged(
            "G2.prefill.control",
            others.wrong == others.reached > 0,
            figure=f"{others.wrong} of {counted(others.reached, 'prompt')} for which the listed host names another "
            "sharing tenant: under that one's namespace",
            bar="all",
            command=COMMAND,
        ),
    ]


async def _of_clients() -> tuple[SplitCount, SplitCount]:
    """Send all that could name a tenant; then, for the control, plain calls of the second one judged as the first's."""
    found, control, prompts = SplitCount(), SplitCount(), NotingPrefiller()
    async with scripted_gateway(terms=SHARES) as gateway:
        gateway.service.dependencies.prefiller = prompts

        def judge(count: SplitCount, tenant: str, what: str) -> None:
            wrong = sum((one.tenant, one.namespace) != (tenant, NAMESPACES[tenant]) for one in prompts.asked)
            count.look(len(prompts.asked), wrong, what)
            prompts.asked.clear()

        for number, (target, body, headers) in enumerate(_http_cases(gateway)):
            tenant = TENANTS[number % 2]
            await _post(gateway, tenant, target, body, headers)
            judge(found, tenant, f"{target} {headers}")
        async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.ends.grpc_port}") as channel:
            for number, metadata in enumerate([(), *((name, LISTED) for name in (*HEADERS, PREFILLER))]):
                tenant = TENANTS[number % 2]
                await _generate(channel, gateway.keys[tenant], metadata)
                judge(found, tenant, f"Generate {metadata}")
        for target in GENERATING:
            await _post(gateway, TENANTS[1], target, BODIES[target], ())
            judge(control, TENANTS[0], target)
    return found, control


def _http_cases(gateway: ScriptedGateway) -> Iterator[tuple[str, dict[str, object], tuple[tuple[str, str], ...]]]:
    other = TENANTS[1]
    word = str(values_for(other, gateway.keys[other], NAMESPACES[other])[0])
    for target in GENERATING:
        body = BODIES[target]
        yield target, body, ()
        yield target, body, ()
        for name in (*HEADERS, PREFILLER):
            if name.lower() != "host":
                yield target, body, ((name, word),)
        yield target, body, ((PREFILLER, "127.0.0.1:1"), (PREFILLER, LISTED))
        for name in FIELDS:
            yield target, {**body, name: word}, ()
        for query in QUERIES:
            yield f"{target}?{query}={word}", body, ()


async def _post(
    gateway: ScriptedGateway, tenant: str, target: str, body: dict[str, object], headers: tuple[tuple[str, str], ...]
) -> None:
    proof = ("authorization", f"Bearer {gateway.keys[tenant]}")
    await talk(gateway.ends.http_port, request_bytes("POST", target, json.dumps(body).encode(), proof, *headers))


async def _generate(channel: grpc.aio.Channel, key: str, metadata: tuple[str, ...]) -> None:
    rows = (("authorization", f"Bearer {key}"), *((metadata,) if metadata and metadata[0].lower() != "host" else ()))
    call = channel.unary_stream(f"/{SERVICE}/Generate")
    try:
        message = pb.GenerateRequest(model=MODEL, text="hi", max_output_tokens=2).SerializeToString()
        async for _ in call(message, metadata=[(name.lower(), value) for name, value in rows], timeout=10):
            pass
    except grpc.aio.AioRpcError:
        pass  # refused: only what is asked of other hosts counts


@dataclass(slots=True)
class HostCall:
    """A call of another host as the service sees it, from the certificate's names on."""

    peer_names: tuple[tuple[str, str], ...] | None
    message: bytes
    metadata: tuple[tuple[str, str], ...] = ()
    method: str = METHOD
    answers: int = 0

    def claim(self, host: str) -> bool:
        """Return that the host may have one connection more."""
        return bool(host)

    def unproved(self) -> None:
        """Do nothing."""

    def bound(self, most: int) -> None:
        """Do nothing."""

    def time_remaining(self) -> float | None:
        """Return a deadline."""
        return 5.0

    async def receive(self) -> bytes | None:
        """Return the message."""
        return self.message

    async def write(self, message: object) -> None:
        """Count an answer."""
        del message
        self.answers += 1


async def _of_hosts() -> tuple[SplitCount, SplitCount]:
    """Make every call; then, for the control, those for the second tenant judged as the first's where both share."""
    found, control = SplitCount(), SplitCount()
    files = SplitTlsConfig(certificate=Path("none"), key=Path("none"), ca=Path("none"))
    config = SplitConfig(role="prefill", listen="127.0.0.1:0", tls=files, decode_hosts=(LISTED,))
    for shares_too, count in ((False, found), (True, control)):
        async with scripted_gateway(terms=SHARES, others="" if shares_too else "kv_export: true") as gateway:
            service = gateway.service
            runs = PrefillRuns(service.dependencies, service.operator_drain, lambda: FleetKeyState.HELD)
            entries = ServedEntries(NoAuditFeed())
            answers = PrefillService(config, runs, entries, lambda *_a, **_k: None, lambda *_a: None)
            gateway.heard.clear()
            for call, tenant, may in _calls(gateway, control=shares_too):
                await answers.serve(cast("GrpcCall", call))
                heard = list(gateway.heard.namespaces)
                gateway.heard.clear()
                wrong = len(heard) if not may else sum(one != NAMESPACES[tenant] for one in heard)
                count.look(len(heard), wrong, f"{call.peer_names} {call.message[:80]!r} {call.metadata}")
    return found, control


def _calls(gateway: ScriptedGateway, *, control: bool) -> Iterator[tuple[HostCall, str, bool]]:
    """Yield calls with the tenant that they name, and whether anything of it may reach an engine."""
    sharing, shy = TENANTS
    digest = gateway.service.dependencies.ledger.policy.digest
    if control:
        yield HostCall((("URI", LISTED),), _compute(shy, digest).SerializeToString()), sharing, True
        return
    word = str(values_for(shy, gateway.keys[shy], NAMESPACES[shy])[0])
    proofs = {
        (("URI", LISTED),): True,
        (("URI", OTHER),): False,
        (("DNS", LISTED),): False,
        (("URI", LISTED), ("URI", OTHER)): False,
        (("URI", f"{LISTED}/"),): False,
        (("URI", f"spiffe://athanor.test/tenant/{sharing}"),): False,
        (): False,
        None: False,
    }
    for proof, listed in proofs.items():
        for tenant in (sharing, shy, "nobody", "", LISTED, word):
            may = listed and tenant == sharing
            yield HostCall(proof, _compute(tenant, digest).SerializeToString()), tenant, may
    proof = (("URI", LISTED),)
    base = _compute(sharing, digest)
    for name in (*HEADERS, PREFILLER):
        yield HostCall(proof, base.SerializeToString(), ((name.lower(), word),)), sharing, True
    for at in base.DESCRIPTOR.fields:
        if at.type == FieldDescriptor.TYPE_STRING and at.name != "tenant":
            changed = _compute(sharing, digest)
            setattr(changed, at.name, word)
            yield HostCall(proof, changed.SerializeToString()), sharing, True
    # Fields that no version of the service has, as texts (wire type 2); and the tenant twice: the last one counts.
    key = NAMESPACES[shy]
    for number in range(100, 140):
        tag = number << 3 | 2
        unknown = bytes([tag & 0x7F | 0x80, tag >> 7, len(key)]) + key
        yield HostCall(proof, base.SerializeToString() + unknown), sharing, True
    twice = fleet.ComputeRequest(tenant=shy).SerializeToString()
    yield HostCall(proof, base.SerializeToString() + twice), shy, False
    yield HostCall(proof, twice + base.SerializeToString()), sharing, True


def _compute(tenant: str, digest: str) -> fleet.ComputeRequest:
    return fleet.ComputeRequest(
        request_id="req_1", tenant=tenant, model=MODEL, policy_digest=digest, token_ids=range(30, 90)
    )
