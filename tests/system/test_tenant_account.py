"""A real appliance tells a tenant its limits and its usage, by both APIs, and nobody else's."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from appliance.gateway.grpc.generated import usage_pb2, usage_pb2_grpc
from appliance.operator.cli.key import create_key
from tests.system.conftest import PLAIN, Appliance

pytestmark = pytest.mark.runsc

MODEL = "athanor-mini"
COUNTED_S = 10.0
"""Longest until an ended request is in the usage: the log's delay, and the time for which an answer is given again."""


def newcomer(appliance: Appliance, tenant: str) -> str:
    """Take a tenant in that has asked for nothing yet; gives its key."""
    made = create_key(tenant, f"{tenant}-1", appliance.state / "credentials.json", appliance.state / "pepper")
    limits = "{requests_per_minute: 600, tokens_per_minute: 100000, concurrency: 8}"
    policy = appliance.state / "policy.yaml"
    row = f'  {tenant}: {{credentials: ["key:{tenant}-1"], models: ["*"], limits: {limits}}}\n'
    policy.write_text(policy.read_text().replace("  beta:\n", row + "  beta:\n"))
    httpx.post(appliance.ready["admin"] + "/reload", timeout=30, verify=PLAIN).raise_for_status()
    return made.key


def get(appliance: Appliance, path: str, key: str) -> dict[str, Any]:
    """The answer to a tenant's request."""
    headers = {"authorization": f"Bearer {key}"}
    answer = httpx.get(appliance.ready["http"] + path, headers=headers, timeout=30, verify=PLAIN)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_what_a_request_used_is_told_to_its_tenant(governed: Appliance) -> None:
    """One request is missing from the limits at once, and in the usage of day and month within seconds, with the
    tokens that the answer named; gRPC and a watch tell the same. Another tenant's account does not change."""
    appliance = governed
    key, others = newcomer(appliance, "ann-and-co"), newcomer(appliance, "bob-and-co")
    before = {one["name"]: one["left"] for one in get(appliance, "/v1/limits", key)["limits"]}
    headers = {"authorization": f"Bearer {key}"}
    body = {"model": MODEL, "messages": [{"role": "user", "content": "What is a sandbox?"}], "max_tokens": 8}
    body["user"] = "ann@example.org"
    answer = httpx.post(
        appliance.ready["http"] + "/v1/chat/completions", json=body, headers=headers, timeout=60, verify=PLAIN
    )
    used = answer.json()["usage"]
    after = {one["name"]: one["left"] for one in get(appliance, "/v1/limits", key)["limits"]}
    assert before["requests_per_minute"] - after["requests_per_minute"] in (0, 1)  # a second gives one back
    assert after["concurrency"] == before["concurrency"]
    until = time.monotonic() + COUNTED_S
    while not (found := get(appliance, "/v1/usage", key))["day"]["models"]:
        assert time.monotonic() < until
        time.sleep(0.2)
    (row,) = found["day"]["models"]
    assert (row["model"], row["requests"]) == (MODEL, 1)
    assert (row["input_tokens"], row["output_tokens"]) == (used["prompt_tokens"], used["completion_tokens"])
    assert found["month"]["total"] == found["day"]["total"]
    (user,) = found["day"]["users"]
    assert {**user, "user": ""} == {**{key: value for key, value in row.items() if key != "model"}, "user": ""}
    assert "ann" not in user["user"] and found_by_name(appliance, key) == [user]
    assert get(appliance, "/v1/usage?user=bob", key)["day"]["users"] == []
    with grpc.insecure_channel(appliance.ready["grpc"]) as channel:
        stub = usage_pb2_grpc.UsageServiceStub(channel)
        proof = [("authorization", f"Bearer {key}")]
        usage = stub.GetUsage(usage_pb2.GetUsageRequest(), metadata=proof, timeout=30).usage
        assert usage.day.models[0].output_tokens == row["output_tokens"]
        watched = next(stub.WatchUsage(usage_pb2.WatchUsageRequest(), metadata=proof, timeout=30))
        assert (watched.sequence, watched.usage, watched.limits.tenant) == (0, usage, "ann-and-co")
    other = get(appliance, "/v1/usage", others)
    assert (other["tenant"], other["month"]["models"], other["month"]["users"]) == ("bob-and-co", [], [])
    assert get(appliance, "/v1/usage?user=ann%40example.org", others)["month"]["users"] == []


def found_by_name(appliance: Appliance, key: str) -> list[Any]:
    """Users of today whom the tenant asks for by the name that it gave them."""
    return list(get(appliance, "/v1/usage?user=ann%40example.org", key)["day"]["users"])


def test_the_commands_of_the_document_work(appliance: Appliance, root: Path) -> None:
    """docs/usage.md asks for both, as a tenant does."""
    text = (root / "docs" / "usage.md").read_text(encoding="utf-8")
    block = text.partition("```sh account\n")[2].partition("```")[0]
    told = []
    for line in block.splitlines():
        done = subprocess.run(
            ["/bin/sh", "-c", line],
            env={**os.environ, "ADDRESS": appliance.ready["http"], "KEY": appliance.key("alpha")},
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
        told.append(json.loads(done.stdout)["object"])
    assert told == ["limits", "usage"]
