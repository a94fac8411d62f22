"""The documents name only what exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from appliance.cli import exits
from appliance.cli.app import app

DOCUMENTS = ("README.md", "ARCHITECTURE.md", "SECURITY.md", "docs/sampling.md", "docs/install.md", "docs/operate.md",
             "docs/console.md", "docs/observability.md")
PLACES = ("", "docs/", "docs/monitoring/", "appliance/", "engine/", "isolation/", "isolation/ipc/",
          "appliance/api/", "tests/appliance/gateway/", "tests/appliance/api/")
"""Where a path in a document may begin."""


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_path_in_a_document_exists(root: Path, name: str) -> None:
    """What looks like a file or folder of ours is one."""
    text = (root / name).read_text()
    words = re.findall(r"[`(]([a-zA-Z_][\w./-]*(?:\.py|\.md|\.yaml|/))[`)]", text)
    assert words
    made = ("policy.yaml", "athanor.yaml", ".athanor/")
    missing = [
        word for word in words if word not in made and not any((root / place / word).exists() for place in PLACES)
    ]
    assert missing == []


def test_make_targets_in_the_documents_exist(root: Path) -> None:
    """Every `make X` that a document names is a target."""
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.MULTILINE))
    pattern = re.compile(r"(?:`|^    )make ([a-z]+)", re.MULTILINE)
    named = {word for name in DOCUMENTS for word in pattern.findall((root / name).read_text())}
    assert {"run", "test"} <= named <= targets


def test_every_command_is_documented_and_every_documented_one_exists(root: Path) -> None:
    """The table of docs/operate.md and the command line name the same commands."""
    text = (root / "docs/operate.md").read_text()
    table = text.partition("## Commands")[2].partition("##")[0]
    documented = set(re.findall(r"`athanor ([a-z ]+)`", table))
    command = typer.main.get_command(app)
    existing = set()
    for name, one in command.commands.items():  # type: ignore[attr-defined]
        below = getattr(one, "commands", None)
        existing |= {name} if below is None else {f"{name} {inner}" for inner in below}
    assert documented == existing


def test_exit_codes_are_documented(root: Path) -> None:
    """The table of docs/operate.md has each code of the command line, and no other."""
    codes = {value for name, value in vars(exits).items() if name.isupper()}
    table = (root / "docs/operate.md").read_text().partition("## Exit codes")[2].partition("##")[0]
    assert {int(code) for code in re.findall(r"^\| (\d) \|", table, re.MULTILINE)} == codes


def test_indented_commands_of_the_operators_guide_run(root: Path, tmp_path: Path) -> None:
    """The doctor's line ends well on any machine where nothing is a problem, and prints the summary."""
    (line,) = re.findall(r"^    (athanor .*)$", (root / "docs/operate.md").read_text(), re.MULTILINE)
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    done = subprocess.run(
        ["sh", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "'problem':" in done.stdout
