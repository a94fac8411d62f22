"""``policy check``: problems like a compiler's, tenants when there are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.appliance import golden
from tests.appliance.operator.cli.conftest import Run

GOLDEN = Path(__file__).parent / "golden"

GOOD = """\
version: 1
tenants:
  alpha:
    credentials: ["key:alpha-1"]
    models: ["athanor-mini", "qwen3-*"]
    limits: {requests_per_minute: 6000, concurrency: 8}
  beta-research-group:
    credentials: ["key:beta-1", "spiffe://example.org/tenant/beta"]
    models: ["*"]
    retention: none
"""

BAD = """\
version: 1
tenants:
  alpha:
    credentials: ["key:alpha-1"]
    models: ["*"]
    limits: {burts: 3, concurrency: 0}
  Beta:
    credentials: []
    models: ["*"]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory of its own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("columns", [80, 120])
def test_a_good_policy(run: Run, folder: Path, columns: int) -> None:
    """A policy without problems shows its tenants and limits and ends with 0."""
    (folder / "policy.yaml").write_text(GOOD)
    result = run("policy", "check", "policy.yaml", columns=columns)
    assert result.exit_code == 0
    golden.check(GOLDEN / f"policy-good-{columns}.txt", result.stdout)


def test_problems_like_a_compilers(run: Run, folder: Path) -> None:
    """Every problem has its place, its path, the line and a caret; the end is 1."""
    (folder / "policy.yaml").write_text(BAD)
    result = run("policy", "check", "policy.yaml")
    assert result.exit_code == 1
    golden.check(GOLDEN / "policy-bad-80.txt", result.stdout)


def test_the_caret_stands_under_the_column(run: Run, folder: Path) -> None:
    """In a line far wider than the terminal the caret still points at the culprit."""
    line = "    models: [" + ", ".join(f'"model-{n}"' for n in range(40)) + ', "bad model"]\n'
    text = GOOD.replace('    models: ["*"]\n', line)
    (folder / "policy.yaml").write_text(text)
    result = run("policy", "check", "policy.yaml")
    shown = result.stdout.splitlines()
    caret = next(n for n, one in enumerate(shown) if one.rstrip().endswith("^"))
    column = shown[caret].index("^")
    assert shown[caret - 1][column:].startswith('"bad model"')
    assert len(shown[caret - 1]) <= 80


def test_broken_yaml(run: Run, folder: Path) -> None:
    """A file that is no YAML is one problem with its place."""
    (folder / "policy.yaml").write_text("version: 1\ntenants:\n\talpha: {}\n")
    result = run("policy", "check", "policy.yaml")
    assert result.exit_code == 1
    assert result.stdout.startswith("policy.yaml:3:1: not YAML")
    assert "1 problem" in result.stdout


def test_drop_ins_are_one_policy(run: Run, folder: Path) -> None:
    """A folder and several files are checked together: a tenant stands in one of them only."""
    drop_ins = folder / "policy.d"
    drop_ins.mkdir()
    (drop_ins / "10.yaml").write_text(GOOD)
    assert run("policy", "check", "policy.d").exit_code == 0
    other = folder / "20.yaml"
    other.write_text(GOOD.replace("beta-research-group", "gamma"))
    result = run("policy", "check", "policy.d", "20.yaml")
    assert result.exit_code == 1
    assert "stands in" in result.stdout


def test_json(run: Run, folder: Path) -> None:
    """-o json gives problems, or tenants and digest, to programs."""
    (folder / "bad.yaml").write_text(BAD)
    (folder / "good.yaml").write_text(GOOD)
    bad = json.loads(run("policy", "check", "bad.yaml", "-o", "json").stdout)
    assert bad["ok"] is False
    assert {"file", "line", "column", "path", "message"} == set(bad["problems"][0])
    good = json.loads(run("policy", "check", "good.yaml", "-o", "json").stdout)
    assert good["ok"] is True
    assert len(good["digest"]) == 64
    assert good["tenants"]["alpha"]["limits"]["concurrency"] == 8


def test_unreadable(run: Run, folder: Path) -> None:
    """A file that is not there ends with 1 and its name; no file at all is a usage error."""
    result = run("policy", "check", "none.yaml")
    assert result.exit_code == 1
    assert "cannot read none.yaml: no such file" in result.stderr
    assert run("policy", "check").exit_code == 2


def test_texts_cannot_steer_the_terminal(run: Run, folder: Path) -> None:
    """Markup in a file is shown as it stands."""
    (folder / "policy.yaml").write_text('version: 1\ntenants:\n  "[red]x[/red]": {}\n')
    result = run("policy", "check", "policy.yaml")
    assert "[red]x[/red]" in result.stdout
