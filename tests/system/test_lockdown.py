"""What the operator sees when a sandbox breaks its lock-down."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx

from appliance.operator.precedence import NICENESS
from tests.system.conftest import PLAIN, Appliance
from tests.system.test_deaths import host_pid

NICE = 16
"""Place of the nice value behind the name in proc(5)'s ``stat``."""


def niceness(task: Path) -> int:
    """Nice value of a thread."""
    return int((task / "stat").read_text().rpartition(")")[2].split()[NICE])


def test_the_gateways_loop_has_precedence(battered: Appliance) -> None:
    """Its thread is served before threads that compute; those that it made are not, and the supervisor is not. Where
    this user may not take the nice value, it has that of all others."""
    may = subprocess.run([sys.executable, "-c", f"import os; os.setpriority(0, 0, {NICENESS})"], check=False)
    gateway, supervisor = host_pid(battered, "gateway"), host_pid(battered, "supervisor")
    httpx.post(battered.ready["admin"] + "/reload", timeout=30, verify=PLAIN).raise_for_status()  # Read in a thread.
    found = {int(task.name): niceness(task) for task in Path(f"/proc/{gateway}/task").iterdir()}
    own = found.pop(gateway)
    assert own == NICENESS if may.returncode == 0 else own >= 0
    assert found and set(found.values()) <= {0, *range(1, 20)}, found
    assert niceness(Path(f"/proc/{supervisor}")) >= 0


def test_a_breach_is_told_in_words_and_the_sandbox_comes_back(battered: Appliance, runsc_path: Path) -> None:
    """SIGSYS ends engine or text worker: the log names what that means, a fresh one is booted, and it serves."""
    client = battered.openai()
    for room in ("engine", "text"):
        before = battered.status()["models"][0][room]
        earlier = battered.log.stat().st_size
        command = Path(f"/proc/{before['pid']}/cmdline").read_bytes().split(b"\0")
        root = next(word.decode() for word in command if word.startswith(b"--root="))
        subprocess.run([str(runsc_path), root, "kill", f"{room}-athanor-mini", "SYS"], check=True, timeout=30)
        battered.wait_generation(room, before["generation"])
        log = battered.log.read_bytes()[earlier:].decode(errors="replace")
        down = next(line for line in log.splitlines() if "sandbox is down" in line and f"{room}-athanor-mini" in line)
        assert "SIGSYS" in down
        assert "made a system call beyond its lock-down" in down
        answer = client.completions.create(model="athanor-mini", prompt="Count:", max_tokens=4, temperature=0)
        assert answer.usage is not None
        assert answer.usage.completion_tokens > 0
