"""The operator's API beside a whole appliance: what it orders happens to real requests, keys and policies, and each
call is in the audit log and the metrics."""

from __future__ import annotations

import asyncio
import re
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

from appliance.operator.api.front import OperatorFront
from appliance.operator.api.generated import admin_pb2, policy_pb2
from appliance.operator.api.roles import Roles
from appliance.operator.api.server import serving
from appliance.operator.audit_entries import in_order
from tests.appliance.operator.api.place import OWN_POOL, Client
from tests.system.conftest import PLAIN, Appliance

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
            serving(socket, OperatorFront(config, roles), roles, 20.0),
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
    answer of the revocation is there. Every call that changed something is in the audit log before and after, and in
    the metrics."""
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
        assert await answered(client)
        await call(ADMIN, "RevokeCredential", admin_pb2.RevokeCredentialRequest(ids=["api-1"]))
        with pytest.raises(openai.AuthenticationError):
            await answered(client)
    told = await asyncio.to_thread(entries, governed)
    changed = [(one["method"].rpartition("/")[2], one["outcome"]) for one in told]
    for name in ("CreateCredential", "Apply", "RevokeCredential"):
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
