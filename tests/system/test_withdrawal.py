"""A reload reaches answers that are running: what does not hold any more ends within a second, the rest goes on."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pytest

from appliance.gateway.grpc.generated import inference_pb2, inference_pb2_grpc
from tests.system.conftest import PLAIN, Appliance

pytestmark = [pytest.mark.runsc, pytest.mark.timeout(180)]

STREAMS = {1: 4, 2: 16}
"""Of each API, at once, by the number of rounds: enough that the engine takes seconds for their answers."""

TOKENS = 3_500
"""Of each answer; the model's context has 4,096."""

MOST_S = 1.0
"""From the reload to the last byte."""


@dataclass
class Answer:
    """How one stream went."""

    code: str = ""
    """Error that ended it; empty when it came to its end."""
    chunks: int = 0
    last_at: float = 0.0
    """Time of its last byte."""


async def over_http(client: httpx.AsyncClient, url: str, key: str, answer: Answer, tokens: int = TOKENS) -> None:
    """One completion as server-sent events."""
    body = {"model": "athanor-mini", "prompt": "Count:", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    async with client.stream("POST", url, json=body, headers={"authorization": f"Bearer {key}"}) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                answer.chunks += 1
                answer.last_at = time.monotonic()
                answer.code = (json.loads(line[6:]).get("error") or {}).get("code", "")
    answer.last_at = time.monotonic()


async def over_grpc(stub: inference_pb2_grpc.InferenceServiceStub, key: str, answer: Answer) -> None:
    """One answer over gRPC."""
    request = inference_pb2.GenerateRequest(
        model="athanor-mini", text="Count:", max_output_tokens=TOKENS, ignore_eos=True
    )
    try:
        async for _ in stub.Generate(request, metadata=(("authorization", f"Bearer {key}"),)):
            answer.chunks += 1
    except grpc.aio.AioRpcError as error:
        answer.code = error.code().name
    answer.last_at = time.monotonic()


@pytest.fixture
def governed(appliance: Appliance) -> Iterator[Appliance]:
    """The shared demo, whose policy and keys are afterwards what they were."""
    files = [appliance.state / name for name in ("policy.yaml", "credentials.json")]
    before = [file.read_text() for file in files]
    yield appliance
    for file, text in zip(files, before, strict=True):
        file.write_text(text)
    assert httpx.post(appliance.ready["admin"] + "/reload", timeout=30, verify=PLAIN).status_code == 200


def revoke(state: Path) -> tuple[str, str]:
    """Revoke the first tenant's key; gives the codes that both APIs tell."""
    path = state / "credentials.json"
    table = json.loads(path.read_text())
    name = next(key for key in table["keys"] if key.startswith("alpha"))
    table["keys"][name]["revoked"] = True
    path.write_text(json.dumps(table))
    return "invalid_api_key", "UNAUTHENTICATED"


def remove(state: Path) -> tuple[str, str]:
    """Remove the first tenant."""
    path = state / "policy.yaml"
    text = path.read_text()
    head, rest = text[: text.index("  alpha:")], text[text.index("  alpha:") :]
    path.write_text(head + rest[rest.index("  beta:") :])
    return "invalid_api_key", "UNAUTHENTICATED"


def take_model(state: Path) -> tuple[str, str]:
    """Give the first tenant another model."""
    path = state / "policy.yaml"
    text = path.read_text()
    place = text.index("models:", text.index("  alpha:"))
    end = text.index("\n", place)
    path.write_text(text[:place] + 'models: ["another"]' + text[end:])
    return "model_not_allowed", "PERMISSION_DENIED"


def change_class(state: Path) -> tuple[str, str]:
    """Put the first tenant into another class."""
    path = state / "policy.yaml"
    text = path.read_text()
    place = text.index("    models:", text.index("  alpha:"))
    terms = text[place:].replace("deterministic: allowed", "deterministic: always", 1)
    path.write_text(text[:place] + "    class: strict\n    kv: {reservation: 20%}\n" + terms)
    return "policy_changed", "ABORTED"


THIRD = '  gamma:\n    credentials: ["key:absent"]\n    models: ["*"]\n'
"""A tenant that never calls."""

MEMBERS = "{tenants: [alpha, gamma]}"


def join_group(state: Path) -> tuple[str, str]:
    """Put the first tenant into a sharing group with a third one: from now on it uses the group's blocks."""
    path = state / "policy.yaml"
    text = path.read_text()
    path.write_text(f"{text}{THIRD}\nsharing_groups:\n  one: {MEMBERS}\n")
    return "policy_changed", "ABORTED"


def change_group(state: Path) -> tuple[str, str]:
    """Put the first tenant into another group than its own."""
    path = state / "policy.yaml"
    path.write_text(path.read_text().replace(f"  one: {MEMBERS}", f"  another: {MEMBERS}"))
    return "policy_changed", "ABORTED"


def leave_group(state: Path) -> tuple[str, str]:
    """Dissolve the first tenant's group."""
    path = state / "policy.yaml"
    text = path.read_text()
    path.write_text(text[: text.index("\nsharing_groups:")])
    return "policy_changed", "ABORTED"


GROUPED = (change_group, leave_group)
"""Changes of a tenant that is in a group before."""


EVERY_RUN = (revoke, take_model)
"""Changes that every run has, one of keys and one of the policy: which of them end an answer is decided in one place,
which ``tests/appliance/gateway/request/test_withdrawal.py`` shows for all."""


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(one, marks=() if one in EVERY_RUN else pytest.mark.full)
        for one in (revoke, remove, take_model, change_class, join_group, *GROUPED)
    ],
)
@pytest.mark.parametrize("rounds", [1, pytest.param(2, marks=pytest.mark.full)])
async def test_running_answers_end_when_they_do_not_hold(governed: Appliance, change: object, rounds: int) -> None:
    """On both APIs, with the typed error, within a second of the reload; nothing of them is left in the engine. The
    control: the other tenant's answer comes to its end."""
    assert callable(change)
    if change in GROUPED:
        join_group(governed.state)
    files = {name: (governed.state / name).read_text() for name in ("policy.yaml", "credentials.json")}
    streams = STREAMS[rounds]
    admin, url, key = governed.ready["admin"], governed.ready["http"] + "/v1/completions", governed.key("alpha")
    timeout, limits = httpx.Timeout(60), httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(verify=PLAIN, timeout=timeout, limits=limits) as client,
        grpc.aio.insecure_channel(governed.ready["grpc"]) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        assert (await client.post(admin + "/reload")).status_code == 200
        for _ in range(rounds):
            web, rpc, other = [Answer() for _ in range(streams)], [Answer() for _ in range(streams)], Answer()
            tasks = [asyncio.create_task(over_http(client, url, key, one)) for one in web]
            tasks += [asyncio.create_task(over_grpc(stub, key, one)) for one in rpc]
            while not all(one.chunks > 2 for one in (*web, *rpc)):
                assert not any(task.done() for task in tasks), "an answer ended before the change"
                await asyncio.sleep(0.01)
            tasks.append(asyncio.create_task(over_http(client, url, governed.key("beta"), other, tokens=300)))
            while other.chunks == 0:
                assert not tasks[-1].done(), "the control ended before the change"
                await asyncio.sleep(0.01)
            http_code, grpc_code = change(governed.state)
            assert (await client.post(admin + "/reload")).status_code == 200
            reloaded = time.monotonic()
            await asyncio.gather(*tasks)
            assert {one.code for one in web} == {http_code}
            assert {one.code for one in rpc} == {grpc_code}
            assert max(one.last_at for one in (*web, *rpc)) - reloaded < MOST_S
            assert other.code == "" and other.last_at > reloaded
            engine = (await client.get(admin + "/status")).json()["models"][0]["engine"]
            assert (engine["running"], engine["waiting"]) == (0, 0)
            for name, text in files.items():
                (governed.state / name).write_text(text)
            assert (await client.post(admin + "/reload")).status_code == 200
