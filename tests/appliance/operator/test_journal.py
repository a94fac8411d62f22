"""Lines of the log become values, whatever is in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from appliance.common.errors import ConfigError
from appliance.operator.journal import LogLine, parse_line, read_file

LINE = '{"timestamp": "2026-11-22T01:05:16Z", "level": "warning", "event": "sandbox is down", "sandbox": "x", "n": 2}'


def test_our_own_lines() -> None:
    """Time, level, event and what else there is, with a priority of the journal's before it or without."""
    expected = LogLine("2026-11-22T01:05:16Z", "warning", "sandbox is down", (("sandbox", "x"), ("n", "2")))
    assert parse_line(LINE) == parse_line(f"<4>{LINE}\n") == expected


@pytest.mark.parametrize("text", ["Started athanor.", '{"no": "event"}', "{broken", "[1]", "{" * 100_000])
def test_lines_of_others_are_kept_as_they_are(text: str) -> None:
    """systemd's words, tracebacks, junk: text, and as loud as information."""
    line = parse_line(text)
    assert line is not None
    assert (line.event, line.level, line.is_at_least("info"), line.is_at_least("warning")) == (text, "", True, False)


def test_empty_lines_are_none() -> None:
    """Nothing is shown for them."""
    assert parse_line("  \n") is None


def test_levels_and_requests() -> None:
    """A level lets through itself and what is louder; a request is known by the beginning of its id."""
    line = parse_line(LINE.replace('"n": 2', '"request": "req_7f3a9c01"'))
    assert line is not None
    assert [line.is_at_least(level) for level in ("info", "warning", "error")] == [True, True, False]
    assert [line.concerns(name) for name in ("req_7f3a9c", "req_00", "x")] == [True, False, False]


def test_the_end_of_a_file(tmp_path: Path) -> None:
    """The last lines, of a file of any length; a missing file is an error with its name."""
    path = tmp_path / "log"
    path.write_text("".join(json.dumps({"event": str(number)}) + "\n" for number in range(5_000)))
    assert [json.loads(line)["event"] for line in read_file(path, 3)] == ["4997", "4998", "4999"]
    assert len(list(read_file(path, 100_000))) == 5_000
    with pytest.raises(ConfigError, match="no such file"):
        list(read_file(tmp_path / "none", 3))
