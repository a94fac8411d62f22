"""The record of a self-test: written whole, read as it was written, and refused where it is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from appliance.common.errors import ConfigError
from appliance.common.selftest_record import NAME, SelftestRecord, read_record, write_record

ONE = SelftestRecord(1_790_812_800, "0.1.0", "full", (80, 0, 3, 0))


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    """None before the first; then the last; the file is readable by the supervisor's user."""
    assert read_record(tmp_path) is None
    write_record(tmp_path, SelftestRecord(1, "0.0.9", "short", (1, 2, 3, 4)))
    write_record(tmp_path, ONE)
    assert read_record(tmp_path) == ONE
    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    "change",
    [
        {"at": "yesterday"},
        {"at": -1},
        {"at": True},
        {"version": "0.1.0, short form: 999 pass\n"},
        {"form": "long"},
        {"pass": 1.5},
        {"fail": -1},
        {"extra": 1},
    ],
    ids=str,
)
def test_what_is_no_record_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    """A value of another kind, a number beyond bounds, a text that would add to the line, a field more. Control: the
    same file without the change."""
    write_record(tmp_path, ONE)
    found = json.loads((tmp_path / NAME).read_text())
    assert read_record(tmp_path) == ONE
    (tmp_path / NAME).write_text(json.dumps({**found, **change}))
    with pytest.raises(ConfigError):
        read_record(tmp_path)


def test_what_is_not_json_is_refused(tmp_path: Path) -> None:
    """Half a file and a file that is too long."""
    for text in ('{"at": 1', " " * 5_000):
        (tmp_path / NAME).write_text(text)
        with pytest.raises(ConfigError, match="not valid JSON"):
            read_record(tmp_path)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """The record has nowhere to go, and the path is named."""
    with pytest.raises(ConfigError, match="nowhere"):
        write_record(tmp_path / "nowhere", ONE)
