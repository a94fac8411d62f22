"""Attestations of a real appliance: asked for as a tenant, verified offline, withheld by the policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from appliance.common.audit.attestation import read_attestation
from appliance.common.audit.verify import read_verifier
from appliance.common.catalog import embedded_model, read_model
from appliance.common.model_digests import DigestCache
from appliance.gateway.grpc.generated import inference_pb2, inference_pb2_grpc
from tests.system.commands import athanor
from tests.system.conftest import PLAIN, Appliance
from tests.system.test_audit import entries, wait_for

pytestmark = pytest.mark.runsc

MODEL = "athanor-mini"
NONCE = "9f86d081884c7d65"


def ask(appliance: Appliance, tenant: str = "alpha", **body: Any) -> httpx.Response:
    """The answer to a tenant's request."""
    headers = {"authorization": f"Bearer {appliance.key(tenant)}"}
    url = appliance.ready["http"] + "/v1/attestations"
    return httpx.post(url, json={"model": MODEL, "nonce": NONCE} | body, headers=headers, timeout=30, verify=PLAIN)


def test_a_tenant_verifies_what_serves_it(governed: Appliance, tmp_path: Path) -> None:
    """The command asks over HTTP and verifies offline: the one model that is served with the digest of its files, the
    policy that status shows, gVisor without a network. gRPC gives the same facts. Another nonce, and another
    expectation, are told; the request is in the audit log, and costs nothing. With the feature withheld both APIs
    refuse it."""
    appliance, text = governed, tmp_path / "text"
    known = sum(one["kind"] == "request" for one in entries(appliance.state / "audit"))
    (tmp_path / "key").write_text(appliance.key("alpha") + "\n")
    asked = ("--url", appliance.ready["http"], "--model", MODEL, "--key-file", str(tmp_path / "key"))
    told = athanor("attest", "ask", *asked, "--nonce", NONCE, "--out", str(text))
    assert told.returncode == 0, told.stderr
    public = appliance.state / "audit" / "public.key"
    verify = ("attest", "verify", str(text), "--key", str(public))
    verified = athanor(*verify, "--nonce", NONCE, "--expect", "runtime=gvisor/systrap", "-o", "json")
    assert verified.returncode == 0, verified.stderr
    found = json.loads(verified.stdout)
    files = read_model(MODEL, embedded_model(), DigestCache.load(None))
    status = httpx.get(appliance.ready["admin"] + "/status", timeout=10, verify=PLAIN).json()
    assert (found["ok"], found["fresh"], found["model_digest"]) == (True, True, files.digest)
    assert found["policy"] == status["policy"]["digest"]
    assert "--network=none" in found["flags"]
    stated = {"name": MODEL, "digest": files.digest, "signer": "", "sandbox": "gvisor/systrap", "flags": []}
    assert (found["form"], found["models"], found["adapters"]) == (3, [stated], [])
    assert athanor(*verify, "--nonce", NONCE[::-1]).returncode == 1
    assert athanor(*verify, "--expect", "runtime=unsafe/none").returncode == 1
    by_grpc = attest_by_grpc(appliance)
    one = read_attestation(by_grpc.attestation.encode(), read_verifier(public))
    assert (one.tenant, one.asked.digest, one.policy) == ("alpha", files.digest, found["policy"])
    entry, _ = wait_for(appliance.state / "audit", "request", known + 2)[known:]
    assert (entry["operation"], entry["outcome"], entry["input_tokens"], entry["cost"]) == ("attest", "OK", 0, 0)
    policy = appliance.state / "policy.yaml"
    policy.write_text(policy.read_text().replace("  alpha:\n", "  alpha:\n    features: {attestation: false}\n"))
    assert httpx.post(appliance.ready["admin"] + "/reload", timeout=10, verify=PLAIN).status_code == 200
    assert (ask(appliance).status_code, ask(appliance, "beta").status_code) == (403, 200)
    with pytest.raises(grpc.RpcError) as refused:
        attest_by_grpc(appliance)
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


def attest_by_grpc(appliance: Appliance) -> inference_pb2.AttestResponse:
    """The answer over gRPC."""
    with grpc.insecure_channel(appliance.ready["grpc"]) as channel:
        return inference_pb2_grpc.InferenceServiceStub(channel).Attest(
            inference_pb2.AttestRequest(model=MODEL, nonce=NONCE),
            metadata=[("authorization", f"Bearer {appliance.key('alpha')}")],
            timeout=30,
        )


def test_a_model_of_another_is_not_attested(appliance: Appliance) -> None:
    """A model that is not there and one that is nobody's are refused alike, with 404; a nonce that is none with 400.
    Control: the tenant's own."""
    assert ask(appliance).status_code == 200
    assert ask(appliance, model="other").json()["error"]["code"] == "model_not_found"
    assert (ask(appliance, nonce="x").status_code, ask(appliance, nonce="x").json()["error"]["param"]) == (400, "nonce")
