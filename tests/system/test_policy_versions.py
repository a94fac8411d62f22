"""Policies that are put in force and taken back, on a real appliance: the document's commands, and what they do."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import time
from pathlib import Path

import openai
import pytest

from tests.system.conftest import ATHANOR, Appliance

pytestmark = [pytest.mark.runsc, pytest.mark.timeout(120)]

KEPT_S = 10.0
"""Seconds within which a policy that came into force is kept."""


def athanor(appliance: Appliance, *words: str) -> str:
    """Run a command of `athanor policy` for this appliance, without questions; gives what it printed."""
    change = ["--admin", appliance.ready["admin"], "--yes"] if words[1] in ("apply", "rollback") else []
    argv = [ATHANOR, *words, "--config", str(appliance.state / "athanor.yaml"), *change]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, (argv, done.stdout, done.stderr)
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
    section = (root / "docs/policy.md").read_text().partition("## Put in force")[2]
    commands = [
        line.partition("#")[0]
        for block in re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
        for line in block.splitlines()
    ]
    shown = [command for command in commands if "history" in command]
    assert len(shown) == len(commands) - 2 == 2
    for command in shown:
        program, *words = shlex.split(command.replace(" 7", f" {first + 1}"))
        assert program == "athanor"
        assert athanor(battered, *words)
    assert "may use" in athanor(battered, "policy", "rollback")
    assert battered.status()["policy"]["digest"] == before
    assert path.read_text() == text
    assert battered.openai().completions.create(model="athanor-mini", prompt="Hello", max_tokens=2).choices
    assert versions(battered, first + 2)[0] == first + 2
    assert "in force" in athanor(battered, "policy", "rollback", str(first))
