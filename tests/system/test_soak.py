"""The soak as it is typed: a few faults, every control, and the exit codes; CI runs three minutes of it besides."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.runsc


def soak(root: Path, *arguments: str, timeout_s: float = 30.0) -> subprocess.CompletedProcess[str]:
    """Run it to its end, in a process of its own: it moves into a mount namespace."""
    return subprocess.run(
        [sys.executable, "-m", "bench.soak", *arguments],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def test_a_fault_that_there_is_not_is_refused_with_those_there_are(root: Path) -> None:
    """Exit code 2, and the list; nothing is started."""
    done = soak(root, "--fault", "kill-cat")
    assert (done.returncode, done.stdout) == (2, "")
    assert "kill-engine" in done.stderr


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts private disks: needs root")
def test_six_faults_of_different_kinds_leave_everything_as_it_was(root: Path, runsc_path: Path, tmp_path: Path) -> None:
    """A death, a hang, a full disk, descriptors, a damaged file and a policy: all survived, every control seen."""
    if root.is_relative_to("/tmp"):
        pytest.skip("this checkout lies in /tmp, which is an empty disk to the soak")
    faults = ("kill-engine", "nap-engine", "disk-audit", "fds-boot", "corrupt-spill", "policy-loop")
    chosen = [word for fault in faults for word in ("--fault", fault)]
    done = soak(root, *chosen, "--minutes", "6", "--turns", "6", "--json", str(tmp_path / "soak.json"), timeout_s=380)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "soak.json").read_text())
    assert [turn["fault"] for turn in found["turns"]] == list(faults)
    assert all(control["seen"] for control in found["controls"])
    assert found["heard"]["right"] > 100
