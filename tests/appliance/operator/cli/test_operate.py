"""``top``, ``logs`` and ``bundle`` as an operator meets them, against a real admin listener."""

from __future__ import annotations

import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from appliance.common.status import Alert
from appliance.operator.cli.top_view import bar
from tests.appliance import golden
from tests.appliance.admin_server import STATUS, FakeAppliance
from tests.appliance.operator.cli.conftest import Run

GOLDEN = Path(__file__).parent / "golden"
KEY = "ath_alpha-1_" + "0123456789abcdef" * 4


@pytest.fixture
def busy(appliance: FakeAppliance) -> FakeAppliance:
    """An appliance with rates."""
    alpha = replace(
        STATUS.tenants[0],
        tokens=51_734,
        requests=124,
        refused=3,
        output_tokens_per_s=212.0,
        requests_per_s=2.0,
        refused_per_s=0.5,
    )
    appliance.status = replace(STATUS, tenants=(alpha, STATUS.tenants[1]))
    return appliance


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_top_once(run: Run, busy: FakeAppliance, columns: int) -> None:
    """Rates by tenant, queues and KV by model, as agreed at each width; a pipe gets one look."""
    result = run("top", "--admin", busy.url, columns=columns)
    assert result.exit_code == 0, result.output
    assert result.stdout.isascii()
    golden.check(GOLDEN / f"top-{columns}.txt", result.stdout)


def test_top_says_what_is_wrong(run: Run, appliance: FakeAppliance) -> None:
    """The worst alerts stand above the tables, a line each, and how many more there are."""
    said = tuple(Alert(key=str(one), level="broken", what=f"matter {one}") for one in range(5))
    appliance.status = replace(STATUS, alerts=said)
    lines = run("top", "--once", "-i", "0.2", "--admin", appliance.url).stdout.splitlines()
    assert lines[4:8] == ["FAIL  matter 0", "FAIL  matter 1", "FAIL  matter 2", "      and 2 more: athanor status"]


def test_top_for_scripts(run: Run, busy: FakeAppliance) -> None:
    """JSON and YAML hold the same figures."""
    document = json.loads(run("top", "--once", "-o", "json", "--admin", busy.url).stdout)
    assert (document["load"]["rates"]["output_tokens"], document["tenants"][0]["requests_per_s"]) == (212.0, 2.0)
    again = YAML(typ="safe").load(run("top", "--once", "-o", "yaml", "--admin", busy.url).stdout)
    assert set(again) == set(document)


def test_top_of_nothing(run: Run) -> None:
    """No appliance: the same words and code as everywhere."""
    result = run("top", "--once", "--admin", "http://127.0.0.1:9")
    assert (result.exit_code, "nothing answers" in result.stderr) == (3, True)


def test_bars_stay_in_their_width() -> None:
    """Any share gives as many cells, and none beyond 0 and 100 %."""
    assert {len(bar(share).plain) for share in (-1.0, 0.0, 0.5, 0.97, 1.0, 9.0)} == {26}
    assert bar(9.0).plain.endswith("100 %")


LINES = [
    '{"timestamp": "2026-11-22T01:05:16Z", "level": "info", "event": "ready", "http": "http://127.0.0.1:8080"}',
    f'{{"timestamp": "2026-11-22T01:05:17Z", "level": "warning", "event": "odd key {KEY}", "request": "req_7f3a9c"}}',
    '{"timestamp": "2026-11-22T01:05:18Z", "level": "error", "event": "sandbox is down\\u001b[31m", "cause": "x"}',
    "Traceback (most recent call last):",
]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """What a host process wrote."""
    path = tmp_path / "serve.log"
    path.write_text("\n".join(LINES) + "\n")
    return path


def test_logs_are_for_people(run: Run, log: Path) -> None:
    """One calm line each; credentials are blotted once more, and no text steers the terminal."""
    result = run("logs", "--file", str(log), columns=200)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[0] == "01:05:16  info     ready  http=http://127.0.0.1:8080"
    assert len(result.stdout.splitlines()) == 4
    assert KEY not in result.stdout
    assert "\x1b" not in result.stdout
    assert KEY not in run("logs", "--file", str(log), "--raw").stdout


def test_logs_are_chosen(run: Run, log: Path) -> None:
    """By level, by request, by number."""
    assert len(run("logs", "--file", str(log), "--level", "warning").stdout.splitlines()) == 2
    assert "odd key" in run("logs", "--file", str(log), "--request", "req_7f3").stdout
    assert run("logs", "--file", str(log), "-n", "1").stdout.startswith("Traceback")


def test_logs_that_are_not_there(run: Run, tmp_path: Path) -> None:
    """A missing file, or a file that shall be followed, is refused with what to do."""
    assert run("logs", "--file", str(tmp_path / "none")).exit_code == 1
    refused = run("logs", "--follow", "--file", str(tmp_path / "none"))
    assert (refused.exit_code, "tail -F" in refused.stderr) == (2, True)


def test_a_bundle_of_a_machine_without_an_appliance(run: Run, tmp_path: Path) -> None:
    """Findings and versions are packed all the same."""
    path = tmp_path / "help.tar.gz"
    result = run("bundle", "-c", str(tmp_path / "none.yaml"), "--file", str(path), "-o", "json")
    assert result.exit_code == 0, result.output
    assert {"version.json", "facts.json", "findings.json"} <= set(json.loads(result.stdout)["members"])
    with tarfile.open(path) as archive:
        assert "help/findings.json" in archive.getnames()
    (tmp_path / "file").touch()
    refused = run("bundle", "-c", str(tmp_path / "none.yaml"), "--file", str(tmp_path / "file" / "x"))
    assert (refused.exit_code, "cannot write" in refused.stderr) == (1, True)
