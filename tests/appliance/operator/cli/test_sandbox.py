"""``athanor sandbox calls``: the real text worker from the command line, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from appliance.operator.cli import exits
from tests.appliance.operator.cli.conftest import Run


@pytest.fixture
def mini(root: Path) -> Path:
    """The embedded model."""
    model = root / "images" / "mini" / "athanor-mini"
    if not (model / "tokenizer.json").is_file():
        pytest.skip("the embedded model is not built")
    return model


def test_calls_of_a_text_worker_are_collected(run: Run, mini: Path) -> None:
    """Every call is on the lists: exit code 0, and the document names all four programs."""
    done = run(
        "sandbox",
        "calls",
        "--collect",
        "--quick",
        "--program",
        "text",
        "--model",
        str(mini),
        "--seconds",
        "1",
        "-o",
        "json",
    )
    assert done.exit_code == exits.OK, done.output
    told = json.loads(done.stdout)["text"]
    assert told["lived"] is True
    # Programs stand in the order of their first calls, and the scheduler decides between worker and keeper.
    assert sorted(one["program"] for one in told["programs"]) == ["forker", "grammar", "keeper", "worker"]
    assert all(one["outside"] == [] for one in told["programs"])


def test_a_program_that_does_not_live_is_told(run: Run, tmp_path: Path) -> None:
    """Without a model the exit code is 1, with the program's own reason; a folder that is none is named."""
    done = run("sandbox", "calls", "--program", "text", "--model", str(tmp_path), columns=120)
    assert done.exit_code == exits.REFUSED
    assert "the load came to no end" in done.stdout
    assert "cannot load" in done.stdout
    missing = run("sandbox", "calls", "--model", str(tmp_path / "none"))
    assert missing.exit_code == exits.REFUSED
    assert "is no folder" in missing.output
