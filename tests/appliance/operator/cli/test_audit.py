"""``athanor audit``: what it says of a whole log, a harmed one, and of what is no log."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from appliance.common.audit import files
from appliance.common.audit.entry import entry
from appliance.common.audit.log import open_log
from tests.appliance.operator.cli.conftest import Run


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A folder with a log of thirty entries of two kinds, and a checkpoint kept beside it."""
    audit = open_log(tmp_path / "audit")
    for number in range(15):
        pair = [
            entry("refused", outcome="X", reason="absent", count=number),
            entry("policy", outcome="ok", policy="ab", tenants=number, by="user 0"),
        ]
        audit.append([(1_700_000_000_000 + number, one) for one in pair])
    (tmp_path / "kept").write_text(audit.checkpoint(), encoding="utf-8")
    audit.close()
    return tmp_path / "audit"


def test_a_whole_log_is_whole(run: Run, log: Path) -> None:
    """Status 0, the numbers, the last checkpoint; with a key and a witness kept elsewhere too."""
    plain = run("audit", "verify", "--from", str(log))
    assert plain.exit_code == 0
    assert "the log is whole" in plain.stdout
    assert "the last checkpoint covers 30 entries" in plain.stdout
    key = log.parent / "key"
    (log / files.PUBLIC_KEY).rename(key)
    told = run(
        "audit", "verify", "--from", str(log), "--key", str(key), "--witness", str(log.parent / "kept"), "-o", "json"
    )
    found = json.loads(told.stdout)
    assert (told.exit_code, found["ok"], found["entries"], found["witnesses"]) == (0, True, 30, 1)


def test_a_harmed_log_is_not_whole(run: Run, log: Path) -> None:
    """A changed entry and a cut end: status 1 and what is wrong, in words and in JSON."""
    path = files.segment_paths(log)[0]
    path.write_bytes(path.read_bytes().replace(b'"count":7', b'"count":8'))
    told = run("audit", "verify", "--from", str(log))
    assert told.exit_code == 1
    assert "the log is NOT whole" in told.stdout
    assert "not what was signed, at the beginning: " in told.stdout
    told = run("audit", "verify", "--from", str(log), "-o", "json")
    assert told.exit_code == 1
    assert not json.loads(told.stdout)["ok"]


def test_a_missing_end_shows_against_a_witness(run: Run, log: Path) -> None:
    """Entries cut off together with their checkpoints: the folder alone passes (control), the witness does not."""
    path = files.segment_paths(log)[0]
    segment = files.read_segment(path)
    path.write_bytes(b"\n".join(path.read_bytes().split(b"\n")[:-3]) + b"\n")
    path.with_suffix(files.CHECKPOINT_SUFFIX).write_text("".join(segment.checkpoints[:-1]), encoding="utf-8")
    assert run("audit", "verify", "--from", str(log)).exit_code == 0
    told = run("audit", "verify", "--from", str(log), "--witness", str(log.parent / "kept"))
    assert told.exit_code == 1
    assert "number 30 were signed, and are missing" in told.stdout


def test_entries_are_shown(run: Run, log: Path) -> None:
    """The newest, by kind, one a line or as JSON."""
    told = run("audit", "show", "--from", str(log), "--kind", "policy", "--last", "2")
    assert told.exit_code == 0
    assert [line.split()[0] for line in told.stdout.splitlines()] == ["27", "29"]
    assert "2023-11-14T22:13:20Z  policy" in told.stdout
    found = json.loads(run("audit", "show", "--from", str(log), "-o", "json").stdout)
    assert [one["n"] for one in found] == list(range(10, 30))


def test_lines_are_short_and_json_is_whole(run: Run, log: Path, tmp_path: Path) -> None:
    """A line leaves out what is empty or 0 and cuts a digest short; JSON has both. The log is that of a configuration
    where no folder is named; one without a log, and one that is not there, say so."""
    audit = open_log(log)
    audit.append([(1_700_000_000_100, entry("policy", outcome="ok", policy="ab" * 32, tenants=0, by=""))])
    audit.close()
    model = {"name": "m", "path": str(tmp_path)}
    values = {"run_dir": "run", "policy": "p.yaml", "models": [model], "credentials": "keys", "pepper": "pepper"}
    (tmp_path / "athanor.yaml").write_text(json.dumps(values | {"audit": {"directory": str(log)}}))
    by_config = ("audit", "show", "--config", str(tmp_path / "athanor.yaml"), "--last", "1")
    told = run(*by_config)
    assert told.exit_code == 0, told.output
    assert told.stdout.split()[-2:] == ["outcome=ok", "policy=abababababab"]
    (found,) = json.loads(run(*by_config, "-o", "json").stdout)
    assert (found["policy"], found["tenants"], found["by"]) == ("ab" * 32, 0, "")
    (tmp_path / "athanor.yaml").write_text(json.dumps(values))
    assert "no section audit" in run(*by_config).stderr
    assert "there is no configuration" in run("audit", "show", "--config", str(tmp_path / "none")).stderr


def test_what_is_no_log_is_told(run: Run, tmp_path: Path, log: Path) -> None:
    """A folder that is not there, one without a key, a key and a witness that are none, a kind that is none."""
    assert run("audit", "verify", "--from", str(tmp_path / "none")).exit_code == 1
    (tmp_path / "empty").mkdir()
    assert run("audit", "verify", "--from", str(tmp_path / "empty")).exit_code == 1
    (tmp_path / "bad").write_text("no\nkey")
    told = run("audit", "verify", "--from", str(log), "--key", str(tmp_path / "bad"))
    assert (told.exit_code, "verifier key" in told.stderr) == (1, True)
    told = run("audit", "verify", "--from", str(log), "--witness", str(tmp_path / "bad"))
    assert (told.exit_code, "malformed" in told.stdout) == (1, True)
    assert run("audit", "show", "--from", str(log), "--kind", "prompt").exit_code == 2
