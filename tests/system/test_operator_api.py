"""The operator's API beside a whole appliance: what it orders happens to real requests, keys and policies, and each
call is in the audit log and the metrics."""

from __future__ import annotations

import asyncio
import re
import socket
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest

from appliance.common.account_roles import Roles
from appliance.operator.api.front import OperatorFront
from appliance.operator.api.generated import admin_pb2, policy_pb2
from appliance.operator.api.server import serving
from appliance.operator.audit_entries import in_order
from appliance.operator.cli.bench_target import own_appliance
from tests.appliance.gateway.front.operators import SPIFFE, elsewhere
from tests.appliance.operator.api.place import OWN_POOL, Client
from tests.system.conftest import PLAIN, Appliance, as_demos

pytestmark = [pytest.mark.runsc, pytest.mark.timeout(180)]

ADMIN = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]
POLICY = policy_pb2.DESCRIPTOR.services_by_name["PolicyService"]

TOKENS = 3_500
"""Of the answer that is ended; the model's context has 4,096."""


@asynccontextmanager
async def calling(appliance: Appliance) -> AsyncIterator[Client]:
    """The API over the demo's own configuration."""
    config = appliance.state / "athanor.yaml"
    roles = Roles(frozenset({0, config.stat().st_uid}))
    with tempfile.TemporaryDirectory(prefix="api") as folder:
        socket = Path(folder) / "s"
        async with (
            serving(socket, OperatorFront(config), roles, 20.0),
            grpc.aio.insecure_channel(f"unix:{socket}", OWN_POOL) as channel,
        ):
            yield Client(channel)


async def answered(client: openai.AsyncOpenAI, **options: Any) -> Any:
    """A short answer."""
    return await client.completions.create(model="athanor-mini", prompt="hello", **{"max_tokens": 1, **options})


async def test_a_request_is_seen_and_ended_and_a_drain_refuses_the_next(appliance: Appliance) -> None:
    """A stream that runs is listed and ends when the operator says so; during a drain a request is refused with 503 and
    readiness ends; afterwards one is served (control)."""
    client = appliance.async_openai()
    async with calling(appliance) as call:
        info = await call(ADMIN, "GetServerInfo")
        assert info.ready and "athanor-mini" in info.models
        stream = await answered(client, max_tokens=TOKENS, stream=True, extra_body={"ignore_eos": True})
        await anext(stream)
        listed = await call(ADMIN, "ListRequests", admin_pb2.ListRequestsRequest(tenant="alpha"))
        (one,) = listed.requests
        assert (one.model, one.state) == ("athanor-mini", "running") and one.input_tokens
        await call(ADMIN, "CancelRequest", admin_pb2.CancelRequestRequest(id=one.id))
        with pytest.raises(openai.APIError, match="operator"):
            async for _ in stream:
                pass
        try:
            await call(ADMIN, "Drain")
            with pytest.raises(openai.InternalServerError) as refused:
                await answered(client)
            ready = await asyncio.to_thread(httpx.get, appliance.ready["admin"] + "/health/ready", verify=PLAIN)
            assert (refused.value.status_code, ready.status_code) == (503, 503)
            assert "drained" in ready.text
        finally:
            await call(ADMIN, "Resume")
        assert await answered(client)


async def test_a_key_and_a_policy_come_and_go(governed: Appliance) -> None:
    """A policy that names a new key is put in force, and the key is taken at once; revoked, it is refused when the
    answer of the revocation is there. The policy is tried beside itself meanwhile, and agrees. Every call that changed
    something is in the audit log before and after, and in the metrics."""
    policy = governed.state / "policy.yaml"
    async with calling(governed) as call:
        made = await call(ADMIN, "CreateCredential", admin_pb2.CreateCredentialRequest(tenant="alpha", id="api-1"))
        before = await call(POLICY, "Check")
        new = with_credential(policy.read_text(), made.credential)
        done = await call(
            POLICY,
            "Apply",
            policy_pb2.ApplyRequest(files=[policy_pb2.PolicyFile(text=new)], wait=True, expected_digest=before.digest),
        )
        info = await call(ADMIN, "GetServerInfo")
        assert done.outcome == policy_pb2.OUTCOME_IN_FORCE and info.policy_digest == done.digest
        client = governed.async_openai(max_retries=0)
        client.api_key = made.key
        await call(POLICY, "SetShadow", policy_pb2.SetShadowRequest(files=[policy_pb2.PolicyFile(text=new)]))
        assert await answered(client)
        tried = (await call(POLICY, "GetShadow")).shadow
        assert (tried.digest, tried.verdicts["agrees"], sum(tried.verdicts.values())) == (done.digest, 1, 1)
        await call(POLICY, "ClearShadow")
        assert not (await call(POLICY, "GetShadow")).shadow.digest
        await call(ADMIN, "RevokeCredential", admin_pb2.RevokeCredentialRequest(ids=["api-1"]))
        with pytest.raises(openai.AuthenticationError):
            await answered(client)
    told = await asyncio.to_thread(entries, governed)
    changed = [(one["method"].rpartition("/")[2], one["outcome"]) for one in told]
    for name in ("CreateCredential", "Apply", "SetShadow", "ClearShadow", "RevokeCredential"):
        assert changed.count((name, "BEGUN")) == changed.count((name, "OK")) == 1, changed
    assert not any(made.key.rpartition("_")[2] in str(one) for one in told)
    metrics = await asyncio.to_thread(httpx.get, governed.ready["admin"] + "/metrics", verify=PLAIN)
    series = [line for line in metrics.text.splitlines() if line.startswith("athanor_operator_calls_total{")]
    assert any('PolicyService/Apply"' in line and 'outcome="OK"' in line for line in series), series


