"""Checkpoints in ``athanor status`` and ``athanor doctor``."""

from __future__ import annotations

from rich.console import Console

from appliance.common.checkpoint_status import CheckpointStatus
from appliance.operator.cli.checkpoints_view import SHOWN, checkpoints_view
from appliance.operator.doctor.checkpoints import check_checkpoints
from appliance.operator.doctor.finding import Severity

NOW = 1_800_000_000.0
THERE = CheckpointStatus(role="engine", bytes=153 << 20, made_at=NOW - 7200)
ABSENT = CheckpointStatus(role="text", problem="3 MiB are free")
AVOIDED = CheckpointStatus(
    role="engine", model="llama\x1b[31m", bytes=1 << 30, made_at=NOW - 60, problem="begin without"
)


def shown(*found: CheckpointStatus) -> str:
    """The table as text."""
    console = Console(width=100, record=True, no_color=True)
    console.print(checkpoints_view(found, NOW))
    return console.export_text()


def test_the_table_tells_size_and_age_and_what_is_wrong() -> None:
    """A line for each; what is missing says so, with the reason below; names cannot write to the terminal."""
    text = shown(THERE, ABSENT, AVOIDED)
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert "153 MiB" in text and "2 h 00 min ago" in text
    assert "none" in text and "text, all models: 3 MiB are free" in text
    assert "begin without" in text and "\x1b" not in text
    assert lines["CHECKPOINT"].split() == ["CHECKPOINT", "OF", "SIZE", "MADE"]


def test_a_long_list_is_cut() -> None:
    """No more lines than a terminal has; the rest is counted."""
    many = [CheckpointStatus(role="engine", model=f"m{number}", bytes=1, made_at=1.0) for number in range(SHOWN + 2)]
    text = shown(*many)
    assert f"m{SHOWN - 1}" in text and f"m{SHOWN} " not in text and "2 checkpoints more" in text


def test_the_doctor_tells_bases_and_what_is_wrong() -> None:
    """A base that is there is well; one that is missing, or that some begin without, is a note: nothing depends on it.
    A model's own that is there is not worth a line."""
    own = CheckpointStatus(role="engine", model="m", bytes=1, made_at=1.0)
    findings = list(check_checkpoints((THERE, ABSENT, AVOIDED, own)))
    assert [one.level for one in findings] == [Severity.OK, Severity.NOTE, Severity.NOTE]
    assert "3 MiB are free" in findings[1].what
