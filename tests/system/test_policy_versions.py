"""Policies that are put in force and taken back, on a real appliance: the document's commands, and what they do."""

from __future__ import annotations

import json
import re
import select
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import yaml

from appliance.common.catalog import embedded_model
from appliance.operator.demo import DemoOptions, choose_ports, prepare_keys, prepare_policy, write_config
from tests.system import commands
from tests.system.conftest import ATHANOR, PLAIN, Appliance, checkpoints

pytestmark = [pytest.mark.runsc, pytest.mark.timeout(120)]

START_S = 60.0
"""Seconds for a start, and for an end."""

KEPT_S = 10.0
"""Seconds within which a policy that came into force is kept."""


CHANGES = ("apply", "rollback", "add", "remove")
"""Commands that put something in force."""


def athanor(appliance: Appliance, *words: str) -> str:
    """Run a command of `athanor policy` or `tenant` for this appliance, without questions; gives what it printed."""
    change = ["--admin", appliance.ready["admin"], "--yes"] if words[1] in CHANGES else []
    done = commands.athanor(*words, "--config", str(appliance.state / "athanor.yaml"), *change)
    assert done.returncode == 0, (done.args, done.stdout, done.stderr)
    return done.stdout


def versions(appliance: Appliance, newest: int) -> list[int]:
    """Numbers of the history, once the newest is there."""
    deadline = time.monotonic() + KEPT_S
    while True:
        rows = json.loads(athanor(appliance, "policy", "history", "-o", "json"))["versions"]
        if rows and rows[0]["version"] >= newest:
            return [row["version"] for row in rows]
        assert time.monotonic() < deadline, rows
        time.sleep(0.1)


@pytest.mark.full
def test_a_tenant_comes_and_goes(battered: Appliance) -> None:
    """One command makes a tenant whose printed key is answered at once; a content rule and a limit of end users hold;
    one command more, and the key is refused, the policy's text is that from before, and the history has all three."""
    path = battered.state / "policy.yaml"
    text, known = path.read_text(), versions(battered, 1)[0]
    told = athanor(battered, "tenant", "add", "newcomer", "--models", "*", "--key")
    found = re.search(r"ath_newcomer-\S+", told)
    assert found is not None
    client = battered.openai().with_options(api_key=found[0], max_retries=0)

    def ask(**fields: object) -> object:
        return client.completions.create(model="athanor-mini", prompt="Hello", max_tokens=2, **fields)  # type: ignore[call-overload]

    assert ask(user="ann")
    # What another policy replaces before the supervisor has read its file is not kept, and commands take no time here.
    assert versions(battered, known + 1)[0] == known + 1
    assert "newcomer" in athanor(battered, "tenant", "list", "--admin", battered.ready["admin"])
    new = battered.state / "new.yaml"
    rules = "    content: {denied_fields: [seed]}\n    end_users: {concurrency: 1}\n"
    new.write_text(path.read_text().replace("  newcomer:\n", f"  newcomer:\n{rules}"))
    athanor(battered, "policy", "apply", str(new))
    assert ask(user="ann")
    assert versions(battered, known + 2)[0] == known + 2
    with pytest.raises(openai.PermissionDeniedError, match="may not use the field seed") as refused:
        ask(seed=1)
    assert refused.value.param == "seed"
    with pytest.raises(openai.BadRequestError, match="this end user may have 1"):
        ask(n=2)
    athanor(battered, "tenant", "remove", "newcomer")
    with pytest.raises(openai.AuthenticationError):
        ask()
    assert path.read_text() == text
    assert versions(battered, known + 3)[0] == known + 3


def test_a_policy_is_applied_kept_and_rolled_back(battered: Appliance, root: Path, tmp_path: Path) -> None:
    """The start's policy is the first version. Applied, a new one decides requests at once and is the second; the
    document's commands run; a rollback brings the old decisions and the old digest back."""
    path = battered.state / "policy.yaml"
    before, text = battered.status()["policy"]["digest"], path.read_text()
    first = versions(battered, 1)[0]
    new = tmp_path / "new.yaml"
    new.write_text(text.replace('models: ["*"]', 'models: ["nothing-here"]', 1))
    assert "may no longer use" in athanor(battered, "policy", "apply", str(new))
    with pytest.raises(openai.APIStatusError) as refused:
        battered.openai().completions.create(model="athanor-mini", prompt="Hello", max_tokens=2)
    assert refused.value.status_code in (403, 404)
    assert versions(battered, first + 1)[:2] == [first + 1, first]
    section = (root / "docs/policy.md").read_text().partition("## Put in force")[2].partition("\n## ")[0]
    commands = [
        line.partition("#")[0]
        for block in re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
        for line in block.splitlines()
    ]
    shown = [command for command in commands if "history" in command]
    assert len(shown) == len(commands) - 2 == 3
    for command in shown:
        program, *words = shlex.split(re.sub(r" 7\b", f" {first + 1}", command))
        assert program == "athanor"
        assert athanor(battered, *words)
    assert "may use" in athanor(battered, "policy", "rollback")
    assert battered.status()["policy"]["digest"] == before
    assert path.read_text() == text
    assert battered.openai().completions.create(model="athanor-mini", prompt="Hello", max_tokens=2).choices
    assert versions(battered, first + 2)[0] == first + 2
    assert "in force" in athanor(battered, "policy", "rollback", str(first))


