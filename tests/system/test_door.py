"""The stranger's hour as it is typed: a few seconds of one attack, and the three minutes of all of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.strangers import ATTACKS

pytestmark = pytest.mark.runsc


def door(
    root: Path, *arguments: str, timeout_s: float = 60.0, figures: Path | None = None
) -> tuple[int, Any, subprocess.CompletedProcess[str]]:
    """Run it to its end, in a process of its own: it moves into a network namespace. Gives exit code, figures and
    output."""
    asked = ["--json", str(figures)] if figures else []
    done = subprocess.run(
        [sys.executable, "bench/door.py", *arguments, *asked],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    found = json.loads(figures.read_text()) if figures and figures.exists() else None
    return done.returncode, found, done


def test_the_attacks_are_listed_with_their_rates(root: Path) -> None:
    """Each attack has a line with its rate and what it does; a name that is none is refused."""
    code, _, done = door(root, "--list")
    assert code == 0
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(ATTACKS)
    code, _, done = door(root, "--only", "rapid-rest")
    assert (code, done.stdout) == (2, "")


@pytest.mark.timeout(400)
@pytest.mark.full
def test_wrong_keys_for_seconds_fail_no_request_of_a_tenant(root: Path, runsc_path: Path, tmp_path: Path) -> None:
    """The harness from end to end on a real appliance: the control is seen, the attackers reach the gateway, tenants
    are answered on open and on new connections, and the gateway holds nothing afterwards. Times are for the long
    form."""
    chosen = ("--only", "wrong-keys-http", "--ground", "plain4", "--addresses", "8")
    seconds = ("--seconds", "3", "--calm", "4")
    code, found, done = door(root, *chosen, *seconds, timeout_s=380, figures=tmp_path / "door.json")
    assert code in (0, 1), done.stdout + done.stderr
    (figures,) = found
    assert figures["control"] > 3
    row, whole = figures["rows"]
    assert (row["attack"], row["addresses"]) == ("wrong-keys-http", 8)
    assert row["reached"]["rate"] > 0
    assert row["asked"] > 0
    assert row["new"] > 0
    for one in (row, whole):
        assert set(one["breaches"]) <= {"TTFT"}, done.stdout


@pytest.mark.full
@pytest.mark.timeout(1_200)
def test_three_minutes_of_every_attack_keep_to_the_bars(root: Path, runsc_path: Path, tmp_path: Path) -> None:
    """Each attack for seconds from 64 addresses, those on TLS over TLS: every bar holds, and the control is seen."""
    code, found, done = door(root, "--short", timeout_s=1_100, figures=tmp_path / "door.json")
    assert code == 0, done.stdout + done.stderr
    assert {row["attack"] for figures in found for row in figures["rows"]} >= set(ATTACKS)
    assert all(figures["control"] > 3 for figures in found)
