"""What the operator sees when a sandbox breaks its lock-down."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.system.conftest import Appliance


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