def test_a_shadow_decides_without_effect(battered: Appliance, root: Path, tmp_path: Path) -> None:
    """A policy that takes the model away is tried: the request is served, the table says by which rule it would not
    have been, and the metric counts it. With `--off` nothing is tried any more."""
    appliance, new = battered, tmp_path / "new.yaml"
    section = (root / "docs" / "policy.md").read_text().partition("## Try it on the requests")[2].partition("\n## ")[0]
    block = section.partition("```sh\n")[2].partition("```")[0]
    shown = [shlex.split(line.partition("#")[0])[1:] for line in block.splitlines()]
    assert shown == [["policy", "shadow", "new.yaml"], ["policy", "shadow"], ["policy", "shadow", "--off"]]
    text = (appliance.state / "policy.yaml").read_text()
    new.write_text(text.replace('models: ["*"]', 'models: ["nothing-here"]', 1))
    admin = ["--admin", appliance.ready["admin"]]
    athanor(appliance, "policy", "shadow", str(new), *admin)
    assert appliance.openai().completions.create(model="athanor-mini", prompt="Hello", max_tokens=2).choices
    found = json.loads(athanor(appliance, "policy", "shadow", *admin, "-o", "json"))
    (row,) = found["rows"]
    assert (row["tenant"], row["verdict"], row["requests"]) == ("alpha", "refuses", 1)
    assert row["rule"] == "tenants.alpha.models"
    metrics = httpx.get(appliance.ready["admin"] + "/metrics", timeout=10, verify=PLAIN).text
    assert re.search(r'athanor_policy_shadow_decisions_total\{[a-z_]*verdict="refuses"\} 1.0', metrics)
    assert "no policy is tried" in athanor(appliance, "policy", "shadow", "--off", *admin)
    assert json.loads(athanor(appliance, "policy", "shadow", *admin, "-o", "json"))["digest"] == ""


@pytest.fixture
def signed(tmp_path: Path, root: Path, runsc_path: Path) -> Iterator[tuple[Appliance, list[str]]]:
    """An appliance in a demo's state directory whose configuration asks for signed policies, started by
    `athanor serve`; and the document's command, which signs its policy."""
    state, log = tmp_path / "state", tmp_path / "log"
    state.mkdir(mode=0o700)
    prepare_keys(state)
    prepare_policy(state)
    text = (root / "docs" / "policy.md").read_text().partition("## Signed policies")[2].partition("```sh\n")[2]
    program, *words = shlex.split(text.partition("\n")[0].partition("#")[0])
    places = {"athanor": ATHANOR, "policy.yaml": str(state / "policy.yaml"), "policy.key": str(state / "policy.key")}
    sign = [places.get(word, word) for word in (program, *words)]
    public = subprocess.run(sign, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    options = DemoOptions(*choose_ports((0, 0, 0)), state_dir=state, checkpoints=checkpoints())
    config = write_config(state, options, {"athanor-mini": embedded_model()})
    config.write_text(json.dumps(yaml.safe_load(config.read_text()) | {"policy_keys": [public]}))
    with log.open("wb") as stderr:
        process = subprocess.Popen([ATHANOR, "serve", "--config", str(config)], stdout=subprocess.PIPE, stderr=stderr)
    try:
        assert process.stdout is not None
        line = process.stdout.readline() if select.select([process.stdout], [], [], START_S)[0] else b""
        assert line, log.read_text()[-4_000:]
        yield Appliance(process, json.loads(line), state, log), sign
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(START_S)


@pytest.mark.full
def test_an_unsigned_policy_changes_nothing_on_a_real_appliance(signed: tuple[Appliance, list[str]]) -> None:
    """An edited policy is refused by a reload that says so, and the one in force goes on; signed, it is in force."""
    appliance, sign = signed
    policy, before = appliance.state / "policy.yaml", appliance.status()["policy"]["digest"]
    policy.write_text(policy.read_text().replace("  alpha:\n", "  alpha:\n    weight: 3\n"))
    refused = httpx.post(appliance.ready["admin"] + "/reload", timeout=10, verify=PLAIN)
    assert (refused.status_code, "not signed as it is now" in refused.json()["problems"][0]) == (409, True)
    assert appliance.status()["policy"]["digest"] == before
    subprocess.run(sign, capture_output=True, check=True, timeout=60)
    taken = httpx.post(appliance.ready["admin"] + "/reload", timeout=10, verify=PLAIN)
    assert (taken.status_code, taken.json()["digest"] != before) == (200, True)
