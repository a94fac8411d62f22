"""Tenants of the classes strict and dedicated in the whole appliance: sandboxes of their own, and what they share."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from appliance.operator.demo import run_directory
from tests.appliance.gateway.front.support import post, talk
from tests.system.conftest import PLAIN, Appliance, Batterable

pytestmark = [pytest.mark.runsc, pytest.mark.timeout(180)]

POLICY = """\
version: 1
tenants:
  alpha: {{credentials: ["key:alpha-1"], models: ["*"], class: {alpha}}}
  beta: {{credentials: ["key:beta-1"], models: ["*"], class: {beta}}}
"""


def classes(appliance: Appliance, alpha: str, beta: str) -> None:
    """Put the tenants into these classes."""
    (appliance.state / "policy.yaml").write_text(POLICY.format(alpha=alpha, beta=beta))
    httpx.post(appliance.ready["admin"] + "/reload", timeout=30, verify=PLAIN).raise_for_status()


def ask(appliance: Appliance, tenant: str, **options: object) -> str:
    """The text of one short greedy answer; waits for a sandbox that boots."""
    client = appliance.openai(tenant, max_retries=3)
    fields = {"model": "athanor-mini", "prompt": "The sandbox", "max_tokens": 8, "temperature": 0, **options}
    return client.completions.create(**fields).choices[0].text


def own(appliance: Appliance) -> dict[str, dict[str, object]]:
    """Sandboxes of single tenants, by tenant."""
    return {one["tenant"]: one for one in appliance.status()["own"]}


@pytest.fixture(scope="module")
def classed(batterable: Batterable) -> Iterator[Appliance]:
    """The battered demo with one strict and one dedicated tenant, by a reload; its policy is put back afterwards."""
    appliance = batterable.whole()
    policy = appliance.state / "policy.yaml"
    before = policy.read_text()
    shared = ask(appliance, "alpha", extra_body={"deterministic": True})
    classes(appliance, "strict, kv: {reservation: 40%}", "dedicated")
    assert ask(appliance, "alpha") == ask(appliance, "beta") == shared
    yield appliance
    policy.write_text(before)
    httpx.post(appliance.ready["admin"] + "/reload", timeout=30, verify=PLAIN).raise_for_status()


def test_each_class_has_the_sandboxes_that_it_promises(classed: Appliance) -> None:
    """A strict tenant has a text sandbox of its own beside the shared engine, a dedicated one both."""
    found = own(classed)
    assert found["alpha"]["engine"]["state"] == "shared"
    assert found["alpha"]["text"]["state"] == "ready"
    assert (found["beta"]["engine"]["state"], found["beta"]["text"]["state"]) == ("ready", "ready")
    pids = {one["text"]["pid"] for one in found.values()} | {found["beta"]["engine"]["pid"]}
    shared = {classed.sandbox_pid(role) for role in ("engine", "text")}
    assert len(pids | shared) == 5
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        lines = httpx.get(classed.ready["admin"] + "/metrics", timeout=10, verify=PLAIN).text.splitlines()
        counts = {line.split('role="')[1].split('"')[0]: line[-3:] for line in lines if "sandbox_own{" in line}
        if counts == {"engine": "1.0", "text": "2.0"}:
            break
        time.sleep(0.2)
    assert counts == {"engine": "1.0", "text": "2.0"}


@pytest.mark.parametrize("tenant", ["alpha", "beta"])
async def test_streams_of_both_classes_are_padded(classed: Appliance, tenant: str) -> None:
    """Over a real connection: answers of one token and of forty have the same number of records of the same size, and
    heads of the same size."""
    port = urlsplit(classed.ready["http"]).port
    proof = {"authorization": f"Bearer {classed.key(tenant)}"}
    shapes = []
    for tokens in (1, 40):
        body = {"model": "athanor-mini", "prompt": "The", "stream": True, "max_tokens": tokens, "ignore_eos": True}
        answer = await talk(port, post("/v1/completions", json.dumps(body).encode(), proof), timeout_s=30)
        head, _, rest = answer.partition(b"\r\n\r\n")
        assert b" 200 " in head
        assert rest.count(b'"text":') >= 2
        shapes.append((len(head), rest.count(b"\r\n400\r\n") + rest.startswith(b"400\r\n"), len(rest)))
    assert shapes[0] == shapes[1]
    assert shapes[0][1] == 32


def test_what_ends_the_shared_sandboxes_does_not_touch_the_dedicated_tenant(classed: Appliance) -> None:
    """With the shared engine and text sandbox stopped, the dedicated tenant is answered and nobody else; so its
    requests are in neither."""
    pids = [classed.sandbox_pid(role) for role in ("engine", "text")]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        assert ask(classed, "beta")
        with pytest.raises(openai.APITimeoutError):
            classed.openai("alpha", timeout=1.0).completions.create(model="athanor-mini", prompt="x", max_tokens=1)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.full
def test_the_dedicated_engine_dies_alone(classed: Appliance) -> None:
    """Its death is nobody else's: the shared engine goes on in the same life, and the tenant gets a fresh one."""
    before = classed.status()["models"][0]["engine"]["generation"]
    first = own(classed)["beta"]["engine"]["pid"]
    os.kill(first, signal.SIGKILL)
    assert ask(classed, "alpha")
    assert ask(classed, "beta")
    assert classed.status()["models"][0]["engine"]["generation"] == before
    assert own(classed)["beta"]["engine"]["pid"] != first


def test_a_place_that_is_taken_is_refused_by_name(classed: Appliance) -> None:
    """One engine of a single tenant may be resident: a second dedicated tenant is told so. Sandboxes that the policy
    grants to nobody any more are gone without a trace."""
    classes(classed, "dedicated", "dedicated")
    assert ask(classed, "beta")
    with pytest.raises(openai.InternalServerError) as caught:
        classed.openai("alpha").completions.create(model="athanor-mini", prompt="x", max_tokens=1)
    assert (caught.value.status_code, caught.value.code) == (503, "no_place_left")
    assert int(caught.value.response.headers["retry-after"]) >= 1
    classes(classed, "shared", "shared")
    deadline = time.monotonic() + 20
    folder = run_directory(classed.state) / "ipc"
    while time.monotonic() < deadline and len(list(folder.iterdir())) > 2:
        time.sleep(0.05)
    assert own(classed) == {}
    assert len(list(folder.iterdir())) == 2
