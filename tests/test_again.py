"""Tests that failed beside others are run once more, alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import again

ROOT = Path(__file__).resolve().parents[1]

UNSTEADY = """
from pathlib import Path
import pytest

pytestmark = pytest.mark.xdist_group("a group")

def test_passes():
    pass

@pytest.mark.parametrize("name", ["a@b"])
def test_fails_once(name):
    path = Path(__file__).with_name("seen")
    if not path.exists():
        path.touch()
        raise AssertionError("the first time")
"""
BROKEN = """
def test_always():
    raise AssertionError("each time")
"""
ALONE = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
"""No other plugins: each takes its time to be imported."""

DEADLY = """
import os

def test_dies():
    os._exit(3)
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest on a folder as `make test` runs it."""
    flags = [
        "-q",
        "-p",
        "xdist",
        "-p",
        "tests.again",
        "-p",
        "no:cacheprovider",
        "--failed-to",
        str(folder / "failed.json"),
    ]
    command = [sys.executable, "-m", "pytest", "--rootdir", str(folder), "-c", "/dev/null", *flags, *arguments]
    return subprocess.run([*command, str(folder)], cwd=ROOT, env=ALONE, capture_output=True, text=True, check=False)


def test_one_that_fails_once_passes_and_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of workers in groups a failure is written under the name that pytest takes, also with an ``@`` of its own, and
    passes alone. Control: beside one that fails each time the whole fails."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "test_unsteady.py").write_text(UNSTEADY)
    done = run(tmp_path, "-n", "2", "--dist", "loadgroup")
    assert done.returncode == 1, done.stdout + done.stderr
    names = json.loads((tmp_path / "failed.json").read_text())
    assert [name.rpartition("::")[2] for name in names] == ["test_fails_once[a@b]"]
    (tmp_path / "failed.json").write_text(json.dumps([f"{tmp_path}/test_unsteady.py::test_fails_once[a@b]"]))
    assert again.run_again(tmp_path / "failed.json") == 0
    assert "failed beside others, passed alone:" in capfd.readouterr().out
    (tmp_path / "test_broken.py").write_text(BROKEN)
    (tmp_path / "failed.json").write_text(json.dumps([f"{tmp_path}/test_broken.py::test_always"]))
    assert again.run_again(tmp_path / "failed.json") == 1


@pytest.mark.full
def test_what_is_no_want_of_processor_is_not_tried_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A worker's death, a run without a failure, and failures in numbers."""
    (tmp_path / "test_deadly.py").write_text(DEADLY)
    assert run(tmp_path, "-n", "1", "--dist", "loadgroup").returncode == 1
    assert not (tmp_path / "failed.json").exists()
    assert again.run_again(tmp_path / "failed.json") == 1
    assert "lost a worker" in capfd.readouterr().err
    for count in (0, again.MOST + 1):
        (tmp_path / "failed.json").write_text(json.dumps(["tests/x.py::test"] * count))
        assert again.run_again(tmp_path / "failed.json") == 1
        assert f"{count} tests failed" in capfd.readouterr().err
