"""``athanor config``: how the reference and the values in force look, and that other programs can read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer

from appliance.common.config_keys import keys
from appliance.operator.cli.app import app
from appliance.operator.cli.options import DEFAULT_CONFIG
from tests.appliance import golden
from tests.appliance.operator.cli.conftest import Run

GOLDEN = Path(__file__).parent / "golden"

FILE = """\
models: [{name: m, path: /m, digest: ""}]
policy: /p.yaml
credentials: /c.json
pepper: /pepper
run_dir: /run
sandbox: {cores: 2}
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration in the working directory, so that its name is short."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "athanor.yaml").write_text(FILE)
    return Path("athanor.yaml")


@pytest.mark.parametrize("columns", [80, 120])
def test_the_reference_looks_as_agreed(run: Run, columns: int) -> None:
    """Sections with their keys, each with type, unit, default and meaning; within the terminal."""
    result = run("config", "reference", columns=columns)
    assert max(map(len, result.stdout.splitlines())) <= columns
    golden.check(GOLDEN / f"config-reference-{columns}.txt", result.stdout)


@pytest.mark.parametrize("columns", [80, 120])
def test_values_and_origins_look_as_agreed(run: Run, file: Path, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One value of each origin."""
    monkeypatch.setenv("ATHANOR_SANDBOX__OWN_TEXTS", "9")
    result = run("config", "show", "-c", str(file), "--set", "models[0].dtype=float32", columns=columns)
    assert result.exit_code == 0, result.output
    golden.check(GOLDEN / f"config-show-{columns}.txt", result.stdout)


def test_other_programs_can_read_both(run: Run, file: Path) -> None:
    """JSON of the reference has every key; JSON of the values has the tree and the origins. One section alone."""
    found = json.loads(run("config", "reference", "--format", "json").stdout)
    assert [one["name"] for one in found] == list(keys())
    assert all(one["meaning"] and one["type"] and one["default"] for one in found)
    one = json.loads(run("config", "reference", "models[0].gpu", "--format", "json").stdout)
    assert [key["name"] for key in one] == ["models[].gpu"]
    shown = json.loads(run("config", "show", "-c", str(file), "-o", "json").stdout)
    assert shown["config"]["sandbox"]["cores"] == 2
    assert shown["origins"]["sandbox.cores"] == "athanor.yaml:6:11"


def test_problems_end_with_the_reason(run: Run, file: Path) -> None:
    """A key that there is not, and a configuration that is wrong."""
    assert "no key sandbx" in run("config", "reference", "sandbx").stderr
    wrong = run("config", "show", "-c", str(file), "--set", "sandbox.coers=4")
    assert (wrong.exit_code, wrong.stdout) == (1, "")
    assert "--set sandbox.coers: unknown key; did you mean sandbox.cores?" in wrong.stderr


def test_all_commands_find_the_configuration_alike(run: Run) -> None:
    """The command line is walked: whatever takes ``--config`` has one spelling, one help and one default, the installed
    service's file; without the option commands look there. Control: of those that do not read one, none takes it.
    ``reload`` alone asks the running appliance where none is named, whatever file it was started with."""
    found: dict[str, Any] = {}
    walked = [("", typer.main.get_command(app))]
    while walked:
        name, command = walked.pop()
        walked += [(f"{name} {word}".strip(), one) for word, one in getattr(command, "commands", {}).items()]
        found |= {name: param for param in command.params if "--config" in param.opts}
    assert {"serve", "doctor", "bundle", "config show", "policy check", "image use", "tenant shred"} <= found.keys()
    assert found.pop("reload").default is None
    assert {(tuple(one.opts), one.help, one.default, one.required) for one in found.values()} == {
        (("--config", "-c"), "The appliance's athanor.yaml.", Path("/etc/athanor/athanor.yaml"), False)
    }
    assert "version" not in found and "key create" not in found
    if DEFAULT_CONFIG.exists():
        pytest.skip("an appliance is installed on this machine")
    for words in (("serve",), ("config", "show"), ("image", "list"), ("tenant", "shred", "alpha", "--yes")):
        result = run(*words)
        assert result.exit_code in (1, 4) and f"cannot read {DEFAULT_CONFIG}" in result.stderr, result.stderr
