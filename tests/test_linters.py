"""Style, types, import contracts, shell: the tools' verdicts as tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent


def run(root: Path, *argv: str) -> None:
    """Run a tool; its output is the message when it is not content."""
    done = subprocess.run([str(BIN / argv[0]), *argv[1:]], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_ruff_finds_nothing(root: Path) -> None:
    """Style, imports, docstrings, complexity and banned names are as pyproject.toml asks."""
    run(root, "ruff", "check", ".")


@pytest.mark.timeout(300)
def test_mypy_finds_nothing(root: Path) -> None:
    """All four packages type-check strictly."""
    run(root, "mypy")


def test_import_contracts_hold(root: Path) -> None:
    """Who may import whom: the walls between the packages."""
    run(root, "lint-imports", "--no-cache")


def test_import_contracts_can_break(root: Path, tmp_path: Path) -> None:
    """Positive control: with a forbidden import added, the same tool objects."""
    import shutil

    for name in ("appliance", "bench", "engine", "isolation", "policy"):
        shutil.copytree(root / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(root / "pyproject.toml", tmp_path)
    with (tmp_path / "policy" / "evaluate.py").open("a") as file:
        file.write("\nimport time\n")
    done = subprocess.run(
        [str(BIN / "lint-imports"), "--no-cache"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "Decisions are pure BROKEN" in done.stdout


def test_shell_scripts_are_sound(root: Path) -> None:
    """Every tracked shell script passes shellcheck."""
    listed = subprocess.run(
        ["git", "ls-files", "*.sh", ".ci/run"], cwd=root, capture_output=True, text=True, check=True
    ).stdout.split()
    assert ".ci/run" in listed
    run(root, "shellcheck", *listed)