def with_credential(text: str, credential: str) -> str:
    """A policy in which alpha has one credential more."""
    changed, count = re.subn(r"(\n  alpha:.*?credentials: ?\[)", rf'\1"{credential}", ', text, count=1, flags=re.DOTALL)
    assert count == 1, text
    return changed


def entries(appliance: Appliance) -> list[dict[str, Any]]:
    """The log's entries about calls of the operator's API; they are written within a second."""
    until = time.monotonic() + 10
    while True:
        found = [dict(one.entry.fields) for one in in_order(appliance.state / "audit") if one.entry.kind == "call"]
        if any(str(one["method"]).endswith("RevokeCredential") and one["outcome"] == "OK" for one in found):
            return found
        assert time.monotonic() < until, found
        time.sleep(0.2)


@pytest.mark.full
async def test_operators_elsewhere_reach_both_interfaces(tmp_path: Path, runsc_path: Path) -> None:
    """A whole appliance that was started with the section: over TLS a certificate drains it by the admin listener, a
    token resumes it by gRPC, and the log names both. Without either nothing is answered, and on loopback (control) the
    admin listener asks for no role, as ever."""
    ports = [free_port() for _ in range(2)]
    addresses = {name: f"127.0.0.1:{port}" for name, port in zip(("admin", "grpc"), ports, strict=True)}
    async with elsewhere(tmp_path, **addresses) as known:

        def adjust(_state: Path, config: dict[str, Any]) -> None:
            config["models"][0]["runner"] = "null"
            config["sandbox"] |= as_demos()
            config["audit"] = {"directory": "audit"}
            config["operator_api"] = {}
            (tmp_path / "keys.json").write_bytes(known.provider.published())
            section = known.section.model_dump(mode="json", exclude_none=True)
            section["tokens"][0] = {**section["tokens"][0], "keys_file": str(tmp_path / "keys.json")}
            for name in ("keys_url", "keys_ca"):  # served by this event loop, which the start holds up
                del section["tokens"][0][name]
            config["remote_operators"] = section

        with own_appliance(None, 16 << 20, "float32", adjust=adjust) as target:
            shown, url = known.of_role("operator"), f"https://{addresses['admin']}"
            async with httpx.AsyncClient(base_url=url, verify=known.context(shown), timeout=30) as client:
                assert (await client.post("/drain")).json()["draining"]
                assert (await client.post("/reload")).json()["error"]["role"] == "security"
            async with httpx.AsyncClient(base_url=url, verify=known.context(), timeout=30) as client:
                assert (await client.post("/resume")).status_code == 401
            credentials = grpc.ssl_channel_credentials(known.pki.authority.pem)
            token = known.token("operator", sub="ann")
            async with grpc.aio.secure_channel(addresses["grpc"], credentials, OWN_POOL) as channel:
                resume = channel.unary_unary(f"/{ADMIN.full_name}/Resume")
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await resume(b"", timeout=30, wait_for_ready=True)
                await taken(resume, token)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            plain = await asyncio.to_thread(httpx.get, target.admin + "/drain", verify=PLAIN)
            assert not plain.json()["draining"]
            told = await asyncio.to_thread(_until_told, target.state / "audit", 2)
    assert {(one["route"], one["caller"]) for one in told["admin"] if one["outcome"] == "OK"} == {
        ("POST /drain", f"{SPIFFE}operator")
    }
    assert {one["caller"] for one in told["call"] if one["outcome"] == "OK"} == {"oidc:corp:ann"}


async def taken(method: grpc.aio.UnaryUnaryMultiCallable, token: str) -> None:
    """Call a method with a token, again until the issuer's keys are there."""
    deadline = time.monotonic() + 20
    while True:
        try:
            await method(b"", metadata=(("authorization", f"Bearer {token}"),), timeout=30)
            return
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED and time.monotonic() < deadline, error
        await asyncio.sleep(0.1)


def free_port() -> int:
    """A port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def _until_told(folder: Path, least: int) -> dict[str, list[dict[str, Any]]]:
    """Entries of both kinds, once there are so many of each that have ended; they are handed on twice a second."""
    deadline = time.monotonic() + 20
    while True:
        found: dict[str, list[dict[str, Any]]] = {"admin": [], "call": []}
        for one in in_order(folder):
            if one.entry.kind in found:
                found[one.entry.kind].append(dict(one.entry.fields))
        if all(sum(one["outcome"] != "BEGUN" for one in rows) >= least for rows in found.values()):
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.2)
