"""Reloads under load: each decision is of one policy, and no request that both policies allow notices anything."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from ruamel.yaml import YAML

from policy.files import read_sources
from policy.loader import load_policy
from tests.system.audit_files import written
from tests.system.conftest import PLAIN, Appliance
from tests.system.test_audit import LOOK_S

pytestmark = [pytest.mark.runsc, pytest.mark.timeout(900)]

TOKENS = 12
"""Output tokens of each request: a few reloads pass while it runs."""

LEAST_SHARE = 0.1
"""Least part of the requests that each of the two policies has to have decided."""


def three_policies(path: Path) -> dict[str, str]:
    """Texts of a policy by their digests; in the second alpha has other limits and another model pattern, in the third
    it may not use the model."""
    yaml, found = YAML(), {}
    for number, limits in enumerate(({"concurrency": 60}, {"concurrency": 61, "requests_per_minute": 900_000}, {})):
        policy = yaml.load(path)
        for tenant in policy["tenants"].values():
            tenant["limits"] = {"requests_per_minute": 1_000_000, "tokens_per_minute": 1_000_000_000}
        policy["tenants"]["alpha"]["limits"].update(limits)
        policy["tenants"]["alpha"]["models"] = [("*", "athanor-*", "none")[number]]
        draft = path.parent / f"draft-{number}.yaml"
        with draft.open("w") as file:
            yaml.dump(policy, file)
        text = draft.read_text()
        found[load_policy(read_sources(draft)).digest] = text
        draft.unlink()
    assert len(found) == 3
    return found


def keep_asking(appliance: Appliance, tenant: str, stop: threading.Event, outcomes: list[str]) -> None:
    """Ask as a tenant, in turn for a stream and for a whole answer; notes what became of each request."""
    headers, url = {"authorization": f"Bearer {appliance.key(tenant)}"}, appliance.ready["http"] + "/v1/completions"
    body: dict[str, Any] = {"model": "athanor-mini", "prompt": "Count", "max_tokens": TOKENS, "ignore_eos": True}
    with httpx.Client(verify=PLAIN, timeout=60, headers=headers) as client:
        while not stop.is_set():
            body["stream"] = not body.get("stream")
            try:
                answer = client.post(url, json=body)
            except httpx.HTTPError as error:
                outcomes.append(repr(error))
                continue
            whole = answer.text.endswith("data: [DONE]\n\n") if body["stream"] else answer.status_code == 200
            outcomes.append("whole" if whole and '"error"' not in answer.text else answer.text[-300:])


@pytest.mark.parametrize("reloads", [12, pytest.param(1_000, marks=pytest.mark.full)])
def test_reloads_under_load_drop_nothing(governed: Appliance, reloads: int) -> None:
    """So many reloads, one right after the other, between two policies that both allow what four clients ask: all
    answers are whole, each request was decided under one of the two policies, and both decided a good part. Control: a
    policy that does not allow alpha's model has its requests refused at once."""
    path = governed.state / "policy.yaml"
    (first, second, without) = (texts := three_policies(path))
    stop, outcomes = threading.Event(), list[str]()
    askers = [
        threading.Thread(target=keep_asking, args=(governed, tenant, stop, outcomes))
        for tenant in ("alpha", "beta") * 2
    ]
    put(governed, texts[first])
    before = len(all_entries(governed))
    for asker in askers:
        asker.start()
    try:
        for number in range(reloads):
            put(governed, texts[(second, first)[number % 2]])
    finally:
        stop.set()
        for asker in askers:
            asker.join()
    assert set(outcomes) == {"whole"} and len(outcomes) > reloads / 10
    deadline = time.monotonic() + LOOK_S
    while len(logged := requests_in(all_entries(governed)[before:], (first, second))) < len(outcomes):
        assert time.monotonic() < deadline, (len(logged), len(outcomes))
        time.sleep(0.1)
    decided = {digest: sum(one["policy"] == digest for one in logged) for digest in (first, second)}
    assert sum(decided.values()) == len(logged) == len(outcomes)
    assert min(decided.values()) > LEAST_SHARE * len(logged), decided
    put(governed, texts[without])
    refused: list[str] = []
    once = threading.Event()
    asker = threading.Thread(target=keep_asking, args=(governed, "alpha", once, refused))
    asker.start()
    while not refused:
        once.wait(0.05)
    once.set()
    asker.join()
    assert "whole" not in refused


def put(appliance: Appliance, text: str) -> None:
    """Put a policy in force."""
    (appliance.state / "policy.yaml").write_text(text)
    answer = httpx.post(appliance.ready["admin"] + "/reload", timeout=30, verify=PLAIN)
    assert answer.status_code == 200, answer.text


def requests_in(found: list[dict[str, Any]], policies: tuple[str, str]) -> list[dict[str, Any]]:
    """Those about requests under these policies; a request of a test before may be written late, under another."""
    return [one for one in found if one["kind"] == "request" and one["policy"] in policies]


def all_entries(appliance: Appliance) -> list[dict[str, Any]]:
    """All entries of the audit log, as they are in its files."""
    return written(appliance.state / "audit")
