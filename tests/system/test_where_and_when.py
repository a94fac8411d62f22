"""Networks and hours of tenants on a real appliance: who is outside is a stranger, and the log says who it was."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import grpc
import httpx
import pytest
from ruamel.yaml import YAML

from appliance.gateway.grpc.generated import inference_pb2, inference_pb2_grpc
from policy.hours import DAYS
from tests.system.conftest import PLAIN, Appliance
from tests.system.test_audit import LOOK_S, entries

pytestmark = pytest.mark.runsc


def use_policy(appliance: Appliance, **keys: list[str]) -> None:
    """Put keys of alpha in force."""
    path, yaml = appliance.state / "policy.yaml", YAML()
    policy = yaml.load(path)
    for name in ("networks", "hours"):
        policy["tenants"]["alpha"].pop(name, None)
    policy["tenants"]["alpha"].update(keys)
    with path.open("w") as file:
        yaml.dump(policy, file)
    httpx.post(appliance.ready["admin"] + "/reload", timeout=30, verify=PLAIN).raise_for_status()


def ask(appliance: Appliance, tenant: str = "alpha", key: str | None = None) -> httpx.Response:
    """The answer to a short request."""
    headers = {"authorization": f"Bearer {key or appliance.key(tenant)}"}
    body = {"model": "athanor-mini", "prompt": "Hi", "max_tokens": 1}
    return httpx.post(appliance.ready["http"] + "/v1/completions", json=body, headers=headers, timeout=30, verify=PLAIN)


def code_by_grpc(appliance: Appliance) -> grpc.StatusCode:
    """The status of a call over gRPC."""
    with grpc.insecure_channel(appliance.ready["grpc"]) as channel:
        try:
            inference_pb2_grpc.InferenceServiceStub(channel).ListModels(
                inference_pb2.ListModelsRequest(),
                metadata=[("authorization", f"Bearer {appliance.key('alpha')}")],
                timeout=30,
            )
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def without_ids(answer: httpx.Response) -> tuple[int, dict[str, object]]:
    """Status and body of an answer."""
    return answer.status_code, answer.json()


def denied_by(appliance: Appliance, rule: str) -> dict[str, Any]:
    """The newest denial of alpha by a rule, once it is in the log; other tests have denials of their own."""
    deadline = time.monotonic() + LOOK_S
    while time.monotonic() < deadline:
        for one in reversed(entries(appliance.state / "audit")):
            if (one["kind"], one.get("tenant"), one.get("rule")) == ("denied", "alpha", rule):
                return one
    raise AssertionError(f"no denial by {rule}")


def test_from_outside_a_credential_is_no_credential(governed: Appliance) -> None:
    """From another network alpha's key is refused in the words in which an unknown one is, over both APIs, and the log
    names the tenant and the rule; beta is served. With its own network in the list alpha is served (control)."""
    use_policy(governed, networks=["10.0.0.0/8", "2001:db8::/32"])
    assert without_ids(ask(governed)) == without_ids(ask(governed, key="ath_nobody-1_" + "0" * 64))
    assert ask(governed).status_code == 401
    assert code_by_grpc(governed) is grpc.StatusCode.UNAUTHENTICATED
    assert ask(governed, "beta").status_code == 200
    assert denied_by(governed, "tenants.alpha.networks")["principal"].startswith("key:alpha")
    use_policy(governed, networks=["10.0.0.0/8", "127.0.0.0/8"])
    assert (ask(governed).status_code, code_by_grpc(governed)) == (200, grpc.StatusCode.OK)
    now = datetime.now(UTC)
    away = f"{DAYS[(now + timedelta(days=3)).weekday()]} 00:00-24:00"
    use_policy(governed, hours=[away])
    refused = ask(governed)
    assert (refused.status_code, f"served at {away} UTC, next in " in refused.json()["error"]["message"]) == (403, True)
    use_policy(governed, hours=[away, f"{DAYS[now.weekday()]} 00:00-24:00", "00:00-24:00"])
    assert ask(governed).status_code == 200
