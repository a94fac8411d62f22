"""The audit log of a real appliance: everything is in it, content is not, and it verifies after any end."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.system.commands import athanor
from tests.system.conftest import Appliance

pytestmark = [pytest.mark.runsc, pytest.mark.timeout(180)]

CANARY = "xylophone-quartz-4711"
LOOK_S = 20.0


def entries(folder: Path) -> list[dict[str, Any]]:
    """What the command shows."""
    told = athanor("audit", "show", "--from", str(folder), "--last", "1000000", "-o", "json")
    assert told.returncode == 0, told.stderr
    return list(json.loads(told.stdout))


def wait_for(folder: Path, kind: str, count: int = 1) -> list[dict[str, Any]]:
    """Until so many entries of a kind are written: a second or two. The files are looked at before the command is
    asked, which takes longer to start."""
    deadline = time.monotonic() + LOOK_S
    written = f'"kind":"{kind}"'.encode()
    while sum(path.read_bytes().count(written) for path in folder.glob("*.log")) < count:
        assert time.monotonic() < deadline, f"no entries {kind}"
        time.sleep(0.05)
    while len(found := [one for one in entries(folder) if one["kind"] == kind]) < count:
        assert time.monotonic() < deadline, f"the command shows no entries {kind}"
    return found


def test_everything_is_accounted_for_and_no_content(own_appliance: Appliance) -> None:
    """Requests with rule, policy and outcome, a denial, a wrong key, a reload, an engine that is killed: each is in the
    log; no prompt is; it verifies while it is written and at the end, and does not once it was changed (control)."""
    folder = own_appliance.state / "audit"
    verify = ("audit", "verify", "--from", str(folder))
    client = own_appliance.openai()
    for _ in range(3):
        client.completions.create(model="athanor-mini", prompt=CANARY, max_tokens=2, extra_body={"ignore_eos": True})
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model=CANARY, prompt=CANARY, max_tokens=2)
    for _ in range(5):
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key=CANARY).models.list()
    digest = own_appliance.status()["policy"]["digest"]
    requests = wait_for(folder, "request", 3)
    for one in requests:
        assert (one["tenant"], one["outcome"], one["policy"]) == ("alpha", "OK", digest)
        assert one["principal"].startswith("key:")
        assert (one["rule"] != "", one["output_tokens"]) == (True, 2)
    assert wait_for(folder, "denied")[0]["outcome"] == "MODEL_NOT_FOUND"
    assert sum(one["count"] for one in wait_for(folder, "refused")) == 5
    assert athanor("reload", "--admin", own_appliance.ready["admin"]).returncode == 0
    assert [one["policy"] for one in wait_for(folder, "policy", 2)] == [digest] * 2

    generation = own_appliance.status()["models"][0]["engine"]["generation"]
    os.kill(own_appliance.sandbox_pid("engine"), signal.SIGKILL)
    own_appliance.wait_generation("engine", generation)
    sandboxes = wait_for(folder, "sandbox", 4)
    states = Counter((one["role"], one["state"]) for one in sandboxes)
    assert states == {("engine", "up"): 2, ("engine", "down"): 1, ("text", "up"): 1}
    assert all(len(one["model_digest"]) == 64 for one in sandboxes)
    assert wait_for(folder, "keys", 2)

    live = athanor(*verify)
    assert live.returncode == 0, live.stdout
    own_appliance.stop()
    told = athanor(*verify, "-o", "json")
    report = json.loads(told.stdout)
    assert (told.returncode, report["live"], report["unsigned"]) == (0, False, 0), told.stdout
    kept = [path for path in folder.rglob("*") if path.is_file()]
    assert {path.parent.name for path in kept} == {"audit", "usage", "policies", "names"}
    for path in kept:
        assert CANARY.encode() not in path.read_bytes(), path
    path = next(folder.glob("*.log"))
    path.write_bytes(path.read_bytes().replace(b'"OK"', b'"NO"', 1))
    assert athanor(*verify).returncode == 1
